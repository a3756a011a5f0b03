package dualcheck

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	_ "google.golang.org/grpc/health" // servers that say they cannot serve are left alone
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// Client asks servers of one dualcheck cluster. It is safe for use by many at once, and
// one is enough for a process: the more calls share it, the less each costs.
type Client struct {
	config
	servers []*server
	room    *semaphore.Weighted
	calls   sync.Pool // of *call

	ctx     context.Context // ends with the Client
	cancel  context.CancelFunc
	working sync.WaitGroup // this Client's goroutines

	closing atomic.Bool   // no new work is begun
	closed  chan struct{} // closed: nothing is sent any more
	ended   chan struct{} // closed: Close is done

	mu sync.Mutex
	// changed is closed and made anew when a server comes, goes or fails.
	changed chan struct{}
	// finishing is how many finishes and Dos are under way; Close waits for idle, which
	// is set once it does.
	finishing int
	idle      chan struct{}
}

// server is one address.
type server struct {
	client *Client
	addr   string
	hash   uint64
	conn   *grpc.ClientConn
	lanes  []*lane
	// unary: this server has no Session, or none is wanted; ready is then whether it is
	// connected.
	unary, ready atomic.Bool
	// failed is why it cannot be reached: nil while it can, or while that is not known.
	failed atomic.Pointer[Error]
	// dialled is when redial last had it dialled, as Unix time in nanoseconds.
	dialled atomic.Int64
}

const (
	// The server allows a ping every 10 s; less a margin for how long pings travel.
	pingEvery   = 12 * time.Second
	pingTimeout = 4 * time.Second
	// windows are large enough that no frame waits for an update.
	streamWindow = 1 << 20
	connWindow   = 4 << 20
	// mostReceived is over the largest answer.
	mostReceived = 64 << 20
)

// New makes a Client of the servers' addresses, for instance "dualcheck-0:7070". It
// returns at once and connects meanwhile; the first calls wait for that. All clients of
// a cluster should name its servers alike: a key's calls then meet on one server, which
// is where they are cheap.
func New(servers []string, opts ...Option) (*Client, error) {
	cfg := defaults()
	for _, opt := range opts {
		opt(&cfg)
	}
	if err := cfg.validate(servers); err != nil {
		return nil, err
	}
	c := &Client{
		config: cfg, room: semaphore.NewWeighted(int64(cfg.most)),
		closed: make(chan struct{}), ended: make(chan struct{}), changed: make(chan struct{}),
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	for _, addr := range servers {
		conn, err := grpc.NewClient(addr, append([]grpc.DialOption{
			grpc.WithTransportCredentials(cfg.creds),
			grpc.WithDefaultServiceConfig(ServiceConfig),
			grpc.WithDisableRetry(), // see ServiceConfig
			grpc.WithIdleTimeout(0),
			grpc.WithInitialWindowSize(streamWindow),
			grpc.WithInitialConnWindowSize(connWindow),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingEvery, Timeout: pingTimeout, PermitWithoutStream: true}),
			// Jitter 1 is full jitter: anything from nothing to twice the delay.
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: firstPause / 2, Multiplier: 2, Jitter: 1, MaxDelay: longestWait / 2},
				MinConnectTimeout: longestWait,
			}),
		}, cfg.dial...)...)
		if err != nil {
			c.shut()
			return nil, err
		}
		s := &server{client: c, addr: addr, hash: hashOf(addr, ""), conn: conn}
		s.unary.Store(cfg.unary)
		c.servers = append(c.servers, s)
	}
	for _, s := range c.servers {
		s.conn.Connect()
		if cfg.unary {
			c.working.Go(s.watch)
			continue
		}
		for range cfg.streams {
			l := &lane{server: s}
			s.lanes = append(s.lanes, l)
		}
		for _, l := range s.lanes {
			c.working.Go(l.run)
		}
	}
	return c, nil
}

// Close ends the Client. No new work is begun and no record read from now on. Finishes
// under way are sent and answered first, and Dos whose work runs may end and report,
// all within WithCloseTimeout; then what is left ends with ErrClosed. The error says
// how many finishes were cut off.
func (c *Client) Close() error {
	if c.closing.Swap(true) {
		<-c.ended
		return nil
	}
	defer close(c.ended)
	c.mu.Lock()
	idle := make(chan struct{})
	if c.idle = idle; c.finishing == 0 {
		close(idle)
	}
	c.mu.Unlock()
	timer := time.NewTimer(c.config.closing)
	defer timer.Stop()
	var err error
	select {
	case <-idle:
	case <-timer.C:
		err = errors.New("dualcheck: closed with finishes under way: their claims lapse unless they are finished otherwise")
	}
	close(c.closed)
	c.shut()
	return err
}

// shut ends what runs.
func (c *Client) shut() {
	c.cancel()
	c.working.Wait()
	for _, s := range c.servers {
		_ = s.conn.Close() // it was open
	}
}

// finish counts something in that Close waits for; finished counts it out.
func (c *Client) finish() *Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle != nil && c.finishing == 0 {
		return closedError()
	}
	c.finishing++
	return nil
}

func (c *Client) finished() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.finishing--; c.finishing == 0 && c.idle != nil {
		close(c.idle)
	}
}

// change wakes those who wait for a server.
func (c *Client) change() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.changed)
	c.changed = make(chan struct{})
}

// changes is closed with the next change.
func (c *Client) changes() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// pick returns the server that a call goes to, and its session unless it is asked by
// unary calls: the first in the key's own order that can be reached. The one that the
// call is to avoid comes last. It returns nil while none can be reached.
func (c *Client) pick(cl *call) (*server, *session) {
	var best *server
	var in *session
	var top uint64
	for _, s := range c.servers {
		score := mix(cl.hash^s.hash) | 1
		if s == cl.avoid {
			score = 0
		}
		if best != nil && score <= top {
			continue
		}
		if s.unary.Load() {
			if s.ready.Load() {
				best, in, top = s, nil, score
			}
		} else if open := s.session(cl.hash); open != nil {
			best, in, top = s, open, score
		}
	}
	return best, in
}

// await returns when there may be a server to pick, or why there is none.
func (c *Client) await(ctx context.Context, changes <-chan struct{}) *Error {
	var failed *Error
	for _, s := range c.servers {
		if failed = s.failed.Load(); failed == nil {
			break // it may yet come
		}
	}
	if failed != nil {
		for _, s := range c.servers {
			s.redial()
		}
		return &Error{Reason: ErrUnreachable, Code: codes.Unavailable, Message: "no server can be reached: " + failed.Message, cause: failed}
	}
	select {
	case <-changes:
		return nil
	case <-ctx.Done():
		return contextError(ctx, nil)
	case <-c.closed:
		return closedError()
	}
}

// session is the open one for a key, nil if there is none. A key keeps to one stream
// while it is open, which keeps its calls in order.
func (s *server) session(hash uint64) *session {
	n := uint64(len(s.lanes))
	for i := range n {
		if open := s.lanes[(hash>>32+i)%n].open.Load(); open != nil {
			return open
		}
	}
	return nil
}

// up says that the server can be reached.
func (s *server) up() {
	s.failed.Store(nil)
	s.client.change()
}

// down says why it cannot.
func (s *server) down(e *Error) {
	if s.failed.Swap(e) == nil {
		s.client.log.Debug("server cannot be reached", slog.String("server", s.addr), slog.String("error", e.Message))
	}
	s.client.change()
}

// redial has the next try of the connection come at once, should it be waiting: gRPC's
// own pauses grow while nobody calls, and a server that is back would be told of late.
func (s *server) redial() {
	now, last := time.Now().UnixNano(), s.dialled.Load()
	if now-last >= int64(firstPause) && s.dialled.CompareAndSwap(last, now) {
		s.conn.ResetConnectBackoff()
	}
}

// connected waits until the server is connected and healthy; false: the Client ends.
// While it is told that the server cannot be reached, it lets probe find out why.
func (s *server) connected(probe func() error) bool {
	ctx := s.client.ctx
	for ctx.Err() == nil {
		state := s.conn.GetState()
		switch state {
		case connectivity.Ready:
			return true
		case connectivity.Idle:
			s.conn.Connect()
		case connectivity.TransientFailure:
			if err := probe(); err != nil {
				s.down(errorOf(err))
			}
		}
		if !s.conn.WaitForStateChange(ctx, state) {
			return false
		}
	}
	return false
}

// watch follows a server that is asked by unary calls.
func (s *server) watch() {
	ctx := s.client.ctx
	probe := func() error {
		ctx, cancel := context.WithTimeout(ctx, longestWait)
		defer cancel()
		_, err := healthv1.NewHealthClient(s.conn).Check(ctx, &healthv1.HealthCheckRequest{})
		if status.Code(err) == codes.Unavailable {
			return err
		}
		return nil
	}
	for s.connected(probe) {
		s.ready.Store(true)
		s.up()
		s.conn.WaitForStateChange(ctx, connectivity.Ready)
		s.ready.Store(false)
	}
}

// hashOf hashes namespace and key, alike in every process: FNV-1a, 64 bits, with a zero
// byte between.
func hashOf(namespace, key string) uint64 {
	const prime = 1099511628211
	h := uint64(14695981039346656037)
	for i := range len(namespace) {
		h = (h ^ uint64(namespace[i])) * prime
	}
	h *= prime
	for i := range len(key) {
		h = (h ^ uint64(key[i])) * prime
	}
	return mix(h)
}

// mix spreads every bit over all (the finalizer of MurmurHash3).
func mix(h uint64) uint64 {
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
