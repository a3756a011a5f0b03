package server

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/test/bufconn"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/telemetry"
	"github.com/dualcheck/dualcheck/internal/waiting"
)

// Config is what a Server needs. All but TLS, MaxConnectionAge, RedisAway, Feed,
// MaxSubscribers, the switches and what waiting callers are woken by must be given.
type Config struct {
	Store      claim.Store
	Namespaces Namespaces
	Levers     Levers
	Cluster    Cluster
	// Changes tell waiting callers of their keys' changes, and Revisions looks at their
	// keys once a second; without them, they ask. See waiting.Config.
	Changes   waiting.Changes
	Revisions func(ctx context.Context, keys []string) ([]int64, error)
	// Ready says why this node cannot serve, nil if it can.
	Ready func() error
	// RedisAway says why Redis is not used, nil if it is; a nil func: this node has none.
	RedisAway func() error
	Metrics   *telemetry.Metrics
	Log       *slog.Logger
	// PlainKeys puts users' keys into logs as they are.
	PlainKeys bool
	// TLS is for both ports; nil serves in the clear.
	TLS *tls.Config
	// MaxConnectionAge makes gRPC clients connect anew, so that load spreads over
	// nodes; 0 never does.
	MaxConnectionAge time.Duration
	// Reflection lets clients learn the contract from the server.
	Reflection bool
	// MaxInFlight is how many questions the Store is asked at once; those over it are
	// OVERLOADED; 1 or more. Finishes and extensions are never counted.
	MaxInFlight int
	// Tracing makes a span of each call.
	Tracing bool
	// Feed is what Watch tells; nil: Watch is UNIMPLEMENTED.
	Feed Feed
	// MaxSubscribers is how many streams of Watch there may be at once; those over it are
	// OVERLOADED; 0: 10,000.
	MaxSubscribers int

	sessions sessionLimits // zero: the usual ones
	watches  watchLimits   // zero: the usual ones
}

// Server serves the contract on two ports.
type Server struct {
	cfg     Config
	calls   *calls
	grpc    *grpc.Server // on the network
	inner   *grpc.Server // for the gateway alone
	opened  *sessions
	waits   *waiting.Room
	watched *watches
	health  *health.Server
	telling sync.Mutex // one at a time
	outage  outage
	http    *http.Server
	local   *bufconn.Listener // the gateway's way into inner
	gateway *grpc.ClientConn
	lines   *grpc.ClientConn // the same, for streams of lines

	stopping atomic.Bool     // health says no
	draining chan struct{}   // closed: no new work
	ending   context.Context // done: endless streams end
	end      context.CancelFunc
	stopped  chan struct{} // closed: all is over
	stop     atomic.Bool   // Stop was called
}

// healthEvery is how often health looks at readiness.
const healthEvery = 100 * time.Millisecond

// New makes a Server; Serve starts it.
func New(cfg Config) (*Server, error) {
	s := &Server{
		cfg:      cfg,
		calls:    newCalls(cfg.Metrics, cfg.Log),
		health:   health.NewServer(),
		local:    bufconn.Listen(1 << 20),
		draining: make(chan struct{}),
		stopped:  make(chan struct{}),
	}
	s.calls.degraded = s.degraded
	s.opened = newSessions(cfg.Metrics, cfg.sessions, cfg.MaxConnectionAge)
	s.watched = newWatches(cfg.watches, cfg.MaxSubscribers, cfg.MaxConnectionAge)
	s.ending, s.end = context.WithCancel(context.Background())
	cfg.Store = newBounded(cfg.Store, cfg.MaxInFlight)
	s.waits = waiting.New(waiting.Config{Store: cfg.Store, Revisions: cfg.Revisions, Changes: cfg.Changes, Draining: s.draining, Log: cfg.Log, Observe: cfg.Metrics})
	s.grpc = grpc.NewServer(append(s.options(), s.networkOptions()...)...)
	s.inner = grpc.NewServer(s.options()...)
	for g, slow := range map[*grpc.Server]time.Duration{s.grpc: s.watched.limits.slow, s.inner: 0} {
		g.RegisterService(decoded(&dualcheckv1.DedupService_ServiceDesc), &dedup{store: cfg.Store, waits: s.waits, calls: s.calls, metrics: cfg.Metrics, draining: s.draining, sessions: s.opened})
		g.RegisterService(decoded(&dualcheckv1.AdminService_ServiceDesc), &admin{store: cfg.Store, namespaces: cfg.Namespaces, levers: cfg.Levers, cluster: cfg.Cluster, log: cfg.Log, plainKeys: cfg.PlainKeys})
		g.RegisterService(decoded(&dualcheckv1.StatusService_ServiceDesc), dualcheckv1.UnimplementedStatusServiceServer{})
		g.RegisterService(decoded(&dualcheckv1.WatchService_ServiceDesc), &watcher{feed: cfg.Feed, cluster: cfg.Cluster, calls: s.calls, metrics: cfg.Metrics, draining: s.draining, watches: s.watched, slow: slow})
	}
	healthv1.RegisterHealthServer(s.grpc, s.health)
	if cfg.Reflection {
		reflection.Register(s.grpc)
	}
	s.TellHealth()
	handler, err := s.handler()
	if err != nil {
		return nil, err
	}
	s.http = &http.Server{
		Handler:           handler,
		TLSConfig:         cfg.TLS,
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       time.Minute,
		WriteTimeout:      2 * time.Minute, // over what a call may take, its wait and its body included
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    48 << 10, // what is passed on of them must fit maxHeaders
		ErrorLog:          slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}
	return s, nil
}

const (
	// maxHeaders is how many bytes the headers of a gRPC call may have.
	maxHeaders = 64 << 10
	// mostStreams is how many calls one connection may have under way. The gateway's
	// one connection has no such bound: a finish over JSON must not queue behind calls
	// that wait.
	mostStreams = 1000
	// ageGrace is how long calls may go on over a connection that is to end: the
	// longest that there are.
	ageGrace = deleteMost + time.Minute
)

// options are those of both gRPC servers.
func (s *Server) options() []grpc.ServerOption {
	opts := []grpc.ServerOption{
		// Over the limit of the contract, which the codec keeps, so that most who are
		// over it are told so by an error of ours.
		grpc.MaxRecvMsgSize(maxBody),
		grpc.ForceServerCodecV2(lenientCodec{encoding.GetCodecV2(proto.Name)}),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.ChainUnaryInterceptor(s.calls.unary),
		grpc.ChainStreamInterceptor(s.calls.stream, s.endless),
		grpc.UnknownServiceHandler(func(_ any, ss grpc.ServerStream) error {
			method, _ := grpc.MethodFromServerStream(ss)
			return claim.Errorf(claim.Unimplemented, "this server has no method %s: its reflection, or /openapi.json on the other port, lists them all", method)
		}),
	}
	if s.cfg.Tracing {
		opts = append(opts, grpc.StatsHandler(otelgrpc.NewServerHandler()))
	}
	return opts
}

// networkOptions are those of the server that strangers reach.
func (s *Server) networkOptions() []grpc.ServerOption {
	creds := insecure.NewCredentials()
	if s.cfg.TLS != nil {
		creds = credentials.NewTLS(s.cfg.TLS)
	}
	return []grpc.ServerOption{
		grpc.Creds(creds),
		grpc.MaxConcurrentStreams(mostStreams),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAge:      s.cfg.MaxConnectionAge,
			MaxConnectionAgeGrace: ageGrace,
			Time:                  30 * time.Second,
			Timeout:               10 * time.Second,
		}),
	}
}

// endless ends the streams that never end by themselves, health's and
// reflection's, when the server stops.
func (s *Server) endless(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if methods[info.FullMethod] {
		return handler(srv, ss)
	}
	ctx, cancel := context.WithCancel(ss.Context())
	defer cancel()
	defer context.AfterFunc(s.ending, cancel)()
	return handler(srv, endingStream{ss, ctx})
}

// endingStream is a stream with a context of its own.
type endingStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s endingStream) Context() context.Context { return s.ctx }

// RecvMsg returns when the context ends too: reflection waits here for as long as its
// client keeps quiet. What is left reading then ends with the stream, which ends
// with its handler.
func (s endingStream) RecvMsg(m any) error {
	received := make(chan error, 1)
	go func() { received <- s.ServerStream.RecvMsg(m) }()
	select {
	case err := <-received:
		return err
	case <-s.ctx.Done():
		return &claim.Error{Reason: claim.Draining, Message: "this node is stopping: open the stream to another", RetryAfter: time.Second}
	}
}

// Ready says why this node does not serve, nil if it does.
func (s *Server) Ready() error {
	if err := s.servingErr(); err != nil {
		return err
	}
	return s.cfg.Ready()
}

// degraded names the part that this node does without, "" if none: what it answers is
// as right as ever, and slower.
func (s *Server) degraded() string {
	if s.cfg.RedisAway != nil && s.cfg.RedisAway() != nil {
		return "redis"
	}
	return ""
}

func (s *Server) servingErr() error {
	if s.stopping.Load() {
		return errors.New("this node is stopping")
	}
	return nil
}

// TellHealth makes gRPC's health what readiness is. Serve does so ten times a second; who
// tells others that the node is ready does so before.
func (s *Server) TellHealth() {
	s.telling.Lock()
	defer s.telling.Unlock()
	status := healthv1.HealthCheckResponse_SERVING
	err := s.Ready()
	if err != nil {
		status = healthv1.HealthCheckResponse_NOT_SERVING
	}
	if !s.stopping.Load() { // why a node that stops is not ready is known
		s.outage.tell(s.cfg.Log, err)
	}
	s.health.SetServingStatus("", status)
	for _, d := range services {
		s.health.SetServingStatus(d.ServiceName, status)
	}
}

// outage follows readiness to tell of its ends and returns, each once and at the same
// level, so that who reads of the one reads of the other. That a node is not ready
// before it ever was is told by whoever makes it ready.
type outage struct {
	was   bool      // it has been ready
	since time.Time // zero: it is ready
}

// tell is called by one at a time.
func (o *outage) tell(log *slog.Logger, err error) {
	switch {
	case err == nil && !o.since.IsZero():
		log.Warn("this node is ready again", telemetry.FieldAfter, time.Since(o.since).Round(time.Millisecond))
		o.since = time.Time{}
	case err == nil:
		o.was = true
	case o.was && o.since.IsZero():
		log.Warn("this node is not ready: it answers UNAVAILABLE until it is again", telemetry.FieldError, err)
		o.since = time.Now()
	}
}

// Serve answers on both listeners until Stop has been called and has done its
// work, or until one of them fails.
func (s *Server) Serve(grpcListener, httpListener net.Listener) error {
	group, ctx := errgroup.WithContext(context.Background())
	group.Go(func() error { return servingGRPC(s.grpc, grpcListener) })
	group.Go(func() error { return servingGRPC(s.inner, s.local) })
	group.Go(func() error {
		serve := s.http.Serve
		if s.cfg.TLS != nil {
			serve = func(l net.Listener) error { return s.http.ServeTLS(l, "", "") }
		}
		if err := serve(httpListener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		tick := time.NewTicker(healthEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				s.TellHealth()
			case <-s.stopped:
				return nil
			case <-ctx.Done(): // one of the others failed
				s.halt()
				return nil
			}
		}
	})
	return group.Wait()
}

func servingGRPC(s *grpc.Server, l net.Listener) error {
	if err := s.Serve(l); !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// Stop stops in order: health says no; after delay, in which load balancers notice
// and all is still served, new work is refused and waiters are answered; calls
// under way end, those of both ports at once, so that neither takes the other's
// time; connections close. When ctx ends first, what is left is cut off, and so is what
// nobody reads once no call is under way.
func (s *Server) Stop(ctx context.Context, delay time.Duration) {
	if s.stop.Swap(true) {
		<-s.stopped
		return
	}
	defer close(s.stopped)
	s.stopping.Store(true)
	s.health.Shutdown()
	if delay > 0 {
		wait := time.NewTimer(delay)
		select {
		case <-wait.C:
		case <-ctx.Done():
		}
		wait.Stop()
	}
	close(s.draining)
	s.end()
	graceful := make(chan struct{})
	go func() {
		defer close(graceful)
		s.grpc.GracefulStop()
	}()
	if err := s.http.Shutdown(ctx); err != nil {
		s.cfg.Log.Warn("JSON calls were cut off", telemetry.FieldError, err)
	}
	s.await(ctx, graceful)
	s.halt()
	<-graceful
	s.opened.reading.Wait()
	s.watched.telling.Wait()
}

// flushMost is how long the last answers may take to reach their callers once no call is
// under way. gRPC keeps the end of a stream behind what was sent on it before: a client
// that reads nothing would hold a stop up until its time is over.
const flushMost = 3 * time.Second

// await waits until gRPC has stopped, ctx ends, or nothing is left but what nobody reads.
func (s *Server) await(ctx context.Context, graceful <-chan struct{}) {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	ended := time.Now() // the last call
	for {
		select {
		case <-graceful:
			return
		case <-ctx.Done():
			select {
			case <-graceful: // long ago
			default:
				s.cfg.Log.Warn("gRPC calls were cut off", telemetry.FieldError, ctx.Err())
			}
			return
		case now := <-tick.C:
			switch {
			case s.calls.running.Load() > 0:
				ended = now
			case now.Sub(ended) > flushMost:
				return
			}
		}
	}
}

// halt closes everything at once.
func (s *Server) halt() {
	s.end()
	_ = s.http.Close() // only what Shutdown left, if anything
	s.grpc.Stop()
	s.inner.Stop()
	_ = s.gateway.Close()
	_ = s.lines.Close()
	_ = s.local.Close()
	s.waits.Close()
}
