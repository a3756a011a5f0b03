package robustness

import (
	"context"
	"flag"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/dualcheck/dualcheck"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/feedtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
	"github.com/dualcheck/dualcheck/internal/sdktest"
)

var (
	duration = flag.Duration("robustness.duration", 15*time.Second, "how long each test breaks things, at least")
	seed     = flag.Uint64("robustness.seed", 0, "of all luck; 0: a new one")
)

func TestMain(m *testing.M) {
	redis.SetLogger(silence{})
	os.Exit(etcdtest.Main(m))
}

// silence keeps the Redis client from telling of each connection that was cut.
type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

const (
	nodes     = 3
	clients   = 8  // of the SDK, of all nodes each
	workers   = 64 // over the clients
	insiders  = 16 // who ask the nodes themselves
	operators = 16
	thieves   = 3
	keys      = 50
	// extra is how much longer a run may take until everything has happened once.
	extra = 90 * time.Second
)

// C67, G1 to G6: Redis is flushed, killed, failed over with lost writes, stopped,
// filled with garbage and with what it held before, nodes lose etcd and find it
// again, clients lose nodes in the midst of a call, servers drain and are cut off; only
// how long answers take is different for it. Subscribers are told of each change, or
// begin anew (G9). 64 callers ask through the SDK's sessions,
// and others beside them.
func TestTorture(t *testing.T) {
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	t.Logf("-robustness.seed=%d -robustness.duration=%v", *seed, *duration)
	etcd, sentinel := etcdtest.Start(t, 3), redistest.StartSentinel(t)
	var all []*nodetest.Node
	var stores []claim.Store
	var links [][]*redistest.Proxy
	for i := range nodes {
		var link []*redistest.Proxy
		var addrs []string
		for _, member := range etcd.Endpoints() {
			p := redistest.NewProxy(t, member)
			link, addrs = append(link, p), append(addrs, p.Addr())
		}
		n := nodetest.Start(t, nodetest.Options{
			Client: etcd.Client(addrs...), Watch: etcd.Client(addrs...), Tell: etcd.Client(addrs...),
			Redis:  rediscache.Server{Mode: rediscache.Sentinel, Addrs: sentinel.Addrs(), MasterName: redistest.MasterName},
			Memory: int64(i) << 16, // the first has none, so that Redis is asked as often as ever
		})
		all, stores, links = append(all, n), append(stores, n), append(links, link)
	}
	truth := feedtest.Record(t, etcd.Client(), namespace)
	var streams []*stream
	for _, n := range all {
		streams = append(streams, follow(t, n, truth))
	}
	var servers []*sdktest.Server
	for _, n := range all {
		servers = append(servers, sdktest.ServeNode(t, n))
	}
	var ways [][]*redistest.Proxy // by client, then by node
	for i := range clients {
		var way []*redistest.Proxy
		var addrs []string
		for _, s := range servers {
			p := redistest.NewProxy(t, s.Addr())
			way, addrs = append(way, p), append(addrs, p.Addr())
		}
		ways = append(ways, way)
		stores = append(stores, sdktest.Open(t, addrs, dualcheck.WithStreams(1+i%2)))
	}
	c := newCluster(keys, *seed, stores...)

	// Calls end with enough, chaos before them, and the judge last of all.
	enough, stop := context.WithCancel(context.Background())
	var running, judging sync.WaitGroup
	judged := make(chan struct{})
	end := sync.OnceFunc(func() {
		stop()
		running.Wait()
		close(judged)
		judging.Wait()
	})
	t.Cleanup(end)
	for i := range workers {
		running.Go(func() { c.caller("w", i).through(i % clients).serve(enough) })
	}
	for i := range insiders {
		running.Go(func() { c.caller("in", i).serve(enough) })
	}
	for i := range operators {
		running.Go(func() { c.caller("op", i).operate(enough) })
	}
	for i := range thieves {
		h := &thief{caller: c.caller("thief", i), redis: sentinel.Client()}
		running.Go(func() { h.tamper(enough) })
	}
	running.Go(func() { c.caller("links", 0).breakLinks(enough, t, etcd, links) })
	for i := range 4 {
		running.Go(func() { c.caller("ways", i).breakWays(enough, ways[2*i:2*i+2]) })
	}
	running.Go(func() { c.caller("servers", 0).breakServers(enough, t, servers) })
	running.Go(func() {
		for pause(enough, 250*time.Millisecond) {
			took := time.Since(c.start)
			if took > *duration && (len(c.stats.missing()) == 0 || took > *duration+extra) {
				stop()
			}
		}
	})
	judging.Go(func() {
		for {
			for _, b := range c.books {
				b.judge()
			}
			if c.wrong() != nil {
				stop()
			}
			select {
			case <-judged:
				return
			case <-time.After(time.Second):
			}
		}
	})
	c.caller("redis", 0).breakRedis(enough, sentinel)
	end()
	took := time.Since(c.start)

	if c.wrong() == nil {
		c.lookAtAll()
	}
	for _, b := range c.books {
		b.judge()
	}
	truth.Await(t, etcd.Client())
	for i, s := range streams { // G9
		s.end(t)
		t.Logf("stream %d: %d events, %d deletes, %d resyncs", i, s.Events, s.Deletes, s.Resyncs)
		for _, err := range s.Finish("") {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	t.Logf("%s", c.stats.figures(took))
	for i, n := range all {
		t.Logf("node %d: %v", i, n.Seen)
	}
	c.report(t)
	if none := c.stats.missing(); len(none) > 0 && !t.Failed() {
		t.Errorf("nothing was tested: never happened %q", none)
	}
}

// lookAtAll asks each node for each key once more, and by each client.
func (c *cluster) lookAtAll() {
	w := c.caller("last", 0)
	for _, key := range c.keys {
		for w.by = range c.stores {
			w.get(context.Background(), key)
			w.begin(context.Background(), key, "last@last", time.Second)
		}
	}
}

// wrong returns a key whose promises were not kept.
func (c *cluster) wrong() *book {
	for _, key := range c.keys {
		b := c.books[key]
		b.mu.Lock()
		found := len(b.wrong) > 0
		b.mu.Unlock()
		if found {
			return b
		}
	}
	return nil
}

// report fails the test for each promise that was not kept, and shows how that came
// for the first key.
func (c *cluster) report(t testing.TB) {
	t.Helper()
	shown := false
	for _, key := range c.keys {
		b := c.books[key]
		for _, v := range b.wrong {
			t.Errorf("%s: %s\n%v", key, v.what, v.by)
		}
		if len(b.wrong) > 0 && !shown {
			shown = true
			t.Logf("all of %s around it (seconds since the start; caller, node, call, answer):\n%s", key, b.show(b.wrong[0].by))
		}
	}
}
