package feed_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/feedtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
)

func TestMain(m *testing.M) { os.Exit(etcdtest.Main(m)) }

const ns = "pay"

// site is a node with a feed, and what is truly written.
type site struct {
	t       *testing.T
	etcd    *etcdtest.Cluster
	client  *clientv3.Client
	node    *nodetest.Node
	feed    *feed.Feed
	history *feedtest.History
}

// start starts a site of one node; watching is the address of what the feed watches, ""
// for etcd itself.
func start(t *testing.T, members int, watching string, tune ...func(*feed.Config)) *site {
	t.Helper()
	etcd := etcdtest.Start(t, members)
	return startOn(t, etcd, watching, tune...)
}

func startOn(t *testing.T, etcd *etcdtest.Cluster, watching string, tune ...func(*feed.Config)) *site {
	t.Helper()
	s := &site{t: t, etcd: etcd, client: etcd.Client()}
	s.node = nodetest.Start(t, nodetest.Options{Client: s.client, Tell: telling(etcd, watching), Feed: tuned(tune)})
	s.history = feedtest.Record(t, s.client, ns)
	s.feed = s.node.Feed
	return s
}

// telling is a client of the feed's own, through what is watched if that is not etcd.
func telling(etcd *etcdtest.Cluster, watching string) *clientv3.Client {
	if watching == "" {
		return etcd.Client()
	}
	return etcd.Client(watching)
}

func tuned(all []func(*feed.Config)) func(*feed.Config) {
	return func(c *feed.Config) {
		c.Heartbeat = 200 * time.Millisecond
		for _, f := range all {
			f(c)
		}
	}
}

// reading is a subscriber that reads all the time.
type reading struct {
	*feedtest.Stream
	site  *site
	req   feed.Request
	token string
	// broken counts how often its stream ended because the node was of no use.
	broken int
	// progress counts how often it was told that it has all there is.
	progress int

	mu      sync.Mutex
	moved   chan struct{}
	stop    context.CancelFunc
	running sync.WaitGroup
}

// read has a subscriber read until the test ends, or it is stopped.
func (s *site) read(req feed.Request) *reading {
	s.t.Helper()
	r := &reading{Stream: feedtest.NewStream(s.history), site: s, req: req, moved: make(chan struct{})}
	if req.Namespace == "" {
		r.req.Namespace = ns
	}
	r.open(s.feed)
	s.t.Cleanup(r.close)
	return r
}

// open opens the stream, and returns once it has told something. It goes on by the token
// that there is.
func (r *reading) open(f *feed.Feed) {
	t := r.site.t
	t.Helper()
	req := r.req
	if r.token != "" {
		req.Token = r.token
	}
	sub, err := f.Subscribe(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	r.broken = 0
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	first := make(chan struct{})
	opened := sync.OnceFunc(func() { close(first) })
	r.running.Go(func() {
		defer func() { sub.Close() }()
		defer opened()
		for {
			b, err := sub.Next(ctx)
			if claim.ReasonOf(err) == claim.StoreUnavailable && r.broken < 50 { // it comes back, as readers do
				sub.Close()
				r.mu.Lock()
				r.broken++
				r.mu.Unlock()
				if req.Token = r.token; req.Token != "" {
					req.Snapshot = false
				}
				if next, err := f.Subscribe(ctx, req); err == nil {
					sub = next
				}
				continue
			}
			if errors.Is(err, context.Canceled) {
				return
			}
			if err != nil {
				t.Errorf("the stream ended: %v", err)
				return
			}
			r.take(b)
			opened()
		}
	})
	<-first
}

func (r *reading) take(b feed.Batch) {
	m := feedtest.Message{Token: b.Token, Progress: b.Progress, Begin: b.Begin, End: b.End, Cause: b.Cause}
	for _, e := range b.Events {
		told := feedtest.EventOf(e.Record)
		told.Deleted = e.Deleted
		m.Events = append(m.Events, told)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Take(m)
	r.token = b.Token
	if b.Progress {
		r.progress++
	}
	close(r.moved)
	r.moved = make(chan struct{})
}

// next is what a subscriber is told next.
func (s *site) next(of *feed.Subscription) feed.Batch {
	s.t.Helper()
	b, err := of.Next(within(60 * time.Second))
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// told is how many events came so far.
func (r *reading) told() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Events
}

// standing is how often it was told that it has all there is, and how often its stream was
// ended because the node was of no use.
func (r *reading) standing() (progress, broken int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.progress, r.broken
}

// close ends the stream.
func (r *reading) close() {
	r.stop()
	r.running.Wait()
}

// until waits for something about the reader.
func (r *reading) until(what string, ok func() bool) {
	t := r.site.t
	t.Helper()
	deadline := time.After(60 * time.Second)
	for {
		r.mu.Lock()
		there, moved := ok(), r.moved
		r.mu.Unlock()
		if there {
			return
		}
		select {
		case <-moved:
		case <-deadline:
			t.Fatalf("waited for %s: %d events, %d resyncs, newest %d, of %d: %v", what, r.Events, r.Resyncs, r.Newest(), r.site.history.Newest(r.req.Prefix), r.Errors)
		}
	}
}

// caughtUp waits until the readers have what etcd has, ends them and judges them.
func (s *site) caughtUp(all ...*reading) {
	s.t.Helper()
	s.history.Await(s.t, s.client)
	for i, r := range all {
		r.until("what etcd has", func() bool { return r.Complete(r.req.Prefix) })
		r.close()
		for _, err := range r.Finish(r.req.Prefix) {
			s.t.Errorf("reader %d (%+v): %v", i, r.req, err)
		}
	}
}

// within is a context for one call.
func within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	context.AfterFunc(ctx, cancel)
	return ctx
}

// claimed begins a key. What cannot be established is asked again, as callers do.
func (s *site) claimed(key string) (token string) {
	s.t.Helper()
	req := &claim.BeginRequest{Namespace: ns, Key: key, Owner: "test", RequestID: rand.Text()}
	nodetest.Eventually(s.t, 60*time.Second, "a claim of "+key, func() error {
		a, err := s.node.Begin(within(10*time.Second), req)
		if err == nil && a.Verdict != claim.First {
			s.t.Fatalf("begin %s: %+v", key, a)
		}
		if err == nil {
			token = a.Claim.Token
		}
		return err
	})
	return token
}

func (s *site) finish(key, token string, body string) {
	s.t.Helper()
	req := &claim.FinishRequest{Namespace: ns, Key: key, Token: token, Result: &claim.Result{Body: []byte(body)}}
	nodetest.Eventually(s.t, 60*time.Second, "the finish of "+key, func() error {
		_, err := s.node.Finish(within(10*time.Second), req)
		return err
	})
}

// done begins and finishes keys.
func (s *site) done(keys ...string) {
	s.t.Helper()
	for _, key := range keys {
		s.finish(key, s.claimed(key), "result of "+key)
	}
}

// keys names so many.
func keys(prefix string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("%s-%04d", prefix, i))
	}
	return all
}

// work has callers begin, extend, release and finish keys at random until it is stopped.
// What goes wrong while etcd is disturbed is not their business.
func (s *site) work(prefix string, callers, keys int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for c := range callers {
		running.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				s.step(ctx, fmt.Sprintf("%s-%04d-%d", prefix, (i*7+c*13)%keys, i/(2*keys)), i)
			}
		})
	}
	return sync.OnceFunc(func() { cancel(); running.Wait() })
}

// step does one thing with a key.
func (s *site) step(ctx context.Context, key string, i int) {
	a, err := s.node.Begin(ctx, &claim.BeginRequest{Namespace: ns, Key: key})
	if err != nil || a.Verdict != claim.First {
		return
	}
	lease := time.Minute
	switch i % 4 {
	case 0:
		_, _ = s.node.Extend(ctx, &claim.ExtendRequest{Namespace: ns, Key: key, Token: a.Claim.Token, Lease: &lease})
		fallthrough
	case 1, 2:
		_, _ = s.node.Finish(ctx, &claim.FinishRequest{Namespace: ns, Key: key, Token: a.Claim.Token, Failure: &claim.Failure{Class: claim.Retryable}})
	case 3:
		_, _ = s.node.Finish(ctx, &claim.FinishRequest{Namespace: ns, Key: key, Token: a.Claim.Token, Result: &claim.Result{Body: []byte(key)}})
	}
}

// etcdAs is a client of a user's.
func etcdAs(t *testing.T, etcd *etcdtest.Cluster, user, password string, endpoints ...string) *clientv3.Client {
	t.Helper()
	if len(endpoints) == 0 {
		endpoints = etcd.Endpoints()
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, Username: user, Password: password, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil && !errors.Is(err, context.Canceled) {
			t.Log(err)
		}
	})
	return c
}
