package load

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func nap(d time.Duration) { <-time.After(d) }

func newKeys() Keys { return Keys{Kind: New, Fresh: new(atomic.Uint64)} }

// stallsOnce answers at once but for one call, which takes long.
func stallsOnce(at int64, long time.Duration) Op {
	var calls atomic.Int64
	return func(context.Context, uint64) error {
		if calls.Add(1) == at {
			nap(long)
		}
		return nil
	}
}

func TestOpenLoopTellsWhatAStallKeptBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plan := Plan{InFlight: 1, Rate: 1000, Duration: time.Second, Keys: newKeys(), nap: nap}
		r := Run(t.Context(), plan, stallsOnce(500, 200*time.Millisecond))
		// 200 of the 1,000 were to be sent during the stall, and waited 100 ms in the mean.
		if p50, p90, p999 := r.Quantile(0.5), r.Quantile(0.9), r.Quantile(0.999); p50 > 2000 || p90 < 95_000 || p90 > 105_000 || p999 < 195_000 {
			t.Errorf("p50 %.0f, p90 %.0f, p99.9 %.0f µs: the stall of 200 ms does not show", p50, p90, p999)
		}
		if r.Ops != 1000 {
			t.Errorf("%d operations, not the 1,000 that were to be sent", r.Ops)
		}
	})
}

func TestClosedLoopTellsOfTheCallsThatWereMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		op := func(context.Context, uint64) error { nap(time.Millisecond); return nil }
		r := Run(t.Context(), Plan{InFlight: 4, WarmUp: time.Second, Duration: time.Second, Keys: newKeys()}, op)
		if r.Ops < 3990 || r.Ops > 4004 {
			t.Errorf("%d operations, not some 4,000: the warm-up does not count", r.Ops)
		}
		if p99 := r.Quantile(0.99); p99 < 990 || p99 > 1010 {
			t.Errorf("p99 %.0f µs", p99)
		}
	})
}

func TestErrorsAreCountedAndToldAndAreNoLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		op := func(_ context.Context, key uint64) error {
			nap(time.Millisecond)
			if key%2 == 1 {
				return errors.New("odd")
			}
			return nil
		}
		for _, rate := range []float64{0, 500} {
			r := Run(t.Context(), Plan{InFlight: 2, Rate: rate, Duration: time.Second, Keys: newKeys(), nap: nap}, op)
			if r.FirstError != "odd" || r.Errors < 200 || r.Ops < 200 || r.hist.TotalCount() > r.Ops+2 {
				t.Errorf("rate %v: %d errors (%q), %d operations, %d latencies", rate, r.Errors, r.FirstError, r.Ops, r.hist.TotalCount())
			}
		}
	})
}

func TestOpenLoopMissesNothingSilently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		op := func(ctx context.Context, _ uint64) error { <-ctx.Done(); return ctx.Err() }
		r := Run(t.Context(), Plan{InFlight: 1, Rate: 3, Duration: time.Second, Keys: newKeys(), nap: nap}, op)
		if r.Ops != 0 || r.Errors+r.Missed != 3 {
			t.Errorf("%d operations, %d errors, %d missed", r.Ops, r.Errors, r.Missed)
		}
	})
}

func TestMergeAddsUp(t *testing.T) {
	a, b := Result{Ops: 10, Duration: time.Second, hist: newHistogram()}, Result{Ops: 30, Errors: 1, FirstError: "x", Duration: time.Second}
	_ = a.hist.RecordValue(70)
	if m := Merge(a, b); m.PerSecond() != 20 || m.Errors != 1 || m.FirstError != "x" || m.Quantile(0.5) != 70 {
		t.Errorf("%+v", m)
	}
}

func TestMeter(t *testing.T) {
	m := NewMeter()
	m.Record(-time.Second)
	m.Record(3 * time.Millisecond)
	m.Fail("late")
	m.Fail("later")
	r := m.Result(2 * time.Second)
	if r.Ops != 2 || r.Errors != 2 || r.FirstError != "late" || r.PerSecond() != 1 || r.Quantile(0.5) != 1 || r.Quantile(1) < 2990 {
		t.Errorf("%+v, %v to %v µs", r, r.Quantile(0.5), r.Quantile(1))
	}
}

func TestKeyShares(t *testing.T) {
	const known, draws = 1000, 100_000
	for _, c := range []struct {
		kind    Kind
		repeats float64
		least   map[uint64]float64 // the least share of draws of some known keys
	}{
		{New, 0.9, nil},
		{Zipf, 0.9, map[uint64]float64{0: 0.1, 1: 0.05}},
		{Hot, 0.9, map[uint64]float64{0: 0.89}},
		{Hot, 0, nil},
	} {
		fresh := new(atomic.Uint64)
		fresh.Store(known)
		s := Keys{Kind: c.kind, Repeats: c.repeats, Known: known, Fresh: fresh}.source(7)
		seen, repeats := map[uint64]int{}, 0
		for range draws {
			key := s.next()
			seen[key]++
			if key < known {
				repeats++
			} else if seen[key] > 1 {
				t.Fatalf("%s: new key %d came twice", c.kind, key)
			}
		}
		want := c.repeats
		if c.kind == New {
			want = 0
		}
		if share := float64(repeats) / draws; share < want-0.01 || share > want+0.01 {
			t.Errorf("%s: a share of %.3f repeats, not %.2f", c.kind, share, want)
		}
		for key, least := range c.least {
			if share := float64(seen[key]) / draws; share < least {
				t.Errorf("%s: key %d has a share of %.3f, not %.2f", c.kind, key, share, least)
			}
		}
		if c.kind == Zipf && seen[0] < 2*seen[9] {
			t.Errorf("zipf: the first key came %d times, the tenth %d", seen[0], seen[9])
		}
	}
}

func TestDrawingAKeyAllocatesNothing(t *testing.T) {
	fresh := new(atomic.Uint64)
	fresh.Store(100)
	s := Keys{Kind: Zipf, Repeats: 0.9, Known: 100, Fresh: fresh}.source(0)
	r := recorder{hist: newHistogram()}
	if n := testing.AllocsPerRun(1000, func() { s.next(); r.record(time.Millisecond, true) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
