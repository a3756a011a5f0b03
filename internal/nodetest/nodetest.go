// Package nodetest starts whole nodes for tests, all but their ports: what follows
// etcd, what keeps its clock, what decides, and Redis in front. Several in one
// process are a cluster.
package nodetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/watch"
)

// Options say what a node is made of.
type Options struct {
	// Client is for claims and the keeper, Watch, if set, for what follows.
	Client, Watch *clientv3.Client
	// Redis is where Redis is; no Addrs: this node has none.
	Redis rediscache.Server
	// View, if set, is put between what follows and those who ask it.
	View func(rediscache.Viewer) rediscache.Viewer
	// Cache, if set, is put between the store and the cache.
	Cache func(etcdtxn.Cache) etcdtxn.Cache
	// Idle: it does not register and tick.
	Idle bool
}

// Node is a node without its ports. As a claim.Store it is what its callers ask.
type Node struct {
	claim.Store
	// Behind decides, in etcd; Cache is Redis, nil if there is none.
	Behind   *etcdtxn.Store
	Cache    *rediscache.Cache
	Follower *watch.Follower
	ID       string
	Seen     *Counter

	stop func()
}

var started atomic.Int64

// Start starts a node and waits until it is ready. It ends with the test.
func Start(t testing.TB, o Options) *Node {
	t.Helper()
	n := &Node{ID: fmt.Sprintf("n%d", started.Add(1)), Seen: &Counter{}}
	if o.Watch == nil {
		o.Watch = o.Client
	}
	n.Follower = watch.New(watch.Config{Client: o.Watch, Default: policy.Namespace{}.Claim()})
	view := viewer{n.Follower, n.Follower}
	if o.View != nil {
		view.Viewer = o.View(n.Follower)
	}
	config := etcdtxn.Config{Client: o.Client, View: view, Observe: n.Seen}
	if len(o.Redis.Addrs) > 0 {
		n.Cache = rediscache.New(rediscache.Config{Server: o.Redis, View: view, Observe: n.Seen})
		config.Cache = n.Cache
		if o.Cache != nil {
			config.Cache = o.Cache(n.Cache)
		}
	}
	n.Behind = etcdtxn.New(config)
	n.Store = n.Behind
	if n.Cache != nil {
		n.Store = n.Cache.Front(n.Behind)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := etcdtxn.Bootstrap(ctx, o.Client); err != nil {
		t.Fatal(err)
	}
	var running, caching sync.WaitGroup
	ctx, cancel = context.WithCancel(context.Background())
	cacheCtx, cacheEnd := context.WithCancel(context.Background())
	run := func(group *sync.WaitGroup, ctx context.Context, f func(context.Context) error) {
		group.Go(func() {
			if err := f(ctx); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("run: %v", err)
			}
		})
	}
	run(&running, ctx, n.Follower.Run)
	if !o.Idle {
		k := etcdtxn.NewKeeper(etcdtxn.KeeperConfig{Client: o.Client, Follower: n.Follower, Node: layout.Node{ID: n.ID, StartedAt: time.Now()}})
		run(&running, ctx, k.Run)
	}
	if n.Cache != nil {
		run(&caching, cacheCtx, n.Cache.Run)
	}
	var once sync.Once
	n.stop = func() {
		once.Do(func() {
			within, done := context.WithTimeout(context.Background(), 20*time.Second)
			defer done()
			if err := n.Behind.Close(within); err != nil {
				t.Errorf("close the store: %v", err)
			}
			cacheEnd()
			caching.Wait()
			cancel()
			running.Wait()
		})
	}
	t.Cleanup(n.stop)
	Eventually(t, 30*time.Second, "the node to be ready", n.Follower.Ready)
	if n.Cache != nil {
		Eventually(t, 30*time.Second, "the node to believe", n.Believes)
	}
	return n
}

// viewer is a Viewer of which one half may be put in between.
type viewer struct {
	rediscache.Viewer
	follower *watch.Follower
}

func (v viewer) CatchUp(ctx context.Context, used claim.View, saw claim.Seen) error {
	return v.follower.CatchUp(ctx, used, saw)
}

// Stop ends the node: accepted finishes, what is on its way to Redis, the rest.
func (n *Node) Stop() { n.stop() }

// Believes reports nil if the node may tell what is cached.
func (n *Node) Believes() error {
	v, err := n.Follower.View()
	if err == nil && !v.Believed {
		err = errors.New("it does not believe its caches")
	}
	return err
}

// Eventually asks until there is no error.
func Eventually(t testing.TB, d time.Duration, what string, ask func() error) {
	t.Helper()
	deadline := time.After(d)
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		err := ask()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("waited for %s: not within %v: %v", what, d, err)
		case <-again.C:
		}
	}
}

// Counter counts what a node's parts observe.
type Counter struct {
	mu     sync.Mutex
	counts map[string]int
}

func (c *Counter) count(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts == nil {
		c.counts = map[string]int{}
	}
	c.counts[what]++
}

func (c *Counter) most(what string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts == nil {
		c.counts = map[string]int{}
	}
	c.counts[what] = max(c.counts[what], n)
}

// Of returns how often something was observed: "etcd <kind> <outcome>", "look
// <finding>", "<stage, confirm, fill, discard> <outcome>", "pipeline <lane>",
// "breaker <state>", "refused <cause>", "sent <write, read>"; and "members <write, read>",
// the most that went together.
func (c *Counter) Of(what string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts[what]
}

// String lists all counts.
func (c *Counter) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fmt.Sprint(c.counts)
}

// Call implements etcdtxn.Observer.
func (c *Counter) Call(kind, outcome string, _ time.Duration) {
	c.count("etcd " + kind + " " + outcome)
}

// Settled implements etcdtxn.Observer.
func (c *Counter) Settled(string) { c.count("settled") }

// Refused implements etcdtxn.Observer.
func (c *Counter) Refused(cause string) { c.count("refused " + cause) }

// Undated implements etcdtxn.Observer.
func (c *Counter) Undated() { c.count("undated") }

// Sent implements etcdtxn.Observer.
func (c *Counter) Sent(kind string, members int, _ time.Duration) {
	c.count("sent " + kind)
	c.most("members "+kind, members)
}

// Landed implements etcdtxn.Observer.
func (c *Counter) Landed(kind string) { c.count("landed " + kind) }

// Behind implements etcdtxn.Observer.
func (c *Counter) Behind() { c.count("behind") }

// Crowded implements etcdtxn.Observer.
func (c *Counter) Crowded(kind string) { c.count("crowded " + kind) }

// Looked implements rediscache.Observer.
func (c *Counter) Looked(finding string) { c.count("look " + finding) }

// Wrote implements rediscache.Observer.
func (c *Counter) Wrote(kind, outcome string) { c.count(kind + " " + outcome) }

// Pipeline implements rediscache.Observer.
func (c *Counter) Pipeline(lane string, _ int, _ time.Duration, _ bool) { c.count("pipeline " + lane) }

// Breaker implements rediscache.Observer.
func (c *Counter) Breaker(_, to string) { c.count("breaker " + to) }

// Within returns a context that ends with the test, or sooner.
func Within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// Pass waits until so much cluster time has passed on a node's clock.
func Pass(t testing.TB, node rediscache.Viewer, d time.Duration) {
	t.Helper()
	start, err := node.View()
	if err != nil {
		t.Fatal(err)
	}
	Eventually(t, d+30*time.Second, "time to pass", func() error {
		v, err := node.View()
		if err == nil && v.Now.Sub(start.Now) < d {
			err = fmt.Errorf("%v of %v", v.Now.Sub(start.Now), d)
		}
		return err
	})
}
