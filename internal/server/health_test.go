package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

func TestHealthFollowsReadinessBothWays(t *testing.T) {
	w := start(t)
	health := healthv1.NewHealthClient(w.conn)
	watch, err := health.Watch(t.Context(), &healthv1.HealthCheckRequest{Service: "dualcheck.v1.DedupService"})
	if err != nil {
		t.Fatal(err)
	}
	for _, ready := range []error{nil, errors.New("etcd does not answer"), nil} {
		w.setReady(ready)
		wanted, code := healthv1.HealthCheckResponse_SERVING, 200
		if ready != nil {
			wanted, code = healthv1.HealthCheckResponse_NOT_SERVING, 503
		}
		got, err := watch.Recv()
		if err != nil || got.GetStatus() != wanted {
			t.Fatalf("watch: %v %v, want %v", got, err, wanted)
		}
		for _, service := range []string{"", "dualcheck.v1.AdminService"} {
			eventually(t, "Check says so", func() bool {
				got, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
				return err == nil && got.GetStatus() == wanted
			})
		}
		if got, body := w.get("/readyz"); got != code || ready != nil && !strings.Contains(body, "etcd does not answer") {
			t.Errorf("/readyz %d %s", got, body)
		}
		if got, body := w.get("/readyz?verbose"); got != code || ready != nil && !strings.Contains(body, "[-] cluster: etcd does not answer") {
			t.Errorf("/readyz?verbose %d %s", got, body)
		}
		if got, _ := w.get("/livez"); got != 200 {
			t.Errorf("/livez %d", got)
		}
	}
	_, err = health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: "none"})
	if status.Code(err) != codes.NotFound {
		t.Errorf("an unknown service: %v", err)
	}
}

// Stop: health first, then no new work, then the end of what is under way.
func TestStopInOrder(t *testing.T) {
	w := start(t)
	health := healthv1.NewHealthClient(w.conn)
	watch, err := health.Watch(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := watch.Recv(); err != nil || got.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Fatalf("%v %v", got, err)
	}
	token := w.first("held").GetToken()
	// One call waits for a key, one is in the middle of a finish.
	waited := make(chan *dualcheckv1.BeginResponse, 1)
	go func() {
		resp, err := w.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "held", Wait: durationpb.New(30 * time.Second)})
		if err != nil {
			t.Error(err)
		}
		waited <- resp
	}()
	eventually(t, "it waits", func() bool { _, m := w.get("/metrics"); return strings.Contains(m, "dualcheck_begins_waiting 1") })
	finishing, goOn := make(chan struct{}), make(chan struct{})
	w.store.beforeFinish(func(context.Context, *claim.FinishRequest) error { close(finishing); <-goOn; return nil })
	finished := make(chan error, 1)
	go func() {
		_, err := w.Complete(t.Context(), &dualcheckv1.CompleteRequest{Namespace: "a", Key: "held", Token: token})
		finished <- err
	}()
	<-finishing

	stopped := make(chan struct{})
	stop, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	go func() {
		defer close(stopped)
		w.server.Stop(stop, 2*time.Second)
	}()
	if got, err := watch.Recv(); err != nil || got.GetStatus() != healthv1.HealthCheckResponse_NOT_SERVING {
		t.Fatalf("health: %v %v", got, err)
	}
	if w.server.Ready() == nil {
		t.Error("still ready")
	}
	// While the delay lasts, everything is served; new work too.
	w.first("late")
	// Then the waiter is answered, and the finish still goes on.
	if resp := <-waited; resp.GetVerdict() != dualcheckv1.Verdict_VERDICT_IN_PROGRESS {
		t.Errorf("the waiter got %v", resp)
	}
	select {
	case <-stopped:
		t.Error("it stopped with a finish under way")
	default:
	}
	close(goOn)
	if err := <-finished; err != nil {
		t.Errorf("the finish: %v", err)
	}
	<-stopped
	if err := stop.Err(); err != nil {
		t.Errorf("an endless stream held it up: %v", err)
	}
}

// Between the end of the delay and the end of the connections.
func TestNoNewWorkWhileDraining(t *testing.T) {
	w := start(t)
	token := w.first("k").GetToken()
	close(w.server.draining)
	w.server.draining = make(chan struct{}) // for Stop to close
	_, err := w.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "new"})
	want(t, err, claim.Draining, codes.Unavailable)
	resp, err := w.BatchBegin(t.Context(), &dualcheckv1.BatchBeginRequest{Requests: []*dualcheckv1.BeginRequest{{Namespace: "a", Key: "new"}}})
	if err != nil || resp.GetResponses()[0].GetError().GetReason() != "DRAINING" {
		t.Errorf("%v %v", resp, err)
	}
	if _, err := w.Complete(t.Context(), &dualcheckv1.CompleteRequest{Namespace: "a", Key: "k", Token: token}); err != nil {
		t.Errorf("a finish is no new work: %v", err)
	}
}

func TestStopCutsOffWhatDoesNotEnd(t *testing.T) {
	w := start(t)
	blocked := make(chan struct{})
	w.store.before(func(ctx context.Context, _ *claim.BeginRequest) error { close(blocked); <-ctx.Done(); return ctx.Err() })
	got := make(chan error, 1)
	go func() {
		_, err := w.Begin(context.Background(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"})
		got <- err
	}()
	<-blocked
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	w.server.Stop(ctx, 0)
	if err := <-got; status.Code(err) != codes.Unavailable {
		t.Errorf("the call ended with %v", err)
	}
}

// A body that does not come takes the time of no gRPC call.
func TestASlowUploadDoesNotCutOffGRPC(t *testing.T) {
	w := start(t)
	upload, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer upload.Close()
	if _, err := upload.Write([]byte("POST /v1/dedup:begin HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := upload.Read(make([]byte, 10)); err != nil { // the body is being read
		t.Fatal(err)
	}
	if _, err := upload.Write([]byte(`{"namespace":`)); err != nil {
		t.Fatal(err)
	}
	under := make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	w.store.before(func(context.Context, *claim.BeginRequest) error {
		close(under)
		<-w.server.draining
		<-time.After(100 * time.Millisecond)
		return nil
	})
	got := make(chan error, 1)
	go func() {
		_, err := w.Begin(context.Background(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"})
		got <- err
	}()
	<-under
	w.server.Stop(ctx, 0)
	if err := <-got; err != nil {
		t.Errorf("the call ended with %v", err)
	}
	if log := w.logs.String(); !strings.Contains(log, "JSON calls were cut off") || strings.Contains(log, "gRPC calls were cut off") {
		t.Errorf("the log:\n%s", log)
	}
}

// A connection that is to end waits for every call that there can be.
func TestNoCallOutlastsItsConnection(t *testing.T) {
	for _, req := range []any{&dualcheckv1.DeleteNamespaceRequest{Force: true}, &dualcheckv1.BeginRequest{Wait: durationpb.New(time.Hour)}, &dualcheckv1.GetRequest{}} {
		if most := limit(req); most >= ageGrace {
			t.Errorf("%T may take %v, and its connection ends after %v", req, most, ageGrace)
		}
	}
}

func TestAFailedListenerEndsServe(t *testing.T) {
	w := start(t)
	s, err := New(w.server.cfg)
	if err != nil {
		t.Fatal(err)
	}
	a, b := listen(t), listen(t)
	b.Close()
	if err := s.Serve(a, b); err == nil {
		t.Error("Serve goes on with one port")
	}
	s.Stop(t.Context(), 0)
	conn, err := grpc.NewClient(a.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}); err == nil {
		t.Error("the other port still answers")
	}
}

func TestTheLogTellsOfAnOutageTwice(t *testing.T) {
	w := start(t)
	const ends, returns = "this node is not ready", "this node is ready again"
	for i := 1; i <= 2; i++ {
		w.setReady(errors.New("etcd does not answer"))
		eventually(t, "it says that it is not ready", func() bool { return strings.Count(w.logs.String(), ends) == i })
		w.setReady(errors.New("etcd still does not answer"))
		w.setReady(nil)
		eventually(t, "it says that it is ready again", func() bool { return strings.Count(w.logs.String(), returns) == i })
	}
	if log := w.logs.String(); !strings.Contains(log, `error="etcd does not answer"`) || !strings.Contains(log, "after=") {
		t.Errorf("neither cause nor length:\n%s", log)
	}
	w.server.Stop(t.Context(), 2*healthEvery)
	if log := w.logs.String(); strings.Count(log, ends) != 2 {
		t.Errorf("a stop is told as an outage:\n%s", log)
	}
}

// Before it was ever ready, a node is on its way; that is told elsewhere.
func TestAStartIsNoOutage(t *testing.T) {
	var logs logBuffer
	log := slog.New(slog.NewTextHandler(&logs, nil))
	var o outage
	o.tell(log, errTest)
	o.tell(log, nil)
	if logs.String() != "" {
		t.Errorf("it says %s", logs.String())
	}
	o.tell(log, errTest)
	o.tell(log, errTest)
	o.tell(log, nil)
	o.tell(log, nil)
	if n := strings.Count(logs.String(), "\n"); n != 2 {
		t.Errorf("%d lines: %s", n, logs.String())
	}
}
