package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memStore is a store in memory whose time passes as the test's does, and further
// if it is advanced.
type memStore struct {
	*claimtest.Memory
	mu   sync.Mutex
	seen time.Time // up to when the time that passed has been told
	// Hooks run first, if set, and end the call with what they return. Set
	// them with before and beforeFinish.
	onBegin  func(context.Context, *claim.BeginRequest) error
	onFinish func(context.Context, *claim.FinishRequest) error
	// begins are those that were asked for, questions how often something was.
	begins, questions atomic.Int64
}

func newMemStore() *memStore { return &memStore{Memory: claimtest.NewMemory(), seen: time.Now()} }

// before sets the hook of Begin.
func (s *memStore) before(begin func(context.Context, *claim.BeginRequest) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onBegin = begin
}

// beforeFinish sets the hook of Finish.
func (s *memStore) beforeFinish(finish func(context.Context, *claim.FinishRequest) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onFinish = finish
}

// current is the store at this moment.
func (s *memStore) current() *claimtest.Memory {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.Advance(now.Sub(s.seen))
	s.seen = now
	return s.Memory
}

func (s *memStore) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	s.begins.Add(1)
	s.questions.Add(1)
	s.mu.Lock()
	hook := s.onBegin
	s.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, req); err != nil {
			return claim.Answer{}, err
		}
	}
	return s.current().Begin(ctx, req)
}

func (s *memStore) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	s.begins.Add(int64(len(reqs)))
	s.questions.Add(1)
	s.mu.Lock()
	hook := s.onBegin
	s.mu.Unlock()
	if hook != nil {
		for _, req := range reqs {
			if err := hook(ctx, req); err != nil {
				return claim.NoneBegun(len(reqs), err)
			}
		}
	}
	return s.current().BeginTogether(ctx, reqs)
}

func (s *memStore) Finish(ctx context.Context, req *claim.FinishRequest) (claim.Found, error) {
	s.mu.Lock()
	hook := s.onFinish
	s.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, req); err != nil {
			return claim.Found{}, err
		}
	}
	return s.current().Finish(ctx, req)
}

func (s *memStore) Extend(ctx context.Context, req *claim.ExtendRequest) (*claim.Grant, error) {
	return s.current().Extend(ctx, req)
}

func (s *memStore) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	return s.current().Get(ctx, req)
}

func (s *memStore) Resolve(ctx context.Context, req *claim.ResolveRequest) (claim.Found, error) {
	return s.current().Resolve(ctx, req)
}

func (s *memStore) Forget(ctx context.Context, req *claim.ForgetRequest) (int64, error) {
	return s.current().Forget(ctx, req)
}

func (s *memStore) List(ctx context.Context, req *claim.ListRequest) (claim.Page, error) {
	return s.current().List(ctx, req)
}

// memNamespaces are the declared namespaces of one node.
type memNamespaces struct {
	mu  sync.Mutex
	all []policy.Namespace
	err error
}

func (n *memNamespaces) List() ([]policy.Namespace, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.all), n.err
}

func (n *memNamespaces) Put(_ context.Context, ns policy.Namespace) (policy.Namespace, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = slices.DeleteFunc(n.all, func(o policy.Namespace) bool { return o.Name == ns.Name })
	ns.Revision = int64(len(n.all)) + 100
	n.all = append(n.all, ns)
	slices.SortFunc(n.all, func(a, b policy.Namespace) int { return strings.Compare(a.Name, b.Name) })
	return ns, nil
}

func (n *memNamespaces) Delete(_ context.Context, name string, force bool) (int64, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := len(n.all)
	n.all = slices.DeleteFunc(n.all, func(o policy.Namespace) bool { return o.Name == name })
	if len(n.all) == before {
		return 0, claim.Errorf(claim.NamespaceNotFound, "nobody declared namespace %q", name)
	}
	if !force {
		return 0, nil
	}
	return 7, nil
}

type memCluster struct{}

func (memCluster) View() (claim.View, error) {
	return claim.View{Guard: 3, Tick: claim.Tick{Time: claim.Instant(90 * time.Second), Version: 180}, FenceBase: 1 << 40, Epoch: claim.ID{1}}, nil
}

func (memCluster) Standing(context.Context) Standing {
	return Standing{
		Node: "n1", Applied: 99, TickAge: 200 * time.Millisecond,
		Nodes:   []Node{{ID: "n1", Version: "v1", GRPCAddr: "127.0.0.1:7070", StartedAt: time.Unix(1, 0), Ticks: true}},
		Members: []Member{{Endpoint: "127.0.0.1:2379", Version: "3.7.3", Leader: true, DBSize: 4096, DBInUse: 2048, Quota: 1 << 30, Alarms: []string{"NOSPACE"}}, {Endpoint: "gone", Err: "refused"}},
	}
}

// memLevers are the switches and the epoch of one node.
type memLevers struct {
	mu       sync.Mutex
	switches map[string]policy.Switch
	raised   []string // the reasons
	err      error
}

func (l *memLevers) Switches() ([]policy.Switch, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []policy.Switch
	for _, name := range policy.SwitchNames() {
		sw := l.switches[name]
		sw.Name = name
		all = append(all, sw)
	}
	return all, l.err
}

func (l *memLevers) PutSwitch(_ context.Context, sw policy.Switch) (policy.Switch, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return policy.Switch{}, l.err
	}
	sw.ChangedAt = time.Unix(1, 0)
	l.switches[sw.Name] = sw
	return sw, nil
}

func (l *memLevers) RaiseEpoch(_ context.Context, reason string) (claim.ID, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return claim.ID{}, l.err
	}
	l.raised = append(l.raised, reason)
	return claim.ID{0xab, byte(len(l.raised))}, nil
}

// world is a running server and clients of it.
type world struct {
	t          testing.TB
	store      *memStore
	namespaces *memNamespaces
	levers     *memLevers
	feed       *fakeFeed
	metrics    *telemetry.Metrics
	logs       *logBuffer
	server     *Server
	conn       *grpc.ClientConn
	grpcAddr   string
	url        string
	readyErr   atomic.Pointer[error]
	served     chan error

	dualcheckv1.DedupServiceClient
	admin    dualcheckv1.AdminServiceClient
	watching dualcheckv1.WatchServiceClient
}

type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// start runs a server for the test's length; tune may change its configuration.
func start(t testing.TB, tune ...func(*Config)) *world {
	t.Helper()
	w := &world{t: t, store: newMemStore(), namespaces: &memNamespaces{}, levers: &memLevers{switches: map[string]policy.Switch{}}, feed: newFakeFeed(), metrics: telemetry.NewMetrics(telemetry.Build{Version: "test"}), logs: &logBuffer{}, served: make(chan error, 1)}
	cfg := Config{
		Store: w.store, Namespaces: w.namespaces, Levers: w.levers, Cluster: memCluster{}, Metrics: w.metrics,
		Log:         slog.New(slog.NewTextHandler(w.logs, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Feed:        w.feed,
		Reflection:  true,
		MaxInFlight: 1000,
		Ready: func() error {
			if err := w.readyErr.Load(); err != nil {
				return *err
			}
			return nil
		},
	}
	for _, f := range tune {
		f(&cfg)
	}
	var err error
	if w.server, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	grpcListener, httpListener := listen(t), listen(t)
	go func() { w.served <- w.server.Serve(grpcListener, httpListener) }()
	w.grpcAddr = grpcListener.Addr().String()
	w.url = "http://" + httpListener.Addr().String()
	if cfg.TLS != nil {
		w.url = "https://" + httpListener.Addr().String()
	} else {
		if w.conn, err = grpc.NewClient(w.grpcAddr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(claim.MaxMessage))); err != nil {
			t.Fatal(err)
		}
		w.DedupServiceClient = dualcheckv1.NewDedupServiceClient(w.conn)
		w.admin = dualcheckv1.NewAdminServiceClient(w.conn)
		w.watching = dualcheckv1.NewWatchServiceClient(w.conn)
	}
	t.Cleanup(func() {
		if w.conn != nil {
			w.conn.Close()
		}
		http.DefaultClient.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		w.server.Stop(ctx, 0)
		if err := <-w.served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return w
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (w *world) setReady(err error) {
	if err == nil {
		w.readyErr.Store(nil)
		return
	}
	w.readyErr.Store(&err)
}

// post sends a body as it is and returns the status, the headers and the body.
func (w *world) post(path, body string, headers ...string) (int, http.Header, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, w.url+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return w.do(req)
}

func (w *world) get(path string) (int, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), http.MethodGet, w.url+path, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	code, _, body := w.do(req)
	return code, body
}

func (w *world) do(req *http.Request) (int, http.Header, string) {
	w.t.Helper()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

// jsonError is an error as the gateway writes it.
type jsonError struct {
	Code    int              `json:"code"`
	Message string           `json:"message"`
	Details []map[string]any `json:"details"`
}

func (e jsonError) reason() string {
	for _, d := range e.Details {
		if r, ok := d["reason"].(string); ok {
			return r
		}
	}
	return ""
}

func parseError(t *testing.T, body string) jsonError {
	t.Helper()
	var e jsonError
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		t.Fatalf("no error in JSON: %v: %s", err, body)
	}
	return e
}

// want fails the test unless err is this reason under this code.
func want(t *testing.T, err error, reason claim.Reason, code codes.Code) *status.Status {
	t.Helper()
	s := status.Convert(err)
	if got := reasonOf(s); got != string(reason) || s.Code() != code {
		t.Fatalf("got %v %q (%s), want %v %q", s.Code(), got, s.Message(), code, reason)
	}
	return s
}

func detail[T any](s *status.Status) (found T, ok bool) {
	for _, d := range s.Details() {
		if m, is := d.(T); is {
			return m, true
		}
	}
	return found, false
}

func infoOf(s *status.Status) *errdetails.ErrorInfo {
	info, _ := detail[*errdetails.ErrorInfo](s)
	return info
}

// eventually tries until f is true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for !f() {
		select {
		case <-deadline:
			t.Fatalf("never: %s", what)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(fmt.Sprintf("%v", err))
	}
	return v
}

var errTest = errors.New("secret of the store")
