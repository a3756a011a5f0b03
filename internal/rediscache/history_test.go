package rediscache_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// step is one thing that Redis is told in a history. Of two steps with one name the
// second is a late copy of the first.
type step struct {
	name string
	send func(p redis.Pipeliner)
}

// orders calls f with every order of the steps, each once: copies are not told apart.
func orders(steps []step, f func(order []step)) {
	slices.SortFunc(steps, func(a, b step) int { return strings.Compare(a.name, b.name) })
	used := make([]bool, len(steps))
	order := make([]step, 0, len(steps))
	var next func()
	next = func() {
		if len(order) == len(steps) {
			f(slices.Clone(order))
			return
		}
		for i, s := range steps {
			if used[i] || i > 0 && steps[i-1].name == s.name && !used[i-1] {
				continue
			}
			used[i] = true
			order = append(order, s)
			next()
			order = order[:len(order)-1]
			used[i] = false
		}
	}
	next()
}

// H01, G4: Completes with r1 and with r2 race through two nodes, etcd takes one, its
// node confirms, the client repeats stages and confirm late, a reader fills with what
// etcd holds, a Begin leaves its mark, Redis loses the entry. Whatever the order of
// these steps, also one that no node makes: after each of them nobody who looks is
// told what etcd did not take, what is there expires, and once etcd's truth is there
// it stays there.
func TestH01EveryOrder(t *testing.T) {
	t.Parallel()
	const revision = 1234
	for _, c := range []struct {
		name, winner string
		extra        string
	}{{"r1 wins", "r1", "mark"}, {"r2 wins", "r2", "mark"}, {"the entry is lost", "r1", "lost"}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			client := redistest.Start(t).Client()
			v := someView()
			name := someName(v)
			ctx := context.Background()
			for _, s := range []*redis.Script{rediscache.StageScript, rediscache.ConfirmScript, rediscache.FillScript} {
				if err := s.Load(ctx, client).Err(); err != nil {
					t.Fatal(err)
				}
			}
			script := func(what string, s *redis.Script, entry []byte, ttl time.Duration) step {
				return step{what, func(p redis.Pipeliner) {
					s.EvalSha(ctx, p, []string{name}, entry, ttl.Milliseconds())
				}}
			}
			stages := map[string][]byte{}
			for _, body := range []string{"r1", "r2"} {
				stages[body] = rediscache.StagedEntry(encoded(t, finished(body)))
			}
			header := slices.Clone(stages[c.winner][:rediscache.HeaderSize])
			rediscache.Stamp(header, v.Sealer, name, revision)
			extra := step{"mark", func(p redis.Pipeliner) { p.Do(ctx, "SET", name, rediscache.MarkKind, "NX", "GET", "PX", 10000) }}
			if c.extra == "lost" {
				extra = step{"lost", func(p redis.Pipeliner) { p.Do(ctx, "DEL", name) }}
			}
			s1 := script("stage r1", rediscache.StageScript, stages["r1"], 40*time.Second)
			s2 := script("stage r2", rediscache.StageScript, stages["r2"], 40*time.Second)
			confirm := script("confirm", rediscache.ConfirmScript, header, time.Hour)
			fill := script("fill", rediscache.FillScript, confirmed(t, v, finished(c.winner), revision), time.Hour)

			h := &history{t: t, client: client, view: v, winner: c.winner}
			orders([]step{s1, s1, s2, s2, confirm, confirm, fill, extra}, func(order []step) {
				h.waiting = append(h.waiting, order)
				if len(h.waiting) == 100 {
					h.play()
				}
			})
			h.play()
			if h.played != 5040 { // 8! / 2^3
				t.Errorf("%d orders", h.played)
			}
			if h.hits == 0 || h.misses == 0 {
				t.Errorf("%d hits, %d misses: nothing was tested", h.hits, h.misses)
			}
		})
	}
}

// history plays orders of steps, many in one round trip.
type history struct {
	t            *testing.T
	client       *redis.Client
	view         *claim.View
	winner       string
	waiting      [][]step
	played       int
	hits, misses int
}

func (h *history) play() {
	h.t.Helper()
	ctx := context.Background()
	name := someName(h.view)
	pipe := h.client.Pipeline()
	for _, order := range h.waiting {
		pipe.Del(ctx, name)
		for _, s := range order {
			s.send(pipe)
			pipe.Get(ctx, name)
			pipe.PTTL(ctx, name)
		}
	}
	cmds, err := pipe.Exec(ctx)
	if err != nil && err != redis.Nil {
		h.t.Fatal(err)
	}
	for _, order := range h.waiting {
		cmds = cmds[1:]
		there := false // etcd's truth
		for i, s := range order {
			did, entry, left := cmds[0].(*redis.Cmd), cmds[1].(*redis.StringCmd), cmds[2].(*redis.DurationCmd)
			cmds = cmds[3:]
			answer, _ := did.Text()
			switch {
			case s.name == "lost":
				there = false
			case s.name == "confirm" && answer == "ok", s.name == "fill":
				there = true
			}
			if wrong := h.check(entry, left, there); wrong != "" {
				h.t.Fatalf("after %s: %s", names(order[:i+1]), wrong)
			}
		}
		h.played++
	}
	h.waiting = h.waiting[:0]
}

func names(order []step) string {
	var all []string
	for _, s := range order {
		all = append(all, s.name)
	}
	return strings.Join(all, ", ")
}

// check tells what is wrong with the entry as a node finds it.
func (h *history) check(entry *redis.StringCmd, left *redis.DurationCmd, there bool) string {
	if entry.Err() == redis.Nil {
		h.misses++
		if there {
			return "etcd's truth was there and is gone"
		}
		return ""
	}
	if left.Val() <= 0 {
		return fmt.Sprintf("C66: it never expires (%v)", left.Val())
	}
	rec, found := readAs(h.view, []byte(entry.Val()))
	switch {
	case found != rediscache.Hit && there:
		return "etcd's truth was there, and now it is " + string(found)
	case found == rediscache.Hit && string(rec.Result.Body) != h.winner:
		return fmt.Sprintf("%s is told and etcd took %s", rec.Result.Body, h.winner)
	case found == rediscache.Hit:
		h.hits++
	case found == rediscache.Staged || found == rediscache.Marked:
		h.misses++
	default:
		return "it is " + string(found)
	}
	return ""
}
