package robustness

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// tally counts what happened.
type tally struct {
	mu     sync.Mutex
	counts map[string]int
	calls  int
	begins [latencies]int // by how long they took, in steps of 20 %
}

// latencies are steps from 20 µs on: the last is some minutes.
const latencies = 100

func (t *tally) add(what string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.counts == nil {
		t.counts = map[string]int{}
	}
	t.counts[what]++
}

func (t *tally) of(what string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts[what]
}

func (t *tally) count(c *call) {
	t.mu.Lock()
	t.calls++
	if c.op == begin && c.reason == "" {
		step := 0
		for limit := 20e-6; c.end.Seconds()-c.start.Seconds() > limit && step < latencies-1; limit *= 1.2 {
			step++
		}
		t.begins[step]++
	}
	t.mu.Unlock()
	if c.retries > 0 {
		t.add("sent again by the SDK")
		if c.verdict == claim.First && c.repeat {
			t.add("sent again by the SDK, and told FIRST as a repeat")
		}
	}
	if c.never {
		t.add("surely not carried out")
	}
	switch {
	case c.reason != "":
		t.add(fmt.Sprintf("%s %s", c.op, c.reason))
	case c.op == forget:
		t.add("Forget ok")
	case c.verdict == claim.First && c.repeat:
		t.add("Begin FIRST repeated")
	case c.verdict == claim.First:
		t.add("Begin FIRST")
		if c.previous == claim.PreviousLapsed {
			t.add("takeover")
		}
		if c.previous == claim.PreviousReleased {
			t.add("after a release")
		}
	case c.verdict != 0:
		t.add(fmt.Sprintf("Begin %s from %s", verdictNames[c.verdict], sourceNames[c.source]))
		if c.shows() {
			t.add("replay from " + sourceNames[c.source])
		}
	case c.op == get:
		t.add(fmt.Sprintf("Get %v from %s", c.state, sourceNames[c.source]))
	case c.op == finish:
		t.add(fmt.Sprintf("Finish ok %v", c.state))
	default:
		t.add(string(c.op) + " ok")
	}
}

// missing are the things that must have happened at least once, and did not.
func (t *tally) missing() []string {
	var none []string
	for _, what := range append([]string{
		"Begin FIRST", "Begin FIRST repeated", "takeover", "after a release", "Forget ok",
		"replay from Redis", "replay from etcd", "Begin IN_PROGRESS from etcd",
		"Finish ok STATE_SUCCEEDED", "Finish ok STATE_FAILED", "Finish ok STATE_RELEASED",
		"Finish CLAIM_LOST", "Finish ALREADY_FINISHED", "Extend ok",
		"sent again by the SDK", "sent again by the SDK, and told FIRST as a repeat",
	}, kinds...) {
		if t.of(what) == 0 {
			none = append(none, what)
		}
	}
	return none
}

// String lists the counts and what they come to in this time.
func (t *tally) figures(took time.Duration) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "%d calls in %.1f s, %.0f a second; Begin p50 %v, p99 %v, p99.9 %v\n", t.calls, took.Seconds(), float64(t.calls)/took.Seconds(),
		t.quantile(0.5), t.quantile(0.99), t.quantile(0.999))
	for _, what := range slices.Sorted(maps.Keys(t.counts)) {
		fmt.Fprintf(&b, "%8d %s\n", t.counts[what], what)
	}
	return b.String()
}

// quantile is at most 20 % too high.
func (t *tally) quantile(q float64) time.Duration {
	var all, sum int
	for _, n := range t.begins {
		all += n
	}
	limit := 20e-6
	for _, n := range t.begins {
		if sum += n; float64(sum) >= q*float64(all) {
			break
		}
		limit *= 1.2
	}
	return time.Duration(limit * float64(time.Second)).Round(10 * time.Microsecond)
}
