package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/oklog/run"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/recency"
	"github.com/dualcheck/dualcheck/internal/server"
	"github.com/dualcheck/dualcheck/internal/telemetry"
	"github.com/dualcheck/dualcheck/internal/watch"
)

// ears are the listeners of a server.
type ears struct {
	grpc, http, debug net.Listener // debug may be nil
}

// listen opens the ports that the settings say, each by the flag that names it.
func (s settings) listen() (e ears, err error) {
	defer func() {
		if err != nil {
			e.close()
		}
	}()
	if e.grpc, err = listenAt("grpc-addr", s.GRPCAddr); err != nil {
		return e, err
	}
	if e.http, err = listenAt("http-addr", s.HTTPAddr); err != nil {
		return e, err
	}
	if s.DebugAddr != "" {
		e.debug, err = listenAt("debug-addr", s.DebugAddr)
	}
	return e, err
}

func listenAt(flag, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s is in use: stop what listens there, or choose another --%s (port 0 takes a free one)", addr, flag)
	case err != nil:
		return nil, fmt.Errorf("--%s %s cannot be listened on: %w", flag, addr, err)
	}
	return l, nil
}

// warnOpen says that others than this machine reach a port that asks nobody who
// they are: TLS keeps out who listens, and nobody who calls.
func (e ears) warnOpen(log *slog.Logger, secure bool) {
	without := " without TLS"
	if secure {
		without = ""
	}
	if open := beyondLoopback(e.grpc, e.http); len(open) > 0 {
		log.Warn("it listens on a network"+without+", and asks no caller who they are: whoever reaches these ports may call; put them behind a firewall or a proxy that authenticates, or listen on 127.0.0.1",
			"ports", strings.Join(open, ", "))
	}
	if open := beyondLoopback(e.debug); len(open) > 0 {
		log.Warn("debug-addr is open to a network: pprof is in the clear and asks no caller who they are, and its heap dump holds tokens and results; listen on 127.0.0.1",
			"ports", strings.Join(open, ", "))
	}
}

// beyondLoopback lists the addresses that others than this machine reach.
func beyondLoopback(all ...net.Listener) (open []string) {
	for _, l := range all {
		if l == nil {
			continue
		}
		if at, ok := l.Addr().(*net.TCPAddr); ok && !at.IP.IsLoopback() {
			open = append(open, at.String())
		}
	}
	return open
}

// debugAddr is where pprof is; "" if it is nowhere.
func (e ears) debugAddr() string {
	if e.debug == nil {
		return ""
	}
	return e.debug.Addr().String()
}

// close closes what is open; serving closes them too, so that errors say nothing.
func (e ears) close() {
	for _, l := range []net.Listener{e.grpc, e.http, e.debug} {
		if l != nil {
			_ = l.Close()
		}
	}
}

func (s settings) ownTLS(log *slog.Logger) (*tls.Config, error) {
	if s.TLSCertFile == "" {
		return nil, nil
	}
	return server.TLS(s.TLSCertFile, s.TLSKeyFile, log)
}

// etcdTLS is nil for etcd in the clear.
func (s settings) etcdTLS() (*tls.Config, error) {
	return clientTLS("etcd", transport.TLSInfo{CertFile: s.EtcdCertFile, KeyFile: s.EtcdKeyFile, TrustedCAFile: s.EtcdCAFile, ServerName: s.EtcdServerName}, strings.HasPrefix(s.EtcdEndpoints[0], "https://"))
}

// dialEtcd makes a client; it connects with its first call.
func (s settings) dialEtcd(log *slog.Logger, traced bool) (*clientv3.Client, error) {
	password, err := s.password()
	if err != nil {
		return nil, err
	}
	config, err := s.etcdTLS()
	if err != nil {
		return nil, err
	}
	var opts []grpc.DialOption
	if traced {
		opts = append(opts, grpc.WithStatsHandler(otelgrpc.NewClientHandler()))
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            s.EtcdEndpoints,
		DialTimeout:          5 * time.Second,
		DialKeepAliveTime:    15 * time.Second,
		DialKeepAliveTimeout: 5 * time.Second,
		Username:             s.EtcdUser,
		Password:             password,
		TLS:                  config,
		DialOptions:          opts,
		Logger:               telemetry.Zap(log.With("part", "etcd client"), zapcore.ErrorLevel),
	})
	if err != nil {
		return nil, fmt.Errorf("connect to etcd at %s: %w", strings.Join(s.EtcdEndpoints, ", "), err)
	}
	return client, nil
}

// runServer runs one server on these listeners until ctx ends, an extra actor
// returns, or a part of it fails. ready is called once the server can serve. When
// it returns, everything has stopped and the listeners are closed.
//
// The parts stop in the order in which they are added below: first the ports
// (unhealthy, no new work, drain, close), then what they need.
func runServer(ctx context.Context, s settings, e ears, log *slog.Logger, ready func() error, extra ...func(context.Context) error) (err error) {
	defer e.close()
	if s.NodeID == "" {
		s.NodeID = hostname() + "-" + strings.ToLower(rand.Text()[:6])
	}
	if s.AdvertiseAddr == "" {
		s.AdvertiseAddr = advertised(e.grpc.Addr())
	}
	b := buildInfo()
	running := telemetry.Build{Version: b.Version, Commit: b.Commit, Node: s.NodeID}
	log = log.With(telemetry.FieldNode, s.NodeID)
	e.warnOpen(log, s.TLSCertFile != "")
	metrics := telemetry.NewMetrics(running)
	tracing, err := telemetry.StartTracing(ctx, running, log)
	if err != nil {
		return err
	}
	defer func() {
		flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
		defer cancel()
		err = errors.Join(err, tracing.Stop(flush))
	}()
	ownTLS, err := s.ownTLS(log)
	if err != nil {
		return err
	}

	// One connection for claims, one for the watch, one for the clock, one for the watch of
	// records: none of them waits for another.
	var clients [4]*clientv3.Client
	for i := range clients {
		if clients[i], err = s.dialEtcd(log, tracing.On()); err != nil {
			return err
		}
		defer clients[i].Close()
	}
	claims, watching, keeping, telling := clients[0], clients[1], clients[2], clients[3]

	follower := watch.New(watch.Config{Client: watching, Default: policy.Namespace{}.Claim(), RefuseUndeclared: s.RequireDeclared, Log: log})
	var habits *recency.Habits
	habits = recency.New(metrics.Recency(func() int { return habits.Len() }))
	var changes *feed.Feed
	remembered := s.memoryCache(follower, habits, func(namespace, key string) bool { return changes.Absent(namespace, key) }, metrics)
	var told func(*claim.View, *claim.Record)
	if remembered != nil {
		told = remembered.Keep
	}
	cache, err := s.redisCache(follower, habits, told, log, metrics)
	if err != nil {
		return err
	}
	deciding := etcdtxn.Config{Client: claims, View: follower, Log: log, Observe: metrics}
	switch {
	case remembered != nil && cache != nil:
		deciding.Cache = remembered.With(cache)
	case remembered != nil:
		deciding.Cache = remembered
	case cache != nil:
		deciding.Cache = cache
	}
	store := etcdtxn.New(deciding)
	front, degraded := claim.Store(store), (func() error)(nil)
	if cache != nil {
		front, degraded = cache.Front(store), cache.Degraded
	}
	if remembered != nil {
		front = remembered.Front(front)
	}
	front = habits.Front(front) // the foremost, so that it sees what every cache tells
	keeper := etcdtxn.NewKeeper(etcdtxn.KeeperConfig{
		Client: keeping, Follower: follower, Log: log,
		Node: layout.Node{ID: s.NodeID, Version: b.Version, GRPCAddr: s.AdvertiseAddr, StartedAt: time.Now()},
	})
	changes = feed.New(feed.Config{Client: telling, Govern: follower, Records: store, Log: log})
	serving, err := server.New(server.Config{
		Store:            front,
		Changes:          changes,
		Revisions:        store.Revisions,
		RedisAway:        degraded,
		Namespaces:       declared{follower, store},
		Levers:           levers{store, follower},
		Cluster:          clusterView{s.NodeID, follower, keeping},
		Ready:            follower.Ready,
		Metrics:          metrics,
		Log:              log,
		PlainKeys:        s.LogKeys,
		TLS:              ownTLS,
		MaxConnectionAge: s.MaxConnectionAge,
		Reflection:       s.Reflection,
		Tracing:          tracing.On(),
		MaxInFlight:      s.MaxInFlight,
		Feed:             subscribing{changes},
	})
	if err != nil {
		return err
	}

	metrics.Follows("governing", func() telemetry.Followed { return followed(follower.Following()) })
	metrics.Follows("records", func() telemetry.Followed { return followed(changes.Status().Following) })
	metrics.Feeds(func() telemetry.Feeding {
		s := changes.Status()
		return telemetry.Feeding{RingBytes: s.RingBytes, RingChanges: s.RingChanges, Changes: s.Changes, Scans: s.Scans, Pieces: s.Pieces, FilterLen: s.Names}
	})
	metrics.Watch(serving.Ready, func() telemetry.Following { return telemetry.Following(follower.Status()) })

	var group run.Group
	ending := context.WithoutCancel(ctx)          // what is left to do once ctx has ended
	actor(&group, func(c context.Context) error { // the end that was asked for
		select {
		case <-ctx.Done():
			log.Info("stopping")
		case <-c.Done():
		}
		return nil
	})
	group.Add(
		func() error { return serving.Serve(e.grpc, e.http) },
		func(error) {
			within, cancel := context.WithTimeout(ending, s.DrainTimeout)
			defer cancel()
			serving.Stop(within, s.PreDrainDelay)
		})
	if e.debug != nil {
		debug := debugServer()
		group.Add(func() error { return debug.Serve(e.debug) }, func(error) { _ = debug.Close() })
	}
	for _, f := range extra {
		actor(&group, f)
	}
	actor(&group, func(c context.Context) error { // tell that it can serve
		for follower.Ready() != nil {
			if !pause(c, 20*time.Millisecond) {
				return nil
			}
		}
		serving.TellHealth()
		log.Info("serving", "grpc", e.grpc.Addr().String(), "http", e.http.Addr().String(), "debug", e.debugAddr(), "version", b.Version)
		if err := ready(); err != nil {
			return err
		}
		<-c.Done()
		return nil
	})
	stored := make(chan struct{})
	group.Add(
		func() error { <-stored; return nil },
		func(error) {
			defer close(stored)
			within, cancel := context.WithTimeout(ending, closeTimeout)
			defer cancel()
			if err := store.Close(within); err != nil {
				log.Warn("finishes that were under way were abandoned: their callers repeat them", telemetry.FieldError, err)
			}
		})
	if cache != nil {
		actor(&group, cache.Run) // sends what the last finishes left
	}
	actor(&group, changes.Run)
	actor(&group, func(c context.Context) error { // make etcd ready, then keep
		if err := prepare(c, keeping, log); err != nil || c.Err() != nil {
			return err
		}
		if ops, err := etcdtxn.MaxTxnOps(c, keeping); err == nil { // else etcd's default, less once it refuses that
			store.Fit(ops)
		}
		return keeper.Run(c)
	})
	actor(&group, follower.Run)
	return group.Run()
}

const (
	// closeTimeout is how long finishes that were accepted may take at the end.
	closeTimeout = 10 * time.Second
	// flushTimeout is how long the last spans may take to be sent.
	flushTimeout = 5 * time.Second
)

// actor adds a part that runs until its context ends.
func actor(group *run.Group, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	group.Add(func() error { return f(ctx) }, func(error) { cancel() })
}

// pause waits; it reports false if ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

const (
	checkTimeout = 10 * time.Second
	checkAgain   = 2 * time.Second
	// tellAgain is how often the log repeats that etcd cannot be used.
	tellAgain = 30 * time.Second
)

// prepare looks at etcd until it can be served from, and makes the first start. An
// etcd that does not answer is waited for, and readiness says so meanwhile; one that
// must not be served from is an error.
func prepare(ctx context.Context, client *clientv3.Client, log *slog.Logger) error {
	var told string // what was last told, and when
	var at time.Time
	for ctx.Err() == nil {
		within, cancel := context.WithTimeout(ctx, checkTimeout)
		members, err := etcdtxn.Check(within, client)
		if err == nil {
			err = etcdtxn.Bootstrap(within, client)
		}
		timeout := within.Err() != nil
		cancel()
		if err == nil {
			warnOf(members, log)
			return nil
		}
		if ctx.Err() == nil && !timeout && answered(members) && !isUnavailable(err) {
			return err
		}
		what := "etcd does not answer"
		if answered(members) {
			what = "etcd answers, but cannot be read and written yet"
		}
		if what != told || time.Since(at) >= tellAgain {
			log.Warn(what+": this node is not ready, and keeps trying", telemetry.FieldError, err)
			told, at = what, time.Now()
		}
		pause(ctx, checkAgain)
	}
	return nil // it was stopped
}

// warnOf tells what is wrong with etcd and yet no reason not to serve from it.
func warnOf(members []etcdtxn.Member, log *slog.Logger) {
	for _, m := range members {
		if m.Err != "" {
			log.Warn("an etcd member does not answer", "endpoint", m.Endpoint, telemetry.FieldError, m.Err)
		}
		for _, alarm := range m.Alarms {
			log.Warn("etcd has raised an alarm", "endpoint", m.Endpoint, "alarm", alarm)
		}
	}
}

// answered reports whether any member told its status.
func answered(members []etcdtxn.Member) bool {
	for _, m := range members {
		if m.Err == "" {
			return true
		}
	}
	return false
}

func isUnavailable(err error) bool {
	return claim.ReasonOf(err) == claim.StoreUnavailable || errors.Is(err, context.DeadlineExceeded)
}

// declared are the namespaces, read from the follower and changed in the store.
type declared struct {
	follower *watch.Follower
	store    *etcdtxn.Store
}

func (d declared) List() ([]policy.Namespace, error) {
	if _, err := d.follower.View(); err != nil {
		return nil, err
	}
	return d.follower.Namespaces(), nil
}

func (d declared) Put(ctx context.Context, n policy.Namespace) (policy.Namespace, error) {
	return d.store.PutNamespace(ctx, n)
}

func (d declared) Delete(ctx context.Context, name string, force bool) (int64, error) {
	return d.store.DeleteNamespace(ctx, name, force)
}

// levers are the cluster's, turned in the store and read from the follower.
type levers struct {
	*etcdtxn.Store
	follower *watch.Follower
}

func (l levers) Switches() ([]policy.Switch, error) {
	if _, err := l.follower.View(); err != nil {
		return nil, err
	}
	return l.follower.Switches(), nil
}

func followed(f watch.Following) telemetry.Followed {
	return telemetry.Followed{State: f.State.String(), Behind: f.Behind, BehindFor: f.BehindFor, Lists: f.Lists, Cuts: f.Cuts}
}

// subscribing is the feed as the server asks it.
type subscribing struct{ changes *feed.Feed }

func (s subscribing) Subscribe(ctx context.Context, req feed.Request) (server.Subscription, error) {
	subscription, err := s.changes.Subscribe(ctx, req)
	if err != nil {
		return nil, err // and no interface that holds a nil
	}
	return subscription, nil
}

// clusterView is what this node knows of the cluster.
type clusterView struct {
	node     string
	follower *watch.Follower
	client   *clientv3.Client
}

func (c clusterView) View() (claim.View, error) { return c.follower.View() }

func (c clusterView) Standing(ctx context.Context) server.Standing {
	status := c.follower.Status()
	at := server.Standing{Node: c.node, Applied: status.Applied, TickAge: status.TickAge}
	for _, n := range c.follower.Nodes() {
		at.Nodes = append(at.Nodes, server.Node{ID: n.ID, Version: n.Version, GRPCAddr: n.GRPCAddr, StartedAt: n.StartedAt, Ticks: n.Ticks})
	}
	for _, m := range etcdtxn.Members(ctx, c.client) {
		at.Members = append(at.Members, server.Member(m))
	}
	return at
}

// debugServer serves pprof, on a port of its own.
func debugServer() *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "node"
	}
	return name
}

// advertised is where others reach a listener: by the host's name if it listens
// everywhere.
func advertised(addr net.Addr) string {
	host, port, err := net.SplitHostPort(addr.String())
	if err != nil {
		return addr.String()
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = hostname()
	}
	return net.JoinHostPort(host, port)
}
