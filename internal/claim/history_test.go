package claim_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

func TestH03TheClockNeitherJumpsNorGoesBack(t *testing.T) {
	start := claim.Tick{Time: claimed, Version: 5}
	for _, c := range []struct {
		elapsed time.Duration
		step    time.Duration
		ticks   bool
	}{
		{-time.Hour, 0, false}, {0, 0, false}, {500*time.Millisecond - 1, 0, false},
		{500 * time.Millisecond, 500 * time.Millisecond, true}, {550 * time.Millisecond, 550 * time.Millisecond, true},
		{600 * time.Millisecond, 600 * time.Millisecond, true}, {600*time.Millisecond + 1, 600 * time.Millisecond, true},
		// A wild clock, minutes without a ticker, an hour of standstill.
		{2 * time.Minute, 600 * time.Millisecond, true}, {time.Hour, 600 * time.Millisecond, true}, {math.MaxInt64, 600 * time.Millisecond, true},
	} {
		next, ticks := start.Next(c.elapsed)
		if ticks != c.ticks || ticks && next.Sub(start.Time) != c.step {
			t.Errorf("after %v: %v, %v, want a step of %v", c.elapsed, next.Sub(start.Time), ticks, c.step)
		}
	}
}

func TestH03TimeStandsWhileNobodyTicks(t *testing.T) {
	tick := claim.Tick{Time: claimed}
	for _, c := range []struct{ since, ahead time.Duration }{
		{-time.Hour, 0}, {0, 0}, {1, 1}, {499 * time.Millisecond, 499 * time.Millisecond},
		{500 * time.Millisecond, 500 * time.Millisecond}, {501 * time.Millisecond, 500 * time.Millisecond}, {time.Hour, 500 * time.Millisecond}, {math.MaxInt64, 500 * time.Millisecond},
	} {
		if got := tick.Now(c.since).Sub(claimed); got != c.ahead {
			t.Errorf("%v after the tick: %v ahead, want %v", c.since, got, c.ahead)
		}
	}
	// A claim given at the last tick is not lapsed by a node that waits for the next.
	w := newWorld()
	req := asks("")
	req.Lease = new(time.Second)
	w.first(t, req)
	w.at(tick.Now(24 * time.Hour))
	w.told(t, asks(""), "IN_PROGRESS")
}

// Two tickers write by compare: the one that loses reads again. Whatever their
// clocks say, each tick is one step ahead, and no node's clock runs behind a tick.
func TestH03TwoTickersAtOnce(t *testing.T) {
	tick := claim.Tick{Time: 0, Version: 1}
	clocks := [2]time.Duration{}
	read := [2]claim.Tick{tick, tick}
	for i := range 1000 {
		n := i * 7 % 2
		clocks[0] += 130 * time.Millisecond
		clocks[1] += time.Duration(i%5) * 300 * time.Millisecond
		next, ok := read[n].Next(clocks[n])
		if !ok {
			continue
		}
		if read[n].Version != tick.Version { // the compare fails
			read[n], clocks[n] = tick, 0
			continue
		}
		if step := next.Sub(tick.Time); step < 500*time.Millisecond || step > 600*time.Millisecond {
			t.Fatalf("tick %d moved by %v", tick.Version, step)
		}
		if next < tick.Now(math.MaxInt64) {
			t.Fatalf("tick %d is behind a node's clock", tick.Version+1)
		}
		tick = claim.Tick{Time: next, Version: tick.Version + 1}
		read[n], clocks[n] = tick, 0
	}
	if tick.Version < 100 {
		t.Fatalf("only %d ticks", tick.Version)
	}
}

// v-1 < Version(/m/tick) < v+10.
func TestTheTickWindow(t *testing.T) {
	tick := claim.Tick{Version: 100}
	for version := int64(0); version < 200; version++ {
		if got, want := tick.Admits(version), 100-1 < version && version < 100+10; got != want {
			t.Errorf("decided at 100, committed under %d: %v", version, got)
		}
	}
}

func TestInstantsNeverOverflow(t *testing.T) {
	if got := claim.Never.Add(time.Second); got != claim.Never {
		t.Errorf("after never: %d", got)
	}
	if got := claimed.Add(math.MaxInt64); got != claim.Never {
		t.Errorf("an endless retention ends at %d", got)
	}
	if got := claimed.Add(-time.Second); got != claimed-1e9 {
		t.Errorf("a second before: %d", got)
	}
	w := newWorld()
	w.policy.ResultRetention, w.policy.KeyRetention = math.MaxInt64, math.MaxInt64
	must(t)(w.complete(w.first(t, asks("")).ID, bankResult))
	w.at(claim.Never - 1)
	w.told(t, asks(""), "REPLAY")
}

func TestH09TheKeysTimeEndsUnderALiveClaim(t *testing.T) {
	w := newWorld()
	w.policy.ResultRetention, w.policy.KeyRetention = 2*time.Second, 2*time.Second
	g := w.first(t, asks("r"))
	for w.now < leaseEnd+grace {
		w.told(t, asks(""), "IN_PROGRESS")
		w.pass(100 * time.Millisecond)
	}
	w.at(leaseEnd + grace - 1)
	must(t)(w.extend(g.ID, lease))
	w.at(w.rec.LeaseUntil + grace - 1)
	w.told(t, asks(""), "IN_PROGRESS")
	must(t)(w.complete(g.ID, bankResult))
	w.told(t, asks(""), "REPLAY")
}

func TestH09NothingButAFinishAResolveOrAForcedForgetEndsNeverAndUnknown(t *testing.T) {
	for _, state := range []string{"pending, NEVER", "unknown", "unknown, NEVER"} {
		for end, act := range map[string]func(w *world) error{
			"finish":        func(w *world) error { _, err := w.complete(holder, bankResult); return err },
			"resolve":       func(w *world) error { _, err := w.resolve(&claim.ResolveRequest{State: claim.Released}); return err },
			"forced forget": func(w *world) error { err := w.forget(true); w.open(); return err },
		} {
			f := fixtures(t)[state]
			w := newWorld()
			w.rec, w.policy = f.rec, f.policy
			w.policy.ResultRetention, w.policy.KeyRetention, w.policy.TakeoverNever = 2*time.Second, 2*time.Second, false
			w.at(f.since.Add(1_000_000 * time.Hour))
			w.told(t, asks("holder"), "UNKNOWN_OUTCOME")
			if err := w.forget(false); claim.ReasonOf(err) != claim.ClaimLive {
				t.Fatalf("%s: forgotten without force: %v", state, err)
			}
			must0(t, act(w))
			w.told(t, asks("new"), map[string]string{"finish": "REPLAY", "resolve": "FIRST 4 RELEASED", "forced forget": "FIRST 1 NONE"}[end])
		}
	}
}

func TestH10ARepeatAfterTheLeaseIsJudgedAsAnyone(t *testing.T) {
	w := newWorld()
	g := w.first(t, asks("r"))
	w.at(leaseEnd - 1)
	if a := w.told(t, asks("r"), "REPEAT 1"); a.Claim.ID != g.ID || a.Claim.Fence != g.Fence {
		t.Fatalf("repeated as %+v, given as %+v", a.Claim, g)
	}
	w.pass(1)
	w.told(t, asks("r"), "IN_PROGRESS")
	w.at(leaseEnd + grace)
	w.told(t, asks("r"), "FIRST 2 LAPSED")
}

func TestH10ACopyAfterAReleaseIsRefusedAsSpent(t *testing.T) {
	for name, release := range map[string]func(w *world, id claim.ID) error{
		"by its holder": func(w *world, id claim.ID) error { _, err := w.fail(id, passing); return err },
		"by its holder after unknown": func(w *world, id claim.ID) error {
			if _, err := w.fail(id, unsure); err != nil {
				return err
			}
			_, err := w.fail(id, passing)
			return err
		},
		"by an operator after unknown": func(w *world, id claim.ID) error {
			if _, err := w.fail(id, unsure); err != nil {
				return err
			}
			_, err := w.resolve(&claim.ResolveRequest{State: claim.Released})
			return err
		},
		"by an operator after it lapsed": func(w *world, id claim.ID) error {
			w.at(leaseEnd + grace)
			_, err := w.resolve(&claim.ResolveRequest{State: claim.Released})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			must0(t, release(w, w.first(t, asks("r")).ID))
			w.told(t, asks("r"), "REQUEST_ID_SPENT")
			b := w.first(t, asks("other"))
			must(t)(w.fail(b.ID, passing))
			w.told(t, asks("r"), "REQUEST_ID_SPENT")
			w.told(t, asks("other"), "REQUEST_ID_SPENT")
			w.told(t, asks("third"), "FIRST 3 RELEASED")
		})
	}
}

func TestH10TheLastSixteenAreRemembered(t *testing.T) {
	w := newWorld()
	for i := range 20 {
		must(t)(w.fail(w.first(t, asks(fmt.Sprint("r", i))).ID, passing))
	}
	for i := 4; i < 20; i++ {
		w.told(t, asks(fmt.Sprint("r", i)), "REQUEST_ID_SPENT")
	}
	if len(w.rec.Spent) != 16 {
		t.Fatalf("%d are kept", len(w.rec.Spent))
	}
	if a, err := w.begin(asks("r3")); err != nil || a.Claim.Attempt != 21 {
		t.Fatalf("the seventeenth last: %+v, %v", a, err)
	}
}

func TestH10TwoOwnersAreTwoCallers(t *testing.T) {
	w := newWorld()
	one, two := asks("order-1"), asks("order-1")
	one.Owner, two.Owner = "billing", "shipping"
	g := w.first(t, one)
	w.told(t, two, "IN_PROGRESS")
	w.told(t, one, "REPEAT 1")
	must(t)(w.fail(g.ID, passing))
	w.told(t, one, "REQUEST_ID_SPENT")
	w.told(t, two, "FIRST 2 RELEASED")
}

func TestH11ADelayedExtendDoesNotMoveTheDeadlineBack(t *testing.T) {
	w := newWorld()
	g := w.first(t, asks(""))
	must(t)(w.extend(g.ID, 60*time.Second))
	until, revision := w.rec.LeaseUntil, w.revision
	w.pass(time.Second)
	must(t)(w.extend(g.ID, 5*time.Second))
	if w.rec.LeaseUntil != until || until != claimed.Add(60*time.Second) || w.revision != revision {
		t.Fatalf("the deadline moved to %v", w.rec.LeaseUntil.Sub(claimed))
	}
}

func TestH16AClaimIsJudgedByThePolicyItWasGivenUnder(t *testing.T) {
	given := newWorld()
	given.policy.TakeoverNever = true
	given.first(t, asks(""))
	given.policy = claim.Policy{DefaultLease: lease, MaxLease: time.Hour, ResultRetention: time.Second, KeyRetention: time.Second}
	given.at(leaseEnd.Add(time.Hour))
	given.told(t, asks(""), "UNKNOWN_OUTCOME")

	kept := newWorld()
	g := kept.first(t, asks(""))
	kept.policy.ResultRetention, kept.policy.KeyRetention, kept.policy.TakeoverNever = time.Second, time.Second, true
	must(t)(kept.complete(g.ID, bankResult))
	kept.at(claimed.Add(keepDone))
	kept.told(t, asks(""), "REPLAY")
	kept.at(claimed.Add(keepKey))
	kept.told(t, asks(""), "EXPIRED")

	taken := newWorld()
	taken.first(t, asks(""))
	taken.policy.TakeoverNever = true
	taken.at(leaseEnd + grace)
	taken.told(t, asks(""), "FIRST 2 LAPSED")
	taken.at(claimed.Add(1_000_000 * time.Hour))
	taken.told(t, asks(""), "UNKNOWN_OUTCOME") // the new claim, by the new policy
}

func TestH22ARepeatedReleaseAfterTheNextClaimIsFine(t *testing.T) {
	w := newWorld()
	a := w.first(t, asks("a"))
	must(t)(w.fail(a.ID, passing))
	repeat := func(wantState claim.State) {
		t.Helper()
		revision := w.revision
		rec, err := w.fail(a.ID, passing)
		if err != nil || w.revision != revision || rec.State != wantState {
			t.Fatalf("repeated: %+v, %v", rec, err)
		}
	}
	repeat(claim.Released)
	b := w.first(t, asks("b"))
	repeat(claim.Pending)
	w.told(t, asks("b"), "REPEAT 2")
	for name, finish := range map[claim.State]*claim.FinishRequest{
		claim.Succeeded: {Result: bankResult}, claim.Failed: {Failure: blocked}, claim.Released: {Failure: passing}, claim.Unknown: {Failure: unsure},
	} {
		before := *w.rec
		must(t)(w.finish(b.ID, finish))
		repeat(name)
		w.rec = &before
	}
	// Only the claim directly before is remembered.
	must(t)(w.fail(b.ID, passing))
	w.first(t, asks("c"))
	w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.fail(a.ID, passing) })
	must(t)(w.fail(b.ID, passing))
}

// The claim directly before is remembered only if its own holder released it.
func TestH22AnOperatorsReleaseIsNotTheHolders(t *testing.T) {
	w := newWorld()
	a := w.first(t, asks("a"))
	must(t)(w.fail(a.ID, passing))
	b := w.first(t, asks("b"))
	must(t)(w.fail(b.ID, unsure))
	must(t)(w.resolve(&claim.ResolveRequest{State: claim.Released}))
	w.first(t, asks("c"))
	for _, old := range []*claim.Grant{a, b} {
		w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.fail(old.ID, passing) })
	}
}

// A claim that an operator took back leaves the release before it known, also once the
// operator has finished the key.
func TestH22ARepeatedReleaseAfterAnOperatorsReleaseAndFinish(t *testing.T) {
	w := newWorld()
	a := w.first(t, asks("a"))
	must(t)(w.fail(a.ID, passing))
	b := w.first(t, asks("b"))
	w.at(w.rec.LeaseUntil + grace)
	must(t)(w.resolve(&claim.ResolveRequest{State: claim.Released}))
	must(t)(w.fail(a.ID, passing))
	w.policy.MaxAttempts = 2 // used up: only then may a released key be resolved
	must(t)(w.resolve(&claim.ResolveRequest{State: claim.Succeeded, Result: otherResult}))
	must(t)(w.fail(a.ID, passing))
	if w.rec.State != claim.Succeeded {
		t.Fatalf("a repeated release changed the record to %v", w.rec.State)
	}
	w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.fail(b.ID, passing) })
}

func TestH23ACompleteOvertakenByItsOwnReleaseIsAccepted(t *testing.T) {
	for state, req := range map[claim.State]*claim.FinishRequest{claim.Succeeded: {Result: bankResult}, claim.Failed: {Failure: blocked}} {
		w := newWorld()
		g := w.first(t, asks("r"))
		must(t)(w.fail(g.ID, passing))
		must(t)(w.finish(g.ID, req))
		if w.rec.State != state {
			t.Fatalf("%v after its own release", w.rec.State)
		}
		must(t)(w.finish(g.ID, req))
		must(t)(w.fail(g.ID, passing)) // the copy that came first, once more
		if w.rec.State != state {
			t.Fatalf("%v after a repeated release", w.rec.State)
		}

		w = newWorld()
		g = w.first(t, asks("r"))
		must(t)(w.fail(g.ID, passing))
		w.first(t, asks("next"))
		w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.finish(g.ID, req) })
	}
}

func TestH23ACompleteAfterAnOperatorsReleaseIsRefused(t *testing.T) {
	for _, req := range []*claim.FinishRequest{{Result: bankResult}, {Failure: blocked}, {Failure: unsure}, {Failure: passing}} {
		w := newWorld()
		g := w.first(t, asks("r"))
		w.at(leaseEnd + grace)
		must(t)(w.resolve(&claim.ResolveRequest{State: claim.Released}))
		w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.finish(g.ID, req) })
		w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.extend(g.ID, lease) })
		w.told(t, asks("next"), "FIRST 2 RELEASED")
	}
}

func TestH28UnderNeverALateExtendOrCompletePasses(t *testing.T) {
	for _, late := range []string{"extend", "complete"} {
		w := newWorld()
		w.policy.TakeoverNever = true
		g := w.first(t, asks("r"))
		held := *w.rec
		w.at(leaseEnd.Add(time.Hour))
		w.told(t, asks(""), "UNKNOWN_OUTCOME")
		if w.rec.State != claim.Pending || w.rec.At(w.now).State != claim.Unknown {
			t.Fatal("UNKNOWN is computed, never written")
		}
		same(t, "the record", *w.rec, held)
		if late == "extend" {
			must(t)(w.extend(g.ID, lease))
			w.told(t, asks(""), "IN_PROGRESS")
			w.told(t, asks("r"), "REPEAT 1")
		}
		must(t)(w.complete(g.ID, bankResult))
		w.told(t, asks(""), "REPLAY")
	}
}

func TestH37AnUnknownAfterTheClaimsOwnReleaseLeavesTheKeyFree(t *testing.T) {
	for _, never := range []bool{false, true} {
		w := newWorld()
		w.policy.TakeoverNever = never
		g := w.first(t, asks(""))
		must(t)(w.fail(g.ID, passing))
		revision := w.revision
		rec, err := w.fail(g.ID, unsure)
		if err != nil || rec.State != claim.Released || w.revision != revision {
			t.Fatalf("%+v, %v", rec, err)
		}
		w.told(t, asks(""), "FIRST 2 RELEASED")
	}
}

// Fences grow with each new claim, also over a forget and a raised epoch, and stay
// what they were through extensions and renewals.
func TestFencesGrow(t *testing.T) {
	w := newWorld()
	last := int64(0)
	grow := func() *claim.Grant {
		t.Helper()
		g := w.first(t, asks(""))
		if g.Fence <= last || w.rec.Fence() != g.Fence {
			t.Fatalf("fence %d after %d", g.Fence, last)
		}
		last = g.Fence
		stays := func() {
			t.Helper()
			if w.rec.Fence() != g.Fence || w.rec.Revision == g.Fence {
				t.Fatalf("the fence of a claim moved from %d to %d", g.Fence, w.rec.Fence())
			}
		}
		for range 3 {
			w.pass(time.Second)
			must(t)(w.extend(g.ID, time.Hour))
			stays()
		}
		w.commit(claim.Renew(w.rec, 24*time.Hour, w.now))
		stays()
		return g
	}
	must(t)(w.fail(grow().ID, passing))
	grow()
	must0(t, w.forget(true))
	w.open()
	must(t)(w.fail(grow().ID, passing))
	w.revision, w.fenceBase = 3, 1<<40 // restored, and the epoch raised
	must(t)(w.fail(grow().ID, passing))
	grow()
}
