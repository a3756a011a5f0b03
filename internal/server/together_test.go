package server

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// C09 on a session: Begins of one key that wait for each other are one question, told in
// the order in which they were sent.
func TestC09ManyBeginsOfOneKeyAreOneQuestion(t *testing.T) {
	w := start(t)
	k := w.open(t, t.Context())
	at, letGo := make(chan struct{}, 1), make(chan struct{})
	first := true
	w.store.before(func(ctx context.Context, _ *claim.BeginRequest) error {
		if first { // of the one that is sent before the others are there
			first = false
			at <- struct{}{}
			<-letGo
		}
		return ctx.Err()
	})
	k.send(begin(1, "hot"))
	<-at
	const more = 500
	var calls []*dualcheckv1.SessionCall
	for id := range uint64(more) {
		calls = append(calls, begin(2+id, "hot"))
	}
	k.send(append(calls, look(1000, "hot"), begin(1001, "other"))...)
	if got := k.answer(1001).GetBegin().GetVerdict(); got != dualcheckv1.Verdict_VERDICT_FIRST { // and all before it were read
		t.Errorf("another key: %v", got)
	}
	asked := w.store.questions.Load()
	close(letGo)
	k.close()
	all, err := k.rest()
	if err != nil || len(all) != more+2 {
		t.Fatalf("%d answers, %v", len(all), err)
	}
	if got := all[1].GetBegin().GetVerdict(); got != dualcheckv1.Verdict_VERDICT_FIRST {
		t.Errorf("the first: %v", got)
	}
	for id := range uint64(more) {
		if got := all[2+id].GetBegin().GetVerdict(); got != dualcheckv1.Verdict_VERDICT_IN_PROGRESS {
			t.Errorf("%d: %v", 2+id, got)
		}
	}
	if all[1000].GetGet().GetRecord().GetState() != dualcheckv1.State_STATE_PENDING {
		t.Errorf("the Get behind them: %v", all[1000])
	}
	if got := w.store.questions.Load() - asked; got != 1 {
		t.Errorf("%d Begins were %d questions", more, got)
	}
}

// Those that are wrong, those that wait and those that do not, together: each gets what
// is its own, in its order, and the Complete behind them is not held up (H36).
func TestH36BeginsTogetherThatWait(t *testing.T) {
	w := start(t)
	k := w.open(t, t.Context())
	k.send(begin(1, "k"))
	token := k.answer(1).GetBegin().GetClaim().GetToken()
	at, letGo := make(chan struct{}, 1), make(chan struct{})
	first := true
	w.store.before(func(context.Context, *claim.BeginRequest) error {
		if first {
			first = false
			at <- struct{}{}
			<-letGo
		}
		return nil
	})
	k.send(begin(2, "k"))
	<-at
	wrong := begin(4, "k")
	wrong.GetBegin().RequestId = string(make([]byte, 200))
	k.send(begin(3, "k"), wrong, patient(5, "k"), patient(6, "k"), complete1(7, "k", token), begin(8, "k"), look(9, "none"))
	k.answer(9) // all before it were read
	close(letGo)
	k.close()
	all, err := k.rest()
	if err != nil || len(all) != 7 {
		t.Fatalf("%d answers, %v", len(all), err)
	}
	for id, want := range map[uint64]string{
		2: "VERDICT_IN_PROGRESS", 3: "VERDICT_IN_PROGRESS", 4: "REQUEST_ID_INVALID",
		5: "VERDICT_REPLAY", 6: "VERDICT_REPLAY", 8: "VERDICT_REPLAY",
	} {
		got := all[id].GetError().GetReason()
		if b := all[id].GetBegin(); b != nil {
			got = b.GetVerdict().String()
		}
		if got != want {
			t.Errorf("%d: %s, want %s", id, got, want)
		}
	}
	if all[7].GetFinish().GetRecord().GetState() != dualcheckv1.State_STATE_SUCCEEDED {
		t.Errorf("the Complete: %v", all[7])
	}
}

// A panic in the middle of several is an error of each that was not answered, and the
// session goes on.
func TestSessionPanicTogether(t *testing.T) {
	w := start(t)
	k := w.open(t, t.Context())
	at, letGo := make(chan struct{}, 1), make(chan struct{})
	asked := 0
	w.store.before(func(context.Context, *claim.BeginRequest) error {
		switch asked++; asked {
		case 1:
			at <- struct{}{}
			<-letGo
		case 3: // the second of those that go together
			panic("boom")
		}
		return nil
	})
	k.send(begin(1, "k"))
	<-at
	k.send(begin(2, "k"), begin(3, "k"), begin(4, "k"), look(5, "none"))
	k.answer(5) // all before it were read
	close(letGo)
	k.answer(1)
	for id := uint64(2); id <= 4; id++ {
		if got := k.answer(id).GetError(); got.GetReason() != string(claim.Internal) || got.GetMetadata()["incident"] == "" {
			t.Errorf("%d: %v", id, got)
		}
	}
	k.send(begin(6, "k"))
	if got := k.answer(6).GetBegin().GetVerdict(); got != dualcheckv1.Verdict_VERDICT_IN_PROGRESS {
		t.Errorf("after the panic: %v", got)
	}
}

// H26: the outcome of the first member of a batch is ambiguous: those behind it share its
// fate; sent again, the first two get one claim, the second as its repeat, and the third,
// with another payload, none.
func TestH26MembersBehindAnUndecidedOneShareItsFate(t *testing.T) {
	w := start(t)
	req := func(requestID, f string) *dualcheckv1.BeginRequest {
		return &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", RequestId: requestID, Owner: "o", Fingerprint: fingerprint(f)}
	}
	batch := &dualcheckv1.BatchBeginRequest{Requests: []*dualcheckv1.BeginRequest{req("r1", "f"), req("r1", "f"), req("r2", "g")}}
	w.store.before(func(ctx context.Context, r *claim.BeginRequest) error {
		// It is stored, and its answer lost.
		_, err := w.store.current().Begin(ctx, r)
		return claim.Unavailable("lost", errors.Join(err, context.DeadlineExceeded))
	})
	resp, err := w.BatchBegin(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range resp.GetResponses() {
		if r.GetError().GetReason() != string(claim.StoreUnavailable) {
			t.Errorf("%d: %v", i, r)
		}
	}
	w.store.before(nil)
	resp, err = w.BatchBegin(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	r := resp.GetResponses()
	if a, b := r[0].GetBegin(), r[1].GetBegin(); a.GetClaim().GetToken() == "" || a.GetClaim().GetToken() != b.GetClaim().GetToken() || !b.GetRepeat() {
		t.Errorf("given %v and %v", a, b)
	}
	if got := r[2].GetBegin().GetVerdict(); got != dualcheckv1.Verdict_VERDICT_CONFLICT {
		t.Errorf("the third: %v", got)
	}

	// Finishes too: the second is not tried while the fate of the first is not known.
	token := r[0].GetBegin().GetClaim().GetToken()
	tried := 0
	w.store.beforeFinish(func(context.Context, *claim.FinishRequest) error {
		tried++
		return claim.Unavailable("lost", nil)
	})
	ends := &dualcheckv1.BatchFinishRequest{Requests: []*dualcheckv1.FinishRequest{
		{Finish: &dualcheckv1.FinishRequest_Complete{Complete: &dualcheckv1.CompleteRequest{Namespace: "a", Key: "k", Token: token}}},
		{Finish: &dualcheckv1.FinishRequest_Fail{Fail: &dualcheckv1.FailRequest{Namespace: "a", Key: "k", Token: token, Failure: &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL}}}},
	}}
	finished, err := w.BatchFinish(t.Context(), ends)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range finished.GetResponses() {
		if f.GetError().GetReason() != string(claim.StoreUnavailable) {
			t.Errorf("finish %d: %v", i, f)
		}
	}
	if tried != 1 {
		t.Errorf("%d finishes were tried", tried)
	}
}

// The context that several are judged in lasts as long as the most patient of them.
func TestSessionTogetherLastsAsLongAsTheMostPatient(t *testing.T) {
	w := start(t)
	k := w.open(t, t.Context())
	at, letGo := make(chan struct{}, 1), make(chan struct{})
	asked := 0
	left := make(chan time.Duration, 1)
	w.store.before(func(ctx context.Context, _ *claim.BeginRequest) error {
		switch asked++; asked {
		case 1:
			at <- struct{}{}
			<-letGo
		case 2:
			until, _ := ctx.Deadline()
			left <- time.Until(until)
		}
		return nil
	})
	k.send(begin(1, "k"))
	<-at
	k.send(timed(begin(2, "k"), 3*time.Second), timed(begin(3, "k"), 6*time.Second), timed(begin(4, "k"), 4*time.Second), look(5, "none"))
	k.answer(5) // all before it were read
	close(letGo)
	if got := <-left; got < 5*time.Second || got > 6*time.Second {
		t.Errorf("it may take %v", got)
	}
	for id := uint64(1); id <= 4; id++ {
		k.answer(id)
	}
}

func timed(c *dualcheckv1.SessionCall, d time.Duration) *dualcheckv1.SessionCall {
	c.Timeout = durationpb.New(d)
	return c
}

// Who no longer waits when his turn comes is not given what others wait for.
func TestSessionTogetherPassesOverWhoHasGone(t *testing.T) {
	w := start(t)
	k := w.open(t, t.Context())
	at, letGo := make(chan struct{}, 1), make(chan struct{})
	asked := 0
	w.store.before(func(context.Context, *claim.BeginRequest) error {
		if asked++; asked == 1 {
			at <- struct{}{}
			<-letGo
			return claim.Unavailable("away", nil)
		}
		return nil
	})
	k.send(begin(1, "k"))
	<-at
	k.send(begin(2, "k"), begin(3, "k"), withdrawal(2), look(4, "none"))
	k.answer(4) // all before it were read
	close(letGo)
	k.answer(1)
	if got := k.answer(2).GetError(); got.GetReason() != string(claim.StoreUnavailable) {
		t.Errorf("who has gone: %v", got)
	}
	if got := k.answer(3).GetBegin().GetVerdict(); got != dualcheckv1.Verdict_VERDICT_FIRST {
		t.Errorf("who waits: %v", got)
	}
}
