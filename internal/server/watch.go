package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// Feed tells of records' changes.
type Feed interface {
	// Subscribe returns what tells of a namespace's changes. Error: REQUEST_INVALID, for a
	// token that is none.
	Subscribe(ctx context.Context, req feed.Request) (Subscription, error)
}

// Subscription tells one subscriber; it is asked by one at a time.
type Subscription interface {
	// Next waits until there is something to tell, and for some seconds at most: then it
	// tells of progress.
	Next(ctx context.Context) (feed.Batch, error)
	Close()
}

// watchLimits bound one stream of Watch.
type watchLimits struct {
	// slow is how long a message may wait for its reader.
	slow time.Duration
	// events and bytes are what one message holds; one event alone may be larger.
	events, bytes int
}

func defaultWatchLimits() watchLimits {
	// What a reader leaves unread is held for it by gRPC, a message and 64 KiB of them. So
	// messages stay far below the 4 MiB that clients take unless they say otherwise.
	return watchLimits{slow: time.Minute, events: 1000, bytes: 256 << 10}
}

// defaultSubscribers is how many streams of Watch one node serves unless it is told.
const defaultSubscribers = 10_000

// watches is what the streams of Watch of one server share.
type watches struct {
	limits watchLimits
	most   int64
	open   atomic.Int64
	// age is when a stream is asked to move elsewhere; 0: never.
	age time.Duration
	// telling are the goroutines that tell. One outlives its stream's handler for as long
	// as gRPC takes to let go of the message that it sends.
	telling sync.WaitGroup
}

// newWatches takes zeros for the usual limits.
func newWatches(limits watchLimits, most int, age time.Duration) *watches {
	if limits == (watchLimits{}) {
		limits = defaultWatchLimits()
	}
	if most <= 0 {
		most = defaultSubscribers
	}
	return &watches{limits: limits, most: int64(most), age: min(age, ageGrace/2)} // as with sessions
}

// enter takes a stream on; leave must follow.
func (w *watches) enter() (leave func(), err error) {
	if w.open.Add(1) > w.most {
		w.open.Add(-1)
		return nil, &claim.Error{
			Reason:     claim.Overloaded,
			Message:    fmt.Sprintf("this node has %d subscribers, the most that it serves: watch through another node, or come back after the given time", w.most),
			RetryAfter: time.Second + rand.N(time.Second),
		}
	}
	return func() { w.open.Add(-1) }, nil
}

// watcher is WatchService over a Feed.
type watcher struct {
	dualcheckv1.UnimplementedWatchServiceServer
	feed    Feed // nil: not served
	cluster Cluster
	calls   *calls
	metrics *telemetry.Metrics
	// draining is closed when this node stops.
	draining <-chan struct{}
	watches  *watches
	// slow is how long a message may wait for its reader; 0: whoever reads sees to that.
	slow time.Duration
}

// Watch tells until its client goes. Else it is always an error that ends it, so that no
// reader takes an end of the stream for an end of the changes.
func (w *watcher) Watch(m *dualcheckv1.WatchRequest, stream grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error {
	if w.feed == nil {
		return w.UnimplementedWatchServiceServer.Watch(m, stream)
	}
	req, err := watchRequest(m)
	if err != nil {
		return err
	}
	view, err := w.cluster.View()
	if err != nil {
		return err
	}
	if _, err := view.Policy(req.Namespace); err != nil {
		return err
	}
	select {
	case <-w.draining:
		return moveOn("this node is stopping")
	default:
	}
	leave, err := w.watches.enter()
	if err != nil {
		return err
	}
	defer leave()
	defer w.metrics.Subscriber()()
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	slow := time.NewTimer(time.Hour)
	slow.Stop()
	defer slow.Stop()
	t := &teller{limits: &w.watches.limits, metrics: w.metrics, stream: stream, values: m.GetIncludeValues(), token: req.Token, wait: func() {
		if w.slow > 0 {
			slow.Reset(w.slow)
		}
	}, sent: func() { slow.Stop() }}
	if age := w.watches.age; age > 0 {
		// Not all at once.
		defer time.AfterFunc(age*9/10+rand.N(age/5+1), func() { t.aged.Store(true) }).Stop()
	}
	told := make(chan error, 1)
	w.watches.telling.Go(func() {
		told <- w.calls.guard(func() error { return t.tell(ctx, w.feed, req) })
	})
	// A message that waits for its reader is let go of when this handler returns, and in no
	// other way.
	select {
	case err := <-told:
		return err
	case <-w.draining:
		return moveOn("this node is stopping")
	case <-slow.C:
		w.metrics.Slow()
		return &claim.Error{
			Reason:     claim.Overloaded,
			Message:    fmt.Sprintf("this stream is read too slowly, no message was taken for %v: read faster, and watch again with the last resume token", w.slow),
			RetryAfter: time.Second + rand.N(time.Second),
		}
	case <-stream.Context().Done():
		return nil // nobody is there to be told
	}
}

// moveOn ends a stream that goes on elsewhere. When all of a node's streams move at once
// they come back over a second.
func moveOn(why string) error {
	return &claim.Error{
		Reason:     claim.Draining,
		Message:    why + "; watch again with the last resume token: nothing is missed, or RESYNC says that it may be",
		RetryAfter: 50*time.Millisecond + rand.N(950*time.Millisecond),
	}
}

// watchRequest decodes and checks what needs neither policy nor feed.
func watchRequest(m *dualcheckv1.WatchRequest) (feed.Request, error) {
	req := feed.Request{Namespace: m.GetNamespace(), Prefix: m.GetKeyPrefix(), Token: m.GetResumeToken(), Snapshot: m.GetSnapshot()}
	if err := claim.ValidateNamespace(req.Namespace); err != nil {
		return req, err
	}
	records := len(m.GetKinds()) == 0
	for _, kind := range m.GetKinds() {
		switch kind {
		case dualcheckv1.EventKind_EVENT_KIND_RECORD:
			records = true
		case dualcheckv1.EventKind_EVENT_KIND_STATUS: // there are none yet
		default:
			return req, refuse(claim.RequestInvalid, "kinds", fmt.Sprintf("there is no kind %d of events: leave kinds out for all, or name EVENT_KIND_RECORD", kind))
		}
	}
	if !records {
		return req, refuse(claim.Unimplemented, "kinds", "statuses cannot be watched in this version: leave kinds out, or name EVENT_KIND_RECORD")
	}
	return req, validatePrefix(req.Prefix)
}

// validatePrefix refuses what no key can begin with.
func validatePrefix(s string) error {
	bad := func(format string, args ...any) error {
		return refuse(claim.KeyInvalid, "key_prefix", fmt.Sprintf(format, args...))
	}
	if len(s) > claim.MaxKey {
		return bad("a key has at most %d bytes, and so has the beginning of one; this has %d", claim.MaxKey, len(s))
	}
	if !utf8.ValidString(s) {
		return bad("the beginning of a key is not valid UTF-8: send text that ends with a whole character")
	}
	for i, c := range s {
		if unicode.In(c, unicode.Cc, unicode.Cf) {
			return bad("a key has no control or format characters, and byte %d of its beginning is %U: take it out", i, c)
		}
	}
	return nil
}

// teller sends one subscriber what it is to be told.
type teller struct {
	limits  *watchLimits
	metrics *telemetry.Metrics
	stream  grpc.ServerStreamingServer[dualcheckv1.WatchResponse]
	values  bool
	// token is the last that was sent, or that the reader came with.
	token string
	// aged: the stream is to end with the next token that can be gone on from, so that who
	// is given a long snapshot is not sent away before its end, over and over.
	aged atomic.Bool
	// wait is called when a message begins to wait for its reader, sent when it was taken.
	wait, sent func()
}

// tell returns when ctx ends or there is no more to be told, with the reason.
func (t *teller) tell(ctx context.Context, from Feed, req feed.Request) error {
	sub, err := from.Subscribe(ctx, req)
	if err != nil {
		return err
	}
	defer sub.Close()
	for {
		batch, err := sub.Next(ctx)
		if err == nil {
			err = t.batch(&batch)
		}
		switch {
		case t.stream.Context().Err() != nil:
			return nil // there is no more stream on which to tell it
		case err != nil:
			return err
		case t.aged.Load() && !batch.Partial:
			return moveOn("this stream has lasted long enough: readers spread over the nodes")
		}
	}
}

// batch sends a batch in as many messages as it needs. Its token goes with the last: who
// resumes in between has the token of before, and is told the whole batch again, each
// event with the revision that it had.
func (t *teller) batch(b *feed.Batch) error {
	m := &dualcheckv1.WatchResponse{ResumeToken: t.token}
	if b.Begin {
		t.metrics.Resync(b.Cause)
		m.Resync = &dualcheckv1.Resync{Begin: true, Cause: b.Cause}
	}
	wall, bytes := time.Now(), 0
	for i := range b.Events {
		e := eventMessage(&b.Events[i], t.values, wall)
		size := proto.Size(e)
		if n := len(m.Events); n > 0 && (n >= t.limits.events || bytes+size > t.limits.bytes) {
			if err := t.send(m); err != nil {
				return err
			}
			m, bytes = &dualcheckv1.WatchResponse{ResumeToken: t.token}, 0
		}
		m.Events = append(m.Events, e)
		bytes += size
	}
	t.token = b.Token
	m.ResumeToken, m.Progress = b.Token, b.Progress
	if b.End {
		if m.Resync == nil {
			m.Resync = &dualcheckv1.Resync{Cause: b.Cause}
		}
		m.Resync.End = true
	}
	return t.send(m)
}

// send returns when gRPC has taken the message, which it does once the reader has read
// enough of those before it.
func (t *teller) send(m *dualcheckv1.WatchResponse) error {
	t.wait()
	err := t.stream.Send(m)
	t.sent()
	if c := status.Code(err); c == codes.Unavailable || c == codes.Canceled {
		return context.Canceled // the connection is gone: there is nobody to be told
	}
	if err != nil {
		return fmt.Errorf("send events: %w", err)
	}
	t.metrics.Told(len(m.GetEvents()))
	return nil
}

// eventMessage tells one change, as a caller may see it now.
func eventMessage(e *feed.Event, values bool, wall time.Time) *dualcheckv1.Event {
	m := &dualcheckv1.Event{
		Type:      dualcheckv1.EventType_EVENT_TYPE_PUT,
		Kind:      dualcheckv1.EventKind_EVENT_KIND_RECORD,
		Namespace: e.Record.Namespace,
		Key:       e.Record.Key,
		Revision:  e.Record.Revision,
	}
	if e.Deleted {
		m.Type = dualcheckv1.EventType_EVENT_TYPE_DELETE
		return m
	}
	m.State = dualcheckv1.State(e.Record.StateAt(e.Now))
	m.Digest = e.Record.Digest
	m.KeyUntil = wallDeadline(e.Record.KeyUntil, e.Now, wall)
	if values {
		m.Record = recordMessage(e.Record.At(e.Now), e.Now, wall)
	}
	return m
}
