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
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/memory"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/recency"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/watch"
)

// Options say what a node is made of.
type Options struct {
	// Client is for claims and the keeper; Watch, if set, for what follows, and Tell for
	// the watch of records.
	Client, Watch, Tell *clientv3.Client
	// Redis is where Redis is; no Addrs: this node has none.
	Redis rediscache.Server
	// Memory is how many bytes of finished records the node remembers; 0: none. Encode, if
	// set, has them kept as they are sent, and Absent is asked by cached Gets.
	Memory int64
	Encode func(rec *claim.Record) []byte
	Absent func(namespace, key string) bool
	// Feed, if set, changes how the feed is configured.
	Feed func(*feed.Config)
	// Behind, if set, is put between the memory and what is behind it.
	Behind func(claim.Store) claim.Store
	// View, if set, is put between what follows and those who ask it.
	View func(rediscache.Viewer) rediscache.Viewer
	// Cache, if set, is put between the store and the cache.
	Cache func(etcdtxn.Cache) etcdtxn.Cache
	// LongestTTL: what it writes to Redis lives as long as the policy allows, however keys
	// come back.
	LongestTTL bool
	// Idle: it does not register and tick.
	Idle bool
}

// Node is a node without its ports. As a claim.Store it is what its callers ask.
type Node struct {
	claim.Store
	// Behind decides, in etcd; Cache is Redis, and Memory what it remembers; nil if there is
	// none.
	Behind   *etcdtxn.Store
	Cache    *rediscache.Cache
	Memory   *memory.Cache
	Follower *watch.Follower
	// Feed tells of records' changes.
	Feed *feed.Feed
	// Habits is how keys come back here; nil with LongestTTL.
	Habits *recency.Habits
	ID     string
	Seen   *Counter

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
	if o.Tell == nil {
		o.Tell = o.Client
	}
	n.Follower = watch.New(watch.Config{Client: o.Watch, Default: policy.Namespace{}.Claim()})
	view := viewer{n.Follower, n.Follower}
	if o.View != nil {
		view.Viewer = o.View(n.Follower)
	}
	config := etcdtxn.Config{Client: o.Client, View: view, Observe: n.Seen}
	if !o.LongestTTL {
		n.Habits = recency.New(n.Seen)
	}
	redis := rediscache.Config{Server: o.Redis, View: view, Observe: n.Seen, Habits: n.Habits}
	if o.Memory > 0 {
		n.Memory = memory.New(memory.Config{Bytes: o.Memory, View: view, Encode: o.Encode, Absent: o.Absent, TTL: n.Habits.TTL, Observe: n.Seen})
		config.Cache, redis.Told = n.Memory, n.Memory.Keep
	}
	if len(o.Redis.Addrs) > 0 {
		n.Cache = rediscache.New(redis)
		config.Cache = n.Cache
		if n.Memory != nil {
			config.Cache = n.Memory.With(n.Cache)
		}
	}
	if o.Cache != nil && config.Cache != nil {
		config.Cache = o.Cache(config.Cache)
	}
	n.Behind = etcdtxn.New(config)
	telling := feed.Config{Client: o.Tell, Govern: n.Follower, Records: n.Behind, Heartbeat: 500 * time.Millisecond}
	if o.Feed != nil {
		o.Feed(&telling)
	}
	n.Feed = feed.New(telling)
	n.Store = n.Behind
	if n.Cache != nil {
		n.Store = n.Cache.Front(n.Store)
	}
	if o.Behind != nil {
		n.Store = o.Behind(n.Store)
	}
	if n.Memory != nil {
		n.Store = n.Memory.Front(n.Store)
	}
	n.Store = n.Habits.Front(n.Store)
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
	run(&running, ctx, n.Feed.Run)
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
	if n.Cache != nil || n.Memory != nil {
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

// Of returns how often something was observed: "etcd <kind> <outcome>", "remembered
// <finding>", "absent by <read, filter>", "look <finding>", "<stage, confirm, fill, discard> <outcome>", "pipeline <lane>",
// "breaker <state>", "ttl <by>", "refused <cause>", "sent <write, read>"; and "members <write, read>",
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

// Remembered implements memory.Observer.
func (c *Counter) Remembered(finding string) { c.count("remembered " + finding) }

// Absent implements memory.Observer.
func (c *Counter) Absent(by string) { c.count("absent by " + by) }

// Looked implements rediscache.Observer.
func (c *Counter) Looked(finding string) { c.count("look " + finding) }

// Wrote implements rediscache.Observer.
func (c *Counter) Wrote(kind, outcome string) { c.count(kind + " " + outcome) }

// Pipeline implements rediscache.Observer.
func (c *Counter) Pipeline(lane string, _ int, _ time.Duration, _ bool) { c.count("pipeline " + lane) }

// TTL implements recency.Observer.
func (c *Counter) TTL(by string, _ time.Duration) { c.count("ttl " + by) }

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
