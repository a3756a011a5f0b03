package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// sessionLimits bound one session, in numbers of calls or answers, bytes and time.
type sessionLimits struct {
	// asks are how many Begins and Gets may be under way, and askBytes what they hold;
	// those over it are OVERLOADED.
	asks, askBytes int
	// tells and tellBytes are the same of finishes and extensions; over it no more is
	// read until some are answered. No caller that waits for answers comes near it.
	tells, tellBytes int
	// unsent and unsentBytes are the answers that may be waiting to be sent; over it no
	// more is read until the client has read some.
	unsent, unsentBytes int
	// recordBytes is the same for answers with large records, which are told without
	// them over it.
	recordBytes int
	// quiet is how long a session that drains hears of no work before it ends, and
	// drain how long it goes on at most.
	quiet, drain time.Duration
	// aged is how long a session that is to move elsewhere goes on at most.
	aged time.Duration
}

func defaultSessionLimits() sessionLimits {
	return sessionLimits{
		asks: 10_000, askBytes: 32 << 20,
		tells: 20_000, tellBytes: 64 << 20,
		unsent: 10_000, unsentBytes: 4 << 20, recordBytes: 64 << 20,
		quiet: 500 * time.Millisecond, drain: 10 * time.Second, aged: 2 * time.Minute,
	}
}

// sessions is what the sessions of one server share.
type sessions struct {
	limits sessionLimits
	// age is when a session is asked to move elsewhere; 0: never.
	age time.Duration
	// reading are the goroutines that read. One outlives its session where that ends
	// before its client closed its side, until gRPC has told it of the end.
	reading sync.WaitGroup
	// answered observes a call that went well, by its kind.
	answered [kinds]func(time.Duration)
}

// newSessions takes the zero limits for the usual ones.
func newSessions(metrics *telemetry.Metrics, limits sessionLimits, age time.Duration) *sessions {
	if limits == (sessionLimits{}) {
		limits = defaultSessionLimits()
	}
	// A connection that is to end waits ageGrace for its streams, and a session may be
	// opened on it just before.
	s := &sessions{limits: limits, age: min(age, ageGrace/2)}
	for k := range s.answered {
		s.answered[k] = metrics.Requests(callKind(k).label(), "OK")
	}
	return s
}

// session is one stream of calls. Its handler writes; one goroutine reads; workers
// carry out calls.
//
// What always holds, under mu:
//
//   - A call is in calls from when it is accepted until its answer is in out.
//   - Of the calls of one key, one has the turn, last has the newest, and those between
//     them are linked by next.
//   - Once closed, no call is accepted.
type session struct {
	d      *dedup
	limits *sessionLimits
	stream grpc.ServerStream
	ctx    context.Context // has the calls' values; ends with the stream
	cancel context.CancelFunc
	wake   chan struct{} // there is something for the writer to look at
	work   chan *sessionCall
	idle   atomic.Int32 // workers that wait for work
	crew   sync.WaitGroup

	mu    sync.Mutex
	room  sync.Cond // something was answered or sent, or it is closed
	calls map[uint64]*sessionCall
	last  map[key]*sessionCall
	out   outbox

	asks, askBytes   int
	tells, tellBytes int
	counted          int // calls in the gauge

	// timer ends the contexts of calls whose deadline has come; due is when it goes off,
	// zero if it does not.
	timer *time.Timer
	due   time.Time

	readEnd bool
	readErr error

	draining bool // the client is told
	leaving  bool // the node stops: Begins are refused
	closed   bool
	worked   time.Time // when work was last accepted, while draining
	until    time.Time // when draining ends at the latest
}

func (d *dedup) Session(stream grpc.BidiStreamingServer[dualcheckv1.SessionRequest, dualcheckv1.SessionResponse]) error {
	defer d.metrics.Session()()
	s := &session{
		d: d, limits: &d.sessions.limits, stream: stream,
		wake: make(chan struct{}, 1), work: make(chan *sessionCall),
		calls: make(map[uint64]*sessionCall), last: make(map[key]*sessionCall),
	}
	s.room.L = &s.mu
	s.timer = time.AfterFunc(time.Hour, s.expire)
	s.timer.Stop()
	s.ctx, s.cancel = context.WithCancel(untraced(stream.Context()))
	defer s.end()
	// So that the client knows at once that this server has sessions.
	if err := stream.SendHeader(nil); err != nil {
		return nil // the client has gone
	}
	d.sessions.reading.Go(s.read)
	return s.write()
}

// untraced returns the context of a stream without its trace: each call has its own,
// or none.
func untraced(ctx context.Context) context.Context {
	if md, ok := metadata.FromIncomingContext(ctx); ok && len(md.Get("traceparent")) > 0 {
		md.Delete("traceparent")
		ctx = metadata.NewIncomingContext(ctx, md)
	}
	return trace.ContextWithSpanContext(ctx, trace.SpanContext{})
}

// read accepts calls until the client closes its side, a frame is wrong, or the session
// is over.
func (s *session) read() {
	err := s.d.calls.guard(s.frames)
	s.mu.Lock()
	s.readEnd, s.readErr = true, err
	s.mu.Unlock()
	s.poke()
}

func (s *session) frames() error {
	for s.awaitRoom() {
		frame := lenient{into: new(dualcheckv1.SessionRequest)}
		err := s.stream.RecvMsg(&frame)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			s.cancel()
			return nil //nolint:nilerr // there is no more stream on which to tell it
		}
		if err := s.accept(&frame); err != nil {
			return err
		}
	}
	return nil
}

// awaitRoom returns when there is room for another frame: false if the session is over.
func (s *session) awaitRoom() bool {
	l := s.limits
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.closed && (s.out.answers >= l.unsent || s.out.bytes >= l.unsentBytes || s.tells >= l.tells || s.tellBytes >= l.tellBytes) {
		s.room.Wait()
	}
	return !s.closed
}

// accept takes the calls of a frame on, or returns what is wrong with it.
func (s *session) accept(r *lenient) error {
	if r.err != nil {
		return r.told()
	}
	frame, ok := r.into.(*dualcheckv1.SessionRequest)
	if !ok {
		return fmt.Errorf("a frame is no %T", r.into)
	}
	calls := frame.GetCalls()
	if len(calls) > claim.MaxBatch {
		return refuse(claim.BatchTooLarge, "calls", fmt.Sprintf("a frame has at most %d calls, this has %d: send more frames", claim.MaxBatch, len(calls)))
	}
	if r.size > claim.MaxBatchBytes && len(calls) > 1 {
		return refuse(claim.BatchTooLarge, "calls", fmt.Sprintf("a frame of several calls has at most %s, this has %d bytes: send more frames", size(claim.MaxBatchBytes), r.size))
	}
	read := time.Now()
	heavy := r.size > 2*frugal*len(calls) // more than usual calls hold: each is measured
	for _, m := range calls {
		if m.GetCancel() != nil {
			s.withdraw(m.GetId())
			continue
		}
		c := newSessionCall(s, m, read, heavy)
		ready, err := s.enter(c)
		if err != nil {
			return err
		}
		if ready {
			s.start(c)
		}
	}
	return nil
}

// enter takes a call on, and reports whether it is its turn; the calls before it of its
// key come first. An error is the frame's.
func (s *session) enter(c *sessionCall) (ready bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false, nil // nothing was done: the client sends it to another
	}
	if s.calls[c.id] != nil {
		return false, refuse(claim.RequestInvalid, "calls.id", fmt.Sprintf("id %d is that of a call that is not answered yet: give each its own", c.id))
	}
	s.counted++
	s.d.metrics.AddInFlight(1)
	if c.kind.asks() {
		if s.asks >= s.limits.asks || s.askBytes >= s.limits.askBytes {
			s.refuse(c, overloaded())
			return false, nil
		}
		s.asks++
		s.askBytes += c.bytes
	} else {
		s.tells++
		s.tellBytes += c.bytes
	}
	if !s.leaving || !c.kind.asks() {
		s.worked = c.read
	}
	s.calls[c.id] = c
	if s.due.IsZero() || c.deadline.Before(s.due) {
		s.due = c.deadline
		s.timer.Reset(c.deadline.Sub(c.read))
	}
	before := s.last[c.name]
	s.last[c.name] = c
	if before != nil {
		before.next = c
		return false, nil
	}
	c.turn = true
	return true, nil
}

// expireEvery is how often a session looks for calls whose deadline has come, at most.
const expireEvery = 10 * time.Millisecond

// expire ends the contexts of calls whose deadline has come.
func (s *session) expire() {
	s.mu.Lock()
	now := time.Now()
	var late []*sessionCall
	s.due = time.Time{}
	for _, c := range s.calls {
		switch {
		case c.late:
		case !c.deadline.After(now):
			c.late = true
			late = append(late, c)
		case s.due.IsZero() || c.deadline.Before(s.due):
			s.due = c.deadline
		}
	}
	if !s.due.IsZero() {
		s.timer.Reset(max(s.due.Sub(now), expireEvery))
	}
	s.mu.Unlock()
	for _, c := range late {
		c.end(context.DeadlineExceeded)
	}
}

// withdraw ends the wait of the call with this id, if it waits.
func (s *session) withdraw(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.calls[id]
	if c == nil || c.withdrawn {
		return
	}
	c.withdrawn = true
	if c.enough != nil {
		close(c.enough)
	}
}

// pass hands the turn of c's key on, if c has it, and returns who has it now; mu is
// held.
func (s *session) pass(c *sessionCall) *sessionCall {
	if !c.turn {
		return nil
	}
	c.turn = false
	if s.last[c.name] == c {
		delete(s.last, c.name)
		return nil
	}
	next := c.next
	c.next = nil
	next.turn = true
	return next
}

// mostIdle is how many workers of a session wait for work: a new one costs more, for
// its stack has yet to grow.
const mostIdle = 256

// start carries a call out that is in calls and has the turn.
func (s *session) start(c *sessionCall) {
	select {
	case s.work <- c:
	default:
		s.crew.Go(func() { s.toil(c) })
	}
}

// toil carries calls out until there are none.
func (s *session) toil(c *sessionCall) {
	for {
		for c != nil {
			c = s.serve(c)
		}
		if s.idle.Add(1) > mostIdle {
			s.idle.Add(-1)
			return
		}
		c = <-s.work // closed in the end
		s.idle.Add(-1)
		if c == nil {
			return
		}
	}
}

// poke has the writer look.
func (s *session) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// write sends what there is until the session is over.
func (s *session) write() error {
	leaving := s.d.draining
	quiet := time.NewTimer(time.Hour)
	quiet.Stop()
	defer quiet.Stop()
	var aged <-chan time.Time
	if age := s.d.sessions.age; age > 0 {
		// Not all at once.
		t := time.NewTimer(age*9/10 + rand.N(age/5+1))
		defer t.Stop()
		aged = t.C
	}
	for {
		select {
		case <-s.wake:
			if s.busy() {
				runtime.Gosched() // what is about to be answered goes with it
			}
		case <-leaving:
			leaving = nil
			s.drain(true, s.limits.drain)
			quiet.Reset(s.limits.quiet)
		case <-aged:
			s.drain(false, s.limits.aged)
			quiet.Reset(s.limits.quiet)
		case <-quiet.C:
			if again := s.stillQuiet(); again > 0 {
				quiet.Reset(again)
			}
		case <-s.ctx.Done():
			return nil // nobody is there to be told
		}
		// One at a time: under a flood there is always another.
		if f := s.next(); f != nil {
			s.d.metrics.AddInFlight(-f.answers)
			if err := s.stream.SendMsg(f); err != nil {
				if s.stream.Context().Err() != nil {
					return nil
				}
				return fmt.Errorf("send answers: %w", err)
			}
		}
		if over, err := s.over(); over {
			return err
		}
	}
}

// busy reports whether other calls than those that are answered are under way.
func (s *session) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls) > 0
}

// drain has the client told to go elsewhere.
func (s *session) drain(leaving bool, most time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.leaving = s.leaving || leaving
	s.worked = now
	if until := now.Add(most); !s.draining || until.Before(s.until) {
		s.until = until
	}
	s.draining, s.out.due = true, true
}

// stillQuiet closes a session that drains if it has had no work for long enough, or has
// had all its time; else it returns when to look again.
func (s *session) stillQuiet() (again time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	// While the node stops, new work is refused and keeps nobody.
	busy := s.tells > 0 || s.asks > 0 && !s.leaving
	left := s.worked.Add(s.limits.quiet).Sub(now)
	if now.Before(s.until) && (busy || left > 0) {
		return min(max(left, s.limits.quiet/4), s.until.Sub(now))
	}
	s.closed = true
	s.room.Broadcast()
	return 0
}

// over reports whether all is answered and sent and nothing more will come, and how the
// stream ends.
func (s *session) over() (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && !s.readEnd || len(s.calls) > 0 || s.out.answers > 0 || s.out.due {
		return false, nil
	}
	s.closed = true
	if s.readEnd {
		return true, s.readErr
	}
	return true, nil
}

// next returns the next frame to send, nil if there is none.
func (s *session) next() *outFrame {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.out.take()
	if f == nil {
		return nil
	}
	f.tell(s.draining, s.degraded())
	s.counted -= f.answers
	if s.out.answers > 0 {
		s.poke()
	}
	s.room.Broadcast()
	return f
}

func (s *session) degraded() string {
	if s.d.calls.degraded == nil {
		return ""
	}
	return s.d.calls.degraded()
}

// end waits for everything that the session started but its reader.
func (s *session) end() {
	s.cancel()
	s.mu.Lock()
	s.closed = true
	s.room.Broadcast()
	under := slices.Collect(maps.Values(s.calls))
	s.mu.Unlock()
	for _, c := range under {
		c.end(context.Canceled)
	}
	s.mu.Lock()
	for len(s.calls) > 0 {
		s.room.Wait()
	}
	s.timer.Stop()
	left := s.counted
	for f := s.out.take(); f != nil; f = s.out.take() {
		f.chunks.Free()
	}
	s.mu.Unlock()
	s.d.metrics.AddInFlight(-left)
	close(s.work)
	s.crew.Wait()
}
