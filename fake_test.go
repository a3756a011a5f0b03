package dualcheck

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a server that does what a test tells it: it breaks streams, keeps silent,
// drains, and answers in whatever order.
type fake struct {
	dualcheckv1.UnimplementedDedupServiceServer
	addr string
	srv  *grpc.Server
	// handle is called with each call of a session, one session's at a time. An error
	// ends the stream.
	handle func(*fakeSession, *dualcheckv1.SessionCall) error
	// opened, if set, is called with each session first.
	opened func(*fakeSession) error

	// held, if set, is waited for before a stream ends whose client closed its side.
	held chan struct{}

	mu     sync.Mutex
	frames [][]*dualcheckv1.SessionCall
	unary  []metadata.MD
}

// fakeSession is one stream.
type fakeSession struct {
	fake   *fake
	mu     sync.Mutex
	stream grpc.BidiStreamingServer[dualcheckv1.SessionRequest, dualcheckv1.SessionResponse]
}

// send sends a frame.
func (s *fakeSession) send(m *dualcheckv1.SessionResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.stream.Send(m) // the stream may have ended
}

// answer sends one answer.
func (s *fakeSession) answer(a *dualcheckv1.SessionAnswer) error {
	s.send(&dualcheckv1.SessionResponse{Answers: []*dualcheckv1.SessionAnswer{a}})
	return nil
}

func (f *fake) Session(stream grpc.BidiStreamingServer[dualcheckv1.SessionRequest, dualcheckv1.SessionResponse]) error {
	s := &fakeSession{fake: f, stream: stream}
	if f.opened != nil {
		if err := f.opened(s); err != nil {
			return err
		}
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			if f.held != nil {
				select {
				case <-f.held:
				case <-stream.Context().Done():
				}
			}
			return nil
		}
		f.mu.Lock()
		f.frames = append(f.frames, m.GetCalls())
		f.mu.Unlock()
		for _, c := range m.GetCalls() {
			if err := f.handle(s, c); err != nil {
				return err
			}
		}
	}
}

// seen are the frames that came so far.
func (f *fake) seen() [][]*dualcheckv1.SessionCall {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.frames)
}

// calls are the calls that came so far.
func (f *fake) calls() (all []*dualcheckv1.SessionCall) {
	for _, frame := range f.seen() {
		all = append(all, frame...)
	}
	return all
}

// first answers that the caller has the claim, for 10 s; its token is the key.
func first(c *dualcheckv1.SessionCall) *dualcheckv1.SessionAnswer {
	key := c.GetBegin().GetKey()
	return &dualcheckv1.SessionAnswer{Id: c.GetId(), Answer: &dualcheckv1.SessionAnswer_Begin{Begin: &dualcheckv1.BeginResponse{
		Verdict: dualcheckv1.Verdict_VERDICT_FIRST, KeyAction: dualcheckv1.KeyAction_KEY_ACTION_PROCEED, Enforced: true,
		Claim: &dualcheckv1.Claim{Token: key, Attempt: 1, Fence: 7, LeaseLeft: durationpb.New(10 * time.Second)},
	}}}
}

// well answers any call as if all went well.
func well(c *dualcheckv1.SessionCall) *dualcheckv1.SessionAnswer {
	a := &dualcheckv1.SessionAnswer{Id: c.GetId()}
	switch {
	case c.GetBegin() != nil:
		return first(c)
	case c.GetExtend() != nil:
		a.Answer = &dualcheckv1.SessionAnswer_Extend{Extend: &dualcheckv1.ExtendResponse{Claim: &dualcheckv1.Claim{LeaseLeft: durationpb.New(10 * time.Second)}}}
	case c.GetGet() != nil:
		a.Answer = &dualcheckv1.SessionAnswer_Get{Get: &dualcheckv1.GetResponse{Record: &dualcheckv1.Record{Key: c.GetGet().GetKey()}}}
	default:
		a.Answer = &dualcheckv1.SessionAnswer_Finish{Finish: &dualcheckv1.FinishResponse{Record: &dualcheckv1.Record{State: dualcheckv1.State_STATE_SUCCEEDED}}}
	}
	return a
}

// refused answers with an error.
func refused(c *dualcheckv1.SessionCall, reason Reason, code codes.Code) *dualcheckv1.SessionAnswer {
	return &dualcheckv1.SessionAnswer{Id: c.GetId(), Answer: &dualcheckv1.SessionAnswer_Error{Error: &dualcheckv1.BatchError{
		Code: int32(code), Reason: string(reason), Message: "told so",
	}}}
}

var errBroken = status.Error(codes.Unavailable, "broken on purpose")

// Begin is for clients without sessions.
func (f *fake) Begin(ctx context.Context, m *dualcheckv1.BeginRequest) (*dualcheckv1.BeginResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	f.mu.Lock()
	f.unary = append(f.unary, md)
	n := len(f.unary)
	f.mu.Unlock()
	if m.GetKey() == "second time" && n == 1 {
		return nil, errBroken
	}
	if m.GetKey() == "never" {
		return nil, (&Error{Reason: ErrKeyInvalid, Code: codes.InvalidArgument, Message: "no", Field: "key", Metadata: map[string]string{"a": "b"}, RetryAfter: time.Second}).GRPCStatus().Err()
	}
	return first(&dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Begin{Begin: m}}).GetBegin(), nil
}

// start serves a fake over TCP until the test ends.
func start(tb testing.TB, handle func(*fakeSession, *dualcheckv1.SessionCall) error, tune ...func(*fake)) *fake {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	f := startOn(tb, l, handle, tune...)
	f.addr = l.Addr().String()
	return f
}

func startOn(tb testing.TB, l net.Listener, handle func(*fakeSession, *dualcheckv1.SessionCall) error, tune ...func(*fake)) *fake {
	f := &fake{handle: handle}
	if handle == nil {
		f.handle = func(s *fakeSession, c *dualcheckv1.SessionCall) error { return s.answer(well(c)) }
	}
	for _, t := range tune {
		t(f)
	}
	f.srv = grpc.NewServer(grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}))
	dualcheckv1.RegisterDedupServiceServer(f.srv, f)
	serveGRPC(tb, f.srv, l)
	return f
}

// serveGRPC serves until the test ends; every service is healthy.
func serveGRPC(tb testing.TB, srv *grpc.Server, l net.Listener) {
	h := health.NewServer()
	h.SetServingStatus("dualcheck.v1.DedupService", healthv1.HealthCheckResponse_SERVING)
	healthv1.RegisterHealthServer(srv, h)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	tb.Cleanup(func() {
		srv.Stop()
		if err := <-served; err != nil {
			tb.Error(err)
		}
	})
}

// inMemory starts a fake that is reached without a network, and a client of it: for
// tests under a fake clock.
func inMemory(t testing.TB, handle func(*fakeSession, *dualcheckv1.SessionCall) error, opts ...Option) (*fake, *Client) {
	l := bufconn.Listen(1 << 20)
	f := startOn(t, l, handle)
	return f, newClient(t, []string{"passthrough:///fake"}, append(opts, WithDialOptions(
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) })))...)
}

// within fails the test unless f is true soon.
func within(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-deadline:
			t.Fatalf("never: %s", what)
		case <-tick.C:
		}
	}
}
