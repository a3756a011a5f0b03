package claim_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// ask makes an anonymous Begin of another payload or operation.
func ask(print []byte, operation string) *claim.BeginRequest {
	r := asks("")
	r.Fingerprint, r.Operation = print, operation
	return r
}

// refusedWith checks an error's reason and that nothing was written.
func (w *world) refusedWith(t *testing.T, want claim.Reason, act func() (*claim.Record, error)) *claim.Error {
	t.Helper()
	revision := w.revision
	_, err := act()
	if claim.ReasonOf(err) != want {
		t.Fatalf("%v, want %s", err, want)
	}
	if w.revision != revision {
		t.Fatalf("%s, yet the record was written", want)
	}
	return err.(*claim.Error)
}

func TestC05AnotherPayloadIsAConflict(t *testing.T) {
	w := newWorld()
	g := w.first(t, asks("r"))
	held := w.rec
	w.told(t, ask(otherPrint, ""), "CONFLICT")
	if w.rec != held {
		t.Fatal("the claim was touched")
	}
	w.told(t, asks("r"), "REPEAT 1")
	must(t)(w.complete(g.ID, bankResult))
	if a := w.told(t, ask(otherPrint, ""), "CONFLICT"); a.Record.Result != nil || a.Claim != nil {
		t.Fatalf("a conflict tells of the other request: %+v", a)
	}
	w.told(t, asks("r"), "REPLAY")
}

func TestC12ADeadCallerHoldsTheKeyForItsLeaseOnly(t *testing.T) {
	w := newWorld()
	w.policy.ResultRetention, w.policy.KeyRetention = 720*time.Hour, 720*time.Hour
	req := asks("")
	req.Lease = new(5 * time.Second)
	w.first(t, req)
	w.pass(5*time.Second + claim.Grace - 1)
	w.told(t, asks(""), "IN_PROGRESS")
	w.pass(1)
	w.told(t, asks(""), "FIRST 2 LAPSED")
}

func TestC13ALeaseOfZeroOrLessIsRefusedAndOneLeftOutIsTheDefault(t *testing.T) {
	for state, f := range fixtures(t) {
		for _, none := range []time.Duration{0, -1, -time.Second} {
			req := asks("")
			req.Lease = &none
			check(t, state, req.Validate(), claim.LeaseInvalid)
			_, write, err := claim.Begin(f.rec, req, f.moment(f.since))
			if claim.ReasonOf(err) != claim.LeaseInvalid || write != nil {
				t.Errorf("%s, lease %v: %v", state, none, err)
			}
		}
	}
	w := newWorld()
	if g := w.first(t, asks("")); w.rec.LeaseUntil != claimed.Add(30*time.Second) || g.Left != 29900*time.Millisecond {
		t.Errorf("left out: until %v, %v left", w.rec.LeaseUntil.Sub(claimed), g.Left)
	}
}

func TestC14AClaimWithoutADeadlineIsHeldUntilItIsResolved(t *testing.T) {
	for _, state := range []string{"pending without a lease", "pending without a lease, key_until set"} {
		f := fixtures(t)[state]
		w := newWorld()
		w.rec, w.policy = f.rec, f.policy
		w.at(f.since)
		for range 6 {
			w.pass(100_000 * time.Hour)
			a := w.told(t, asks("holder"), "UNKNOWN_OUTCOME")
			if a.KeyAction() != claim.Reuse || !strings.Contains(a.Detail, "no deadline") || !w.rec.Undated() {
				t.Fatalf("%s: %+v", state, a)
			}
		}
		must(t)(w.resolve(&claim.ResolveRequest{State: claim.Released}))
		w.told(t, asks("new"), "FIRST 4 RELEASED")
	}
}

// takeover lets A's lease lapse and B take over.
func takeover(t *testing.T, w *world) (a, b *claim.Grant) {
	t.Helper()
	a = w.first(t, asks("a"))
	w.at(w.rec.LeaseUntil + grace)
	b = w.first(t, asks("b"))
	if b.Attempt != 2 || b.Previous != claim.PreviousLapsed || b.Fence <= a.Fence {
		t.Fatalf("taken over: %+v after %+v", b, a)
	}
	return a, b
}

func TestC16AFinishAfterATakeoverChangesNothing(t *testing.T) {
	w := newWorld()
	a, b := takeover(t, w)
	err := w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.complete(a.ID, otherResult) })
	same(t, "metadata", err.Metadata, map[string]string{"state": "STATE_PENDING", "attempt": "2"})
	must(t)(w.complete(b.ID, bankResult))
	w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.complete(a.ID, otherResult) })
	// Not even with the very result that is stored: it is not A's.
	w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.complete(a.ID, bankResult) })
	if r := w.told(t, asks(""), "REPLAY"); r.Record.Attempt != 2 || !bytes.Equal(r.Record.Result.Body, bankResult.Body) {
		t.Fatalf("replayed %+v", r.Record)
	}
}

func TestC17NorCanItExtendOrRelease(t *testing.T) {
	w := newWorld()
	a, b := takeover(t, w)
	w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.extend(a.ID, time.Hour) })
	for _, f := range []*claim.Failure{passing, blocked, unsure} {
		w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.fail(a.ID, f) })
	}
	w.told(t, asks(""), "IN_PROGRESS")
	w.told(t, asks("b"), "REPEAT 2")
	must(t)(w.complete(b.ID, bankResult))
}

func TestC20WorkThatMustNotRepeatIsUnknownOnceItsOwnerDied(t *testing.T) {
	for _, late := range []string{"resolved", "finished"} {
		w := newWorld()
		w.policy.TakeoverNever = true
		g := w.first(t, asks("r"))
		held := w.rec
		w.at(leaseEnd + grace - 1)
		w.told(t, asks(""), "IN_PROGRESS")
		w.at(leaseEnd + grace)
		for range 3 {
			if a := w.told(t, asks("r"), "UNKNOWN_OUTCOME"); a.RetryAfter <= 0 || a.KeyAction() != claim.Reuse {
				t.Fatalf("%+v", a)
			}
			w.pass(100_000 * time.Hour)
		}
		if w.rec != held {
			t.Fatal("UNKNOWN was written")
		}
		if late == "finished" {
			must(t)(w.complete(g.ID, bankResult))
		} else {
			must(t)(w.resolve(&claim.ResolveRequest{State: claim.Succeeded, Result: bankResult}))
		}
		w.told(t, asks(""), "REPLAY")
	}
}

func TestC24TheDelayedOriginalIsAReplay(t *testing.T) {
	w := newWorld()
	must(t)(w.complete(w.first(t, asks("retry-1")).ID, bankResult))
	w.told(t, asks("original-1"), "REPLAY")
	w.told(t, asks("retry-1"), "REPLAY")
}

func TestC25APassingFailureFreesTheKey(t *testing.T) {
	w := newWorld()
	must(t)(w.fail(w.first(t, asks("")).ID, passing))
	if w.rec.Failure != nil {
		t.Fatal("the passing failure is kept")
	}
	w.told(t, asks(""), "FIRST 2 RELEASED")
}

func TestC26AFailureForGoodIsReplayed(t *testing.T) {
	w := newWorld()
	must(t)(w.fail(w.first(t, asks("")).ID, blocked))
	for range 2 {
		a := w.told(t, asks(""), "REPLAY_FAILURE")
		same(t, "failure", a.Record.Failure, blocked)
		if a.KeyAction() != claim.Rotate {
			t.Fatalf("key action %d", a.KeyAction())
		}
	}
}

func TestC27AnUnknownOutcomeHoldsTheKey(t *testing.T) {
	for _, state := range []claim.State{claim.Succeeded, claim.Failed, claim.Released} {
		w := newWorld()
		must(t)(w.fail(w.first(t, asks("r")).ID, unsure))
		for range 3 {
			w.pass(100_000 * time.Hour)
			if a := w.told(t, asks("r"), "UNKNOWN_OUTCOME"); a.RetryAfter <= 0 {
				t.Fatal("no retry_after")
			}
			w.told(t, ask(otherPrint, ""), "CONFLICT")
		}
		must(t)(w.resolve(&claim.ResolveRequest{State: state, Failure: blocked}))
		w.told(t, asks(""), map[claim.State]string{claim.Succeeded: "REPLAY", claim.Failed: "REPLAY_FAILURE", claim.Released: "FIRST 2 RELEASED"}[state])
	}
}

func TestC28AfterAFailureForGoodAnotherPayloadNeedsAnotherKey(t *testing.T) {
	w := newWorld()
	must(t)(w.fail(w.first(t, asks("")).ID, blocked))
	a := w.told(t, ask(otherPrint, ""), "CONFLICT")
	if a.KeyAction() != claim.Rotate || a.Record.Failure != nil {
		t.Fatalf("%+v", a)
	}
}

func TestC30AReplaySaysThatItIsOneAndWhenTheWorkWasDone(t *testing.T) {
	w := newWorld()
	g := w.first(t, asks(""))
	w.pass(3 * time.Second)
	must(t)(w.complete(g.ID, bankResult))
	done := w.revision
	w.pass(20 * time.Second)
	a := w.told(t, asks(""), "REPLAY")
	if !a.Record.FinishedAt.Equal(wallStart.Add(3*time.Second)) || a.Record.FinishRevision != done || a.Revision != done || a.Record.State != claim.Succeeded || len(a.Record.Digest) != 32 {
		t.Fatalf("%+v", a.Record)
	}
}

func TestC31StatusHeadersAndBytesComeBackAsTheyWere(t *testing.T) {
	given := &claim.Result{
		Code: 201, ContentType: "application/json; charset=utf-8", Body: []byte("{ \"a\" : 1.0,\n\"é\":\"\x00\"}\xff"),
		Metadata: map[string]string{"Location": "/Orders/7", "ETag": `"AbC"`, "X-Empty": ""},
	}
	w := newWorld()
	must(t)(w.complete(w.first(t, asks("")).ID, given))
	want := *given
	want.Metadata = map[string]string{"location": "/Orders/7", "etag": `"AbC"`, "x-empty": ""}
	for range 2 {
		same(t, "result", w.told(t, asks(""), "REPLAY").Record.Result, &want)
	}
}

func TestC32CookiesAndCredentialsAreNeverKept(t *testing.T) {
	dropped := []string{"set-cookie", "cookie", "authorization", "proxy-authorization", "www-authenticate", "proxy-authenticate"}
	given := &claim.Result{Metadata: map[string]string{"x-ok": "1", "x-cookie": "2", "authorizations": "3"}}
	for i, name := range dropped {
		given.Metadata[[]string{name, strings.ToUpper(name), strings.ToUpper(name[:1]) + name[1:]}[i%3]] = "secret"
	}
	w := newWorld()
	must(t)(w.complete(w.first(t, asks("")).ID, given))
	same(t, "kept", w.rec.Result.Metadata, map[string]string{"x-ok": "1", "x-cookie": "2", "authorizations": "3"})
	w = newWorld()
	must(t)(w.fail(w.first(t, asks("")).ID, unsure))
	must(t)(w.resolve(&claim.ResolveRequest{State: claim.Succeeded, Result: given}))
	same(t, "kept of what an operator says", w.rec.Result.Metadata, map[string]string{"x-ok": "1", "x-cookie": "2", "authorizations": "3"})
	if len(given.Metadata) != 9 {
		t.Error("the caller's own map was changed")
	}
}

func TestC35TheSameFinishAgainIsFineAndADifferentOneIsTold(t *testing.T) {
	w := newWorld()
	g := w.first(t, asks(""))
	must(t)(w.complete(g.ID, bankResult))
	revision, stored := w.revision, w.rec
	for range 3 {
		must(t)(w.complete(g.ID, bankResult))
	}
	for _, other := range []*claim.FinishRequest{{Result: otherResult}, {}, {Failure: blocked}, {Failure: passing}, {Failure: unsure}, {Omitted: &claim.Omitted{Digest: otherPrint}}} {
		err := w.refusedWith(t, claim.AlreadyFinished, func() (*claim.Record, error) { return w.finish(g.ID, other) })
		same(t, "metadata", err.Metadata, map[string]string{
			"state": "STATE_SUCCEEDED", "attempt": "1", "finished_at": "2031-05-06T07:08:09.00000001Z",
			"digest": "fd9eb09fe96209701db8f839057c1b9780e758fc0c17069df823cdda4ca22ddc",
		})
	}
	if w.revision != revision || w.rec != stored {
		t.Fatal("a later finish was written")
	}
}

func TestC36AFailureComesBackWithItsCodeAndDetails(t *testing.T) {
	given := &claim.Failure{Class: claim.Terminal, Code: 8, Message: "quota", Details: []claim.Detail{
		{TypeURL: "type.googleapis.com/google.rpc.ErrorInfo", Value: []byte{10, 1, 'Q'}},
		{TypeURL: "type.example.com/unknown.to.Us", Value: []byte{255, 0, 254}},
	}}
	w := newWorld()
	must(t)(w.fail(w.first(t, asks("")).ID, given))
	same(t, "failure", w.told(t, asks(""), "REPLAY_FAILURE").Record.Failure, given)
}

func TestC39AResultTooLargeToKeepStillFinishesTheKey(t *testing.T) {
	for _, req := range []*claim.FinishRequest{
		{Result: &claim.Result{Code: 200, Body: make([]byte, 6<<20)}},
		{Omitted: &claim.Omitted{Digest: fingerprint, Size: 6 << 20}},
	} {
		w := newWorld()
		g := w.first(t, asks(""))
		must(t)(w.finish(g.ID, req))
		for range 3 {
			a := w.told(t, asks(""), "REPLAY")
			if !a.Record.ResultOmitted || a.Record.ResultSize != 6<<20 || a.Record.Result != nil && a.Record.Result.Body != nil {
				t.Fatalf("%+v", a.Record)
			}
		}
		must(t)(w.finish(g.ID, req))
	}
}

// A Complete that carries the whole result counts as the one that omitted it.
func TestC39AResultSentAfterItWasOmittedIsTheSameFinish(t *testing.T) {
	for _, order := range [][2]*claim.FinishRequest{
		{{Omitted: &claim.Omitted{Digest: resultDigest(bankResult), Size: 10}}, {Result: bankResult}},
		{{Result: bankResult}, {Omitted: &claim.Omitted{Digest: resultDigest(bankResult), Size: 10}}},
	} {
		w := newWorld()
		g := w.first(t, asks(""))
		must(t)(w.finish(g.ID, order[0]))
		revision := w.revision
		must(t)(w.finish(g.ID, order[1]))
		if w.revision != revision {
			t.Fatal("the second was written")
		}
	}
}

func TestC40AnEmptyResultReplaysAsEmpty(t *testing.T) {
	for _, given := range []*claim.Result{nil, {}, {Body: []byte{}}, {Metadata: map[string]string{}}} {
		w := newWorld()
		g := w.first(t, asks(""))
		must(t)(w.complete(g.ID, given))
		r := w.told(t, asks(""), "REPLAY").Record
		if r.ResultOmitted || r.ResultSize != 0 || len(r.Result.Body) != 0 || len(r.Result.Metadata) != 0 || r.Result.Code != 0 {
			t.Fatalf("%+v replayed as %+v", given, r.Result)
		}
		must(t)(w.complete(g.ID, nil))
	}
}

func TestC45TheSameKeyForAnotherOperationIsAConflict(t *testing.T) {
	w := newWorld()
	g := w.first(t, ask(fingerprint, "invoice.issue"))
	w.told(t, ask(fingerprint, "invoice.cancel"), "CONFLICT")
	must(t)(w.complete(g.ID, bankResult))
	if a := w.told(t, ask(fingerprint, "invoice.cancel"), "CONFLICT"); a.Record.Result != nil || a.KeyAction() != claim.Rotate {
		t.Fatalf("%+v", a)
	}
	w.told(t, ask(fingerprint, "invoice.issue"), "REPLAY")
	w.told(t, ask(fingerprint, ""), "REPLAY")
}

func TestC53FingerprintsAreComparedInFull(t *testing.T) {
	for i := range 32 { // they differ in one bit: any truncation misses some of them
		other := bytes.Clone(fingerprint)
		other[i] ^= 1
		w := newWorld()
		g := w.first(t, asks(""))
		w.told(t, ask(other, ""), "CONFLICT")
		must(t)(w.complete(g.ID, bankResult))
		w.told(t, ask(other, ""), "CONFLICT")
	}
}

func TestC55AnExpiredResultIsExpiredNotNew(t *testing.T) {
	w := newWorld()
	w.policy.ResultRetention, w.policy.KeyRetention = time.Hour, 720*time.Hour
	g := w.first(t, asks(""))
	must(t)(w.complete(g.ID, bankResult))
	finishedAt := w.wall
	w.pass(2 * time.Hour)
	a := w.told(t, asks(""), "EXPIRED")
	same(t, "record", a.Record, &claim.Record{State: claim.Succeeded, FinishedAt: finishedAt, Digest: resultDigest(bankResult)})
	if a.KeyAction() != claim.Stop {
		t.Fatalf("key action %d", a.KeyAction())
	}
	w.told(t, ask(otherPrint, ""), "CONFLICT")
	w.at(claimed.Add(720*time.Hour) + grace - 1)
	w.told(t, asks(""), "EXPIRED")
	w.pass(1)
	w.told(t, asks(""), "FIRST 1 NONE")
}

func TestC55AnExpiredFailureAsksForANewKey(t *testing.T) {
	w := newWorld()
	must(t)(w.fail(w.first(t, asks("")).ID, blocked))
	w.at(w.rec.ResultUntil + grace)
	if a := w.told(t, asks(""), "EXPIRED"); a.KeyAction() != claim.Rotate || a.Record.Failure != nil || a.Record.State != claim.Failed {
		t.Fatalf("%+v", a)
	}
}

func TestC57AfterTheKeysOwnTimeItIsNewThoughItsRecordIsStillThere(t *testing.T) {
	w := newWorld()
	g := w.first(t, asks("r"))
	must(t)(w.complete(g.ID, bankResult))
	w.pass(1_000_000 * time.Hour)
	swept := newWorld()
	swept.now = w.now
	for _, world := range []*world{w, swept} {
		world.told(t, ask(otherPrint, "payment.refund"), "FIRST 1 NONE")
		if world.rec.Spent != nil || world.rec.ReleasedClaimID != (claim.ID{}) || !world.rec.CreatedAt.Equal(world.wall) {
			t.Fatalf("the old record shines through: %+v", world.rec)
		}
	}
	w.refusedWith(t, claim.ClaimLost, func() (*claim.Record, error) { return w.complete(g.ID, bankResult) })
}
