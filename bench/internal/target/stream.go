package target

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// stream is a Session on each connection, a frame a call: what the SDK does without its
// gathering of calls.
type stream struct {
	conns    connections
	sessions []*session
	next     atomic.Uint64
}

func newStream(n rig.Node, s Spec) (caller, error) {
	conns, err := dialAll(n.GRPC, s.Connections)
	if err != nil {
		return nil, err
	}
	t := &stream{conns: conns}
	for _, conn := range conns {
		t.sessions = append(t.sessions, &session{conn: conn, waiting: map[uint64]chan *dualcheckv1.SessionAnswer{}})
	}
	return t, nil
}

func (t *stream) one() *session { return t.sessions[t.next.Add(1)%uint64(len(t.sessions))] }

func (t *stream) begin(ctx context.Context, key string) (answer, error) {
	a, err := t.one().ask(ctx, &dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Begin{Begin: beginRequest(key)}})
	if err != nil {
		return answer{}, err
	}
	return answerOf(a.GetBegin()), nil
}

func (t *stream) complete(ctx context.Context, key, token string, body []byte) error {
	_, err := t.one().ask(ctx, &dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Complete{Complete: completeRequest(key, token, body)}})
	return err
}

func (t *stream) Close() error { return t.conns.Close() }

// session is one stream and the calls that wait for their answers on it.
type session struct {
	conn *grpc.ClientConn

	mu      sync.Mutex // held while a frame is sent
	open    dualcheckv1.DedupService_SessionClient
	broken  error
	id      uint64
	waiting map[uint64]chan *dualcheckv1.SessionAnswer // nil: the stream broke
	spare   []chan *dualcheckv1.SessionAnswer
}

func (s *session) ask(ctx context.Context, call *dualcheckv1.SessionCall) (*dualcheckv1.SessionAnswer, error) {
	answered, err := s.send(ctx, call)
	if err != nil {
		return nil, err
	}
	select {
	case a := <-answered:
		if a == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			return nil, fmt.Errorf("the session broke: %w", s.broken)
		}
		s.mu.Lock()
		s.spare = append(s.spare, answered)
		s.mu.Unlock()
		if e := a.GetError(); e != nil {
			return nil, errors.New(e.GetReason() + ": " + e.GetMessage())
		}
		return a, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *session) send(ctx context.Context, call *dualcheckv1.SessionCall) (chan *dualcheckv1.SessionAnswer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		// It outlives the slice that opened it; closing the connection ends it.
		open, err := dualcheckv1.NewDedupServiceClient(s.conn).Session(context.WithoutCancel(ctx))
		if err != nil {
			return nil, err
		}
		s.open = open
		go s.receive(open)
	}
	var answered chan *dualcheckv1.SessionAnswer
	if n := len(s.spare); n > 0 {
		answered, s.spare = s.spare[n-1], s.spare[:n-1]
	} else {
		answered = make(chan *dualcheckv1.SessionAnswer, 1)
	}
	s.id++
	call.Id = s.id
	s.waiting[call.Id] = answered
	if err := s.open.Send(&dualcheckv1.SessionRequest{Calls: []*dualcheckv1.SessionCall{call}}); err != nil {
		delete(s.waiting, call.Id)
		return nil, fmt.Errorf("the session broke: %w", err)
	}
	return answered, nil
}

// receive hands out answers until the stream ends; the next call opens another.
func (s *session) receive(open dualcheckv1.DedupService_SessionClient) {
	for {
		frame, err := open.Recv()
		s.mu.Lock()
		if err != nil {
			for id, answered := range s.waiting {
				delete(s.waiting, id)
				answered <- nil
			}
			s.broken, s.open = err, nil
			s.mu.Unlock()
			return
		}
		for _, a := range frame.GetAnswers() {
			if answered, ok := s.waiting[a.GetId()]; ok {
				delete(s.waiting, a.GetId())
				answered <- a
			}
		}
		s.mu.Unlock()
	}
}
