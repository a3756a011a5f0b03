package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// talk is a client's side of a session.
type talk struct {
	t      *testing.T
	stream grpc.BidiStreamingClient[dualcheckv1.SessionRequest, dualcheckv1.SessionResponse]
	come   []*dualcheckv1.SessionAnswer
	// What the last frame said.
	draining bool
	degraded string
}

func (w *world) open(t *testing.T, ctx context.Context) *talk {
	t.Helper()
	stream, err := w.Session(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &talk{t: t, stream: stream}
}

// send sends a frame.
func (k *talk) send(calls ...*dualcheckv1.SessionCall) {
	k.t.Helper()
	if err := k.stream.Send(&dualcheckv1.SessionRequest{Calls: calls}); err != nil {
		k.t.Fatal(err)
	}
}

// frame reads a frame, and returns how the stream ended if it has.
func (k *talk) frame() error {
	m, err := k.stream.Recv()
	if err == nil {
		k.come = append(k.come, m.GetAnswers()...)
		k.draining, k.degraded = m.GetDraining(), m.GetDegraded()
	}
	return err
}

// next is the next answer.
func (k *talk) next() *dualcheckv1.SessionAnswer {
	k.t.Helper()
	for len(k.come) == 0 {
		if err := k.frame(); err != nil {
			k.t.Fatal(err)
		}
	}
	a := k.come[0]
	k.come = k.come[1:]
	return a
}

// answer is the next answer, which is to this call.
func (k *talk) answer(id uint64) *dualcheckv1.SessionAnswer {
	k.t.Helper()
	a := k.next()
	if a.GetId() != id {
		k.t.Fatalf("%v came, not the answer to %d", a, id)
	}
	return a
}

// rest reads to the end, and returns the answers by id and how it ended.
func (k *talk) rest() (map[uint64]*dualcheckv1.SessionAnswer, error) {
	k.t.Helper()
	all := map[uint64]*dualcheckv1.SessionAnswer{}
	for {
		for _, a := range k.come {
			if all[a.GetId()] != nil {
				k.t.Errorf("%d was answered twice", a.GetId())
			}
			all[a.GetId()] = a
		}
		k.come = nil
		if err := k.frame(); err != nil {
			if err == io.EOF {
				err = nil
			}
			return all, err
		}
	}
}

// close closes the client's side.
func (k *talk) close() {
	k.t.Helper()
	if err := k.stream.CloseSend(); err != nil {
		k.t.Fatal(err)
	}
}

func begin(id uint64, key string) *dualcheckv1.SessionCall {
	return &dualcheckv1.SessionCall{Id: id, Call: &dualcheckv1.SessionCall_Begin{Begin: &dualcheckv1.BeginRequest{Namespace: "a", Key: key}}}
}

func patient(id uint64, key string) *dualcheckv1.SessionCall {
	c := begin(id, key)
	c.GetBegin().Wait = durationpb.New(30 * time.Second)
	return c
}

func complete1(id uint64, key, token string) *dualcheckv1.SessionCall {
	return &dualcheckv1.SessionCall{Id: id, Call: &dualcheckv1.SessionCall_Complete{Complete: &dualcheckv1.CompleteRequest{Namespace: "a", Key: key, Token: token}}}
}

func extend(id uint64, key, token string) *dualcheckv1.SessionCall {
	return &dualcheckv1.SessionCall{Id: id, Call: &dualcheckv1.SessionCall_Extend{Extend: &dualcheckv1.ExtendRequest{Namespace: "a", Key: key, Token: token}}}
}

func look(id uint64, key string) *dualcheckv1.SessionCall {
	return &dualcheckv1.SessionCall{Id: id, Call: &dualcheckv1.SessionCall_Get{Get: &dualcheckv1.GetRequest{Namespace: "a", Key: key}}}
}

func withdrawal(id uint64) *dualcheckv1.SessionCall {
	return &dualcheckv1.SessionCall{Id: id, Call: &dualcheckv1.SessionCall_Cancel{Cancel: &dualcheckv1.SessionCancel{}}}
}

// waiters waits until so many Begins wait.
func (w *world) waiters(t *testing.T, n int) {
	t.Helper()
	w.metric(t, fmt.Sprintf("dualcheck_begins_waiting %d", n))
}

// metric waits until metrics have this line.
func (w *world) metric(t *testing.T, line string) {
	t.Helper()
	eventually(t, line, func() bool { _, m := w.get("/metrics"); return strings.Contains(m, line+"\n") })
}

// blocked has Begins of this key wait until what is returned is called, and tells when
// one has come.
func (w *world) blocked(key string) (came <-chan struct{}, goOn func()) {
	here, open := make(chan struct{}, 100), make(chan struct{})
	w.store.before(func(ctx context.Context, req *claim.BeginRequest) error {
		if req.Key != key {
			return nil
		}
		here <- struct{}{}
		select {
		case <-open:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return here, sync.OnceFunc(func() { close(open) })
}

// H36: a waiting Begin and then a Complete of the same key on one Session, from the
// claim's owner: the Complete is not stuck behind the wait.
func TestH36ACompletePassesAWaitOfItsKey(t *testing.T) {
	w := start(t)
	k := w.open(t, t.Context())
	k.send(begin(1, "k"))
	token := k.answer(1).GetBegin().GetClaim().GetToken()
	k.send(patient(2, "k"), complete1(3, "k", token), begin(4, "k"))
	if a := k.answer(3); a.GetFinish().GetRecord().GetState() != dualcheckv1.State_STATE_SUCCEEDED {
		t.Errorf("%v", a)
	}
	if a := k.answer(4); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_REPLAY {
		t.Errorf("%v", a)
	}
	if a := k.answer(2); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_REPLAY {
		t.Errorf("the waiter: %v", a)
	}
}

// Calls of one key are asked for one after the other and in order, over frames too;
// those of others do not wait for them.
func TestSessionOrder(t *testing.T) {
	w := start(t)
	var mu sync.Mutex
	var order []string
	running := false
	goOn := make(chan struct{})
	w.store.before(func(_ context.Context, req *claim.BeginRequest) error {
		if req.Key != "k" {
			return nil
		}
		mu.Lock()
		if running {
			t.Error("two at once")
		}
		running = true
		order = append(order, req.Owner)
		mu.Unlock()
		<-goOn
		mu.Lock()
		running = false
		mu.Unlock()
		return nil
	})
	k := w.open(t, t.Context())
	const n = 200
	for i := uint64(0); i < n; i += 10 {
		var calls []*dualcheckv1.SessionCall
		for j := i; j < i+10; j++ {
			c := begin(j, "k")
			c.GetBegin().Owner = fmt.Sprintf("%04d", j)
			calls = append(calls, c, begin(1000+j, fmt.Sprintf("other%d", j)))
		}
		k.send(calls...)
	}
	for range n { // all others, while the first of k is stuck
		if a := k.next(); a.GetId() < 1000 || a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
			t.Fatalf("%v", a)
		}
	}
	close(goOn)
	for i := range uint64(n) {
		want := dualcheckv1.Verdict_VERDICT_IN_PROGRESS
		if i == 0 {
			want = dualcheckv1.Verdict_VERDICT_FIRST
		}
		if a := k.next(); a.GetBegin().GetVerdict() != want {
			t.Errorf("%v", a)
		}
	}
	mu.Lock()
	if !slices.IsSorted(order) || len(order) != n {
		t.Errorf("out of order: %v", order)
	}
	mu.Unlock()
	// The same key in another namespace is another key.
	other := begin(1, "k")
	other.GetBegin().Namespace = "b"
	k.send(other)
	if a := k.answer(1); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
		t.Errorf("%v", a)
	}
}

// A call's error is its answer, by the same table and with the same validation as the
// unary methods, and all is counted.
func TestSessionErrorsAreAnswers(t *testing.T) {
	w := start(t)
	k := w.open(t, t.Context())
	bad := begin(3, "k3")
	bad.GetBegin().Fingerprint = []byte("short")
	late := begin(9, "k9")
	late.Timeout = &durationpb.Duration{Seconds: 1, Nanos: -1}
	k.send(begin(1, ""), &dualcheckv1.SessionCall{Id: 2}, bad, complete1(4, "k", "none"), extend(5, "k", "none"), look(6, "nowhere"),
		&dualcheckv1.SessionCall{Id: 7, Call: &dualcheckv1.SessionCall_Fail{Fail: &dualcheckv1.FailRequest{Namespace: "a", Key: "k", Token: "t"}}}, late, begin(0, "k0"))
	k.close()
	all, err := k.rest()
	if err != nil || len(all) != 9 {
		t.Fatalf("%d answers, %v", len(all), err)
	}
	for id, reason := range map[uint64]claim.Reason{1: claim.KeyInvalid, 2: claim.RequestInvalid, 3: claim.FingerprintInvalid, 4: claim.TokenInvalid, 5: claim.TokenInvalid, 6: claim.RecordNotFound, 7: claim.FailureInvalid, 9: claim.RequestInvalid} {
		if e := all[id].GetError(); e.GetReason() != string(reason) || e.GetCode() != int32(table[reason]) || e.GetMessage() == "" {
			t.Errorf("%d: %v, want %s", id, all[id], reason)
		}
	}
	if all[0].GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
		t.Errorf("%v", all[0])
	}
	for _, line := range []string{
		`dualcheck_begin_verdicts_total{namespace="a",source="SOURCE_ETCD",verdict="VERDICT_FIRST"} 1`,
		`dualcheck_finishes_total{kind="complete",reason="TOKEN_INVALID"} 1`,
		`dualcheck_finishes_total{kind="none",reason="FAILURE_INVALID"} 1`,
		`dualcheck_errors_total{reason="KEY_INVALID"} 1`,
		`dualcheck_errors_total{reason="REQUEST_INVALID"} 2`,
		`dualcheck_request_duration_seconds_count{code="OK",method="dualcheck.v1.DedupService/Session:Begin"} 1`,
		`dualcheck_request_duration_seconds_count{code="NotFound",method="dualcheck.v1.DedupService/Session:Get"} 1`,
		`dualcheck_sessions 0`,
		`dualcheck_requests_in_flight 0`,
	} {
		w.metric(t, line)
	}
	if _, m := w.get("/metrics"); strings.Contains(m, `method="dualcheck.v1.DedupService/Session"`) {
		t.Error("how long a session lasted is among the durations of calls")
	}
}

// A panic in one call is that call's error.
func TestSessionOutlivesAPanic(t *testing.T) {
	w := start(t)
	w.store.before(func(_ context.Context, req *claim.BeginRequest) error {
		if req.Key != "other" {
			panic("a bug")
		}
		return nil
	})
	k := w.open(t, t.Context())
	k.send(begin(1, "k"), begin(2, "l"))
	for range 2 {
		e := k.next().GetError()
		incident := e.GetMetadata()["incident"]
		if e.GetReason() != "INTERNAL" || incident == "" || !strings.Contains(w.logs.String(), incident) || strings.Contains(e.GetMessage(), "bug") {
			t.Errorf("%v", e)
		}
	}
	k.send(begin(3, "other"))
	if a := k.answer(3); a.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
		t.Errorf("%v", a)
	}
	w.metric(t, "dualcheck_panics_total 2")
}

// Every call has a deadline from when it was read, its own or the server's.
func TestSessionDeadlines(t *testing.T) {
	w := start(t)
	left := make(chan time.Duration, 1)
	w.store.before(func(ctx context.Context, req *claim.BeginRequest) error {
		deadline, _ := ctx.Deadline()
		if req.Key == "slow" {
			<-ctx.Done()
			return ctx.Err()
		}
		left <- time.Until(deadline)
		return nil
	})
	k := w.open(t, t.Context())
	for i, c := range []struct{ wait, timeout, want time.Duration }{
		{want: claim.AnswerWithin}, {wait: time.Second, want: claim.AnswerWithin + time.Second}, {timeout: time.Second, want: time.Second},
		{timeout: time.Hour, want: claim.AnswerWithin}, {timeout: 15 * time.Second, wait: 10 * time.Second, want: 15 * time.Second},
	} {
		call := begin(uint64(i), fmt.Sprintf("k%d", i))
		if c.timeout > 0 {
			call.Timeout = durationpb.New(c.timeout)
		}
		call.GetBegin().Wait = durationpb.New(c.wait)
		k.send(call)
		k.answer(uint64(i))
		if got := <-left; got > c.want || got < c.want-900*time.Millisecond {
			t.Errorf("%+v: %v left", c, got)
		}
	}
	slow := begin(100, "slow")
	slow.Timeout = durationpb.New(50 * time.Millisecond)
	behind := begin(101, "slow") // is read, and late, before its turn
	behind.Timeout = durationpb.New(time.Millisecond)
	k.send(slow, behind)
	for id := uint64(100); id < 102; id++ {
		if e := k.answer(id).GetError(); e.GetCode() != int32(codes.DeadlineExceeded) || e.GetReason() != "STORE_UNAVAILABLE" {
			t.Errorf("%v", e)
		}
	}
}

// A call's trace is its own, and not that of its stream.
func TestSessionTraceAndRetries(t *testing.T) {
	w := start(t)
	got := make(chan string, 1)
	w.store.before(func(ctx context.Context, req *claim.BeginRequest) error {
		got <- fmt.Sprintf("%x %x", req.TraceID, telemetry.TraceID(ctx))
		return nil
	})
	const stream, call = "00-11111111111111111111111111111111-2222222222222222-01", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	k := w.open(t, metadata.AppendToOutgoingContext(t.Context(), "traceparent", stream))
	for traceparent, want := range map[string]string{"": " ", "nonsense": " ", call: "0af7651916cd43dd8448eb211c80319c 0af7651916cd43dd8448eb211c80319c"} {
		c := begin(1, "k")
		c.Traceparent = traceparent
		k.send(c)
		k.answer(1)
		if v := <-got; v != want {
			t.Errorf("%q: %q", traceparent, v)
		}
	}
	w.store.before(nil)
	again := look(7, "k")
	again.RetryCount = 3
	k.send(again)
	k.answer(7)
	w.metric(t, `dualcheck_retries_total{method="dualcheck.v1.DedupService/Session:Get"} 1`)
	if log := w.logs.String(); !strings.Contains(log, "method=dualcheck.v1.DedupService/Session:Get") || !strings.Contains(log, "retry_count=3") || !strings.Contains(log, "trace_id=0af7651916cd43dd8448eb211c80319c") {
		t.Errorf("the log:\n%s", log)
	}
	for _, n := range []string{"2", "0", "-1", "many", "99999"} {
		_, err := w.Get(metadata.AppendToOutgoingContext(t.Context(), "dualcheck-retry-count", n), &dualcheckv1.GetRequest{Namespace: "a", Key: "k"})
		if err != nil {
			t.Fatal(err)
		}
	}
	w.metric(t, `dualcheck_retries_total{method="dualcheck.v1.DedupService/Get"} 1`)
	w.post("/v1/dedup:get", `{"namespace":"a","key":"k"}`, "Dualcheck-Retry-Count", "2")
	w.metric(t, `dualcheck_retries_total{method="dualcheck.v1.DedupService/Get"} 2`)
	if log := w.logs.String(); !strings.Contains(log, "retry_count=2") {
		t.Errorf("the log:\n%s", log)
	}
}

// When a client does not read, its frames are no longer read either, and nothing grows;
// when it reads, all is answered.
func TestSessionHoldsAClientThatDoesNotRead(t *testing.T) {
	limits := defaultSessionLimits()
	limits.unsent, limits.unsentBytes = 100, 100<<10
	w := start(t, func(c *Config) { c.sessions = limits; c.MaxInFlight = 100_000 })
	roomy := claimtest.DefaultPolicy()
	roomy.MaxResultBytes = claim.MaxResult
	w.store.PutPolicy("a", roomy)
	token := w.first("done").GetToken()
	if _, err := w.Complete(t.Context(), completing("done", token, make([]byte, 50<<10)).GetComplete()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	k := w.open(t, ctx)
	const frames, each = 2000, 20 // 2 GB of answers
	var sent atomic.Int64
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		for i := range uint64(frames) {
			var calls []*dualcheckv1.SessionCall
			for j := range uint64(each) {
				c := begin(i*each+j, "done")
				c.GetBegin().RequestId = strings.Repeat("r", 100)
				calls = append(calls, c)
			}
			if k.stream.Send(&dualcheckv1.SessionRequest{Calls: calls}) != nil {
				return // enough of it
			}
			sent.Add(1)
		}
	}()
	// It comes to a stand, well before the end.
	asked, since := int64(-1), time.Now()
	eventually(t, "it comes to a stand", func() bool {
		if n := w.store.begins.Load(); n != asked {
			asked, since = n, time.Now()
		}
		return time.Since(since) > 300*time.Millisecond
	})
	if n := w.store.begins.Load(); n > 2000 || sent.Load() == frames {
		t.Errorf("%d were asked for, %d frames taken, and nothing was read", n, sent.Load())
	}
	for answers := 0; answers < 4000; {
		m, err := k.stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range m.GetAnswers() {
			if len(a.GetBegin().GetRecord().GetResult().GetBody()) != 50<<10 {
				t.Fatalf("%.300v", a)
			}
		}
		answers += len(m.GetAnswers())
	}
	cancel()
	<-finished
}

// H27: Begins and Gets over the limit of a session are OVERLOADED at once; a finish and
// an extension behind them are read and carried out.
func TestH27ASessionsOverloadNeverHoldsUpAFinish(t *testing.T) {
	limits := defaultSessionLimits()
	limits.asks = 3
	w := start(t, func(c *Config) { c.sessions = limits })
	token, longer := w.first("held").GetToken(), w.first("longer").GetToken()
	came, goOn := w.blocked("slow")
	defer goOn()
	k := w.open(t, t.Context())
	k.send(begin(1, "slow"), begin(2, "slow"), begin(3, "slow"), begin(4, "slow"), look(5, "held"), complete1(6, "held", token), extend(7, "longer", longer))
	<-came
	for range 4 {
		switch a := k.next(); a.GetId() {
		case 4, 5:
			if e := a.GetError(); e.GetReason() != "OVERLOADED" || e.GetRetryAfter().AsDuration() <= 0 || e.GetCode() != int32(codes.ResourceExhausted) {
				t.Errorf("%v", a)
			}
		case 6:
			if a.GetFinish().GetRecord().GetState() != dualcheckv1.State_STATE_SUCCEEDED {
				t.Errorf("%v", a)
			}
		case 7:
			if a.GetExtend().GetClaim() == nil {
				t.Errorf("%v", a)
			}
		default:
			t.Errorf("%v", a)
		}
	}
	goOn()
	for id := uint64(1); id <= 3; id++ {
		k.answer(id)
	}
	k.send(begin(9, "k"))
	if a := k.answer(9); a.GetBegin() == nil {
		t.Errorf("afterwards: %v", a)
	}
}

// The bound of a node holds for sessions too.
func TestH27ANodesOverloadIsASessions(t *testing.T) {
	w := start(t, func(c *Config) { c.MaxInFlight = 1 })
	came, goOn := w.blocked("slow")
	defer goOn()
	k := w.open(t, t.Context())
	k.send(begin(1, "slow"))
	<-came
	k.send(begin(2, "k"))
	if e := k.answer(2).GetError(); e.GetReason() != "OVERLOADED" {
		t.Errorf("%v", e)
	}
}

// Many finishes, or large ones, hold the reading up until some are answered.
func TestSessionBoundsFinishes(t *testing.T) {
	limits := defaultSessionLimits()
	limits.tells = 4
	w := start(t, func(c *Config) { c.sessions = limits })
	var under, most atomic.Int64
	goOn := make(chan struct{})
	w.store.beforeFinish(func(context.Context, *claim.FinishRequest) error {
		most.Store(max(most.Load(), under.Add(1)))
		<-goOn
		under.Add(-1)
		return nil
	})
	k := w.open(t, t.Context())
	const n = 40
	for id := range uint64(n) {
		key := fmt.Sprintf("k%d", id)
		k.send(complete1(id, key, w.first(key).GetToken()))
	}
	k.close()
	eventually(t, "those that may are under way", func() bool { return under.Load() == 4 })
	close(goOn)
	all, err := k.rest()
	if err != nil || len(all) != n {
		t.Errorf("%d answers, %v", len(all), err)
	}
	if most.Load() > 4 {
		t.Errorf("%d at once", most.Load())
	}
}

// What waits to be sent is bounded in bytes though many large answers come at once:
// Begins over it are told to come again, finishes are told without what is large.
func TestSessionLargeAnswersAreBounded(t *testing.T) {
	limits := defaultSessionLimits()
	limits.recordBytes = 8 << 10
	w := start(t, func(c *Config) { c.sessions = limits })
	token := w.first("k").GetToken()
	done, err := w.Complete(t.Context(), completing("k", token, make([]byte, 20<<10)).GetComplete())
	if err != nil {
		t.Fatal(err)
	}
	k := w.open(t, t.Context())
	again := complete1(2, "k", token)
	again.GetComplete().Outcome = &dualcheckv1.CompleteRequest_Omitted{Omitted: &dualcheckv1.Omitted{Digest: done.GetRecord().GetDigest(), Size: 20 << 10}}
	k.send(begin(1, "k"), again)
	if e := k.answer(1).GetError(); e.GetReason() != "OVERLOADED" || e.GetRetryAfter() == nil {
		t.Errorf("%v", e)
	}
	if r := k.answer(2).GetFinish().GetRecord(); r.GetState() != dualcheckv1.State_STATE_SUCCEEDED || r.GetResult() != nil || r.GetResultSize() != 20<<10 {
		t.Errorf("%.300v", r)
	}
}

// The part that a node does without is told with every frame.
func TestSessionTellsDegraded(t *testing.T) {
	var lost atomic.Bool
	w := start(t, func(c *Config) {
		c.RedisAway = func() error {
			if lost.Load() {
				return errTest
			}
			return nil
		}
	})
	k := w.open(t, t.Context())
	for i, want := range []string{"", "redis", "redis", ""} {
		lost.Store(want != "")
		k.send(begin(uint64(i), "k"))
		k.answer(uint64(i))
		if k.degraded != want {
			t.Errorf("%d: %q", i, k.degraded)
		}
	}
}

// A client's half-close: all that was accepted is answered, then the stream ends well.
func TestSessionHalfClose(t *testing.T) {
	w := start(t)
	came, goOn := w.blocked("slow")
	k := w.open(t, t.Context())
	k.send(begin(1, "slow"), begin(2, "slow"), begin(3, "k"))
	k.close()
	<-came
	goOn()
	all, err := k.rest()
	if err != nil || len(all) != 3 {
		t.Errorf("%v, %v", all, err)
	}
	idle := w.open(t, t.Context())
	idle.close()
	if all, err := idle.rest(); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
}

// A client that goes: its Begins stop waiting, what was handed to the store goes on, and
// nothing is left behind.
func TestSessionClientGoes(t *testing.T) {
	for name, leave := range map[string]func(w *world, cancel func()){
		"cancels": func(_ *world, cancel func()) { cancel() },
		"breaks":  func(w *world, _ func()) { w.conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			w := start(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			token := w.first("held").GetToken()
			finishing, ended := make(chan struct{}), make(chan error, 1)
			w.store.beforeFinish(func(ctx context.Context, _ *claim.FinishRequest) error {
				close(finishing)
				<-ctx.Done()
				ended <- ctx.Err()
				return nil // the store goes on
			})
			came, goOn := w.blocked("slow")
			defer goOn()
			k := w.open(t, ctx)
			k.send(patient(1, "held"), begin(2, "slow"), complete1(3, "held", token))
			<-finishing
			<-came
			w.waiters(t, 1)
			w.metric(t, "dualcheck_requests_in_flight 3")
			leave(w, cancel)
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("the finish's context: %v", err)
			}
			for _, line := range []string{"dualcheck_sessions 0", "dualcheck_begins_waiting 0", "dualcheck_requests_in_flight 0"} {
				w.metric(t, line)
			}
			if found, err := w.store.Get(t.Context(), &claim.GetRequest{Namespace: "a", Key: "held"}); err != nil || found.Record.State != claim.Succeeded {
				t.Errorf("the finish: %v %v", found.Record, err)
			}
		})
	}
}
