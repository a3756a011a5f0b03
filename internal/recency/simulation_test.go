package recency_test

import (
	"container/heap"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/recency"
)

var sparse = flag.Int("recency.sparse", 8, "the simulation has one key of so many; the figures of docs/performance.md are with 1")

// TestSimulation compares, in virtual time, a cache whose every TTL is the longest with
// one whose TTLs follow the habits, on one and the same trace of finishes and repeats.
func TestSimulation(t *testing.T) {
	const hour = time.Hour
	for _, c := range []struct {
		name  string
		trace trace
		// lost is the most of the fixed cache's hits that may be lost, saved the least of
		// its entries times seconds that must be.
		lost, saved float64
	}{
		{"webhook retries within minutes", trace{days: 2, every: time.Second, habit: webhook}, 0.01, 0.9},
		{"retries that double from 15 s to a day", trace{days: 3, every: time.Second, habit: backoff}, 0.01, 0},
		{"retries after 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 10 h", trace{days: 3, every: time.Second, habit: published(0.3, 5, 300, 1800, 7200, 18000, 36000, 36000)}, 0.01, 0.5},
		{"retries after 10 s, 30 s, 70 s ... 85 min", trace{days: 3, every: time.Second, habit: published(0.3, 10, 30, 70, 150, 310, 630, 1270, 2550, 5110)}, 0.01, 0.5},
		{"daily batches repeated a day later", trace{days: 4, every: 2 * time.Second, habit: daily}, 0.01, 0.4},
		{"batches repeated an hour later", trace{days: 2, every: time.Second, habit: around(hour)}, 0.01, 0.2},
		{"a poll each minute, for three hours", trace{days: 1, every: 20 * time.Second, habit: poll}, 0.01, 0},
		{"two suppliers, one hourly, one within minutes", trace{days: 2, every: time.Second, habit: mixed}, 0.01, 0.4},
		{"a supplier in a hundred is hourly", trace{days: 2, every: time.Second, habit: rare}, 0.01, 0.85},
		{"one key in ten comes back", trace{days: 3, every: time.Second, habit: seldom}, 0.01, 0.9},
		{"minutes become 40 minutes", trace{days: 4, every: time.Second, habit: turns(2*24*hour, webhook, around(40*time.Minute))}, 0.02, 0.5},
		{"an hour becomes minutes", trace{days: 6, every: 2 * time.Second, habit: turns(24*hour, around(hour), webhook)}, 0.01, 0.5},
		{"quiet nights, and a batch in each", trace{days: 4, every: time.Second, habit: nights}, 0.01, 0},
		{"the same, told apart by supplier", trace{days: 4, every: time.Second, habit: labelled(nights)}, 0.01, 0.3},
		{"a hot key for ten minutes a day", trace{days: 3, every: 5 * time.Second, habit: hot}, 0.01, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.trace.every *= time.Duration(*sparse)
			fixed, adaptive := c.trace.run(1)
			lost := 1 - float64(adaptive.hits)/float64(fixed.hits)
			saved := 1 - adaptive.kept.Seconds()/fixed.kept.Seconds()
			t.Logf("%s: repeats %d, hits fixed %d, adaptive %d, lost %.2f %%; entries at a time fixed %.0f, adaptive %.0f, saved %.0f %%",
				c.name, fixed.repeats, fixed.hits, adaptive.hits, 100*lost, c.trace.at(fixed), c.trace.at(adaptive), 100*saved)
			if lost > c.lost {
				t.Errorf("%.2f %% of the hits are lost, more than %.0f %%", 100*lost, 100*c.lost)
			}
			if *sparse > 1 {
				c.saved /= 2 // what is learned later is saved for a shorter time
			}
			if saved < c.saved {
				t.Errorf("%.0f %% of the entries' time is saved, less than %.0f %%", 100*saved, 100*c.saved)
			}
		})
	}
}

// habit says when a key that finished then will come back: each is the distance from
// the one before it. Keys of one supplier have one habit.
type habit func(r *rand.Rand, finished time.Duration) (supplier string, gaps []time.Duration)

// webhook: a sender repeats after some 10 s, then 1 min, then 3 min, while it gets no answer.
func webhook(r *rand.Rand, _ time.Duration) (string, []time.Duration) {
	var gaps []time.Duration
	for _, gap := range []time.Duration{10 * time.Second, time.Minute, 3 * time.Minute} {
		if r.Float64() > 0.7 {
			break
		}
		gaps = append(gaps, jitter(r, gap))
	}
	return "", gaps
}

// backoff: each distance is twice the one before it, from 15 s to a day.
func backoff(r *rand.Rand, _ time.Duration) (string, []time.Duration) {
	var gaps []time.Duration
	for gap := 15 * time.Second; gap < 24*time.Hour && r.Float64() < 0.6; gap *= 2 {
		gaps = append(gaps, jitter(r, gap))
	}
	return "", gaps
}

// published: a sender's schedule, as its documentation has it, in seconds: each repeat
// is followed by another with this probability, that of an answer that is lost.
func published(again float64, gaps ...int) habit {
	return func(r *rand.Rand, _ time.Duration) (string, []time.Duration) {
		var all []time.Duration
		for _, gap := range gaps {
			if r.Float64() > again {
				break
			}
			all = append(all, jitter(r, time.Duration(gap)*time.Second))
		}
		return "", all
	}
}

func daily(r *rand.Rand, _ time.Duration) (string, []time.Duration) {
	return "", []time.Duration{jitter(r, 24*time.Hour), jitter(r, 10*time.Minute)}
}

func poll(r *rand.Rand, _ time.Duration) (string, []time.Duration) {
	gaps := make([]time.Duration, 180)
	for i := range gaps {
		gaps[i] = jitter(r, time.Minute)
	}
	return "", gaps
}

// around: once or twice, about this long after.
func around(d time.Duration) habit {
	return func(r *rand.Rand, _ time.Duration) (string, []time.Duration) {
		gaps := []time.Duration{jitter(r, d)}
		if r.IntN(2) == 0 {
			gaps = append(gaps, jitter(r, d/10))
		}
		return "", gaps
	}
}

func of(supplier string, h habit, r *rand.Rand, at time.Duration) (string, []time.Duration) {
	_, gaps := h(r, at)
	return supplier, gaps
}

func mixed(r *rand.Rand, at time.Duration) (string, []time.Duration) {
	if r.IntN(2) == 0 {
		return of("hourly", around(time.Hour), r, at)
	}
	return of("hasty", webhook, r, at)
}

func rare(r *rand.Rand, at time.Duration) (string, []time.Duration) {
	if r.IntN(100) == 0 {
		return of("hourly", around(time.Hour), r, at)
	}
	return of("hasty", webhook, r, at)
}

func seldom(r *rand.Rand, at time.Duration) (string, []time.Duration) {
	if r.IntN(10) > 0 {
		return "", nil
	}
	return around(2*time.Minute)(r, at)
}

func turns(when time.Duration, before, after habit) habit {
	return func(r *rand.Rand, at time.Duration) (string, []time.Duration) {
		if at < when {
			return before(r, at)
		}
		return after(r, at)
	}
}

// nights: webhooks from 8 to 20 h; a batch at 1 h, repeated an hour and a half later.
func nights(r *rand.Rand, at time.Duration) (string, []time.Duration) {
	switch hour := at % (24 * time.Hour) / time.Hour; {
	case hour >= 8 && hour < 20:
		return webhook(r, at)
	case hour == 1:
		return around(90*time.Minute)(r, at)
	}
	return "", nil
}

// labelled: keys of the night and of the day are of two suppliers.
func labelled(h habit) habit {
	return func(r *rand.Rand, at time.Duration) (string, []time.Duration) {
		return of(map[bool]string{true: "nightly", false: "by day"}[at%(24*time.Hour) < 8*time.Hour], h, r, at)
	}
}

// hot: keys that come back within the hour, and one a day that comes back a hundred
// times a second for ten minutes.
func hot(r *rand.Rand, at time.Duration) (string, []time.Duration) {
	if at%(24*time.Hour) >= 12*time.Hour && at%(24*time.Hour) < 12*time.Hour+5*time.Second {
		gaps := make([]time.Duration, 60_000)
		for i := range gaps {
			gaps[i] = 10 * time.Millisecond
		}
		return "", gaps
	}
	return around(50*time.Minute)(r, at)
}

// jitter spreads a distance by some 10 %, and now and then by much more.
func jitter(r *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(float64(d) * math.Exp(0.1*r.NormFloat64()))
}

// trace is a history: keys finish one after another, and come back by a habit.
type trace struct {
	days  int
	every time.Duration
	habit habit
}

func (tr trace) length() time.Duration { return time.Duration(tr.days) * 24 * time.Hour }

// at is how many entries there are at a time.
func (tr trace) at(s score) float64 { return s.kept.Seconds() / tr.length().Seconds() }

type score struct {
	repeats, hits int
	kept          time.Duration // entries times how long each was kept
}

// entry is a key's, in both caches.
type entry struct {
	rec   *claim.Record
	until [2]time.Duration
}

type event struct {
	at   time.Duration
	key  *entry
	gaps []time.Duration // to come after this one
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at < e[j].at }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

var usual = claim.Policy{CacheTTLMin: 5 * time.Minute, CacheTTLMax: 2 * time.Hour}

func (tr trace) run(seed uint64) (fixed, adaptive score) {
	r := rand.New(rand.NewPCG(seed, 0))
	habits := [2]*recency.Habits{nil, recency.New(nil)}
	scores := [2]*score{&fixed, &adaptive}
	var queue events
	next := func(at time.Duration, e *entry, gaps []time.Duration) {
		if len(gaps) > 0 {
			heap.Push(&queue, event{at + gaps[0], e, gaps[1:]})
		}
	}
	keep := func(which int, e *entry, now time.Duration) {
		ttl := habits[which].TTL(e.rec, claim.Instant(now), usual)
		e.until[which] = now + ttl
		scores[which].kept += min(ttl, tr.length()-now)
	}
	for at := time.Duration(0); at < tr.length(); at += tr.every {
		for len(queue) > 0 && queue[0].at <= at {
			e := heap.Pop(&queue).(event)
			for which, s := range scores {
				s.repeats++
				if e.at < e.key.until[which] {
					s.hits++
				} else {
					keep(which, e.key, e.at)
				}
			}
			habits[1].Observe(e.key.rec, claim.Instant(e.at))
			next(e.at, e.key, e.gaps)
		}
		supplier, gaps := tr.habit(r, at)
		e := &entry{rec: finished("ns", supplier, at)}
		for which := range scores {
			keep(which, e, at)
		}
		next(at, e, gaps)
	}
	return fixed, adaptive
}

// finished is a record that was finished then.
func finished(namespace, supplier string, at time.Duration) *claim.Record {
	const retention = 24 * time.Hour * 7
	rec := &claim.Record{Namespace: namespace, Key: "k", State: claim.Succeeded, ResultRetention: retention, ResultUntil: claim.Instant(at + retention)}
	if supplier != "" {
		rec.Labels = map[string]string{recency.Label: supplier}
	}
	return rec
}

func ExampleHabits() {
	habits := recency.New(nil)
	for i := range 3 * 60 * 60 { // three hours of keys that come back after 40 s
		at := time.Duration(i) * time.Second
		habits.Observe(finished("ns", "acme", at-40*time.Second), claim.Instant(at))
	}
	now := 3 * time.Hour
	policy := claim.Policy{CacheTTLMin: 10 * time.Second, CacheTTLMax: 2 * time.Hour}
	fmt.Println(habits.TTL(finished("ns", "acme", now), claim.Instant(now), policy).Round(time.Second))
	fmt.Println(habits.TTL(finished("other", "acme", now), claim.Instant(now), policy))
	// Output:
	// 45s
	// 2h0m0s
}
