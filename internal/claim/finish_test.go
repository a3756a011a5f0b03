package claim_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// finishes is what a finish comes to in one state. The holder's: Complete with
// bankResult, with another result, with bankResult omitted; TERMINAL with blocked,
// with another failure; RETRYABLE; UNKNOWN. Then of the claim directly before,
// which had released: RETRYABLE, and anything else. Then anything of an older claim.
//
// A state is what was written; OK is the record as it is.
type finishes struct {
	same, other, omitted, failed, failedOtherwise, released, unknown string
	beforeReleased, beforeElse, older                                string
}

// nothing: all are refused with this.
func nothing(reason string) finishes {
	return finishes{reason, reason, reason, reason, reason, reason, reason, reason, reason, reason}
}

var (
	forgotten = nothing("RECORD_NOT_FOUND")
	// unfinished: the newest claim is accepted, whatever it says.
	unfinished = finishes{
		"STATE_SUCCEEDED", "STATE_SUCCEEDED", "STATE_SUCCEEDED", "STATE_FAILED", "STATE_FAILED", "STATE_RELEASED", "STATE_UNKNOWN",
		"OK", "CLAIM_LOST", "CLAIM_LOST",
	}
	// unsettled: as unfinished, but UNKNOWN repeats UNKNOWN.
	unsettled = finishes{
		"STATE_SUCCEEDED", "STATE_SUCCEEDED", "STATE_SUCCEEDED", "STATE_FAILED", "STATE_FAILED", "STATE_RELEASED", "OK",
		"OK", "CLAIM_LOST", "CLAIM_LOST",
	}
	// ownRelease: a Complete or a TERMINAL failure is accepted, anything else is OK.
	ownRelease = finishes{
		"STATE_SUCCEEDED", "STATE_SUCCEEDED", "STATE_SUCCEEDED", "STATE_FAILED", "STATE_FAILED", "OK", "OK",
		"OK", "CLAIM_LOST", "CLAIM_LOST",
	}
	// takenBack: an operator released it.
	takenBack = finishes{
		"CLAIM_LOST", "CLAIM_LOST", "CLAIM_LOST", "CLAIM_LOST", "CLAIM_LOST", "CLAIM_LOST", "CLAIM_LOST",
		"OK", "CLAIM_LOST", "CLAIM_LOST",
	}
	paid = finishes{
		"OK", "ALREADY_FINISHED", "OK", "ALREADY_FINISHED", "ALREADY_FINISHED", "ALREADY_FINISHED", "ALREADY_FINISHED",
		"OK", "CLAIM_LOST", "CLAIM_LOST",
	}
	// paidAfterRelease: the release that it had been is remembered instead of the
	// one before.
	paidAfterRelease = finishes{
		"OK", "ALREADY_FINISHED", "OK", "ALREADY_FINISHED", "ALREADY_FINISHED", "OK", "ALREADY_FINISHED",
		"CLAIM_LOST", "CLAIM_LOST", "CLAIM_LOST",
	}
	notPaid = finishes{
		"ALREADY_FINISHED", "ALREADY_FINISHED", "ALREADY_FINISHED", "OK", "ALREADY_FINISHED", "ALREADY_FINISHED", "ALREADY_FINISHED",
		"OK", "CLAIM_LOST", "CLAIM_LOST",
	}
)

var finishTable = []phases[finishes]{
	{"none", []phase[finishes]{{forever, forgotten}}},
	{"pending", []phase[finishes]{{claimKeyEnd + grace, unfinished}, {forever, forgotten}}},
	{"pending, policy NEVER since", []phase[finishes]{{claimKeyEnd + grace, unfinished}, {forever, forgotten}}},
	{"pending, kept 2 s", []phase[finishes]{{leaseEnd + grace, unfinished}, {forever, forgotten}}},
	{"pending, NEVER", []phase[finishes]{{forever, unfinished}}},
	{"pending, NEVER, policy AUTO since", []phase[finishes]{{forever, unfinished}}},
	{"pending, used up", []phase[finishes]{{claimKeyEnd + grace, unfinished}, {forever, forgotten}}},
	{"pending without a lease", []phase[finishes]{{forever, unfinished}}},
	{"pending without a lease, key_until set", []phase[finishes]{{forever, unfinished}}},
	{"pending without key_until", []phase[finishes]{{forever, unfinished}}},
	{"released", []phase[finishes]{{keyEnd + grace, ownRelease}, {forever, forgotten}}},
	{"released without key_until", []phase[finishes]{{forever, ownRelease}}},
	{"released by operator", []phase[finishes]{{keyEnd + grace, takenBack}, {forever, forgotten}}},
	{"lapsed, released by operator", []phase[finishes]{{leaseEnd + grace + claim.Instant(keepKey) + grace, takenBack}, {forever, forgotten}}},
	{"released, used up", []phase[finishes]{{keyEnd + grace, ownRelease}, {forever, forgotten}}},
	{"released, used up, allowed again", []phase[finishes]{{keyEnd + grace, ownRelease}, {forever, forgotten}}},
	{"unknown", []phase[finishes]{{forever, unsettled}}},
	{"unknown, NEVER", []phase[finishes]{{forever, unsettled}}},
	{"succeeded", []phase[finishes]{{keyEnd + grace, paid}, {forever, forgotten}}},
	{"succeeded, NEVER", []phase[finishes]{{keyEnd + grace, paid}, {forever, forgotten}}},
	{"succeeded, kept alike", []phase[finishes]{{resultEnd + grace, paid}, {forever, forgotten}}},
	{"succeeded after its release", []phase[finishes]{{keyEnd + grace, paidAfterRelease}, {forever, forgotten}}},
	{"succeeded without key_until", []phase[finishes]{{forever, paid}}},
	{"succeeded without result_until", []phase[finishes]{{forever, paid}}},
	{"failed", []phase[finishes]{{keyEnd + grace, notPaid}, {forever, forgotten}}},
	{"held", []phase[finishes]{{forever, forgotten}}},
	{"opened", []phase[finishes]{{forever, forgotten}}},
}

// finishRequests is every finish that makes a difference.
func finishRequests(yield func(name string, id claim.ID, req *claim.FinishRequest, want func(finishes) string)) {
	digest := resultDigest(bankResult)
	outcomes := []struct {
		name string
		req  claim.FinishRequest
		want func(finishes) string
	}{
		{"Complete", claim.FinishRequest{Result: bankResult}, func(f finishes) string { return f.same }},
		{"Complete otherwise", claim.FinishRequest{Result: otherResult}, func(f finishes) string { return f.other }},
		{"Complete with nothing", claim.FinishRequest{}, func(f finishes) string { return f.other }},
		{"Complete omitted", claim.FinishRequest{Omitted: &claim.Omitted{Digest: digest, Size: 10}}, func(f finishes) string { return f.omitted }},
		{"Complete omitted otherwise", claim.FinishRequest{Omitted: &claim.Omitted{Digest: otherPrint, Size: 10}}, func(f finishes) string { return f.other }},
		{"Fail TERMINAL", claim.FinishRequest{Failure: blocked}, func(f finishes) string { return f.failed }},
		{"Fail TERMINAL otherwise", claim.FinishRequest{Failure: refused}, func(f finishes) string { return f.failedOtherwise }},
		{"Fail RETRYABLE", claim.FinishRequest{Failure: passing}, func(f finishes) string { return f.released }},
		{"Fail UNKNOWN", claim.FinishRequest{Failure: unsure}, func(f finishes) string { return f.unknown }},
	}
	for _, o := range outcomes {
		o.req.Namespace, o.req.Key = "pay", "k"
		yield(o.name+" of the newest", holder, &o.req, o.want)
		beforeWant := func(f finishes) string { return f.beforeElse }
		if o.req.Failure == passing {
			beforeWant = func(f finishes) string { return f.beforeReleased }
		}
		yield(o.name+" of the one before", before, &o.req, beforeWant)
		yield(o.name+" of an older one", older, &o.req, func(f finishes) string { return f.older })
		yield(o.name+" of no claim", claim.ID{}, &o.req, func(f finishes) string { return f.older })
	}
}

// Every state × every finish × every boundary of time.
func TestFinishInEveryStateAtEveryInstant(t *testing.T) {
	everyInstant(t, finishTable, func(t *testing.T, f fixture, now claim.Instant, want finishes) {
		finishRequests(func(name string, id claim.ID, req *claim.FinishRequest, column func(finishes) string) {
			m := f.moment(now)
			answer, write, err := claim.Finish(f.rec, id, req, m)
			what := name + " at " + now.Sub(claimed).String()
			if got := tellWrite(answer, write, err); got != column(want) {
				t.Errorf("%s: %s, want %s", what, got, column(want))
				return
			}
			checkRefusal(t, what, f.rec, now, err)
			switch {
			case write != nil:
				checkFinish(t, what, f.rec, req, m, write)
				same(t, what+": the answer", answer, write.At(now))
			case err == nil:
				same(t, what+": the answer", answer, f.rec.At(now))
			}
		})
	})
}

// tellWrite writes what an act came to: the state that was written, OK, or the
// error's reason.
func tellWrite(answer, write *claim.Record, err error) string {
	switch {
	case err != nil && (answer != nil || write != nil):
		return "an error and an answer"
	case err != nil:
		return string(claim.ReasonOf(err))
	case answer == nil:
		return "no answer"
	case write != nil:
		return write.State.String()
	}
	return "OK"
}

// checkRefusal checks what a refused caller is told of the record.
func checkRefusal(t *testing.T, what string, rec *claim.Record, now claim.Instant, err error) {
	t.Helper()
	var refusal *claim.Error
	switch claim.ReasonOf(err) {
	case claim.ClaimLost, claim.AlreadyFinished, claim.ClaimLive:
		refusal = err.(*claim.Error)
	default:
		return
	}
	want := map[string]string{"state": rec.StateAt(now).String(), "attempt": strconv.Itoa(int(rec.Attempt))}
	if rec.Digest != nil {
		want["digest"] = hex.EncodeToString(rec.Digest)
	}
	if !rec.FinishedAt.IsZero() {
		want["finished_at"] = rec.FinishedAt.Format(time.RFC3339Nano)
	}
	same(t, what+": the error's metadata", refusal.Metadata, want)
}

// checkFinish checks the record of a finish in full.
func checkFinish(t *testing.T, what string, old *claim.Record, req *claim.FinishRequest, m claim.Moment, write *claim.Record) {
	t.Helper()
	want := *old
	want.State = write.State
	want.RequestID = ""
	want.Claimed, want.LeaseUntil, want.ResultUntil, want.KeyUntil = 0, 0, 0, 0
	want.FinishedAt = m.Wall
	want.Result, want.Failure = nil, nil
	want.Revision, want.ClaimRevision, want.FenceBase = 0, 0, 0
	switch write.State {
	case claim.Released:
		want.KeyUntil = m.Now.Add(old.KeyRetention)
		want.Spent = append(slices.Clone(old.Spent), write.Spent[len(write.Spent)-1])
		if write.Spent[len(write.Spent)-1] == old.Spent[0] {
			t.Errorf("%s: the released request id is not spent", what)
		}
	case claim.Unknown:
		want.Failure = req.Failure
		want.RequestID = old.RequestID
	default:
		want.ResultUntil, want.KeyUntil = m.Now.Add(old.ResultRetention), m.Now.Add(old.KeyRetention)
		want.Spent = nil
		if old.State == claim.Released {
			want.ReleasedClaimID = old.ClaimID
		}
		switch {
		case req.Failure != nil:
			want.Failure, want.Digest = req.Failure, failureDigest(req.Failure)
		case req.Omitted != nil:
			want.ResultOmitted, want.ResultSize, want.Digest = true, req.Omitted.Size, req.Omitted.Digest
		case req.Result != nil:
			want.Result, want.ResultSize, want.Digest = req.Result, int64(len(req.Result.Body)), resultDigest(req.Result)
		default:
			want.Result, want.Digest = &claim.Result{}, resultDigest(&claim.Result{})
		}
	}
	same(t, what+": the record written", write, &want)
}

// extends is what an Extend comes to in one state: the holder's, and any other's.
type extends struct{ holder, other string }

var (
	extendable = extends{"EXTENDED", "CLAIM_LOST"}
	over       = extends{"CLAIM_LOST", "CLAIM_LOST"}
	unknownKey = extends{"RECORD_NOT_FOUND", "RECORD_NOT_FOUND"}
)

var extendTable = []phases[extends]{
	{"none", []phase[extends]{{forever, unknownKey}}},
	{"pending", []phase[extends]{{claimKeyEnd + grace, extendable}, {forever, unknownKey}}},
	{"pending, policy NEVER since", []phase[extends]{{claimKeyEnd + grace, extendable}, {forever, unknownKey}}},
	{"pending, kept 2 s", []phase[extends]{{leaseEnd + grace, extendable}, {forever, unknownKey}}},
	{"pending, NEVER", []phase[extends]{{forever, extendable}}},
	{"pending, NEVER, policy AUTO since", []phase[extends]{{forever, extendable}}},
	{"pending, used up", []phase[extends]{{claimKeyEnd + grace, extendable}, {forever, unknownKey}}},
	{"pending without a lease", []phase[extends]{{forever, extendable}}},
	{"pending without a lease, key_until set", []phase[extends]{{forever, extendable}}},
	{"pending without key_until", []phase[extends]{{forever, extendable}}},
	{"released", []phase[extends]{{keyEnd + grace, over}, {forever, unknownKey}}},
	{"released without key_until", []phase[extends]{{forever, over}}},
	{"released by operator", []phase[extends]{{keyEnd + grace, over}, {forever, unknownKey}}},
	{"lapsed, released by operator", []phase[extends]{{leaseEnd + grace + claim.Instant(keepKey) + grace, over}, {forever, unknownKey}}},
	{"released, used up", []phase[extends]{{keyEnd + grace, over}, {forever, unknownKey}}},
	{"released, used up, allowed again", []phase[extends]{{keyEnd + grace, over}, {forever, unknownKey}}},
	{"unknown", []phase[extends]{{forever, over}}},
	{"unknown, NEVER", []phase[extends]{{forever, over}}},
	{"succeeded", []phase[extends]{{keyEnd + grace, over}, {forever, unknownKey}}},
	{"succeeded, NEVER", []phase[extends]{{keyEnd + grace, over}, {forever, unknownKey}}},
	{"succeeded, kept alike", []phase[extends]{{resultEnd + grace, over}, {forever, unknownKey}}},
	{"succeeded after its release", []phase[extends]{{keyEnd + grace, over}, {forever, unknownKey}}},
	{"succeeded without key_until", []phase[extends]{{forever, over}}},
	{"succeeded without result_until", []phase[extends]{{forever, over}}},
	{"failed", []phase[extends]{{keyEnd + grace, over}, {forever, unknownKey}}},
	{"held", []phase[extends]{{forever, unknownKey}}},
	{"opened", []phase[extends]{{forever, unknownKey}}},
}

// Every state × every Extend × every boundary of time.
func TestExtendInEveryStateAtEveryInstant(t *testing.T) {
	leases := []struct {
		asked *time.Duration
		given time.Duration
	}{
		{nil, lease}, {new(time.Nanosecond), time.Second}, {new(time.Second), time.Second}, {new(20 * time.Second), 20 * time.Second},
		{new(time.Hour), time.Hour}, {new(48 * time.Hour), time.Hour},
	}
	everyInstant(t, extendTable, func(t *testing.T, f fixture, now claim.Instant, want extends) {
		for _, l := range leases {
			for id, column := range map[claim.ID]string{holder: want.holder, before: want.other, older: want.other, {}: want.other} {
				m := f.moment(now)
				answer, write, err := claim.Extend(f.rec, id, &claim.ExtendRequest{Namespace: "pay", Key: "k", Lease: l.asked}, m)
				what := "by " + l.given.String() + " of claim " + strconv.Itoa(int(id[15])) + " at " + now.Sub(claimed).String()
				if err != nil || column != "EXTENDED" {
					if got := tellWrite(answer, write, err); got != column {
						t.Errorf("%s: %s, want %s", what, got, column)
					}
					checkRefusal(t, what, f.rec, now, err)
					continue
				}
				checkExtension(t, what, f.rec, now.Add(l.given), answer, write)
			}
		}
		for _, none := range []time.Duration{0, -1, -time.Hour} {
			if _, write, err := claim.Extend(f.rec, holder, &claim.ExtendRequest{Lease: &none}, f.moment(now)); claim.ReasonOf(err) != claim.LeaseInvalid || write != nil {
				t.Errorf("by %v: %v", none, err)
			}
		}
	})
}

// checkExtension: lease_until = max(old, now + lease), and nothing else changes.
func checkExtension(t *testing.T, what string, old *claim.Record, until claim.Instant, answer, write *claim.Record) {
	t.Helper()
	want := *old
	if until > old.LeaseUntil {
		want.LeaseUntil = until
		want.Revision, want.ClaimRevision = 0, old.Revision
		want.KeyUntil = max(until, claimKeyEnd)
		if old.KeyRetention < lease {
			want.KeyUntil = until
		}
		if old.TakeoverNever {
			want.KeyUntil = 0
		}
		same(t, what+": the record written", write, &want)
	} else if write != nil {
		t.Errorf("%s: moved the deadline to %v from %v", what, write.LeaseUntil, old.LeaseUntil)
	}
	same(t, what+": the answer", answer, &want)
	if answer.Fence() != old.Fence() {
		t.Errorf("%s: the fence moved from %d to %d", what, old.Fence(), answer.Fence())
	}
}

// What only matters while a claim runs is dropped at its end, also after it was
// extended: records are small.
func TestFinishDropsWhatMattersOnlyWhileAClaimRuns(t *testing.T) {
	for _, req := range []*claim.FinishRequest{{Result: bankResult}, {Failure: blocked}, {Failure: passing}} {
		w := newWorld()
		w.fenceBase = 1 << 40
		g := w.first(t, asks("r"))
		must(t)(w.extend(g.ID, time.Hour))
		must(t)(w.finish(g.ID, req))
		if r := w.rec; r.ClaimRevision != 0 || r.FenceBase != 0 || r.RequestID != "" || r.Claimed != 0 || r.LeaseUntil != 0 {
			t.Errorf("%v keeps %+v", r.State, r)
		}
	}
}

// Whatever is finished has the digest of its outcome, and nothing else has one.
func TestEveryFinishedRecordHasItsDigest(t *testing.T) {
	for state, f := range fixtures(t) {
		finished := f.rec != nil && f.rec.State.Finished()
		if finished != (f.rec != nil && len(f.rec.Digest) == sha256.Size) {
			t.Errorf("%s: digest %x", state, f.rec.Digest)
		}
		if finished && f.rec.State == claim.Succeeded && !bytes.Equal(f.rec.Digest, resultDigest(bankResult)) {
			t.Errorf("%s: digest %x", state, f.rec.Digest)
		}
	}
}
