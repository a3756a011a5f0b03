package dualcheck

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// fakeWatch hands each stream to the test, which says what is told on it.
type fakeWatch struct {
	dualcheckv1.UnimplementedWatchServiceServer
	addr    string
	streams chan *toldStream
}

// toldStream is one stream.
type toldStream struct {
	*dualcheckv1.WatchRequest
	stream grpc.ServerStreamingServer[dualcheckv1.WatchResponse]
	over   chan error
}

func (f *fakeWatch) Watch(req *dualcheckv1.WatchRequest, stream grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error {
	s := &toldStream{WatchRequest: req, stream: stream, over: make(chan error, 1)}
	select {
	case f.streams <- s:
	case <-stream.Context().Done():
		return nil
	}
	select {
	case err := <-s.over:
		return err
	case <-stream.Context().Done():
		return nil
	}
}

// tell sends messages, in order.
func (s *toldStream) tell(messages ...*dualcheckv1.WatchResponse) {
	for _, m := range messages {
		_ = s.stream.Send(m) // the stream may have ended
	}
}

func (f *fakeWatch) next(t *testing.T) *toldStream {
	t.Helper()
	select {
	case s := <-f.streams:
		return s
	case <-time.After(time.Minute):
		t.Fatal("no stream was opened")
		return nil
	}
}

func newFakeWatch(tb testing.TB, l net.Listener) *fakeWatch {
	f := &fakeWatch{streams: make(chan *toldStream)}
	srv := grpc.NewServer()
	dualcheckv1.RegisterWatchServiceServer(srv, f)
	serveGRPC(tb, srv, l)
	return f
}

// startWatch serves a fake over TCP.
func startWatch(tb testing.TB) *fakeWatch {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	f := newFakeWatch(tb, l)
	f.addr = l.Addr().String()
	return f
}

// watchInMemory serves a fake without a network, for tests under a fake clock.
func watchInMemory(tb testing.TB, opts ...WatchOption) (*fakeWatch, *Watch) {
	tb.Helper()
	l := bufconn.Listen(1 << 20)
	f := newFakeWatch(tb, l)
	c := newClient(tb, []string{"passthrough:///fake"}, WithUnary(), WithDialOptions(
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) })))
	return f, newWatch(tb, c, opts...)
}

func newWatch(tb testing.TB, c *Client, opts ...WatchOption) *Watch {
	tb.Helper()
	w, err := c.Watch(tb.Context(), "orders", opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { w.Close() })
	return w
}

// watching is a fake over TCP, a Watch of it, and the Watch's first stream.
func watching(t *testing.T, opts ...WatchOption) (*fakeWatch, *Watch, *toldStream) {
	t.Helper()
	f := startWatch(t)
	w := newWatch(t, newClient(t, []string{f.addr}, WithUnary()), opts...)
	return f, w, f.next(t)
}

func begin(cause string) *dualcheckv1.WatchResponse {
	return &dualcheckv1.WatchResponse{Resync: &dualcheckv1.Resync{Begin: true, Cause: cause}}
}

func end(token string) *dualcheckv1.WatchResponse {
	return &dualcheckv1.WatchResponse{ResumeToken: token, Resync: &dualcheckv1.Resync{End: true}}
}

func progress(token string) *dualcheckv1.WatchResponse {
	return &dualcheckv1.WatchResponse{ResumeToken: token, Progress: true}
}

func told(token string, events ...*dualcheckv1.Event) *dualcheckv1.WatchResponse {
	return &dualcheckv1.WatchResponse{ResumeToken: token, Events: events}
}

// newest are the newest events there are.
func newest(token string, events ...*dualcheckv1.Event) *dualcheckv1.WatchResponse {
	return &dualcheckv1.WatchResponse{ResumeToken: token, Events: events, Progress: true}
}

func put(key string, revision int64) *dualcheckv1.Event {
	return &dualcheckv1.Event{
		Type: dualcheckv1.EventType_EVENT_TYPE_PUT, Kind: dualcheckv1.EventKind_EVENT_KIND_RECORD,
		Namespace: "orders", Key: key, State: dualcheckv1.State_STATE_PENDING, Revision: revision,
	}
}

func putUntil(key string, revision int64, until time.Time) *dualcheckv1.Event {
	e := put(key, revision)
	e.KeyUntil = timestamppb.New(until)
	return e
}

func forgot(key string, revision int64) *dualcheckv1.Event {
	e := put(key, revision)
	e.Type = dualcheckv1.EventType_EVENT_TYPE_DELETE
	return e
}

// holds says whether the copy has these keys at these revisions, and no other.
func holds(w *Watch, want map[string]int64) bool {
	n := 0
	for key, e := range w.All() {
		if n++; want[key] != e.Revision {
			return false
		}
	}
	for key, revision := range want {
		if e, ok := w.Get(key); !ok || e.Revision != revision {
			return false
		}
	}
	return n == len(want)
}

func TestWhatAWatchReadsIsTheContract(t *testing.T) {
	until := time.Unix(2_000_000_000, 7)
	record, err := proto.Marshal(&dualcheckv1.Record{Key: "a", Result: &dualcheckv1.Result{Code: 201, Body: []byte("b")}})
	if err != nil {
		t.Fatal(err)
	}
	full := put("a", 9)
	full.State, full.Digest, full.KeyUntil = dualcheckv1.State_STATE_SUCCEEDED, make([]byte, 32), timestamppb.New(until)
	full.Record = &dualcheckv1.Record{Key: "a", Result: &dualcheckv1.Result{Code: 201, Body: []byte("b")}}
	status := put("s", 3)
	status.Kind = dualcheckv1.EventKind_EVENT_KIND_STATUS
	later := put("l", 3)
	later.Type = 7
	b, err := proto.Marshal(&dualcheckv1.WatchResponse{
		ResumeToken: "t", Progress: true, Resync: &dualcheckv1.Resync{Begin: true, End: true, Cause: "c"},
		Events: []*dualcheckv1.Event{full, forgot("b", 10), status, later},
	})
	if err != nil {
		t.Fatal(err)
	}
	in := incoming{token: "old", events: make([]event, 5)}
	if !in.decode(b) || in.token != "t" || !in.progress || !in.begin || !in.end || in.cause != "c" || len(in.events) != 2 {
		t.Fatalf("%+v", in)
	}
	e := in.events[0].entry()
	if in.events[0].deleted || in.events[0].key != "a" || e.State != StateSucceeded || e.Revision != 9 || len(e.Digest) != 32 ||
		!e.KeyUntil.Equal(until) || string(e.Encoded()) != string(record) {
		t.Errorf("%+v", e)
	}
	if res, err := e.Result(); err != nil || res.Code != 201 || string(res.Body) != "b" {
		t.Errorf("%+v, %v", res, err)
	}
	if in.events[1].key != "b" || !in.events[1].deleted || in.events[1].revision != 10 {
		t.Errorf("%+v", in.events[1])
	}
	for n := range len(b) {
		in.decode(b[:n]) // whatever is cut off, it does not panic
	}
	if in.decode([]byte{0x12, 0x02, 0x22, 0x09}) {
		t.Error("an event that is cut off was read")
	}
	for _, c := range []struct {
		at   *timestamppb.Timestamp
		want int64
	}{
		{&timestamppb.Timestamp{}, 0}, {&timestamppb.Timestamp{Seconds: -5}, 1}, {&timestamppb.Timestamp{Seconds: 253402300799}, 0},
		{&timestamppb.Timestamp{Seconds: 5, Nanos: 6}, 5_000_000_006},
	} {
		b, err := proto.Marshal(c.at)
		if err != nil {
			t.Fatal(err)
		}
		if got := nanos(b); got != c.want {
			t.Errorf("%v: %d", c.at, got)
		}
	}
}

func TestAWatchKeepsACopy(t *testing.T) {
	_, w, s := watching(t, WithKeyPrefix("po-"), WithValues())
	if s.GetNamespace() != "orders" || s.GetKeyPrefix() != "po-" || !s.GetIncludeValues() || !s.GetSnapshot() || s.GetResumeToken() != "" ||
		len(s.GetKinds()) != 1 || s.GetKinds()[0] != dualcheckv1.EventKind_EVENT_KIND_RECORD {
		t.Errorf("asked for %v", s.WatchRequest)
	}
	if w.Fresh(math.MaxInt64) || w.Status().Synced {
		t.Error("synced before anything was told")
	}
	s.tell(begin("as asked"), told("", put("po-1", 5), put("po-2", 6)))
	within(t, "pages are shown", func() bool { return w.Len() == 2 })
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := w.Synced(short); !errors.Is(err, ErrDeadline) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("before the end: %v", err)
	}
	s.tell(end("1"))
	if err := w.Synced(t.Context()); err != nil {
		t.Fatal(err)
	}
	if st := w.Status(); !st.Synced || !st.Connected || st.Resyncs != 0 || st.Cause != "as asked" || st.Err != nil || st.Keys != 2 || st.Bytes == 0 {
		t.Errorf("%+v", st)
	}
	if w.Fresh(time.Minute) {
		t.Error("fresh before the server said that it had told all")
	}

	done := put("po-1", 7)
	done.State = dualcheckv1.State_STATE_SUCCEEDED
	done.Record = &dualcheckv1.Record{Result: &dualcheckv1.Result{Code: 200, Body: []byte("paid")}}
	failed := put("po-3", 8)
	failed.State = dualcheckv1.State_STATE_FAILED
	failed.Record = &dualcheckv1.Record{Failure: &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL, Message: "no"}}
	s.tell(told("2", done, failed, forgot("po-2", 9)), told("3", put("po-3", 7), forgot("po-1", 6)), progress("4"))
	within(t, "fresh", func() bool { return w.Fresh(time.Minute) })
	if !holds(w, map[string]int64{"po-1": 7, "po-3": 8}) || w.Len() != 2 {
		t.Errorf("%d keys: %+v", w.Len(), w.Status())
	}
	e, ok := w.Get("po-1")
	if res, err := e.Result(); !ok || err != nil || string(res.Body) != "paid" || e.State != StateSucceeded {
		t.Errorf("%+v, %v", res, err)
	}
	if _, err := e.Failure(); err == nil {
		t.Error("what succeeded has a failure")
	}
	e, _ = w.Get("po-3")
	if f, err := e.Failure(); err != nil || f.Class != ClassTerminal || f.Message != "no" || e.State.String() != "FAILED" {
		t.Errorf("%+v, %v", f, err)
	}
	if _, err := e.Result(); err == nil {
		t.Error("what failed has a result")
	}
	if _, ok := w.Get("po-2"); ok {
		t.Error("a forgotten key is there")
	}
	for range w.All() {
		break // who stops is let go
	}
}

func TestAResultThatIsNoLongerKept(t *testing.T) {
	record, err := proto.Marshal(&dualcheckv1.Record{ResultUntil: timestamppb.New(time.Now().Add(-time.Second)), Result: &dualcheckv1.Result{Body: []byte("x")}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (Entry{State: StateSucceeded, encoded: record}).Result(); !errors.Is(err, ErrExpired) {
		t.Error(err)
	}
	if _, err := (Entry{State: StateFailed, encoded: record}).Failure(); !errors.Is(err, ErrExpired) {
		t.Error(err)
	}
}

func TestTheOldCopyIsServedDuringAResync(t *testing.T) {
	_, w, s := watching(t)
	s.tell(begin(""), told("", put("stays", 1), put("goes", 2), put("ahead", 50), put("forgotten", 5), put("gone", 60)), end("1"), progress("1"))
	within(t, "fresh", func() bool { return w.Fresh(time.Minute) })

	s.tell(begin("too slow"),
		told("x", put("ahead", 40)),   // this snapshot lags behind what was known: so it stays until the end
		told("x", forgot("gone", 30)), // so does what it has forgotten
		told("x", forgot("forgotten", 9), put("new", 10)),
		told("x", put("ahead", 39), forgot("ahead", 38)), // what stands aside is newer
		told("x", put("forgotten", 8)),                   // a page that was read before
		told("x", put("new", 9), put("stays", 1)))
	within(t, "the resync has begun", func() bool { _, ok := w.Get("new"); return ok })
	within(t, "all pages are there", func() bool {
		return holds(w, map[string]int64{"stays": 1, "goes": 2, "ahead": 50, "gone": 60, "new": 10})
	})
	if st := w.Status(); st.Synced || st.Resyncs != 1 || st.Cause != "too slow" || w.Fresh(time.Hour) || w.Age() != math.MaxInt64 {
		t.Errorf("%+v", st)
	}
	if err := w.Synced(t.Context()); err != nil {
		t.Errorf("the first snapshot was complete: %v", err)
	}
	s.tell(progress("x"))
	s.tell(end("2"))
	within(t, "synced again", func() bool { return w.Status().Synced })
	if !holds(w, map[string]int64{"stays": 1, "ahead": 40, "new": 10}) {
		t.Errorf("holds %d keys", w.Len())
	}
	if w.Fresh(time.Hour) {
		t.Error("progress within the snapshot counted")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var bytes int64
	for i := range w.copy.shards {
		for _, it := range w.copy.shards[i].items {
			bytes += it.bytes()
		}
	}
	if w.copy.bytes != bytes || len(w.copy.aside)+len(w.copy.forgotten) != 0 {
		t.Errorf("%d bytes are counted, and there are %d", w.copy.bytes, bytes)
	}
}

func TestASnapshotThatIsCutOffIsAskedForAgain(t *testing.T) {
	f, w, s := watching(t)
	s.tell(begin(""), told("", put("a", 1)), end("1"))
	if err := w.Synced(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.tell(begin("new epoch"), told("in between", put("b", 1)))
	within(t, "a page", func() bool { return w.Len() == 2 })
	s.over <- errBroken
	s = f.next(t)
	if s.GetResumeToken() != "" || !s.GetSnapshot() {
		t.Errorf("asked for %v", s.WatchRequest)
	}
	// An end without a beginning does not make half a snapshot whole.
	s.tell(end("2"), begin("again"), told("", put("c", 1)))
	within(t, "the page after", func() bool { return w.Len() == 3 })
	s.tell(end("3"))
	within(t, "whole", func() bool { return w.Status().Synced })
	if !holds(w, map[string]int64{"c": 1}) || w.Status().Resyncs != 2 {
		t.Errorf("%+v", w.Status())
	}
}

func TestAWatchResumesElsewhere(t *testing.T) {
	a, b := startWatch(t), startWatch(t)
	w := newWatch(t, newClient(t, []string{a.addr, b.addr}, WithUnary()))
	var s, other *toldStream
	select {
	case s = <-a.streams:
	case s = <-b.streams:
		a, b = b, a
	}
	s.tell(begin(""), told("", put("a", 1)), end("1"), told("2", put("b", 2)), progress("3"))
	within(t, "fresh", func() bool { return w.Fresh(time.Minute) })
	s.over <- (&Error{Reason: ErrDraining, Code: codes.Unavailable, Message: "stopping"}).GRPCStatus().Err()
	select {
	case <-a.streams:
		t.Fatal("it came back to the server that drains")
	case other = <-b.streams:
	}
	if other.GetResumeToken() != "3" || other.GetSnapshot() {
		t.Errorf("asked for %v", other.WatchRequest)
	}
	if st := w.Status(); st.Connected || !st.Synced || st.Server != b.addr || !errors.Is(st.Err, ErrDraining) || w.Err() != nil {
		t.Errorf("%+v, %v", st, w.Err())
	}
	// What is old on a new stream does not make the copy fresh.
	age := w.Age()
	other.tell(told("3"), told("4", put("c", 3)))
	within(t, "resumed", func() bool { return w.Len() == 3 })
	if w.Age() < age || !w.Status().Connected {
		t.Errorf("a resumed stream that has not caught up made %v of %v", w.Age(), age)
	}
	// A server that refuses the token is asked for a snapshot.
	other.over <- (&Error{Reason: ErrTokenInvalid, Code: codes.InvalidArgument, Message: "of another cluster"}).GRPCStatus().Err()
	s = a.next(t)
	if s.GetResumeToken() != "" || !s.GetSnapshot() {
		t.Errorf("asked for %v", s.WatchRequest)
	}
}

func TestWhatEndsAWatch(t *testing.T) {
	for reason, code := range map[Reason]codes.Code{
		ErrNamespaceInvalid: codes.InvalidArgument, ErrNamespaceDenied: codes.PermissionDenied, ErrUnauthenticated: codes.Unauthenticated,
		ErrUnimplemented: codes.Unimplemented, ErrNamespaceNotFound: codes.NotFound,
	} {
		_, w, s := watching(t)
		s.over <- (&Error{Reason: reason, Code: code, Message: "no"}).GRPCStatus().Err()
		if err := w.Synced(t.Context()); !errors.Is(err, reason) || !errors.Is(w.Err(), reason) {
			t.Errorf("%s: %v, %v", reason, err, w.Err())
		}
		<-w.Done()
	}
	for _, e := range []*Error{
		{Reason: ErrStoreUnavailable, Code: codes.Unavailable}, {Reason: ErrStoreRestored, Code: codes.Unavailable}, {Reason: ErrInternal, Code: codes.Internal},
		{Reason: ErrOverloaded, Code: codes.ResourceExhausted}, {Code: codes.Unknown}, {Code: codes.DeadlineExceeded}, {Code: codes.Canceled},
	} {
		f, w, s := watching(t)
		s.over <- e.GRPCStatus().Err()
		f.next(t)
		if w.Err() != nil {
			t.Errorf("%+v ended it", e)
		}
	}
}

func TestAServerThatHasNoWatchYet(t *testing.T) {
	old := start(t, nil)
	f := startWatch(t)
	for range 3 { // it begins with either
		w := newWatch(t, newClient(t, []string{old.addr, f.addr}, WithUnary()))
		s := f.next(t)
		s.tell(begin(""), end("1"))
		if err := w.Synced(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.over <- errBroken
		f.next(t)
		w.Close()
	}
}

func TestAWatchIsBounded(t *testing.T) {
	_, w, s := watching(t, WithMaxKeys(2))
	s.tell(begin(""), told("", put("a", 1), put("b", 1)), end("1"))
	if err := w.Synced(t.Context()); err != nil {
		t.Fatal(err)
	}
	// In a snapshot what is void makes room.
	s.tell(begin("restored"), told("", put("c", 1)), told("", put("d", 1)), end("2"))
	within(t, "the copy is another", func() bool { return w.Status().Synced && holds(w, map[string]int64{"c": 1, "d": 1}) })
	s.tell(told("3", put("e", 2)))
	<-w.Done()
	if err := w.Err(); !errors.Is(err, ErrCopyTooLarge) || !errors.Is(w.Synced(t.Context()), ErrCopyTooLarge) || w.Fresh(time.Hour) || w.Status().Synced {
		t.Error(err)
	}

	_, w, s = watching(t, WithMaxBytes(1000), WithValues())
	large := put("a", 1)
	large.Record = &dualcheckv1.Record{Result: &dualcheckv1.Result{Body: make([]byte, 2000)}}
	s.tell(begin(""), told("", large))
	if err := w.Synced(t.Context()); !errors.Is(err, ErrCopyTooLarge) {
		t.Error(err)
	}
}

func TestWatchesAreClosed(t *testing.T) {
	f, w, s := watching(t)
	s.tell(begin(""), told("", put("a", 1)), end("1"), progress("1"))
	within(t, "fresh", func() bool { return w.Fresh(time.Minute) })
	w.Close()
	w.Close()
	if _, ok := w.Get("a"); !ok || w.Fresh(time.Hour) || !errors.Is(w.Err(), ErrClosed) || !errors.Is(w.Synced(t.Context()), ErrClosed) {
		t.Errorf("after Close: %v, %+v", w.Err(), w.Status())
	}
	for range w.Changes(t.Context()) {
		t.Error("a change after Close")
	}

	c := newClient(t, []string{f.addr}, WithUnary())
	ctx, cancel := context.WithCancel(t.Context())
	w, err := c.Watch(ctx, "orders")
	if err != nil {
		t.Fatal(err)
	}
	f.next(t)
	cancel()
	<-w.Done()
	if err := w.Err(); !errors.Is(err, context.Canceled) || !errors.Is(err, ErrCanceled) {
		t.Error(err)
	}
	w, err = c.Watch(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	f.next(t)
	c.Close()
	select {
	case <-w.Done():
	default:
		t.Error("the Client was closed, and its Watch goes on")
	}
	if !errors.Is(w.Err(), ErrClosed) {
		t.Error(w.Err())
	}
	if _, err := c.Watch(t.Context(), "orders"); !errors.Is(err, ErrClosed) {
		t.Errorf("of a closed Client: %v", err)
	}
}

func TestWatchesThatAreRefusedAtOnce(t *testing.T) {
	c := newClient(t, []string{"127.0.0.1:1"}, WithUnary())
	for _, k := range []struct {
		namespace string
		opt       WatchOption
		reason    Reason
	}{
		{"", WithValues(), ErrNamespaceInvalid}, {"\xff", WithValues(), ErrNamespaceInvalid}, {"a", WithKeyPrefix("\xff"), ErrKeyInvalid},
		{"a", WithMaxKeys(0), ErrRequestInvalid}, {"a", WithMaxBytes(0), ErrRequestInvalid}, {"a", WithQueueBytes(0), ErrRequestInvalid},
	} {
		if _, err := c.Watch(t.Context(), k.namespace, k.opt); !errors.Is(err, k.reason) {
			t.Errorf("%+v: %v", k, err)
		}
	}
	// A server that is away ends nothing.
	w := newWatch(t, c)
	within(t, "it is told", func() bool { return w.Status().Err != nil })
	if w.Err() != nil || w.Status().Connected {
		t.Errorf("%+v", w.Status())
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := w.Synced(short); !errors.Is(err, ErrConnectionLost) {
		t.Errorf("waiting does not say why: %v", err)
	}
}

func TestASilentStreamIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, w := watchInMemory(t)
		s := f.next(t)
		s.tell(begin(""), told("", put("a", 1)), end("1"), progress("2"))
		synctest.Wait()
		heard := time.Now()
		select {
		case <-f.streams:
			t.Fatal("cut early")
		case <-time.After(watchSilence - time.Second):
		}
		if w.Fresh(watchSilence-2*time.Second) || !w.Fresh(watchSilence-time.Second) || w.Age() != watchSilence-time.Second {
			t.Errorf("after %v it is %v old", time.Since(heard), w.Age())
		}
		s = f.next(t)
		if took := time.Since(heard); s.GetResumeToken() != "2" || took < watchSilence || took > watchSilence+firstPause+1 {
			t.Errorf("resumed at %q after %v", s.GetResumeToken(), took)
		}
		if st := w.Status(); st.Connected || !st.Synced || !st.Heard.Equal(heard) || !errors.Is(st.Err, errSilent) {
			t.Errorf("%+v", st)
		}
		// What had waited is old news, and so is all that a node tells that is cut off.
		s.tell(told("2"), told("2", put("a", 1)))
		synctest.Wait()
		if w.Age() < watchSilence {
			t.Errorf("%v old before it was told all", w.Age())
		}
		s.tell(newest("2", put("a", 2)))
		synctest.Wait()
		if w.Age() != 0 {
			t.Errorf("%v old with all that is told", w.Age())
		}
		// Progress is something to be heard.
		for range 10 {
			s.tell(progress("3"))
			<-time.After(watchSilence - time.Second)
		}
		select {
		case <-f.streams:
			t.Error("cut though there was progress")
		default:
		}
	})
}

func TestPausesBetweenStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _ := watchInMemory(t)
		s := f.next(t)
		var longest time.Duration
		for n := range 40 {
			at := time.Now()
			// One that breaks off each snapshot is not asked without a pause either.
			s.tell(begin("again"), told("", put("a", 1)))
			s.over <- errBroken
			s = f.next(t)
			took := time.Since(at)
			if most := ceiling(n+1) + 1; took > most {
				t.Errorf("pause %d was %v, over %v", n, took, most)
			}
			longest = max(longest, took)
		}
		if longest < longestWait/2 {
			t.Errorf("pauses grew to %v alone", longest)
		}
		// One that held for long is resumed soon.
		s.tell(begin(""), end("1"))
		<-time.After(longestWait + time.Second)
		at := time.Now()
		s.over <- errBroken
		f.next(t)
		if took := time.Since(at); took > firstPause+1 {
			t.Errorf("resumed after %v", took)
		}
	})
}

func TestWhatHasExpiredIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, w := watchInMemory(t)
		s := f.next(t)
		now := time.Now()
		events := []*dualcheckv1.Event{put("ever", 1), putUntil("extended", 1, now.Add(10*time.Second))}
		for i := range 100 {
			events = append(events, putUntil(fmt.Sprint(i), 1, now.Add(time.Duration(i+1)*time.Second)))
		}
		s.tell(begin(""), told("", events...), end("1"))
		s.tell(told("2", putUntil("extended", 2, now.Add(time.Hour)), forgot("50", 2)))
		synctest.Wait()
		gone := 0
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() {
			for c := range w.Changes(ctx) {
				if c.Kind == ChangeGone {
					gone++
				}
			}
		}()
		<-time.After(10 * time.Second)
		s.tell(progress("2"))
		<-time.After(10*time.Second - time.Millisecond)
		if _, ok := w.Get("18"); ok {
			t.Error("an expired key is there")
		}
		if _, ok := w.Get("19"); !ok {
			t.Error("a key is not there until it expires")
		}
		<-time.After(time.Millisecond)
		if _, ok := w.Get("19"); ok {
			t.Error("a key is there when it has expired")
		}
		for key := range w.All() {
			if key == "19" {
				t.Error("an expired key is shown")
			}
		}
		<-time.After(expireEvery)
		synctest.Wait()
		if n := w.Len(); n != 2+99-21 || gone != 21 {
			t.Errorf("%d keys are left, %d were told gone", n, gone)
		}
		// In a snapshot what expires is not shown, and dropped after it.
		s.tell(begin(""), told("", putUntil("short", 3, time.Now().Add(time.Second)), put("ever", 1)))
		<-time.After(5 * time.Second)
		if _, ok := w.Get("short"); ok {
			t.Error("an expired key is there")
		}
		s.tell(end("3"))
		<-time.After(expireEvery + 1)
		synctest.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		if n := w.Len(); n != 1 || len(w.copy.expiring) != 0 {
			t.Errorf("%d keys are left, %d to expire", n, len(w.copy.expiring))
		}
	})
}
