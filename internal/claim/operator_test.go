package claim_test

import (
	"testing"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// resolves is what an operator's word comes to in one state: succeeded, failed,
// released. A state is what was written; OK is the record as it is.
type resolves struct{ succeeded, failed, released string }

var (
	resolvable = resolves{"STATE_SUCCEEDED", "STATE_FAILED", "STATE_RELEASED"}
	free       = resolves{"OK", "OK", "OK"}
	live       = resolves{"CLAIM_LIVE", "CLAIM_LIVE", "CLAIM_LIVE"}
	final      = resolves{"ALREADY_FINISHED", "ALREADY_FINISHED", "ALREADY_FINISHED"}
	gone       = resolves{"RECORD_NOT_FOUND", "RECORD_NOT_FOUND", "RECORD_NOT_FOUND"}
)

var resolveTable = []phases[resolves]{
	{"none", []phase[resolves]{{forever, gone}}},
	{"pending", []phase[resolves]{{leaseEnd + grace, live}, {claimKeyEnd + grace, resolvable}, {forever, gone}}},
	{"pending, policy NEVER since", []phase[resolves]{{leaseEnd + grace, live}, {claimKeyEnd + grace, resolvable}, {forever, gone}}},
	{"pending, kept 2 s", []phase[resolves]{{leaseEnd + grace, live}, {forever, gone}}},
	{"pending, NEVER", []phase[resolves]{{leaseEnd + grace, live}, {forever, resolvable}}},
	{"pending, NEVER, policy AUTO since", []phase[resolves]{{leaseEnd + grace, live}, {forever, resolvable}}},
	{"pending, used up", []phase[resolves]{{leaseEnd + grace, live}, {claimKeyEnd + grace, resolvable}, {forever, gone}}},
	{"pending without a lease", []phase[resolves]{{forever, resolvable}}},
	{"pending without a lease, key_until set", []phase[resolves]{{forever, resolvable}}},
	{"pending without key_until", []phase[resolves]{{leaseEnd + grace, live}, {forever, resolvable}}},
	{"released", []phase[resolves]{{keyEnd + grace, free}, {forever, gone}}},
	{"released without key_until", []phase[resolves]{{forever, free}}},
	{"released by operator", []phase[resolves]{{keyEnd + grace, free}, {forever, gone}}},
	{"lapsed, released by operator", []phase[resolves]{{leaseEnd + grace + claim.Instant(keepKey) + grace, free}, {forever, gone}}},
	{"released, used up", []phase[resolves]{{keyEnd + grace, resolvable}, {forever, gone}}},
	{"released, used up, allowed again", []phase[resolves]{{keyEnd + grace, free}, {forever, gone}}},
	{"unknown", []phase[resolves]{{forever, resolvable}}},
	{"unknown, NEVER", []phase[resolves]{{forever, resolvable}}},
	{"succeeded", []phase[resolves]{{keyEnd + grace, final}, {forever, gone}}},
	{"succeeded, NEVER", []phase[resolves]{{keyEnd + grace, final}, {forever, gone}}},
	{"succeeded, kept alike", []phase[resolves]{{resultEnd + grace, final}, {forever, gone}}},
	{"succeeded after its release", []phase[resolves]{{keyEnd + grace, final}, {forever, gone}}},
	{"succeeded without key_until", []phase[resolves]{{forever, final}}},
	{"succeeded without result_until", []phase[resolves]{{forever, final}}},
	{"failed", []phase[resolves]{{keyEnd + grace, final}, {forever, gone}}},
	{"held", []phase[resolves]{{forever, gone}}},
	{"opened", []phase[resolves]{{forever, gone}}},
}

// Every state × every resolve × every boundary of time.
func TestResolveInEveryStateAtEveryInstant(t *testing.T) {
	// The class of a resolved failure may be left out.
	classless := *blocked
	classless.Class = 0
	requests := []struct {
		req  claim.ResolveRequest
		want func(resolves) string
	}{
		{claim.ResolveRequest{State: claim.Succeeded, Result: bankResult}, func(r resolves) string { return r.succeeded }},
		{claim.ResolveRequest{State: claim.Succeeded}, func(r resolves) string { return r.succeeded }},
		{claim.ResolveRequest{State: claim.Failed, Failure: &classless}, func(r resolves) string { return r.failed }},
		{claim.ResolveRequest{State: claim.Released}, func(r resolves) string { return r.released }},
	}
	everyInstant(t, resolveTable, func(t *testing.T, f fixture, now claim.Instant, want resolves) {
		for _, r := range requests {
			r.req.Namespace, r.req.Key, r.req.Reason = "pay", "k", "asked the bank"
			m := f.moment(now)
			answer, write, err := claim.Resolve(f.rec, &r.req, m)
			what := "as " + r.req.State.String() + " at " + now.Sub(claimed).String()
			if got := tellWrite(answer, write, err); got != r.want(want) {
				t.Errorf("%s: %s, want %s", what, got, r.want(want))
				continue
			}
			checkRefusal(t, what, f.rec, now, err)
			switch {
			case write != nil:
				same(t, what+": the answer", answer, write.At(now))
				checkResolution(t, what, f, &r.req, m, write)
			case err == nil:
				same(t, what+": the answer", answer, f.rec.At(now))
			}
		}
	})
}

func checkResolution(t *testing.T, what string, f fixture, req *claim.ResolveRequest, m claim.Moment, write *claim.Record) {
	t.Helper()
	switch req.State {
	case claim.Succeeded:
		checkFinish(t, what, f.rec, &claim.FinishRequest{Result: req.Result}, m, write)
	case claim.Failed:
		checkFinish(t, what, f.rec, &claim.FinishRequest{Failure: blocked}, m, write)
	default:
		if !write.FinishedAt.Equal(m.Wall) || write.KeyUntil != m.Now.Add(f.rec.KeyRetention) || write.LeaseUntil != 0 || write.Failure != nil || write.RequestID != "" {
			t.Errorf("%s: wrote %+v", what, write)
		}
		if allowed := f.policy.MaxAttempts > 0; allowed && write.AttemptsForgiven != 3 || !allowed && write.AttemptsForgiven != 0 {
			t.Errorf("%s: forgave %d attempts", what, write.AttemptsForgiven)
		}
		// The claim it was taken from cannot finish it any more; but its own release stands.
		_, _, err := claim.Finish(&claim.Record{State: write.State, ClaimID: write.ClaimID, ReleasedClaimID: write.ReleasedClaimID, KeyUntil: write.KeyUntil}, holder, &claim.FinishRequest{}, m)
		if refused := claim.ReasonOf(err) == claim.ClaimLost; refused == (f.rec.State == claim.Released) {
			t.Errorf("%s: a late Complete of the newest claim: %v", what, err)
		}
	}
}

// forgets is what a forget comes to in one state, without and with force: HELD is
// the mark that was written.
type forgets struct{ plain, forced string }

var (
	forgettable = forgets{"HELD", "HELD"}
	ifForced    = forgets{"CLAIM_LIVE", "HELD"}
	noRecord    = forgets{"RECORD_NOT_FOUND", "RECORD_NOT_FOUND"}
)

var forgetTable = []phases[forgets]{
	{"none", []phase[forgets]{{forever, noRecord}}},
	{"pending", []phase[forgets]{{leaseEnd + grace, ifForced}, {claimKeyEnd + grace, forgettable}, {forever, noRecord}}},
	{"pending, policy NEVER since", []phase[forgets]{{leaseEnd + grace, ifForced}, {claimKeyEnd + grace, forgettable}, {forever, noRecord}}},
	{"pending, kept 2 s", []phase[forgets]{{leaseEnd + grace, ifForced}, {forever, noRecord}}},
	{"pending, NEVER", []phase[forgets]{{forever, ifForced}}},
	{"pending, NEVER, policy AUTO since", []phase[forgets]{{forever, ifForced}}},
	{"pending, used up", []phase[forgets]{{leaseEnd + grace, ifForced}, {claimKeyEnd + grace, forgettable}, {forever, noRecord}}},
	{"pending without a lease", []phase[forgets]{{forever, ifForced}}},
	{"pending without a lease, key_until set", []phase[forgets]{{forever, ifForced}}},
	{"pending without key_until", []phase[forgets]{{forever, ifForced}}},
	{"released", []phase[forgets]{{keyEnd + grace, forgettable}, {forever, noRecord}}},
	{"released without key_until", []phase[forgets]{{forever, forgettable}}},
	{"released by operator", []phase[forgets]{{keyEnd + grace, forgettable}, {forever, noRecord}}},
	{"lapsed, released by operator", []phase[forgets]{{leaseEnd + grace + claim.Instant(keepKey) + grace, forgettable}, {forever, noRecord}}},
	{"released, used up", []phase[forgets]{{keyEnd + grace, forgettable}, {forever, noRecord}}},
	{"released, used up, allowed again", []phase[forgets]{{keyEnd + grace, forgettable}, {forever, noRecord}}},
	{"unknown", []phase[forgets]{{forever, ifForced}}},
	{"unknown, NEVER", []phase[forgets]{{forever, ifForced}}},
	{"succeeded", []phase[forgets]{{keyEnd + grace, forgettable}, {forever, noRecord}}},
	{"succeeded, NEVER", []phase[forgets]{{keyEnd + grace, forgettable}, {forever, noRecord}}},
	{"succeeded, kept alike", []phase[forgets]{{resultEnd + grace, forgettable}, {forever, noRecord}}},
	{"succeeded after its release", []phase[forgets]{{keyEnd + grace, forgettable}, {forever, noRecord}}},
	{"succeeded without key_until", []phase[forgets]{{forever, forgettable}}},
	{"succeeded without result_until", []phase[forgets]{{forever, forgettable}}},
	{"failed", []phase[forgets]{{keyEnd + grace, forgettable}, {forever, noRecord}}},
	{"held", []phase[forgets]{{forever, forgets{"WAITING", "WAITING"}}}},
	{"opened", []phase[forgets]{{forever, forgets{"OPENED", "OPENED"}}}},
}

// Every state × every forget × every boundary of time.
func TestForgetInEveryStateAtEveryInstant(t *testing.T) {
	everyInstant(t, forgetTable, func(t *testing.T, f fixture, now claim.Instant, want forgets) {
		for force, column := range map[bool]string{false: want.plain, true: want.forced} {
			m := f.moment(now)
			write, opened, err := claim.Forget(f.rec, &claim.ForgetRequest{Namespace: "pay", Key: "k", Reason: "test", Force: force}, m)
			got := string(claim.ReasonOf(err))
			switch {
			case err != nil:
			case write != nil:
				got = "HELD"
				same(t, "the mark", write, &claim.Record{Namespace: "pay", Key: "k", KeyUntil: now, Forgotten: &claim.Forgotten{At: m.Wall}})
				same(t, "the opened mark", claim.Open(write), &claim.Record{Namespace: "pay", Key: "k", KeyUntil: now, Forgotten: &claim.Forgotten{Opened: true, At: m.Wall}})
			case opened:
				got = "OPENED"
			default:
				got = "WAITING"
			}
			if got != column {
				t.Errorf("force %v at %v: %s, want %s", force, now.Sub(claimed), got, column)
			}
			checkRefusal(t, "the refusal", f.rec, now, err)
		}
	})
}

// sights is a record as it is shown: its state; whether its result or failure is.
type sights struct {
	state   string
	outcome bool
}

var seenTable = []phases[sights]{
	{"none", []phase[sights]{{forever, sights{"", false}}}},
	{"pending", []phase[sights]{{claimKeyEnd + grace, sights{"STATE_PENDING", false}}, {forever, sights{"", false}}}},
	{"pending, policy NEVER since", []phase[sights]{{claimKeyEnd + grace, sights{"STATE_PENDING", false}}, {forever, sights{"", false}}}},
	{"pending, kept 2 s", []phase[sights]{{leaseEnd + grace, sights{"STATE_PENDING", false}}, {forever, sights{"", false}}}},
	{"pending, NEVER", []phase[sights]{{leaseEnd + grace, sights{"STATE_PENDING", false}}, {forever, sights{"STATE_UNKNOWN", false}}}},
	{"pending, NEVER, policy AUTO since", []phase[sights]{{leaseEnd + grace, sights{"STATE_PENDING", false}}, {forever, sights{"STATE_UNKNOWN", false}}}},
	{"pending, used up", []phase[sights]{{claimKeyEnd + grace, sights{"STATE_PENDING", false}}, {forever, sights{"", false}}}},
	{"pending without a lease", []phase[sights]{{forever, sights{"STATE_UNKNOWN", false}}}},
	{"pending without a lease, key_until set", []phase[sights]{{forever, sights{"STATE_UNKNOWN", false}}}},
	{"pending without key_until", []phase[sights]{{leaseEnd + grace, sights{"STATE_PENDING", false}}, {forever, sights{"STATE_UNKNOWN", false}}}},
	{"released", []phase[sights]{{keyEnd + grace, sights{"STATE_RELEASED", false}}, {forever, sights{"", false}}}},
	{"released without key_until", []phase[sights]{{forever, sights{"STATE_RELEASED", false}}}},
	{"released by operator", []phase[sights]{{keyEnd + grace, sights{"STATE_RELEASED", false}}, {forever, sights{"", false}}}},
	{"lapsed, released by operator", []phase[sights]{{leaseEnd + grace + claim.Instant(keepKey) + grace, sights{"STATE_RELEASED", false}}, {forever, sights{"", false}}}},
	{"released, used up", []phase[sights]{{keyEnd + grace, sights{"STATE_RELEASED", false}}, {forever, sights{"", false}}}},
	{"released, used up, allowed again", []phase[sights]{{keyEnd + grace, sights{"STATE_RELEASED", false}}, {forever, sights{"", false}}}},
	{"unknown", []phase[sights]{{forever, sights{"STATE_UNKNOWN", true}}}},
	{"unknown, NEVER", []phase[sights]{{forever, sights{"STATE_UNKNOWN", true}}}},
	{"succeeded", []phase[sights]{{resultEnd + grace, sights{"STATE_SUCCEEDED", true}}, {keyEnd + grace, sights{"STATE_SUCCEEDED", false}}, {forever, sights{"", false}}}},
	{"succeeded, NEVER", []phase[sights]{{resultEnd + grace, sights{"STATE_SUCCEEDED", true}}, {keyEnd + grace, sights{"STATE_SUCCEEDED", false}}, {forever, sights{"", false}}}},
	{"succeeded, kept alike", []phase[sights]{{resultEnd + grace, sights{"STATE_SUCCEEDED", true}}, {forever, sights{"", false}}}},
	{"succeeded after its release", []phase[sights]{{resultEnd + grace, sights{"STATE_SUCCEEDED", true}}, {keyEnd + grace, sights{"STATE_SUCCEEDED", false}}, {forever, sights{"", false}}}},
	{"succeeded without key_until", []phase[sights]{{resultEnd + grace, sights{"STATE_SUCCEEDED", true}}, {forever, sights{"STATE_SUCCEEDED", false}}}},
	{"succeeded without result_until", []phase[sights]{{forever, sights{"STATE_SUCCEEDED", true}}}},
	{"failed", []phase[sights]{{resultEnd + grace, sights{"STATE_FAILED", true}}, {keyEnd + grace, sights{"STATE_FAILED", false}}, {forever, sights{"", false}}}},
	{"held", []phase[sights]{{forever, sights{"STATE_UNSPECIFIED", false}}}},
	{"opened", []phase[sights]{{forever, sights{"", false}}}},
}

// A record is shown with its state computed and its outcome only while it is kept;
// once its time is over or it was forgotten, it is none.
func TestSeenInEveryStateAtEveryInstant(t *testing.T) {
	everyInstant(t, seenTable, func(t *testing.T, f fixture, now claim.Instant, want sights) {
		known := want.state != "" && want.state != "STATE_UNSPECIFIED"
		if err := claim.Known(f.rec, "pay", f.moment(now)); known != (err == nil) || !known && claim.ReasonOf(err) != claim.RecordNotFound {
			t.Errorf("at %v: known: %v, want %v", now.Sub(claimed), err, known)
		}
		if f.rec.Gone(now) {
			if want != (sights{}) {
				t.Errorf("at %v: gone, want %+v", now.Sub(claimed), want)
			}
			return
		}
		seen := f.rec.At(now)
		if got := (sights{seen.State.String(), seen.Result != nil || seen.Failure != nil}); got != want {
			t.Errorf("at %v: %+v, want %+v", now.Sub(claimed), got, want)
		}
		if finish := f.rec.State.Finished(); finish != (seen.FinishRevision == f.rec.Revision) || !finish && seen.FinishRevision != 0 {
			t.Errorf("at %v: finish_revision %d of revision %d", now.Sub(claimed), seen.FinishRevision, f.rec.Revision)
		}
		if finish := f.rec.State.Finished(); finish && len(seen.Digest) != 32 {
			t.Errorf("at %v: digest %x", now.Sub(claimed), seen.Digest)
		}
	})
}

// Undated counts the records that lack a deadline where one is due, and no other.
func TestUndated(t *testing.T) {
	want := map[string]bool{
		"pending without a lease": true, "pending without a lease, key_until set": true, "pending without key_until": true,
		"released without key_until": true, "succeeded without key_until": true, "succeeded without result_until": true,
	}
	for state, f := range fixtures(t) {
		if f.rec != nil && f.rec.Undated() != want[state] {
			t.Errorf("%s: undated %v", state, f.rec.Undated())
		}
	}
}

// Attempts used up: RELEASED allows max_attempts more, again and again.
func TestResolveAsReleasedAllowsMaxAttemptsMore(t *testing.T) {
	w := newWorld()
	w.policy.MaxAttempts = 2
	for attempt := int32(1); attempt <= 6; attempt++ {
		g := w.first(t, asks(""))
		if g.Attempt != attempt {
			t.Fatalf("attempt %d, want %d", g.Attempt, attempt)
		}
		must(t)(w.fail(g.ID, passing))
		if attempt%2 != 0 {
			continue
		}
		if a := w.told(t, asks(""), "UNKNOWN_OUTCOME"); a.Detail == "" || a.KeyAction() != claim.Reuse {
			t.Fatalf("used up: %+v", a)
		}
		must(t)(w.resolve(&claim.ResolveRequest{State: claim.Released}))
	}
}

// A resolve is carried out once: the same word again changes nothing.
func TestResolveAgain(t *testing.T) {
	for state, again := range map[claim.State]string{claim.Succeeded: "ALREADY_FINISHED", claim.Released: "OK"} {
		w := newWorld()
		must(t)(w.fail(w.first(t, asks("")).ID, unsure))
		req := &claim.ResolveRequest{State: state}
		must(t)(w.resolve(req))
		revision := w.revision
		answer, err := w.resolve(req)
		if got := tellWrite(answer, nil, err); got != again || w.revision != revision {
			t.Errorf("%v again: %s, wrote %v", state, got, w.revision != revision)
		}
	}
}
