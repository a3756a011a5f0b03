package claim_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// begins is what a Begin is told in one state: with another fingerprint or
// operation; by anyone; by the very call that was given the newest claim; by a
// call whose claim was released.
type begins struct{ differs, anyone, same, spent string }

// fresh: the key is as new, whoever asks and whatever was there.
var fresh = begins{"FIRST 1 NONE", "FIRST 1 NONE", "FIRST 1 NONE", "FIRST 1 NONE"}

// all: nothing but another fingerprint or operation makes a difference.
func all(verdict string) begins { return begins{"CONFLICT", verdict, verdict, verdict} }

// The rows of a live claim: its own call gets it again until its lease ends.
var (
	ownUntilLeaseEnd = phase[begins]{leaseEnd, begins{"CONFLICT", "IN_PROGRESS", "REPEAT 3", "IN_PROGRESS"}}
	heldInGrace      = phase[begins]{leaseEnd + grace, all("IN_PROGRESS")}
	takenOver        = begins{"CONFLICT", "FIRST 4 LAPSED", "FIRST 4 LAPSED", "REQUEST_ID_SPENT"}
	freed            = begins{"CONFLICT", "FIRST 4 RELEASED", "REQUEST_ID_SPENT", "REQUEST_ID_SPENT"}
)

var beginTable = []phases[begins]{
	{"none", []phase[begins]{{forever, fresh}}},
	{"pending", []phase[begins]{ownUntilLeaseEnd, heldInGrace, {claimKeyEnd + grace, takenOver}, {forever, fresh}}},
	{"pending, policy NEVER since", []phase[begins]{ownUntilLeaseEnd, heldInGrace, {claimKeyEnd + grace, takenOver}, {forever, fresh}}},
	{"pending, kept 2 s", []phase[begins]{ownUntilLeaseEnd, heldInGrace, {forever, fresh}}},
	{"pending, NEVER", []phase[begins]{ownUntilLeaseEnd, heldInGrace, {forever, all("UNKNOWN_OUTCOME")}}},
	{"pending, NEVER, policy AUTO since", []phase[begins]{ownUntilLeaseEnd, heldInGrace, {forever, all("UNKNOWN_OUTCOME")}}},
	{"pending, used up", []phase[begins]{ownUntilLeaseEnd, heldInGrace, {claimKeyEnd + grace, all("UNKNOWN_OUTCOME")}, {forever, fresh}}},
	{"pending without a lease", []phase[begins]{{forever, all("UNKNOWN_OUTCOME")}}},
	{"pending without a lease, key_until set", []phase[begins]{{forever, all("UNKNOWN_OUTCOME")}}},
	{"pending without key_until", []phase[begins]{ownUntilLeaseEnd, heldInGrace, {forever, all("UNKNOWN_OUTCOME")}}},
	{"released", []phase[begins]{{keyEnd + grace, freed}, {forever, fresh}}},
	{"released without key_until", []phase[begins]{{forever, freed}}},
	{"released by operator", []phase[begins]{{keyEnd + grace, freed}, {forever, fresh}}},
	{"lapsed, released by operator", []phase[begins]{{leaseEnd + grace + claim.Instant(keepKey) + grace, freed}, {forever, fresh}}},
	{"released, used up", []phase[begins]{{keyEnd + grace, all("UNKNOWN_OUTCOME")}, {forever, fresh}}},
	{"released, used up, allowed again", []phase[begins]{{keyEnd + grace, freed}, {forever, fresh}}},
	{"unknown", []phase[begins]{{forever, all("UNKNOWN_OUTCOME")}}},
	{"unknown, NEVER", []phase[begins]{{forever, all("UNKNOWN_OUTCOME")}}},
	{"succeeded", []phase[begins]{{resultEnd + grace, all("REPLAY")}, {keyEnd + grace, all("EXPIRED")}, {forever, fresh}}},
	{"succeeded, NEVER", []phase[begins]{{resultEnd + grace, all("REPLAY")}, {keyEnd + grace, all("EXPIRED")}, {forever, fresh}}},
	{"succeeded, kept alike", []phase[begins]{{resultEnd + grace, all("REPLAY")}, {forever, fresh}}},
	{"succeeded after its release", []phase[begins]{{resultEnd + grace, all("REPLAY")}, {keyEnd + grace, all("EXPIRED")}, {forever, fresh}}},
	{"succeeded without key_until", []phase[begins]{{resultEnd + grace, all("REPLAY")}, {forever, all("EXPIRED")}}},
	{"succeeded without result_until", []phase[begins]{{forever, all("REPLAY")}}},
	{"failed", []phase[begins]{{resultEnd + grace, all("REPLAY_FAILURE")}, {keyEnd + grace, all("EXPIRED")}, {forever, fresh}}},
	{"held", []phase[begins]{{forever, begins{"IN_PROGRESS", "IN_PROGRESS", "IN_PROGRESS", "IN_PROGRESS"}}}},
	{"opened", []phase[begins]{{forever, fresh}}},
}

// beginRequests is every Begin that makes a difference.
func beginRequests(yield func(req *claim.BeginRequest, want func(begins) string)) {
	for _, print := range [][]byte{fingerprint, otherPrint, nil} {
		for _, operation := range []string{"payment.capture", "payment.refund", ""} {
			for _, caller := range []struct {
				requestID, owner string
				want             func(begins) string
			}{
				{"", "erp-1", func(b begins) string { return b.anyone }},
				{"holder", "erp-1", func(b begins) string { return b.same }},
				{"holder", "erp-2", func(b begins) string { return b.anyone }},
				{"holder", "", func(b begins) string { return b.anyone }},
				{"another", "erp-1", func(b begins) string { return b.anyone }},
				{"older", "erp-1", func(b begins) string { return b.anyone }},
				{"spent", "erp-1", func(b begins) string { return b.spent }},
				{"spent", "erp-2", func(b begins) string { return b.anyone }},
			} {
				want := caller.want
				if operation == "payment.refund" || print != nil && print[0] == otherPrint[0] {
					want = func(b begins) string { return b.differs }
				}
				yield(&claim.BeginRequest{
					Namespace: "pay", Key: "k", Operation: operation, Fingerprint: print,
					RequestID: caller.requestID, Owner: caller.owner,
					Labels: map[string]string{"plant": "7"}, TraceID: bytes.Repeat([]byte{9}, 16),
				}, want)
			}
		}
	}
}

// Every state × every Begin × every boundary of time.
func TestBeginInEveryStateAtEveryInstant(t *testing.T) {
	everyInstant(t, beginTable, func(t *testing.T, f fixture, now claim.Instant, want begins) {
		beginRequests(func(req *claim.BeginRequest, column func(begins) string) {
			m := f.moment(now)
			a, write, err := claim.Begin(f.rec, req, m)
			what := fmt.Sprintf("at %v, print %.1x, operation %q, request %q of %q", now.Sub(claimed), req.Fingerprint, req.Operation, req.RequestID, req.Owner)
			if got := tell(a, write, err); got != column(want) {
				t.Errorf("%s: %s, want %s", what, got, column(want))
				return
			}
			if err == nil {
				checkAnswer(t, what, f.rec, m, a, write)
			}
			if write != nil {
				checkClaim(t, what, f.rec, req, m, write)
			}
		})
	})
}

// checkAnswer checks what each verdict carries, and that only a claim is written.
func checkAnswer(t *testing.T, what string, rec *claim.Record, m claim.Moment, a claim.Answer, write *claim.Record) {
	t.Helper()
	if (write != nil) != (a.Verdict == claim.First && !a.Repeat) {
		t.Errorf("%s: %v wrote %+v", what, a.Verdict, write)
	}
	wantAction := map[claim.Verdict]claim.KeyAction{
		claim.First: claim.Proceed, claim.InProgress: claim.Reuse, claim.Replay: claim.Stop, claim.ReplayFailure: claim.Rotate,
		claim.Conflict: claim.Rotate, claim.Expired: claim.Stop, claim.OutcomeUnknown: claim.Reuse,
	}[a.Verdict]
	if a.Verdict == claim.Expired && rec.State == claim.Failed {
		wantAction = claim.Rotate
	}
	if a.KeyAction() != wantAction {
		t.Errorf("%s: %s with key action %d, want %d", what, verdicts[a.Verdict], a.KeyAction(), wantAction)
	}
	if sentAway := a.Verdict == claim.InProgress || a.Verdict == claim.OutcomeUnknown; sentAway != (a.RetryAfter > 0) {
		t.Errorf("%s: %s with retry_after %v", what, verdicts[a.Verdict], a.RetryAfter)
	}
	if a.Now != m.Now {
		t.Errorf("%s: told as of %v", what, a.Now)
	}
	var shown *claim.Record
	var wantLapse time.Duration // for a live claim alone
	switch a.Verdict {
	case claim.First:
		if a.Repeat {
			left := max(rec.LeaseUntil.Sub(m.Now)-100*time.Millisecond, 0)
			same(t, what+": the claim", a.Claim, &claim.Grant{ID: holder, Attempt: 3, Fence: rec.Fence(), Left: left, Previous: claim.PreviousReleased})
		}
	case claim.InProgress:
		if rec.State == claim.Pending && a.RetryAfter > max(rec.LeaseUntil.Sub(m.Now), 50*time.Millisecond) {
			t.Errorf("%s: retry_after %v is more than the lease left, %v", what, a.RetryAfter, rec.LeaseUntil.Sub(m.Now))
		}
		if rec.State == claim.Pending && rec.Forgotten == nil {
			wantLapse = (rec.LeaseUntil + grace).Sub(m.Now)
		}
	case claim.Replay:
		seen := *rec
		seen.FinishRevision = rec.Revision
		shown = &seen
	case claim.ReplayFailure:
		seen := *rec
		seen.FinishRevision = rec.Revision
		shown = &seen
	case claim.Conflict:
		shown = &claim.Record{CreatedAt: rec.CreatedAt}
	case claim.Expired:
		shown = &claim.Record{State: rec.State, FinishedAt: rec.FinishedAt, Digest: rec.Digest}
	case claim.OutcomeUnknown:
		if a.Detail == "" {
			t.Errorf("%s: UNKNOWN_OUTCOME does not say why", what)
		}
	}
	same(t, what+": the record told", a.Record, shown)
	if a.LapsesIn != wantLapse {
		t.Errorf("%s: the claim lapses in %v, want %v", what, a.LapsesIn, wantLapse)
	}
	if a.Verdict != claim.First && (a.Claim != nil || a.Repeat) {
		t.Errorf("%s: %s with a claim", what, verdicts[a.Verdict])
	}
}

// Who waits knows to the nanosecond when to ask again.
func TestAClaimLapsesWhenItIsSaidTo(t *testing.T) {
	for _, never := range []bool{false, true} {
		w := newWorld()
		w.policy.TakeoverNever = never
		w.told(t, asks("holder"), "FIRST 1 NONE")
		w.pass(7 * time.Second)
		in := w.told(t, asks("b"), "IN_PROGRESS").LapsesIn
		w.pass(in - 1)
		if left := w.told(t, asks("b"), "IN_PROGRESS").LapsesIn; left != 1 {
			t.Errorf("%v are left of the last nanosecond", left)
		}
		w.pass(1)
		if never {
			w.told(t, asks("b"), "UNKNOWN_OUTCOME")
		} else {
			w.told(t, asks("b"), "FIRST 2 LAPSED")
		}
	}
}

// checkClaim checks the record of a new claim in full.
func checkClaim(t *testing.T, what string, old *claim.Record, req *claim.BeginRequest, m claim.Moment, write *claim.Record) {
	t.Helper()
	want := &claim.Record{
		Namespace: "pay", Key: "k", Operation: req.Operation, State: claim.Pending,
		Fingerprint: req.Fingerprint, Owner: req.Owner,
		Attempt: 1, ClaimID: m.ClaimID, Previous: claim.PreviousNone, RequestID: req.RequestID,
		TakeoverNever: m.Policy.TakeoverNever, ResultRetention: m.Policy.ResultRetention, KeyRetention: m.Policy.KeyRetention,
		Claimed: m.Now, LeaseUntil: m.Now + claim.Instant(lease), CreatedAt: m.Wall, ClaimedAt: m.Wall,
		FenceBase: m.FenceBase, TraceID: req.TraceID, Labels: req.Labels,
	}
	if write.Previous != claim.PreviousNone {
		want.Attempt, want.Previous, want.CreatedAt, want.Spent = 4, write.Previous, old.CreatedAt, old.Spent
		want.AttemptsForgiven = old.AttemptsForgiven
		want.Fingerprint, want.Operation = fingerprint, "payment.capture"
		if old.State == claim.Released {
			want.ReleasedClaimID = old.ClaimID
		}
	}
	if !m.Policy.TakeoverNever {
		want.KeyUntil = m.Now + claim.Instant(max(lease, m.Policy.KeyRetention))
	}
	same(t, what+": the record of the claim", write, want)
}

// While a namespace is being deleted, every Begin is held.
func TestBeginIsHeldWhileItsNamespaceIsDeleted(t *testing.T) {
	for state, f := range fixtures(t) {
		f.policy.Held = true
		for _, now := range f.instants() {
			beginRequests(func(req *claim.BeginRequest, _ func(begins) string) {
				a, write, err := claim.Begin(f.rec, req, f.moment(now))
				if err != nil || write != nil || a.Verdict != claim.InProgress || a.RetryAfter <= 0 {
					t.Errorf("%s at %v: %s", state, now.Sub(claimed), tell(a, write, err))
				}
			})
		}
	}
}

// A fingerprint that the namespace requires is asked for before anything is told.
func TestFingerprintRequired(t *testing.T) {
	for state, f := range fixtures(t) {
		f.policy.RequireFingerprint = true
		req := asks("")
		if _, _, err := claim.Begin(f.rec, req, f.moment(f.since)); err != nil {
			t.Errorf("%s, with a fingerprint: %v", state, err)
		}
		req.Fingerprint = nil
		if _, write, err := claim.Begin(f.rec, req, f.moment(f.since)); claim.ReasonOf(err) != claim.FingerprintRequired || write != nil {
			t.Errorf("%s, without: %v", state, err)
		}
	}
}

// A fingerprint or operation that the record lacks is adopted by the claim that
// brings it, never by a replay, and binds from then on.
func TestFingerprintIsAdoptedByAClaimOnly(t *testing.T) {
	bare := asks("")
	bare.Fingerprint, bare.Operation = nil, ""
	w := newWorld()
	id := w.first(t, bare).ID
	w.told(t, asks(""), "IN_PROGRESS")
	must(t)(w.complete(id, bankResult))
	w.told(t, asks(""), "REPLAY")
	if w.rec.Fingerprint != nil || w.rec.Operation != "" {
		t.Fatal("a replay was adopted")
	}
	other := asks("")
	other.Fingerprint = otherPrint
	w.told(t, other, "REPLAY")

	w = newWorld()
	must(t)(w.fail(w.first(t, bare).ID, passing))
	must(t)(w.fail(w.first(t, asks("")).ID, passing))
	w.told(t, other, "CONFLICT")
	w.told(t, bare, "FIRST 3 RELEASED")
	same(t, "fingerprint", w.rec.Fingerprint, fingerprint)
	same(t, "operation", w.rec.Operation, "payment.capture")
}

// retry_after is jittered, at most what is left of the lease and twice the usual
// time, and 50 ms at least.
func TestRetryAfter(t *testing.T) {
	for _, c := range []struct {
		left, usual time.Duration
		jitter      float64
		least, most time.Duration
	}{
		{30 * time.Second, 0, 1, 50 * time.Millisecond, 30 * time.Second},
		{30 * time.Second, 2 * time.Second, 1, 2 * time.Second, 4 * time.Second},
		{30 * time.Second, 2 * time.Second, 0, 50 * time.Millisecond, 2 * time.Second},
		{3 * time.Second, 20 * time.Second, 1, time.Second, 3 * time.Second},
		{time.Millisecond, 20 * time.Second, 1, 50 * time.Millisecond, 50 * time.Millisecond},
		{-400 * time.Millisecond, 20 * time.Second, 0.3, 50 * time.Millisecond, 50 * time.Millisecond},
		{30 * time.Second, time.Millisecond, 1, 50 * time.Millisecond, 50 * time.Millisecond},
	} {
		w := newWorld()
		w.first(t, asks(""))
		w.at(leaseEnd.Add(-c.left))
		w.usual, w.jitter = c.usual, c.jitter
		if a := w.told(t, asks(""), "IN_PROGRESS"); a.RetryAfter < c.least || a.RetryAfter > c.most {
			t.Errorf("%v left, usually %v, jitter %v: %v, want %v ... %v", c.left, c.usual, c.jitter, a.RetryAfter, c.least, c.most)
		}
	}
	w := newWorld()
	w.first(t, asks(""))
	var seen []time.Duration
	for _, w.jitter = range []float64{0, 0.5, 1} {
		seen = append(seen, w.told(t, asks(""), "IN_PROGRESS").RetryAfter)
	}
	if seen[0] >= seen[1] || seen[1] >= seen[2] {
		t.Errorf("jitter does not spread callers: %v", seen)
	}
}

// lease_left = min(lease, lease_until - the tick its commit read) - 0.1 s.
func TestLeaseLeftIsNeverMoreThanIsTrue(t *testing.T) {
	rec := &claim.Record{LeaseUntil: leaseEnd}
	for _, c := range []struct {
		asked time.Duration
		tick  claim.Instant
		want  time.Duration
	}{
		{lease, claimed, lease - 100*time.Millisecond},
		{lease, claimed - 1e9, lease - 100*time.Millisecond},
		{lease, claimed + 1e9, lease - 1100*time.Millisecond},
		{0, claimed - 1e9, lease + 900*time.Millisecond},
		{lease, leaseEnd - 1e8, 0},
		{lease, leaseEnd - 1e8 - 1, 1},
		{lease, leaseEnd + 5e9, 0},
	} {
		if got := rec.Grant(c.asked, c.tick).Left; got != c.want {
			t.Errorf("%v asked, tick at %v: %v left, want %v", c.asked, c.tick.Sub(claimed), got, c.want)
		}
	}
}

// A claim with less than half of its lease left is set anew before it is told of
// (H33), as the same claim with the same fence.
func TestRenewWhenLessThanHalfIsLeft(t *testing.T) {
	odd := 3*time.Second + 1
	for _, c := range []struct {
		lease, left time.Duration
		renewed     bool
	}{
		{30 * time.Second, 30 * time.Second, false},
		{30 * time.Second, 15 * time.Second, false},
		{30 * time.Second, 15*time.Second - 1, true},
		{30 * time.Second, -time.Second, true},
		{odd, odd/2 + 1, false},
		{odd, odd / 2, true},
	} {
		for _, never := range []bool{false, true} {
			w := newWorld()
			w.policy.TakeoverNever = never
			req := asks("r")
			req.Lease = &c.lease
			w.first(t, req)
			before := w.rec
			tick := before.LeaseUntil.Add(-c.left)
			anew := claim.Renew(before, c.lease, tick)
			if (anew != nil) != c.renewed {
				t.Errorf("lease %v, left %v: renewed to %+v", c.lease, c.left, anew)
			}
			if anew == nil {
				continue
			}
			want := *before
			want.LeaseUntil, want.Revision, want.ClaimRevision = tick.Add(c.lease), 0, before.Revision
			if !never {
				want.KeyUntil = max(before.KeyUntil, want.LeaseUntil)
			}
			same(t, "the renewed claim", anew, &want)
			if anew.Fence() != before.Fence() {
				t.Errorf("the fence moved from %d to %d", before.Fence(), anew.Fence())
			}
		}
	}
}
