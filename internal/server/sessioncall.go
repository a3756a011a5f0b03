package server

import (
	"context"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// callKind is which call of a session.
type callKind uint8

const (
	kindNone callKind = iota
	kindBegin
	kindComplete
	kindFail
	kindExtend
	kindGet
	kinds
)

// callNames are the kinds as methods, for metrics and logs.
var callNames = func() (names [kinds]string) {
	for k, name := range []string{"None", "Begin", "Complete", "Fail", "Extend", "Get"} {
		names[k] = dualcheckv1.DedupService_Session_FullMethodName + ":" + name
	}
	return names
}()

// label is the kind as metrics have it.
func (k callKind) label() string { return callNames[k][1:] }

// asks reports whether such calls may be refused for want of room: the others end or
// keep a claim (H27).
func (k callKind) asks() bool { return k == kindBegin || k == kindGet || k == kindNone }

// sessionCall is one call of a session, and its context.
type sessionCall struct {
	callContext
	s     *session
	id    uint64
	kind  callKind
	name  key
	m     *dualcheckv1.SessionCall
	bytes int // about what it holds
	read  time.Time
	own   bool // its deadline is its caller's

	// The rest is under the session's mu.

	next      *sessionCall // of the same key
	turn      bool         // it is its key's turn
	late      bool         // its deadline is past
	withdrawn bool
	enough    chan struct{} // made when it begins to wait; closed when it is withdrawn
}

// frugal is what a call holds besides what it says.
const frugal = 512

func newSessionCall(s *session, m *dualcheckv1.SessionCall, read time.Time, heavy bool) *sessionCall {
	c := &sessionCall{s: s, id: m.GetId(), m: m, read: read, bytes: frugal}
	c.Context = s.ctx
	if parent := m.GetTraceparent(); parent != "" {
		c.Context = propagation.TraceContext{}.Extract(s.ctx, propagation.MapCarrier{"traceparent": parent})
	}
	most := claim.AnswerWithin // what a store takes
	switch call := m.GetCall().(type) {
	case *dualcheckv1.SessionCall_Begin:
		c.kind, c.name = kindBegin, key{call.Begin.GetNamespace(), call.Begin.GetKey()}
		most += wait(call.Begin)
		if len(call.Begin.GetLabels()) > 0 {
			c.bytes += proto.Size(call.Begin)
		}
	case *dualcheckv1.SessionCall_Complete:
		c.kind, c.name = kindComplete, key{call.Complete.GetNamespace(), call.Complete.GetKey()}
		c.bytes += len(call.Complete.GetResult().GetBody())
		if len(call.Complete.GetResult().GetMetadata()) > 0 {
			c.bytes += proto.Size(call.Complete)
		}
	case *dualcheckv1.SessionCall_Fail:
		c.kind, c.name = kindFail, key{call.Fail.GetNamespace(), call.Fail.GetKey()}
		c.bytes += proto.Size(call.Fail)
	case *dualcheckv1.SessionCall_Extend:
		c.kind, c.name = kindExtend, key{call.Extend.GetNamespace(), call.Extend.GetKey()}
	case *dualcheckv1.SessionCall_Get:
		c.kind, c.name = kindGet, key{call.Get.GetNamespace(), call.Get.GetKey()}
	}
	if t := m.GetTimeout(); t != nil && t.IsValid() && t.AsDuration() <= most {
		c.own, most = true, t.AsDuration()
	}
	c.deadline = read.Add(most)
	if heavy {
		c.bytes = frugal + proto.Size(m)
	}
	return c
}

// waits is called when a Begin begins to wait: with that it counts as applied, and the
// next call of its key has its turn (H36). What it returns is closed when the caller no
// longer waits.
func (c *sessionCall) waits() <-chan struct{} {
	s := c.s
	s.mu.Lock()
	next := s.pass(c)
	c.enough = make(chan struct{})
	if c.withdrawn {
		close(c.enough)
	}
	s.mu.Unlock()
	if next != nil {
		s.start(next)
	}
	return c.enough
}

// serve carries a call out, and returns the next of its key.
func (s *session) serve(c *sessionCall) (next *sessionCall) {
	if c.kind == kindBegin {
		if group := s.gather(c); group != nil {
			return s.serveTogether(group)
		}
	}
	var answer proto.Message
	err := s.d.calls.guard(func() (err error) {
		answer, err = s.ask(c)
		return err
	})
	return s.tell(c, answer, err)
}

// gather returns the Begins that wait right behind c, which has the turn, after c itself;
// nil if there are none. The last of them has the turn then. One operation may judge them
// all in their order, for it is sent when all of them are there: so a key that everybody
// asks for is not asked for one after another.
func (s *session) gather(c *sessionCall) []*sessionCall {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.next == nil || c.next.kind != kindBegin {
		return nil
	}
	group := []*sessionCall{c}
	for c.next != nil && c.next.kind == kindBegin && len(group) < claim.MaxBatch {
		c.turn = false
		c, c.next = c.next, nil
		group = append(group, c)
	}
	c.turn = true
	return group
}

// serveTogether carries Begins of one key out, and returns the next of it.
func (s *session) serveTogether(group []*sessionCall) (next *sessionCall) {
	told := 0 // of group, in order
	tell := func(answer proto.Message, err error) {
		c := group[told]
		told++
		if after := s.tell(c, answer, err); after != nil {
			next = after
		}
	}
	err := s.d.calls.guard(func() error {
		reqs := make([]*claim.BeginRequest, 0, len(group))
		refused := make([]error, len(group))
		until := group[0] // as long as the most patient of them
		for i, c := range group {
			req, err := c.beginRequest()
			if err == nil {
				err = s.stoppedWaiting(c) // it must not be given what others wait for
			}
			if err != nil {
				refused[i] = err
				continue
			}
			reqs = append(reqs, req)
			if c.deadline.After(until.deadline) {
				until = c
			}
		}
		var begun []claim.Begun
		if len(reqs) > 0 {
			begun = s.d.beginTogether(until, reqs)
		}
		for i, c := range group {
			if refused[i] != nil {
				tell(nil, refused[i])
				continue
			}
			req, b := reqs[0], begun[0]
			reqs, begun = reqs[1:], begun[1:]
			switch {
			case b.Err != nil:
				tell(nil, b.Err)
			case b.Answer.Verdict == claim.InProgress && req.Wait > 0:
				told++
				enough := c.waits()
				s.crew.Go(func() { s.waitOn(c, req, b.Answer, enough) })
			default:
				s.awaitSent()
				tell(s.d.begun(req, b.Answer), nil)
			}
		}
		return nil
	})
	for told < len(group) {
		tell(nil, err)
	}
	return next
}

// awaitSent returns when the client has read most of what is large: many who ask for one
// large result are told one after another, as it reads.
func (s *session) awaitSent() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.closed && s.out.bytes+s.out.reserved > s.limits.recordBytes/2 {
		s.room.Wait()
	}
}

// waitOn answers a Begin that waits, for which it no longer matters whose turn it is.
func (s *session) waitOn(c *sessionCall, req *claim.BeginRequest, last claim.Answer, enough <-chan struct{}) {
	var answer proto.Message
	err := s.d.calls.guard(func() error {
		a, err := s.d.wait(c, req, last, enough)
		if err == nil {
			answer = s.d.begun(req, a)
		}
		return err
	})
	s.tell(c, answer, err) // has no next: the turn was handed on
}

// beginRequest is the Begin as the store is asked.
func (c *sessionCall) beginRequest() (*claim.BeginRequest, error) {
	if err := c.timeoutErr(); err != nil {
		return nil, err
	}
	return beginRequest(c.m.GetBegin(), c.traceID())
}

func (c *sessionCall) traceID() []byte {
	if c.m.GetTraceparent() == "" {
		return nil
	}
	return telemetry.TraceID(c)
}

func (c *sessionCall) timeoutErr() error {
	if t := c.m.GetTimeout(); t != nil && !t.IsValid() {
		return refuse(claim.RequestInvalid, "timeout", "timeout is no duration: its seconds and nanos have the same sign, and nanos are less than a second")
	}
	return nil
}

// tell answers a call, and returns the next of its key.
func (s *session) tell(c *sessionCall, answer proto.Message, err error) (next *sessionCall) {
	if err != nil {
		return s.fail(c, err)
	}
	field := answerField[c.kind]
	n := proto.Size(answer)
	if n > smallAnswer && !s.reserve(n) {
		if record := finishRecord(answer); record != nil {
			// A finish that was stored is told as such, see answerRoom.
			record.Result, record.Failure, record.Labels = nil, nil, nil
			n = proto.Size(answer)
		} else {
			// A record is of what was there before: nothing was done.
			return s.fail(c, overloaded())
		}
	}
	s.observe(c, codes.OK)
	return s.answer(c, field, answer, n)
}

// ask asks for the answer.
func (s *session) ask(c *sessionCall) (proto.Message, error) {
	if err := c.timeoutErr(); err != nil {
		return nil, err
	}
	switch call := c.m.GetCall().(type) {
	case *dualcheckv1.SessionCall_Begin:
		return s.d.beginFor(c, call.Begin, c.traceID(), c)
	case *dualcheckv1.SessionCall_Complete:
		return s.d.Complete(c, call.Complete)
	case *dualcheckv1.SessionCall_Fail:
		return s.d.Fail(c, call.Fail)
	case *dualcheckv1.SessionCall_Extend:
		return s.d.Extend(c, call.Extend)
	case *dualcheckv1.SessionCall_Get:
		return s.d.Get(c, call.Get)
	}
	return nil, refuse(claim.RequestInvalid, "calls.call", "this call asks for nothing: send one of begin, complete, fail, extend and get")
}

// finishRecord is the record of an answer to a finish; nil if it answers something else.
func finishRecord(answer proto.Message) *dualcheckv1.Record {
	if f, ok := answer.(*dualcheckv1.FinishResponse); ok {
		return f.GetRecord()
	}
	return nil
}

// caller is a call's context as its caller knows it.
type caller struct {
	context.Context
	err error
}

func (c caller) Err() error { return c.err }

// stoppedWaiting says why the caller no longer waits for a call, nil if it does.
func (s *session) stoppedWaiting(c *sessionCall) error {
	s.mu.Lock()
	withdrawn := c.withdrawn
	s.mu.Unlock()
	switch {
	case withdrawn:
		return context.Canceled
	case c.own && !time.Now().Before(c.deadline):
		return context.DeadlineExceeded
	}
	return s.ctx.Err()
}

// fault puts a call's error through the table.
func (s *session) fault(c *sessionCall, stopped, err error) *dualcheckv1.BatchError {
	f := faultOf(caller{c, stopped}, err)
	s.d.calls.report(c, callNames[c.kind], f)
	s.observe(c, f.code)
	return f.batch()
}

// fail answers a call with an error, and returns the next of its key.
func (s *session) fail(c *sessionCall, err error) (next *sessionCall) {
	e := s.fault(c, s.stoppedWaiting(c), err)
	return s.answer(c, errorField, e, proto.Size(e))
}

// refuse answers a call that is not taken on; mu is held.
func (s *session) refuse(c *sessionCall, err error) {
	e := s.fault(c, nil, err)
	s.put(c, errorField, e, proto.Size(e))
}

// observe counts a call, times it from when it was read, and logs it.
func (s *session) observe(c *sessionCall, code codes.Code) {
	calls, took := s.d.calls, time.Since(c.read)
	if code == codes.OK {
		s.d.sessions.answered[c.kind](took)
	} else {
		calls.metrics.Request(c.kind.label(), code.String(), took)
	}
	retries := c.m.GetRetryCount()
	if retries > 0 {
		calls.metrics.Retried(c.kind.label())
	}
	if calls.log.Enabled(c, slog.LevelDebug) {
		calls.line(c, callNames[c.kind], code, retries, took)
	}
}

// reserve reports whether an answer of n bytes may be kept until it is sent, and counts
// it if so.
func (s *session) reserve(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.out.bytes+s.out.reserved+n > s.limits.recordBytes {
		return false
	}
	s.out.reserved += n
	return true
}

// answer puts a call's answer of n bytes out, and returns the next of its key.
func (s *session) answer(c *sessionCall, field answerNumber, m proto.Message, n int) (next *sessionCall) {
	s.mu.Lock()
	if n > smallAnswer && field != errorField {
		s.out.reserved -= n
	}
	delete(s.calls, c.id)
	if c.kind.asks() {
		s.asks--
		s.askBytes -= c.bytes
	} else {
		s.tells--
		s.tellBytes -= c.bytes
	}
	next = s.pass(c)
	s.put(c, field, m, n)
	s.room.Broadcast()
	s.mu.Unlock()
	s.poke()
	return next
}

// put puts an answer out; mu is held.
func (s *session) put(c *sessionCall, field answerNumber, m proto.Message, n int) {
	if err := s.out.put(c.id, field, m, n); err != nil {
		e := s.fault(c, nil, err)
		_ = s.out.put(c.id, errorField, e, proto.Size(e)) // plain text
	}
	s.poke()
}
