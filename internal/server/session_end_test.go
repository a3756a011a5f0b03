package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// A frame that is wrong ends the stream with a status that says why, after what was
// accepted before it was answered.
func TestSessionWrongFrames(t *testing.T) {
	many := &dualcheckv1.SessionRequest{}
	for i := range claim.MaxBatch + 1 {
		many.Calls = append(many.Calls, look(uint64(100+i), "k"))
	}
	large := complete1(100, "k", "t")
	large.GetComplete().Outcome = &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{Body: make([]byte, claim.MaxBatchBytes)}}
	crowd := append([]byte{0x0a}, bytes.Repeat([]byte{0x0a, 0x00}, 250_000)...) // of empty calls
	for name, c := range map[string]struct {
		frame  any
		reason claim.Reason
	}{
		"many calls":      {many, claim.BatchTooLarge},
		"large":           {&dualcheckv1.SessionRequest{Calls: []*dualcheckv1.SessionCall{large, look(101, "k")}}, claim.BatchTooLarge},
		"id in use":       {&dualcheckv1.SessionRequest{Calls: []*dualcheckv1.SessionCall{look(1, "k")}}, claim.RequestInvalid},
		"id twice":        {&dualcheckv1.SessionRequest{Calls: []*dualcheckv1.SessionCall{begin(5, "slow"), look(5, "k")}}, claim.RequestInvalid},
		"no message":      {rawMessage{0xff, 0xff, 0xff}, claim.RequestInvalid},
		"invalid UTF-8":   {rawMessage{0x0a, 0x06, 0x12, 0x04, 0x0a, 0x02, 0xc3, 0x28}, claim.RequestInvalid},
		"a crowd":         {rawMessage(crowd[1:]), claim.RequestInvalid},
		"over a message":  {make(rawMessage, claim.MaxMessage+1), claim.RequestInvalid},
		"crowd in a call": {rawMessage(crowdedCall()), claim.RequestInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			w := start(t)
			came, goOn := w.blocked("slow")
			defer goOn()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			stream, err := w.conn.NewStream(ctx, &dualcheckv1.DedupService_ServiceDesc.Streams[0], dualcheckv1.DedupService_Session_FullMethodName, forceRaw)
			if err != nil {
				t.Fatal(err)
			}
			send := func(m any) {
				raw, ok := m.(rawMessage)
				if !ok {
					raw = must(proto.Marshal(m.(proto.Message)))
				}
				if err := stream.SendMsg(raw); err != nil {
					t.Fatal(err)
				}
			}
			send(&dualcheckv1.SessionRequest{Calls: []*dualcheckv1.SessionCall{begin(1, "slow"), begin(2, "slow")}})
			<-came
			send(c.frame)
			w.metric(t, "dualcheck_sessions 1") // it waits for what was accepted
			goOn()
			answered := map[uint64]bool{}
			for {
				var raw rawMessage
				if err = stream.RecvMsg(&raw); err != nil {
					break
				}
				var m dualcheckv1.SessionResponse
				if err := proto.Unmarshal(raw, &m); err != nil {
					t.Fatal(err)
				}
				for _, a := range m.GetAnswers() {
					answered[a.GetId()] = a.GetBegin() != nil
				}
			}
			s := want(t, err, c.reason, codes.InvalidArgument)
			if !answered[1] || !answered[2] {
				t.Errorf("answered %v before %v", answered, s)
			}
		})
	}
}

// crowdedCall is a frame of one call with too many empty details.
func crowdedCall() []byte {
	fail := failing(250_000)
	c := &dualcheckv1.SessionCall{Id: 7, Call: &dualcheckv1.SessionCall_Fail{Fail: &dualcheckv1.FailRequest{}}}
	if err := proto.Unmarshal(fail, c.GetFail()); err != nil {
		panic(err)
	}
	return must(proto.Marshal(&dualcheckv1.SessionRequest{Calls: []*dualcheckv1.SessionCall{c}}))
}

// One call alone may be as large as any.
func TestSessionOneLargeCall(t *testing.T) {
	w := start(t)
	k := w.open(t, t.Context())
	large := complete1(1, "k", w.first("k").GetToken())
	large.GetComplete().Outcome = &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{Body: make([]byte, claim.MaxBatchBytes+1)}}
	k.send(large)
	if a := k.answer(1); a.GetFinish() == nil && a.GetError().GetReason() != "RESULT_INVALID" {
		t.Errorf("%.300v", a)
	}
}

// Stop with a session open: it is told at once, waiters are answered, new work is
// refused, finishes and extensions are still carried out; it ends with the client's side.
func TestSessionStop(t *testing.T) {
	w := start(t)
	token, longer := w.first("held").GetToken(), w.first("longer").GetToken()
	k := w.open(t, t.Context())
	k.send(patient(1, "longer"))
	w.waiters(t, 1)
	stopped := w.stopping(t, 20*time.Second)
	for !k.draining {
		if err := k.frame(); err != nil {
			t.Fatal(err)
		}
	}
	if a := k.answer(1); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_IN_PROGRESS {
		t.Errorf("the waiter: %v", a)
	}
	k.send(begin(2, "new"), complete1(3, "held", token), extend(4, "longer", longer))
	k.close()
	all, err := k.rest()
	if err != nil || all[2].GetError().GetReason() != "DRAINING" || all[2].GetError().GetCode() != int32(codes.Unavailable) || all[3].GetFinish() == nil || all[4].GetExtend() == nil {
		t.Errorf("%v, %v", all, err)
	}
	if !k.draining {
		t.Error("a later frame does not say so")
	}
	if took, err := stopped(); err != nil || took > 10*time.Second {
		t.Errorf("%v, %v", took, err)
	}
}

// stopping stops the server; what is returned waits for that.
func (w *world) stopping(t *testing.T, within time.Duration) (stopped func() (time.Duration, error)) {
	ctx, cancel := context.WithTimeout(t.Context(), within)
	began, done := time.Now(), make(chan struct{})
	go func() { defer close(done); w.server.Stop(ctx, 0) }()
	return func() (time.Duration, error) {
		defer cancel()
		<-done
		return time.Since(began), ctx.Err()
	}
}

// A client that never closes its side: its session ends by itself, once all is answered
// and nothing more comes.
func TestSessionStopWithoutTheClient(t *testing.T) {
	w := start(t)
	finishing, finish := make(chan struct{}), make(chan struct{})
	w.store.beforeFinish(func(context.Context, *claim.FinishRequest) error { close(finishing); <-finish; return nil })
	k := w.open(t, t.Context())
	k.send(complete1(1, "held", w.first("held").GetToken()))
	<-finishing
	stopped := w.stopping(t, 20*time.Second)
	if err := k.frame(); err != nil || !k.draining {
		t.Fatal(err)
	}
	select {
	case <-w.server.stopped:
		t.Error("it stopped with a finish under way")
	case <-time.After(2 * defaultSessionLimits().quiet):
	}
	close(finish)
	if all, err := k.rest(); err != nil || all[1].GetFinish() == nil {
		t.Errorf("%v, %v", all, err)
	}
	if took, err := stopped(); err != nil {
		t.Errorf("%v, %v", took, err)
	}
}

// A client that floods a session that drains, with work that is refused or with work
// that is not, does not hold up the end: what was read is answered.
func TestSessionStopUnderAFlood(t *testing.T) {
	limits := defaultSessionLimits()
	limits.drain = time.Second
	w := start(t, func(c *Config) { c.sessions = limits })
	var clients sync.WaitGroup
	for name, flood := range map[string]func(id uint64) *dualcheckv1.SessionCall{
		"begins":   func(id uint64) *dualcheckv1.SessionCall { return begin(id, fmt.Sprintf("k%d", id)) },
		"finishes": func(id uint64) *dualcheckv1.SessionCall { return complete1(id, fmt.Sprintf("k%d", id), "none") },
	} {
		k := w.open(t, t.Context())
		k.send(flood(0))
		k.answer(0)
		clients.Go(func() {
			for id := uint64(1); k.stream.Send(&dualcheckv1.SessionRequest{Calls: []*dualcheckv1.SessionCall{flood(id)}}) == nil; id++ {
			}
		})
		clients.Go(func() {
			if all, err := k.rest(); err != nil || len(all) == 0 {
				t.Errorf("%s: %d answers, %v", name, len(all), err)
			}
		})
	}
	if took, err := w.stopping(t, 20*time.Second)(); err != nil {
		t.Errorf("%v, %v", took, err)
	}
	clients.Wait()
}

// A client that does not read is cut off when the time to stop is over.
func TestSessionStopCutsOff(t *testing.T) {
	w := start(t)
	token := w.first("done").GetToken()
	if _, err := w.Complete(t.Context(), completing("done", token, make([]byte, 200<<10)).GetComplete()); err != nil {
		t.Fatal(err)
	}
	k := w.open(t, t.Context())
	for id := range uint64(40) {
		k.send(begin(id, "done"))
	}
	eventually(t, "they were asked for", func() bool { return w.store.begins.Load() >= 40 })
	if took, err := w.stopping(t, 300*time.Millisecond)(); !errors.Is(err, context.DeadlineExceeded) || took > 5*time.Second {
		t.Errorf("%v, %v", took, err)
	}
	if _, err := k.rest(); status.Code(err) != codes.Unavailable {
		t.Errorf("it ended with %v", err)
	}
}

// A session that has lasted is asked to move elsewhere, and works until it has.
func TestSessionAges(t *testing.T) {
	w := start(t, func(c *Config) { c.MaxConnectionAge = 100 * time.Millisecond })
	token := w.first("held").GetToken()
	k := w.open(t, t.Context())
	if err := k.frame(); err != nil || !k.draining {
		t.Fatal(err)
	}
	k.send(begin(1, "k"), patient(2, "held"))
	if a := k.answer(1); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
		t.Errorf("%v", a)
	}
	w.waiters(t, 1)
	// It waits on, however long nothing comes.
	select {
	case <-time.After(2 * defaultSessionLimits().quiet):
	case <-k.stream.Context().Done():
		t.Error("it ended with a Begin that waits")
	}
	k.send(complete1(3, "held", token))
	k.answer(3)
	if a := k.answer(2); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_REPLAY {
		t.Errorf("%v", a)
	}
	if all, err := k.rest(); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
	if s := newSessions(w.metrics, sessionLimits{}, time.Hour); s.age+s.age/10+s.limits.aged >= ageGrace {
		t.Errorf("a session of %v outlasts its connection", s.age)
	}
}

// A cancel ends a wait at once; whatever else it names goes on and is answered.
func TestSessionCancel(t *testing.T) {
	w := start(t)
	token := w.first("held").GetToken()
	k := w.open(t, t.Context())
	k.send(patient(1, "held"), withdrawal(99))
	w.waiters(t, 1)
	k.send(withdrawal(1), withdrawal(1), withdrawal(99))
	if a := k.answer(1); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_IN_PROGRESS || a.GetBegin().GetRetryAfter().AsDuration() <= 0 {
		t.Errorf("%v", a)
	}
	// Before it begins to wait: it does not.
	came, goOn := w.blocked("held")
	k.send(patient(2, "held"))
	<-came
	k.send(withdrawal(2))
	k.send(begin(3, "other"))
	k.answer(3) // the cancel has been read
	goOn()
	if a := k.answer(2); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_IN_PROGRESS {
		t.Errorf("%v", a)
	}
	// A call under way goes on; if it fails for want of an answer, nobody waited for it.
	finishing, finish := make(chan struct{}), make(chan struct{})
	w.store.beforeFinish(func(ctx context.Context, _ *claim.FinishRequest) error { close(finishing); <-finish; return ctx.Err() })
	k.send(complete1(4, "held", token))
	<-finishing
	k.send(withdrawal(4), begin(5, "another"))
	k.answer(5)
	close(finish)
	if a := k.answer(4); a.GetFinish().GetRecord().GetState() != dualcheckv1.State_STATE_SUCCEEDED {
		t.Errorf("%v", a)
	}
	asked, answer := make(chan struct{}), make(chan struct{})
	w.store.before(func(_ context.Context, req *claim.BeginRequest) error {
		if req.Key == "away" {
			asked <- struct{}{}
			<-answer
			return claim.Unavailable("etcd does not answer", errTest)
		}
		return nil
	})
	k.send(begin(6, "away"))
	<-asked
	k.send(withdrawal(6), begin(7, "yet another"))
	k.answer(7)
	answer <- struct{}{}
	if e := k.answer(6).GetError(); e.GetCode() != int32(codes.Canceled) || e.GetReason() != "STORE_UNAVAILABLE" {
		t.Errorf("%v", e)
	}
}
