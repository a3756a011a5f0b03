package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

// script is one stream: it wants a token, tells these messages and ends so; nil: it goes on
// until its client goes.
func script(t *testing.T, token string, end error, messages ...*dualcheckv1.WatchResponse) watchStream {
	return func(q *dualcheckv1.WatchRequest, stream grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error {
		if q.GetNamespace() != "payments" || q.GetResumeToken() != token || len(q.GetKinds()) != 1 {
			t.Errorf("asked %v, want the token %q", q, token)
		}
		for _, m := range messages {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		if end == nil {
			<-stream.Context().Done()
			return status.FromContextError(stream.Context().Err()).Err()
		}
		return end
	}
}

type watchStream = func(*dualcheckv1.WatchRequest, grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error

func streams(all ...watchStream) []watchStream { return all }

// told is a message of events.
func told(token string, events ...*dualcheckv1.Event) *dualcheckv1.WatchResponse {
	return &dualcheckv1.WatchResponse{ResumeToken: token, Events: events}
}

func put(key string, revision int64, state dualcheckv1.State) *dualcheckv1.Event {
	return &dualcheckv1.Event{Type: dualcheckv1.EventType_EVENT_TYPE_PUT, Kind: dualcheckv1.EventKind_EVENT_KIND_RECORD, Namespace: "payments", Key: key, Revision: revision, State: state}
}

var draining = ingesttest.Error(codes.Unavailable, "DRAINING", "this node is stopping", nil)

func TestWatchShowsLines(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	withValue := put("order-3", 65, dualcheckv1.State_STATE_SUCCEEDED)
	withValue.Record = &dualcheckv1.Record{Result: &dualcheckv1.Result{Code: 200, Body: []byte("{\"a\":\x1b}")}}
	failed := put("order-4", 66, dualcheckv1.State_STATE_FAILED)
	failed.Record = &dualcheckv1.Record{Failure: &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL, Code: 7, Message: "no\nfunds"}}
	large := put("order-5", 67, dualcheckv1.State_STATE_SUCCEEDED)
	large.Record = &dualcheckv1.Record{Result: &dualcheckv1.Result{Body: make([]byte, 3000)}}
	server.watch = append(server.watch, script(t, "",
		nil,
		&dualcheckv1.WatchResponse{ResumeToken: "t0", Progress: true},
		&dualcheckv1.WatchResponse{ResumeToken: "t1", Resync: &dualcheckv1.Resync{Begin: true, Cause: "reader-too-slow"}},
		told("t2", put("order-1\x1b[2J", 62, dualcheckv1.State_STATE_PENDING)),
		&dualcheckv1.WatchResponse{ResumeToken: "t3", Resync: &dualcheckv1.Resync{End: true}},
		told("t4", &dualcheckv1.Event{Type: dualcheckv1.EventType_EVENT_TYPE_DELETE, Key: "order-2", Revision: 64}, withValue, failed),
		told("t5", large),
	))
	o := command(t, "", "watch", "payments", "--addr", addr, "--limit", "5")
	o.wants(t, exitOK,
		"RESYNC: what is there follows; what was shown before may be out of date (reader-too-slow)\n",
		` PUT PENDING 62 order-1\x1b[2J`+"\n",
		"RESYNC ends: ",
		" DELETE - 64 order-2\n",
		` PUT SUCCEEDED 65 order-3 code=200 body={"a":\x1b}`+"\n",
		` PUT FAILED 66 order-4 failure=TERMINAL code=7 no\nfunds`+"\n",
		" PUT SUCCEEDED 67 order-5 code=0 body=3000 bytes\n",
	)
	if want := "watching payments at " + addr + "\n--resume=t5 goes on from here\n"; o.stderr != want {
		t.Errorf("stderr %q, want %q", o.stderr, want)
	}
	if n := strings.Count(o.stdout, "\n"); n != 7 {
		t.Errorf("%d lines in %q", n, o.stdout)
	}
}

func TestWatchAsksForWhatItWasToldTo(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	var asked atomic.Pointer[dualcheckv1.WatchRequest]
	server.watch = append(server.watch, func(q *dualcheckv1.WatchRequest, stream grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error {
		asked.Store(q)
		return stream.Send(told("t", put("k", 1, dualcheckv1.State_STATE_PENDING)))
	})
	server.watch = append(server.watch, server.watch[0])
	records := []dualcheckv1.EventKind{dualcheckv1.EventKind_EVENT_KIND_RECORD}
	command(t, "", "watch", "payments", "--addr", addr, "--prefix", "or", "--snapshot", "--values", "--limit", "1").wants(t, exitOK)
	if want := (&dualcheckv1.WatchRequest{Namespace: "payments", KeyPrefix: "or", Snapshot: true, IncludeValues: true, Kinds: records}); !proto.Equal(asked.Load(), want) {
		t.Errorf("asked %v", asked.Load())
	}
	command(t, "", "watch", "payments", "--addr", addr, "--resume", "tok", "--limit", "1").wants(t, exitOK)
	if want := (&dualcheckv1.WatchRequest{Namespace: "payments", ResumeToken: "tok", Kinds: records}); !proto.Equal(asked.Load(), want) {
		t.Errorf("asked %v", asked.Load())
	}
}

// A token that was told amid a RESYNC is told for what it is: until the end was shown.
func TestWatchEndsAmidAResync(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	begin := &dualcheckv1.WatchResponse{ResumeToken: "t1", Resync: &dualcheckv1.Resync{Begin: true, Cause: "asked-for"}}
	end := &dualcheckv1.WatchResponse{ResumeToken: "t3", Progress: true, Resync: &dualcheckv1.Resync{End: true}}
	a, b := told("t2", put("a", 1, dualcheckv1.State_STATE_PENDING)), told("t4", put("b", 2, dualcheckv1.State_STATE_PENDING))
	for limit, want := range map[string]string{"1": "--resume=t2 begins the RESYNC anew, which has not ended\n", "2": "--resume=t4 goes on from here\n"} {
		server.watch = streams(script(t, "", nil, begin, a, end, b))
		o := command(t, "", "watch", "payments", "--addr", addr, "--snapshot", "--limit", limit)
		o.wants(t, exitOK, " 1 a\n")
		if !strings.HasSuffix(o.stderr, want) {
			t.Errorf("--limit %s: stderr %q", limit, o.stderr)
		}
	}
	// The end that comes with more than was wanted was not reached.
	server.watch = streams(script(t, "", nil, begin, &dualcheckv1.WatchResponse{ResumeToken: "t2", Resync: &dualcheckv1.Resync{End: true}, Events: append(a.Events, b.Events...)}))
	o := command(t, "", "watch", "payments", "--addr", addr, "--snapshot", "--limit", "1")
	if o.code != exitOK || strings.Contains(o.stdout, "RESYNC ends") || !strings.HasSuffix(o.stderr, "--resume=t1 begins the RESYNC anew, which has not ended\n") {
		t.Errorf("%+v", o)
	}
}

// What could never be watched is a mistake in the command line, before anybody is asked.
func TestWatchOfWhatCannotBe(t *testing.T) {
	for _, prefix := range []string{"caf\xc3", "k\x00", "k\u200b", strings.Repeat("k", 256)} {
		command(t, "", "watch", "payments", "--addr", "127.0.0.1:1", "--prefix="+prefix).complains(t, exitUsage, "--prefix", "(KEY_INVALID)")
	}
	o := command(t, "", "watch", "payments", "--addr", "127.0.0.1:1", "--prefix=k\x00", "-o", "json")
	var p problem
	if err := json.Unmarshal([]byte(o.stderr), &p); err != nil || o.code != exitUsage || p.Reason != "KEY_INVALID" || p.Status != "INVALID_ARGUMENT" {
		t.Errorf("%v: %+v", err, o)
	}
	command(t, "", "watch", "payments", "--addr", "127.0.0.1:1", "--snapshot", "--resume", "t").complains(t, exitUsage, "--snapshot", "--resume", "give one of them")
}

// A stream that ends is opened again with the last token, whatever ended it.
func TestWatchGoesOnWhereItWas(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	server.watch = append(server.watch,
		script(t, "", draining, told("t1", put("a", 1, dualcheckv1.State_STATE_PENDING))),
		script(t, "t1", ingesttest.Error(codes.ResourceExhausted, "OVERLOADED", "read too slowly", nil)),
		script(t, "t1", status.Error(codes.Unavailable, "broken"), told("t2", put("b", 2, dualcheckv1.State_STATE_PENDING))),
		script(t, "t2", nil, told("t3", put("c", 3, dualcheckv1.State_STATE_PENDING), put("d", 4, dualcheckv1.State_STATE_PENDING))),
	)
	o := command(t, "", "watch", "payments", "--addr", addr, "--limit", "3")
	o.wants(t, exitOK, " 1 a\n", " 2 b\n", " 3 c\n")
	if n := strings.Count(o.stderr, "it is opened again in"); n != 3 || !strings.Contains(o.stderr, "this node is stopping") || !strings.Contains(o.stderr, "goes on from where it was, or with a RESYNC\n") {
		t.Errorf("stderr %q", o.stderr)
	}
	// The second stream was never one.
	if first, again := strings.Count(o.stderr, "watching payments at "+addr+"\n"), strings.Count(o.stderr, "watching payments at "+addr+" again\n"); first != 1 || again != 2 {
		t.Errorf("stderr %q", o.stderr)
	}
	// The last message was shown in part: its token would leave d out.
	if !strings.HasSuffix(o.stderr, "--resume=t2 goes on from here\n") || strings.Contains(o.stdout, " d\n") {
		t.Errorf("%q %q", o.stdout, o.stderr)
	}
}

func TestWatchAsJSON(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	server.watch = append(server.watch,
		script(t, "", draining, &dualcheckv1.WatchResponse{ResumeToken: "t0", Progress: true}),
		script(t, "t0", nil, told("t1", put("a", 1, dualcheckv1.State_STATE_PENDING))),
	)
	o := command(t, "", "watch", "payments", "--addr", addr, "--limit", "1", "-o", "json")
	o.wants(t, exitOK, `{"resumeToken":"t0","progress":true}`+"\n", `{"resumeToken":"t1","events":[{"type":"EVENT_TYPE_PUT","kind":"EVENT_KIND_RECORD","namespace":"payments","key":"a","state":"STATE_PENDING","revision":"1"}]}`+"\n")
	var warning map[string]string
	if err := json.Unmarshal([]byte(o.stderr), &warning); err != nil || !strings.Contains(warning["warning"], "opened again") {
		t.Errorf("%v: %q", err, o.stderr)
	}
}

func TestWatchThatIsRefused(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	for _, c := range []struct {
		err  error
		code int
		says string
	}{
		{ingesttest.Error(codes.InvalidArgument, "REQUEST_INVALID", "this is no token", nil), exitUsage, "this is no token (REQUEST_INVALID)"},
		{ingesttest.Error(codes.NotFound, "NAMESPACE_NOT_FOUND", "nobody declared it", nil), exitNotFound, "namespace put --addr="},
		{ingesttest.Error(codes.ResourceExhausted, "OVERLOADED", "as many as it serves", nil), exitUnavailable, "as many as it serves"},
		{draining, exitUnavailable, "this node is stopping"},
	} {
		server.watch = append(server.watch, script(t, "", c.err))
		command(t, "", "watch", "payments", "--addr", addr).complains(t, c.code, c.says)
	}
	// Refused later is refused as well.
	server.watch = append(server.watch, script(t, "", draining, told("t1")), script(t, "t1", ingesttest.Error(codes.NotFound, "NAMESPACE_NOT_FOUND", "nobody declared it", nil)))
	if o := command(t, "", "watch", "payments", "--addr", addr); o.code != exitNotFound || strings.Count(o.stderr, "\n") != 3 {
		t.Errorf("%+v", o)
	}
	command(t, "", "watch", "payments", "--addr", addr).complains(t, exitFailure, "does not have it yet") // of an older server
	command(t, "", "watch", "payments", "--addr", addr, "--limit", "-1").complains(t, exitUsage, "--limit")
	command(t, "", "watch", "--addr", addr).complains(t, exitUsage, "NAMESPACE")
}

func TestWatchOfNobody(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	command(t, "", "watch", "payments", "--addr", addr).complains(t, exitUnavailable, "no server answers at "+addr)
}

// A server that accepts the stream and says nothing is given up.
func TestWatchOfASilentServer(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	server.watch = append(server.watch, script(t, "", nil))
	command(t, "", "watch", "payments", "--addr", addr, "--timeout", "200ms").complains(t, exitUnavailable, "no answer within 200ms")
}

// An interrupt is the usual end, amid a stream and amid a pause.
func TestWatchInterrupted(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	later := ingesttest.Error(codes.Unavailable, "DRAINING", "this node is stopping", nil)
	for name, c := range map[string]struct {
		streams []watchStream
		until   string
	}{
		"stream": {streams: streams(script(t, "", nil, told("t1", put("a", 1, dualcheckv1.State_STATE_PENDING)))), until: "  a\n"},
		"pause":  {streams: streams(script(t, "", later, told("t1"))), until: "opened again"},
	} {
		server.watch = c.streams
		ctx, cancel := context.WithCancel(t.Context())
		var out talkBuffer
		root := newRoot()
		root.SetArgs([]string{"watch", "payments", "--addr", addr})
		root.SetOut(&out)
		root.SetErr(&out)
		ended := make(chan error, 1)
		go func() { ended <- root.ExecuteContext(ctx) }()
		deadline := time.After(20 * time.Second)
		for !strings.Contains(out.String(), c.until) {
			select {
			case <-deadline:
				t.Fatalf("%s: never: %q", name, out.String())
			case <-time.After(5 * time.Millisecond):
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !strings.Contains(out.String(), "--resume=t1 goes on from here") {
			t.Errorf("%s: %q", name, out.String())
		}
	}
}

// brokenPipe is an output that nobody reads any more.
type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, net.ErrClosed }

func TestWatchIntoABrokenPipe(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	server.watch = append(server.watch, script(t, "", nil, told("t1", put("a", 1, dualcheckv1.State_STATE_PENDING))))
	var talk bytes.Buffer
	if code := execute([]string{"watch", "payments", "--addr", addr}, nil, brokenPipe{}, &talk); code != exitFailure {
		t.Errorf("%d %s", code, talk.String())
	}
}
