package sdktest

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/server"
	"github.com/dualcheck/dualcheck/internal/telemetry"
	"github.com/dualcheck/dualcheck/internal/watch"
)

// Server serves a Store at one address, stopped and started again as a node would be
// whose Store lives on.
type Server struct {
	config server.Config
	addr   string

	mu      sync.Mutex
	running *server.Server // nil while stopped
	served  chan error
}

// Serve starts a server on loopback; ready says why it cannot serve, nil if it can. It
// ends with the test.
func Serve(t testing.TB, store claim.Store, ready func() error) *Server {
	t.Helper()
	return serve(t, store, ready, nil)
}

// ServeNode serves a node with all that it has: those who wait are woken by its feed, and
// Watch tells of it.
func ServeNode(t testing.TB, n *nodetest.Node) *Server {
	t.Helper()
	return serve(t, n, n.Follower.Ready, func(c *server.Config) {
		c.Feed, c.Changes, c.Revisions, c.Cluster = subscribing{n.Feed}, n.Feed, n.Behind.Revisions, viewing{c.Cluster, n.Follower}
	})
}

// subscribing is a feed as a server asks it.
type subscribing struct{ *feed.Feed }

func (s subscribing) Subscribe(ctx context.Context, req feed.Request) (server.Subscription, error) {
	sub, err := s.Feed.Subscribe(ctx, req)
	if err != nil {
		return nil, err
	}
	return sub, nil
}

// viewing is a cluster of which the view alone is asked.
type viewing struct {
	server.Cluster
	follower *watch.Follower
}

func (v viewing) View() (claim.View, error) { return v.follower.View() }

func serve(t testing.TB, store claim.Store, ready func() error, more func(*server.Config)) *Server {
	t.Helper()
	s := &Server{addr: "127.0.0.1:0", config: server.Config{
		Store: store, Ready: ready,
		Namespaces: struct{ server.Namespaces }{}, Levers: struct{ server.Levers }{}, Cluster: struct{ server.Cluster }{},
		Log:         slog.New(slog.DiscardHandler),
		MaxInFlight: 10_000,
	}}
	if more != nil {
		more(&s.config)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	return s
}

// Addr is where it is asked.
func (s *Server) Addr() string { return s.addr }

// Start starts it, at the address that it had.
func (s *Server) Start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running != nil {
		return nil
	}
	config := s.config
	config.Metrics = telemetry.NewMetrics(telemetry.Build{Version: "test"})
	running, err := server.New(config)
	if err != nil {
		return err
	}
	grpcListener, err := net.Listen("tcp", s.addr)
	if err != nil {
		return err
	}
	httpListener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.running, s.addr, s.served = running, grpcListener.Addr().String(), make(chan error, 1)
	go func() { s.served <- running.Serve(grpcListener, httpListener) }()
	return nil
}

// Stop drains it and stops it: what is left when ctx ends is cut off.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running == nil {
		return nil
	}
	s.running.Stop(ctx, 0)
	s.running = nil
	if err := <-s.served; err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}
