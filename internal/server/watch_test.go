package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/feed"
)

// fakeFeed tells all who subscribe what a test has it tell. A token is how many batches
// were told before.
type fakeFeed struct {
	mu       sync.Mutex
	batches  []feed.Batch
	more     chan struct{} // closed when there are more
	requests []feed.Request
	open     int
}

func newFakeFeed() *fakeFeed { return &fakeFeed{more: make(chan struct{})} }

func (f *fakeFeed) Subscribe(_ context.Context, req feed.Request) (Subscription, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, req)
	at := len(f.batches)
	if req.Token != "" {
		var err error
		if at, err = strconv.Atoi(req.Token); err != nil || at > len(f.batches) {
			return nil, &claim.Error{Reason: claim.RequestInvalid, Field: "resume_token", Message: "this is no token"}
		}
	}
	f.open++
	return &fakeSubscription{feed: f, at: at}, nil
}

// tell has everyone told a batch; its token is set.
func (f *fakeFeed) tell(b feed.Batch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b.Token = strconv.Itoa(len(f.batches) + 1)
	f.batches = append(f.batches, b)
	close(f.more)
	f.more = make(chan struct{})
}

// subscribers is how many subscriptions are open.
func (f *fakeFeed) subscribers() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.open
}

func (f *fakeFeed) last() feed.Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.requests[len(f.requests)-1]
}

type fakeSubscription struct {
	feed  *fakeFeed
	at    int
	begun bool
	once  sync.Once
}

func (s *fakeSubscription) Next(ctx context.Context) (feed.Batch, error) {
	for {
		s.feed.mu.Lock()
		more := s.feed.more
		if !s.begun {
			s.begun = true
			s.feed.mu.Unlock()
			return feed.Batch{Token: strconv.Itoa(s.at), Progress: true}, nil
		}
		if s.at < len(s.feed.batches) {
			b := s.feed.batches[s.at]
			s.at++
			s.feed.mu.Unlock()
			return b, nil
		}
		s.feed.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return feed.Batch{}, ctx.Err()
		}
	}
}

func (s *fakeSubscription) Close() {
	s.once.Do(func() {
		s.feed.mu.Lock()
		defer s.feed.mu.Unlock()
		s.feed.open--
	})
}

// finished is an event of a key that succeeded, at a revision, with a body of some size.
func finished(key string, revision int64, size int) feed.Event {
	at := claim.Instant(100 * time.Second)
	return feed.Event{Now: at, Record: &claim.Record{
		Namespace: "a", Key: key, State: claim.Succeeded, Revision: revision, Digest: []byte(strings.Repeat("d", 32)), Attempt: 1,
		ResultUntil: at.Add(time.Hour), KeyUntil: at.Add(2 * time.Hour), FinishedAt: time.Unix(1, 0), Result: &claim.Result{Code: 200, Body: make([]byte, size)},
	}}
}

// reader is a client's side of a Watch.
type reader struct {
	t      testing.TB
	stream grpc.ServerStreamingClient[dualcheckv1.WatchResponse]
	cancel context.CancelFunc
}

func (w *world) watch(t testing.TB, req *dualcheckv1.WatchRequest) *reader {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	stream, err := w.watching.Watch(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	return &reader{t, stream, cancel}
}

func (r *reader) next() *dualcheckv1.WatchResponse {
	r.t.Helper()
	m, err := r.stream.Recv()
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

// end reads until the stream ends and returns how.
func (r *reader) end() error {
	for {
		if _, err := r.stream.Recv(); err != nil {
			return err
		}
	}
}

func TestWatchTells(t *testing.T) {
	w := start(t)
	r := w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a", KeyPrefix: "or", Kinds: []dualcheckv1.EventKind{dualcheckv1.EventKind_EVENT_KIND_RECORD, dualcheckv1.EventKind_EVENT_KIND_STATUS}, Snapshot: true})
	if m := r.next(); !m.GetProgress() || m.GetResumeToken() != "0" || len(m.GetEvents()) != 0 {
		t.Errorf("first %v", m)
	}
	if got := w.feed.last(); got != (feed.Request{Namespace: "a", Prefix: "or", Snapshot: true}) {
		t.Errorf("asked %+v", got)
	}
	gone := feed.Event{Deleted: true, Record: &claim.Record{Namespace: "a", Key: "order-2", Revision: 8, State: claim.Succeeded}}
	lapsed := feed.Event{Now: claim.Instant(time.Hour), Record: &claim.Record{Namespace: "a", Key: "order-3", Revision: 9, State: claim.Pending, TakeoverNever: true, LeaseUntil: 1}}
	w.feed.tell(feed.Batch{Events: []feed.Event{finished("order-1", 7, 5), gone, lapsed}})
	began := time.Now()
	m := r.next()
	if m.GetResumeToken() != "1" || m.GetProgress() || m.GetResync() != nil || len(m.GetEvents()) != 3 {
		t.Fatalf("%v", m)
	}
	e := m.GetEvents()[0]
	if e.GetType() != dualcheckv1.EventType_EVENT_TYPE_PUT || e.GetKind() != dualcheckv1.EventKind_EVENT_KIND_RECORD || e.GetNamespace() != "a" || e.GetKey() != "order-1" ||
		e.GetState() != dualcheckv1.State_STATE_SUCCEEDED || e.GetRevision() != 7 || len(e.GetDigest()) != 32 || e.GetRecord() != nil {
		t.Errorf("%v", e)
	}
	if left := e.GetKeyUntil().AsTime().Sub(began); left < 2*time.Hour-time.Minute || left > 2*time.Hour+time.Minute {
		t.Errorf("key_until in %v", left)
	}
	if e := m.GetEvents()[1]; !proto.Equal(e, &dualcheckv1.Event{Type: dualcheckv1.EventType_EVENT_TYPE_DELETE, Kind: dualcheckv1.EventKind_EVENT_KIND_RECORD, Namespace: "a", Key: "order-2", Revision: 8}) {
		t.Errorf("%v", e)
	}
	if e := m.GetEvents()[2]; e.GetState() != dualcheckv1.State_STATE_UNKNOWN || e.GetKeyUntil() != nil {
		t.Errorf("%v", e)
	}
	w.feed.tell(feed.Batch{Begin: true, Cause: "too-slow"})
	if m := r.next(); !proto.Equal(m, &dualcheckv1.WatchResponse{ResumeToken: "2", Resync: &dualcheckv1.Resync{Begin: true, Cause: "too-slow"}}) {
		t.Errorf("%v", m)
	}
	w.feed.tell(feed.Batch{End: true})
	if m := r.next(); !proto.Equal(m, &dualcheckv1.WatchResponse{ResumeToken: "3", Resync: &dualcheckv1.Resync{End: true}}) {
		t.Errorf("%v", m)
	}
	w.metric(t, "dualcheck_watch_subscribers 1")
	w.metric(t, "dualcheck_watch_events_total 3")
	w.metric(t, `dualcheck_watch_resyncs_total{cause="too-slow"} 1`)
	r.cancel()
	if err := r.end(); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	eventually(t, "the subscription is closed", func() bool { return w.feed.subscribers() == 0 })
	w.metric(t, "dualcheck_watch_subscribers 0")
	if _, metrics := w.get("/metrics"); strings.Contains(metrics, "WatchService/Watch") || strings.Contains(metrics, "dualcheck_errors_total") {
		t.Error("a stream that went well was observed as a call or an error")
	}
}

func TestWatchTellsValuesWhereAsked(t *testing.T) {
	w := start(t)
	r := w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a", IncludeValues: true})
	r.next()
	old := finished("old", 8, 5)
	old.Record.ResultUntil = 1 // no longer kept
	w.feed.tell(feed.Batch{Events: []feed.Event{finished("new", 7, 5), old}})
	m := r.next()
	if rec := m.GetEvents()[0].GetRecord(); len(rec.GetResult().GetBody()) != 5 || rec.GetRevision() != 7 || rec.GetKey() != "new" || rec.GetAttempt() != 1 {
		t.Errorf("%v", rec)
	}
	if rec := m.GetEvents()[1].GetRecord(); rec == nil || rec.GetResult() != nil {
		t.Errorf("%v", rec)
	}
}

// A batch that is too large for one message has its token with the last alone.
func TestWatchSplitsBatches(t *testing.T) {
	w := start(t)
	for name, c := range map[string]struct {
		events []feed.Event
		values bool
		want   []int
	}{
		"by number":    {slices.Repeat([]feed.Event{finished("k", 1, 0)}, 2500), false, []int{1000, 1000, 500}},
		"by size":      {slices.Repeat([]feed.Event{finished("k", 1, 100<<10)}, 5), true, []int{2, 2, 1}},
		"large events": {slices.Repeat([]feed.Event{finished("k", 1, claim.MaxResult)}, 2), true, []int{1, 1}},
		"no events":    {nil, false, []int{0}},
	} {
		r := w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a", IncludeValues: c.values})
		before := r.next().GetResumeToken()
		w.feed.tell(feed.Batch{Events: c.events, Begin: true, End: true, Cause: "c"})
		for i, n := range c.want {
			m := r.next()
			last := i == len(c.want)-1
			if len(m.GetEvents()) != n || (m.GetResumeToken() != before) != last || m.GetResync().GetBegin() != (i == 0) || m.GetResync().GetEnd() != last || proto.Size(m) > 4<<20 {
				t.Errorf("%s: message %d has %d events, %v, token %q", name, i, len(m.GetEvents()), m.GetResync(), m.GetResumeToken())
			}
		}
		r.cancel()
	}
}

func TestWatchResumes(t *testing.T) {
	w := start(t)
	for i := range 3 {
		w.feed.tell(feed.Batch{Events: []feed.Event{finished(fmt.Sprint("k", i), int64(i+1), 0)}})
	}
	r := w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a", ResumeToken: "1"})
	r.next()
	if m := r.next(); m.GetEvents()[0].GetKey() != "k1" || m.GetResumeToken() != "2" {
		t.Errorf("%v", m)
	}
}

func TestWatchRefuses(t *testing.T) {
	w := start(t)
	kinds := func(k ...dualcheckv1.EventKind) *dualcheckv1.WatchRequest {
		return &dualcheckv1.WatchRequest{Namespace: "a", Kinds: k}
	}
	for name, c := range map[string]struct {
		req    *dualcheckv1.WatchRequest
		reason claim.Reason
		code   codes.Code
		field  string
	}{
		"no namespace":    {&dualcheckv1.WatchRequest{}, claim.NamespaceInvalid, codes.InvalidArgument, "namespace"},
		"namespace":       {&dualcheckv1.WatchRequest{Namespace: "A"}, claim.NamespaceInvalid, codes.InvalidArgument, "namespace"},
		"statuses":        {kinds(dualcheckv1.EventKind_EVENT_KIND_STATUS), claim.Unimplemented, codes.Unimplemented, "kinds"},
		"unknown kind":    {kinds(1, 77), claim.RequestInvalid, codes.InvalidArgument, "kinds"},
		"no kind":         {kinds(0), claim.RequestInvalid, codes.InvalidArgument, "kinds"},
		"negative kind":   {kinds(-1), claim.RequestInvalid, codes.InvalidArgument, "kinds"},
		"long prefix":     {&dualcheckv1.WatchRequest{Namespace: "a", KeyPrefix: strings.Repeat("k", 256)}, claim.KeyInvalid, codes.InvalidArgument, "key_prefix"},
		"control":         {&dualcheckv1.WatchRequest{Namespace: "a", KeyPrefix: "k\x00"}, claim.KeyInvalid, codes.InvalidArgument, "key_prefix"},
		"format":          {&dualcheckv1.WatchRequest{Namespace: "a", KeyPrefix: "k\u200b"}, claim.KeyInvalid, codes.InvalidArgument, "key_prefix"},
		"token":           {&dualcheckv1.WatchRequest{Namespace: "a", ResumeToken: "soon"}, claim.RequestInvalid, codes.InvalidArgument, "resume_token"},
		"token from afar": {&dualcheckv1.WatchRequest{Namespace: "a", ResumeToken: "9"}, claim.RequestInvalid, codes.InvalidArgument, "resume_token"},
	} {
		s := want(t, w.watch(t, c.req).end(), c.reason, c.code)
		bad, _ := detail[*errdetails.BadRequest](s)
		if v := bad.GetFieldViolations(); len(v) != 1 || v[0].GetField() != c.field || s.Message() == "" {
			t.Errorf("%s: %v", name, s)
		}
	}
	if n := w.feed.subscribers(); n != 0 {
		t.Errorf("%d subscriptions are left", n)
	}
	if err := validatePrefix("caf\xc3"); claim.ReasonOf(err) != claim.KeyInvalid {
		t.Errorf("half a character: %v", err)
	}
	if err := validatePrefix(strings.Repeat("k", 255)); err != nil {
		t.Errorf("a whole key: %v", err)
	}
}

// What is no message of the contract is the caller's mistake.
func TestWatchThatCannotBeDecoded(t *testing.T) {
	w := start(t)
	for name, raw := range map[string]rawMessage{"no message": {0xff, 0xff}, "invalid UTF-8": {0x0a, 0x02, 0xc3, 0x28}, "over a message": make(rawMessage, claim.MaxMessage+1)} {
		stream, err := w.conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, dualcheckv1.WatchService_Watch_FullMethodName, forceRaw)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.SendMsg(raw); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		_ = stream.CloseSend() // the answer tells
		if s := want(t, stream.RecvMsg(new(rawMessage)), claim.RequestInvalid, codes.InvalidArgument); s.Message() == "" {
			t.Error(name)
		}
	}
}

// closedCluster serves declared namespaces alone, or nothing at all.
type closedCluster struct {
	memCluster
	err error
}

func (c closedCluster) View() (claim.View, error) {
	return claim.View{RefuseUndeclared: true, Policies: map[string]claim.Policy{"a": {}}}, c.err
}

func TestWatchOfAnUndeclaredNamespace(t *testing.T) {
	w := start(t, func(c *Config) { c.Cluster = closedCluster{} })
	want(t, w.watch(t, &dualcheckv1.WatchRequest{Namespace: "b"}).end(), claim.NamespaceNotFound, codes.NotFound)
	w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"}).next()
}

func TestWatchOnANodeThatIsNotReady(t *testing.T) {
	w := start(t, func(c *Config) { c.Cluster = closedCluster{err: claim.Unavailable("not yet", nil)} })
	want(t, w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"}).end(), claim.StoreUnavailable, codes.Unavailable)
}

func TestWatchWithoutAFeed(t *testing.T) {
	w := start(t, func(c *Config) { c.Feed = nil })
	want(t, w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"}).end(), claim.Unimplemented, codes.Unimplemented)
}

func TestWatchHasSoManySubscribersAndNoMore(t *testing.T) {
	w := start(t, func(c *Config) { c.MaxSubscribers = 2 })
	first := w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"})
	first.next()
	w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"}).next()
	s := want(t, w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"}).end(), claim.Overloaded, codes.ResourceExhausted)
	if retry, ok := detail[*errdetails.RetryInfo](s); !ok || retry.GetRetryDelay().AsDuration() < time.Second {
		t.Errorf("%v", s)
	}
	first.cancel()
	eventually(t, "there is room again", func() bool {
		_, err := w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"}).stream.Recv()
		return err == nil
	})
}

// A panic in what tells is caught as any other.
func TestWatchPanics(t *testing.T) {
	w := start(t)
	r := w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"})
	r.next()
	w.feed.tell(feed.Batch{Events: []feed.Event{{}}}) // without a record
	want(t, r.end(), claim.Internal, codes.Internal)
	w.metric(t, "dualcheck_panics_total 1")
	eventually(t, "the subscription is closed", func() bool { return w.feed.subscribers() == 0 })
}

// A stop ends all streams at once, those that nobody reads too.
func TestWatchStop(t *testing.T) {
	w := start(t)
	w.watching = w.dial(t, 64<<10)
	var readers []*reader
	for range 20 {
		readers = append(readers, w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a", IncludeValues: true}))
	}
	for _, r := range readers {
		r.next()
	}
	for range 20 { // more than gRPC takes ahead of a reader
		w.feed.tell(feed.Batch{Events: []feed.Event{finished("k", 1, 100<<10)}})
	}
	for range 20 {
		readers[0].next()
	}
	stopped := w.stopping(t, 30*time.Second)
	s := want(t, readers[0].end(), claim.Draining, codes.Unavailable)
	if _, ok := detail[*errdetails.RetryInfo](s); !ok {
		t.Errorf("no time to come back: %v", s)
	}
	eventually(t, "all subscriptions are closed", func() bool { return w.feed.subscribers() == 0 })
	if took, err := stopped(); err != nil || took > flushMost+10*time.Second {
		t.Errorf("it took %v, %v", took, err)
	}
}

// A stream does not stay with one node for ever.
func TestWatchMovesOn(t *testing.T) {
	w := start(t, func(c *Config) { c.MaxConnectionAge = 200 * time.Millisecond })
	began := time.Now()
	r := w.watch(t, &dualcheckv1.WatchRequest{Namespace: "a"})
	r.next()
	// Its time is over amid a snapshot: it ends with that.
	w.feed.tell(feed.Batch{Begin: true, Partial: true})
	r.next()
	heartbeats := time.NewTicker(50 * time.Millisecond)
	defer heartbeats.Stop()
	for range 10 {
		<-heartbeats.C
		w.feed.tell(feed.Batch{Partial: true})
		r.next()
	}
	w.feed.tell(feed.Batch{End: true})
	if m := r.next(); !m.GetResync().GetEnd() {
		t.Errorf("it ends with %v", m)
	}
	s := want(t, r.end(), claim.Draining, codes.Unavailable)
	if took := time.Since(began); took < 150*time.Millisecond || took > 20*time.Second || !strings.Contains(s.Message(), "resume token") {
		t.Errorf("after %v: %v", took, s)
	}
}
