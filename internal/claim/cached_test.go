package claim_test

import (
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// A cache stops before either deadline, and a record without one is never cached.
func TestCachedUntil(t *testing.T) {
	hour, minute := claim.Instant(time.Hour), claim.Instant(time.Minute)
	for _, c := range []struct{ result, key, want claim.Instant }{
		{hour, 2 * hour, hour.Add(-4 * time.Second)}, {hour, minute, minute.Add(-4 * time.Second)}, {hour, 0, 0}, {0, minute, 0},
	} {
		rec := &claim.Record{State: claim.Succeeded, ResultUntil: c.result, KeyUntil: c.key}
		if got := rec.CachedUntil(); got != c.want {
			t.Errorf("until %d and %d: %d, want %d", c.result, c.key, got, c.want)
		}
	}
}

// What a cache told of a record goes with its result; whoever is told of it cannot change
// what is kept.
func TestEncodedGoesWithTheResult(t *testing.T) {
	hour := claim.Instant(time.Hour)
	for _, finish := range []int64{0, 3} {
		rec := &claim.Record{State: claim.Failed, ResultUntil: hour, KeyUntil: 2 * hour, Revision: 5, FinishRevision: finish, Encoded: []byte("e")}
		if seen := rec.At(hour); string(seen.Encoded) != "e" {
			t.Errorf("in time: %+v", seen)
		}
		if seen := rec.At(hour.Add(claim.Grace)); seen.Encoded != nil || rec.Encoded == nil {
			t.Errorf("after its time: %+v of %+v", seen, rec)
		}
	}
}

// A view has the epochs of a slot, and for what is told stale the latest that it can be.
func TestEpochsAndLatest(t *testing.T) {
	v := claim.View{Epoch: claim.ID{1}}
	if v.Epochs(7) != (claim.Epochs{Cluster: claim.ID{1}}) {
		t.Errorf("%+v", v.Epochs(7))
	}
	v.SlotEpochs = &[claim.Slots]int64{7: 9}
	if v.Epochs(7) != (claim.Epochs{Cluster: claim.ID{1}, Slot: 9}) || v.Epochs(7) == v.Epochs(8) {
		t.Errorf("%+v, %+v", v.Epochs(7), v.Epochs(8))
	}
	v.Tick.Time, v.TickAge = 100, time.Hour
	if got := v.Latest(); got != claim.Instant(100+time.Hour) {
		t.Errorf("latest %d", got)
	}
}

// A cache answers Begins of something finished, by whom it says; of several, all or none.
func TestReplayed(t *testing.T) {
	rec := &claim.Record{State: claim.Succeeded, Operation: "pay", ResultUntil: 100, KeyUntil: 200, Revision: 5}
	moment := claim.Moment{Now: 1, Policy: claim.Policy{DefaultLease: time.Minute, MaxLease: time.Minute}}
	mine, other := &claim.BeginRequest{}, &claim.BeginRequest{Operation: "refund"}
	begun, ok := claim.Replayed(rec, []*claim.BeginRequest{other, mine}, moment, claim.SourceRedis, true)
	if !ok || begun[0].Answer.Verdict != claim.Conflict || begun[1].Answer.Verdict != claim.Replay || begun[1].Answer.Source != claim.SourceRedis || !begun[0].Answer.Stale {
		t.Errorf("%+v, %t", begun, ok)
	}
	zero := time.Duration(0)
	for what, told := range map[string]func(rec *claim.Record, reqs []*claim.BeginRequest, m *claim.Moment){
		"an error": func(_ *claim.Record, reqs []*claim.BeginRequest, _ *claim.Moment) {
			reqs[1] = &claim.BeginRequest{Lease: &zero}
		},
		"expired":   func(_ *claim.Record, _ []*claim.BeginRequest, m *claim.Moment) { m.Now = claim.Instant(time.Second) },
		"held":      func(_ *claim.Record, _ []*claim.BeginRequest, m *claim.Moment) { m.Policy.Held = true },
		"a pending": func(rec *claim.Record, _ []*claim.BeginRequest, _ *claim.Moment) { rec.State = claim.Pending },
	} {
		changed, reqs, m := *rec, []*claim.BeginRequest{mine, mine}, moment
		if told(&changed, reqs, &m); what == "expired" {
			changed.KeyUntil = claim.Never
		}
		if begun, ok := claim.Replayed(&changed, reqs, m, claim.SourceMemory, false); ok || begun != nil {
			t.Errorf("%s: %+v", what, begun)
		}
	}
}
