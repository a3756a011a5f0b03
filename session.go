package dualcheck

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

var sessionDesc = grpc.StreamDesc{StreamName: "Session", ClientStreams: true, ServerStreams: true}

// lane keeps one session open to one server.
type lane struct {
	server *server
	open   atomic.Pointer[session]
}

// settledIn is how long a session lasts that counts as a good one: the next is opened
// without a pause.
const settledIn = time.Second

// run opens sessions, one after another, and writes to them.
func (l *lane) run() {
	srv, c := l.server, l.server.client
	for n := 0; ; {
		var s *session
		ok := srv.connected(func() (err error) {
			s.discard()
			s, err = l.connect()
			return err
		})
		if !ok {
			s.discard()
			return
		}
		if s == nil {
			var err error
			if s, err = l.connect(); err != nil {
				srv.down(errorOf(err))
				if n++; !c.idleFor(pause(n, 0)) {
					return
				}
				continue
			}
		}
		opened := time.Now()
		l.open.Store(s)
		srv.up()
		c.working.Go(s.read)
		s.write()
		l.open.CompareAndSwap(s, nil)
		if s.unimplemented() {
			// The first lane to learn it follows the server from now on.
			if first := !srv.unary.Swap(true); first {
				c.log.Info("server has no Session: it is asked by unary calls", slog.String("server", srv.addr))
				srv.watch()
			}
			return
		}
		if time.Since(opened) > settledIn {
			n = 0
			continue
		}
		if n++; !c.idleFor(pause(n, 0)) {
			return
		}
	}
}

// idleFor waits; false: the Client ends.
func (c *Client) idleFor(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.ctx.Done():
		return false
	}
}

func (l *lane) connect() (*session, error) {
	ctx, cancel := context.WithCancel(l.server.client.ctx)
	stream, err := l.server.conn.NewStream(ctx, &sessionDesc, service+"Session",
		grpc.ForceCodecV2(packetCodec{}), grpc.MaxCallRecvMsgSize(mostReceived))
	if err != nil {
		cancel()
		return nil, err
	}
	return &session{
		lane: l, stream: stream, cancel: cancel, writing: true,
		pending: make(map[uint64]*call), wake: make(chan struct{}, 1), over: make(chan struct{}),
	}, nil
}

// session is one stream of calls. Its lane's goroutine writes, one of its own reads. A
// call is in the queue, then in pending, then settled; whoever of the two ends last
// settles what was not answered, so that nothing is settled that is still being written.
type session struct {
	lane   *lane
	stream grpc.ClientStream
	cancel context.CancelFunc
	wake   chan struct{} // tells the writer, if it is idle
	over   chan struct{} // closed: the reader has ended

	mu sync.Mutex
	// shut: nothing more is taken. err: the stream has ended, and why.
	shut bool
	err  *Error
	// writing and idle are the writer's: it has not ended; it waits for wake.
	writing, idle bool
	lastID        uint64
	queue         []*call
	cancels       []uint64
	pending       map[uint64]*call

	// Of the reader alone.
	slab    []byte
	answers []answer
}

// answer is one of a frame's, copied out of it.
type answer struct {
	id    uint64
	field protowire.Number
	data  []byte
	to    *call
}

// enqueue takes a call; false: the session takes no more.
func (s *session) enqueue(cl *call) bool {
	s.mu.Lock()
	if s.shut {
		s.mu.Unlock()
		return false
	}
	s.lastID++
	cl.id, cl.state = s.lastID, queued
	s.queue = append(s.queue, cl)
	s.rouse()
	return true
}

// rouse unlocks, and wakes the writer if it is idle.
func (s *session) rouse() {
	idle := s.idle
	s.idle = false
	s.mu.Unlock()
	if idle {
		s.wake <- struct{}{}
	}
}

// leave takes a call away whose caller no longer waits, and says how far it was; false:
// it is settled already.
func (s *session) leave(cl *call) (left bool, was callState) {
	s.mu.Lock()
	was = cl.state
	switch was {
	case settled:
		s.mu.Unlock()
		return false, was
	case flying:
		delete(s.pending, cl.id)
		if !s.shut {
			s.cancels = append(s.cancels, cl.id)
		}
	case queued:
		for i, q := range s.queue {
			if q == cl {
				s.queue[i] = nil
			}
		}
	}
	s.rouse()
	return true, was
}

const (
	// callsInFrame is the contract's bound.
	callsInFrame = 1000
	// bytesInFrame keeps frames such that small calls do not wait for large ones; one
	// call alone may be larger.
	bytesInFrame = 1 << 20
	// framing is what the rest of a call takes in a frame at most.
	framing = 128
)

// write sends what is queued, all of it together, until the session takes no more.
// There is no timer: while one frame is on its way out the next fills by itself.
func (s *session) write() {
	defer s.wrote()
	batch := make([]*call, 0, callsInFrame)
	var cancels []uint64
	for {
		if s.busy() {
			// Those who were answered together ask again together: let them, before the
			// queue is taken.
			runtime.Gosched()
		}
		s.mu.Lock()
		if s.shut {
			s.mu.Unlock()
			return
		}
		now := time.Now()
		batch, cancels = s.take(batch[:0], cancels[:0], now)
		if len(batch) == 0 && len(cancels) == 0 {
			s.idle = true
			s.mu.Unlock()
			<-s.wake
			continue
		}
		s.mu.Unlock()
		frame := packet{encode(batch, cancels, now)}
		if err := s.stream.SendMsg(&frame); err != nil {
			if !errors.Is(err, io.EOF) { // then the stream is over already, and the reader is told why
				s.cancel()
			}
			<-s.over
			return
		}
	}
}

// busy reports whether many call at once: one who calls alone is not to wait for others.
func (s *session) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pending)+len(s.queue) > 1
}

// take moves calls out of the queue, under the lock.
func (s *session) take(batch []*call, cancels []uint64, now time.Time) ([]*call, []uint64) {
	size, n := 0, 0
	for _, cl := range s.queue {
		if cl != nil {
			each := len(cl.body) + framing
			if len(batch) > 0 && size+each > bytesInFrame || len(batch) == callsInFrame {
				break
			}
			size += each
			cl.state, cl.sent = flying, now
			s.pending[cl.id] = cl
			batch = append(batch, cl)
		}
		n++
	}
	rest := copy(s.queue, s.queue[n:])
	clear(s.queue[rest:])
	s.queue = s.queue[:rest]
	room := min(callsInFrame-len(batch), len(s.cancels))
	if size > bytesInFrame {
		room = 0 // a call that is larger than a frame is alone in it
	}
	cancels = append(cancels, s.cancels[:room]...)
	s.cancels = append(s.cancels[:0], s.cancels[room:]...)
	return batch, cancels
}

// encode makes a frame.
func encode(batch []*call, cancels []uint64, now time.Time) mem.Buffer {
	size := len(cancels) * roomForCancel
	for _, cl := range batch {
		size += len(cl.body) + framing
	}
	buf := buffers.Get(size)
	b := (*buf)[:0]
	for _, cl := range batch {
		b = appendCall(b, cl, now)
	}
	for _, id := range cancels {
		b = appendCancel(b, id)
	}
	*buf = b
	return mem.NewBuffer(buf, buffers)
}

// wrote is the end of the writer. What was not sent goes elsewhere.
func (s *session) wrote() {
	_ = s.stream.CloseSend() // never fails
	s.mu.Lock()
	s.writing = false
	s.settle(s.err != nil)
}

// read takes what comes until the stream ends.
func (s *session) read() {
	defer s.cancel()
	defer close(s.over)
	for {
		var in packet
		if err := s.stream.RecvMsg(&in); err != nil {
			s.end(err)
			return
		}
		ok := s.deliver(in.data.ReadOnlyData())
		in.data.Free()
		if !ok {
			s.end(unreadable("a frame"))
			return
		}
	}
}

const (
	// slabSize is how much small answers share: what one that is kept keeps as well.
	slabSize = 16 << 10
	// slabMost is how large an answer may be to share.
	slabMost = 2 << 10
)

// copied returns the bytes in memory that nobody changes.
func (s *session) copied(b []byte) []byte {
	if len(b) > slabMost {
		return append([]byte(nil), b...)
	}
	if len(b) > cap(s.slab)-len(s.slab) {
		s.slab = make([]byte, 0, slabSize)
	}
	at := len(s.slab)
	s.slab = append(s.slab, b...)
	return s.slab[at:len(s.slab):len(s.slab)]
}

// deliver hands a frame's answers to their callers. Decoding them is the callers' part.
func (s *session) deliver(frame []byte) bool {
	s.answers = s.answers[:0]
	drained := false
	f := walk(frame)
	for f.next() {
		switch f.num {
		case 1:
			var a answer
			c := walk(f.data)
			for c.next() {
				switch c.num {
				case 1:
					a.id = c.v
				case answerBegin, answerFinish, answerExtend, answerGet, answerError:
					a.field, a.data = c.num, c.data
				}
			}
			if c.bad {
				return false
			}
			a.data = s.copied(a.data)
			s.answers = append(s.answers, a)
		case 2:
			drained = f.v != 0
		}
	}
	if f.bad {
		return false
	}
	if drained {
		s.lane.open.CompareAndSwap(s, nil)
	}
	s.mu.Lock()
	for i := range s.answers {
		a := &s.answers[i]
		cl := s.pending[a.id]
		if cl == nil {
			continue // its caller has left
		}
		delete(s.pending, a.id)
		cl.state, cl.field, cl.answer = settled, a.field, a.data
		a.to = cl
	}
	if drained {
		s.shut = true
		s.rouse()
	} else {
		s.mu.Unlock()
	}
	for i := range s.answers {
		if cl := s.answers[i].to; cl != nil {
			cl.done <- struct{}{}
		}
	}
	clear(s.answers)
	return true
}

// end is the end of the reader.
func (s *session) end(err error) {
	e := errorOf(err)
	s.lane.open.CompareAndSwap(s, nil)
	s.mu.Lock()
	s.err, s.shut = e, true
	if s.writing {
		s.rouse() // the writer settles
		return
	}
	s.settle(true)
}

// settle gives the calls that were not sent back and, if the stream is over, those that
// were not answered too. It unlocks.
func (s *session) settle(over bool) {
	var done []*call
	for _, cl := range s.queue {
		if cl != nil {
			cl.state, cl.err = settled, &Error{local: notSent}
			done = append(done, cl)
		}
	}
	s.queue = nil
	if over {
		for id, cl := range s.pending {
			delete(s.pending, id)
			cl.state, cl.err = settled, s.verdict()
			done = append(done, cl)
		}
	}
	s.mu.Unlock()
	for _, cl := range done {
		cl.done <- struct{}{}
	}
}

// verdict is what the end of the stream says of a call that was sent and not answered.
func (s *session) verdict() *Error {
	if s.lane.server.client.ctx.Err() != nil {
		e := closedError()
		e.MaybeAccepted = true
		return e
	}
	switch s.err.Code {
	case codes.Unimplemented:
		return &Error{local: notSent}
	case codes.InvalidArgument, codes.ResourceExhausted, codes.PermissionDenied, codes.Unauthenticated, codes.FailedPrecondition:
		// That may be said of another call: each is asked by itself.
		return &Error{Reason: s.err.Reason, Code: s.err.Code, Message: s.err.Message, MaybeAccepted: true, local: refusedTogether}
	}
	return &Error{
		Reason: ErrConnectionLost, Code: codes.Unavailable, MaybeAccepted: true,
		Message: "the stream to " + s.lane.server.addr + " ended before the answer came: " + s.err.Message, cause: s.err,
	}
}

// unimplemented says whether the server has no Session; it is known once it ended.
func (s *session) unimplemented() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err != nil && s.err.Code == codes.Unimplemented
}

// discard ends a session that was never used; nil is none.
func (s *session) discard() {
	if s != nil {
		s.cancel()
	}
}
