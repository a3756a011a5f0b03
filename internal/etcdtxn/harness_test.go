package etcdtxn_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/watch"
)

func TestMain(m *testing.M) { os.Exit(etcdtest.Main(m)) }

// node is one dualcheck server without its face: what follows, what keeps, what
// decides.
type node struct {
	*etcdtxn.Store
	id       string
	client   *clientv3.Client
	follower *watch.Follower
	seen     *counter
	stop     func()
}

type options struct {
	// keeps: the node registers and ticks.
	keeps bool
	// byHand: nobody ticks but the test.
	byHand bool
	// watch is where the follower watches and reads; nil: the node's own client.
	watch *clientv3.Client
	// watchOnly is where the follower watches; it reads by watch.
	watchOnly        *clientv3.Client
	view             func(etcdtxn.Viewer) etcdtxn.Viewer
	wall             func() time.Time
	mono             func() time.Duration
	refuseUndeclared bool
	waitingMost      int
}

var nodes atomic.Int64

// startNode starts a node and waits until it is ready.
func startNode(t testing.TB, client *clientv3.Client, o options) *node {
	t.Helper()
	n := &node{id: fmt.Sprintf("n%d", nodes.Add(1)), client: client, seen: &counter{}}
	if o.watch == nil {
		o.watch = client
	}
	n.follower = watch.New(watch.Config{Client: o.watch, WatchClient: o.watchOnly, Default: policy.Namespace{}.Claim(), RefuseUndeclared: o.refuseUndeclared})
	var view etcdtxn.Viewer = n.follower
	if o.view != nil {
		view = o.view(view)
	}
	n.Store = etcdtxn.New(etcdtxn.Config{Client: client, View: view, Observe: n.seen, WaitingMost: o.waitingMost, Wall: o.wall, Monotonic: o.mono})
	ctx, cancel := context.WithCancel(context.Background())
	if err := etcdtxn.Bootstrap(within(t, 30*time.Second), client); err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() { report(t, n.follower.Run(ctx)) })
	if o.keeps {
		k := etcdtxn.NewKeeper(etcdtxn.KeeperConfig{Client: client, Follower: n.follower, Node: layout.Node{ID: n.id, StartedAt: time.Now()}})
		running.Go(func() { report(t, k.Run(ctx)) })
	}
	var once sync.Once
	n.stop = func() {
		once.Do(func() {
			if err := n.Close(within(t, 20*time.Second)); err != nil {
				t.Errorf("close the store: %v", err)
			}
			cancel()
			running.Wait()
		})
	}
	t.Cleanup(n.stop)
	if o.byHand {
		n.ticksByHand(t)
	}
	n.awaitReady(t)
	return n
}

func report(t testing.TB, err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("run: %v", err)
	}
}

// ticksByHand moves the clock until the node has seen it move.
func (n *node) ticksByHand(t testing.TB) {
	t.Helper()
	eventually(t, 20*time.Second, "the first list", func() error {
		if tick, _, _ := n.follower.Tick(); tick.Version == 0 {
			return errors.New("not listed")
		}
		return nil
	})
	ticks(t, n, 2)
}

func (n *node) awaitReady(t testing.TB) {
	t.Helper()
	eventually(t, 30*time.Second, "node ready", func() error { return n.follower.Ready() })
}

// one starts an etcd of one member and a node that keeps it.
func one(t testing.TB) (*etcdtest.Cluster, *node) {
	t.Helper()
	c := etcdtest.Start(t, 1)
	return c, startNode(t, c.Client(), options{keeps: true})
}

func within(t testing.TB, d time.Duration) context.Context { return nodetest.Within(t, d) }

// eventually asks until there is no error.
func eventually(t testing.TB, d time.Duration, what string, ask func() error) {
	t.Helper()
	nodetest.Eventually(t, d, what, ask)
}

// passes waits until so much cluster time has passed on the node's clock.
func (n *node) passes(t testing.TB, d time.Duration) {
	t.Helper()
	nodetest.Pass(t, n.follower, d)
}

func (n *node) begin(t testing.TB, req claim.BeginRequest) claim.Answer {
	t.Helper()
	a, err := n.Begin(within(t, 20*time.Second), fill(&req))
	if err != nil {
		t.Fatalf("begin: %v", err)
	}
	return a
}

func (n *node) complete(t testing.TB, key, token, body string) claim.Found {
	t.Helper()
	f, err := n.Finish(within(t, 20*time.Second), completion(key, token, body))
	if err != nil {
		t.Fatalf("complete: %v", err)
	}
	return f
}

func (n *node) put(t testing.TB, p policy.Policy) {
	t.Helper()
	if _, err := n.PutNamespace(within(t, 20*time.Second), policy.Namespace{Name: "ns", Policy: p}); err != nil {
		t.Fatalf("put namespace: %v", err)
	}
}

// knowsPolicy waits until the node follows a policy of the namespace.
func (n *node) knowsPolicy(t testing.TB, ok func(claim.Policy) bool) {
	t.Helper()
	eventually(t, 10*time.Second, "the policy to be followed", func() error {
		v, err := n.follower.View()
		if err == nil && !ok(v.Policies["ns"]) {
			err = fmt.Errorf("policy %+v", v.Policies["ns"])
		}
		return err
	})
}

func fill(req *claim.BeginRequest) *claim.BeginRequest {
	if req.Namespace == "" {
		req.Namespace = "ns"
	}
	if req.Key == "" {
		req.Key = "k"
	}
	return req
}

func completion(key, token, body string) *claim.FinishRequest {
	return &claim.FinishRequest{Namespace: "ns", Key: key, Token: token, Result: &claim.Result{Code: 200, Body: []byte(body)}}
}

func failure(key, token string, class claim.FailureClass) *claim.FinishRequest {
	return &claim.FinishRequest{Namespace: "ns", Key: key, Token: token, Failure: &claim.Failure{Class: class, Message: "m"}}
}

func want(t testing.TB, a claim.Answer, v claim.Verdict) {
	t.Helper()
	if a.Verdict != v {
		t.Fatalf("verdict %d (%s), want %d", a.Verdict, a.Detail, v)
	}
}

func wantReason(t testing.TB, err error, reason claim.Reason) {
	t.Helper()
	if claim.ReasonOf(err) != reason {
		t.Fatalf("error %v, want %s", err, reason)
	}
}

func seconds(n int) *time.Duration {
	d := time.Duration(n) * time.Second
	return &d
}

// counter is an Observer that counts.
type counter struct {
	mu      sync.Mutex
	calls   map[string]int
	settled int
	refused map[string]int
	undated int
	crowded int
	behind  int
	// batches are the members of each transaction, by kind.
	batches map[string][]int
	// afterRead is run once, when etcd has next answered a read.
	afterRead func()
}

func (c *counter) Call(kind, outcome string, _ time.Duration) {
	var next func()
	c.mu.Lock()
	if c.calls == nil {
		c.calls = map[string]int{}
	}
	c.calls[kind+" "+outcome]++
	if kind == "read" && outcome == "ok" {
		next, c.afterRead = c.afterRead, nil
	}
	c.mu.Unlock()
	if next != nil {
		next()
	}
}

// onceRead arms what is run between the next read and what it leads to.
func (c *counter) onceRead(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.afterRead = f
}

func (c *counter) Sent(kind string, members int, _ time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.batches == nil {
		c.batches = map[string][]int{}
	}
	c.batches[kind] = append(c.batches[kind], members)
}

func (c *counter) Landed(string) {}

func (c *counter) Behind() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.behind++
}

// waitedBehind is how many writes waited for another of their key.
func (c *counter) waitedBehind() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.behind
}

func (c *counter) Crowded(string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.crowded++
}

// sent returns how many members each transaction of a kind had.
func (c *counter) sent(kind string) []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.batches[kind])
}

func (c *counter) Settled(string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settled++
}

func (c *counter) Refused(cause string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refused == nil {
		c.refused = map[string]int{}
	}
	c.refused[cause]++
}

func (c *counter) Undated() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.undated++
}

// count returns how many calls of a kind ended so.
func (c *counter) count(kind, outcome string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls[kind+" "+outcome]
}

func (c *counter) refusals() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.refused["guard"] + c.refused["tick"]
}

func (c *counter) overloads() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.crowded
}

func (c *counter) ambiguities() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.settled
}

// failpoint is a wall clock that runs something once, when it is next looked at:
// between a decision and its write.
type failpoint struct {
	mu sync.Mutex
	f  func()
}

func (p *failpoint) arm(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.f = f
}

func (p *failpoint) wall() time.Time {
	p.mu.Lock()
	f := p.f
	p.f = nil
	p.mu.Unlock()
	if f != nil {
		f()
	}
	return time.Now()
}
