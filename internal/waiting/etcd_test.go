package waiting_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/waiting"
)

// traffic counts what a client sends to etcd.
type traffic struct{ reads, writes atomic.Int64 }

func (c *traffic) count(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if txn, ok := req.(*pb.TxnRequest); ok && len(txn.Compare) == 0 {
		c.reads.Add(1)
	} else {
		c.writes.Add(1)
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}

// node is a node whose claims have a client of their own, all of whose calls are counted;
// another ticks.
type node struct {
	*nodetest.Node
	sent  *traffic
	seen  *seen // of the newest room
	other *nodetest.Node
}

func startNode(t *testing.T) *node {
	t.Helper()
	c := etcdtest.Start(t, 1)
	n := &node{sent: &traffic{}, other: nodetest.Start(t, nodetest.Options{Client: c.Client()})}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: c.Endpoints(), DialTimeout: 5 * time.Second, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(n.sent.count)},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	n.Node = nodetest.Start(t, nodetest.Options{Client: client, Watch: c.Client(), Tell: c.Client(), Idle: true})
	return n
}

// room is one over the node, all in.
func (n *node) room(t *testing.T, changes waiting.Changes) *waiting.Room {
	n.seen = &seen{causes: map[string]int{}}
	r := waiting.New(waiting.Config{Store: n.Store, Revisions: n.Behind.Revisions, Changes: changes, Observe: n.seen})
	t.Cleanup(r.Close)
	return r
}

func (n *node) begin(t *testing.T, req *claim.BeginRequest, want claim.Verdict) claim.Answer {
	t.Helper()
	a, err := n.Begin(nodetest.Within(t, 20*time.Second), req)
	if err != nil || a.Verdict != want {
		t.Fatalf("told %d, %v, want %d", a.Verdict, err, want)
	}
	return a
}

// held has a key held for long.
func (n *node) held(t *testing.T, key string) claim.Answer {
	t.Helper()
	req, lease := request(key, "holder"), time.Hour
	req.Lease = &lease
	return n.begin(t, req, claim.First)
}

// crowd are many who wait.
type crowd struct {
	end    sync.WaitGroup
	joined atomic.Int64
	mu     sync.Mutex
	told   []told
	of     []int // whose it is
}

// wait has number i wait.
func (c *crowd) wait(t *testing.T, room *waiting.Room, i int, req *claim.BeginRequest, last claim.Answer) {
	c.end.Go(func() {
		c.joined.Add(1)
		a, err := room.Wait(t.Context(), req, last, nil)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.told, c.of = append(c.told, told{a, err, time.Now()}), append(c.of, i)
	})
}

// check checks what all were told, and returns when the last was.
func (c *crowd) check(t *testing.T, want claim.Verdict) (last time.Time) {
	t.Helper()
	for i, got := range c.told {
		if got.err != nil || got.Verdict != want {
			t.Fatalf("number %d was told %d, %v, want %d", c.of[i], got.Verdict, got.err, want)
		}
		if got.at.After(last) {
			last = got.at
		}
	}
	return last
}

// C09: ten thousand who wait for one key cost etcd a read a second, and one when it is
// finished, which tells them all.
func TestC09TenThousandWaitForOneKey(t *testing.T) {
	for name, polls := range map[string]bool{"changes are told": false, "they are not": true} {
		t.Run(name, func(t *testing.T) {
			const many = 10_000
			n := startNode(t)
			changed := newChanges()
			changed.live.Store(!polls)
			room := n.room(t, changed)
			if polls {
				room = n.room(t, nil)
			}
			first := n.held(t, "k")
			last := n.begin(t, request("k", "b"), claim.InProgress)
			if last.Guard == 0 || last.LapsesIn < 50*time.Minute {
				t.Fatalf("%+v", last)
			}
			reads, writes := n.sent.reads.Load(), n.sent.writes.Load()
			var waiters crowd
			began := time.Now()
			for i := range many {
				waiters.wait(t, room, i, request("k", fmt.Sprint(i)), last)
			}
			pass(3200 * time.Millisecond)
			seconds := int64(time.Since(began) / time.Second)
			most := seconds + 2 // a first look, and one of the second that has begun
			if polls {
				most = 2*seconds + 3 // after what each answer said: half a second at least
			}
			if got := n.sent.reads.Load() - reads; got > most || got < 2 {
				t.Errorf("%d reads in %v, want %d at most", got, time.Since(began), most)
			} else {
				t.Logf("%d reads in %v", got, time.Since(began))
			}
			if _, err := n.Finish(t.Context(), &claim.FinishRequest{Namespace: "a", Key: "k", Token: first.Claim.Token, Result: &claim.Result{Body: []byte("done")}}); err != nil {
				t.Fatal(err)
			}
			reads = n.sent.reads.Load()
			done := time.Now()
			changed.of("k")
			waiters.end.Wait()
			late := waiters.check(t, claim.Replay).Sub(done)
			t.Logf("the last of %d was told after %v", many, late)
			if late > 3*time.Second || !polls && n.seen.of("change") != 1 {
				t.Errorf("the last was told after %v, %v", late, n.seen.causes)
			}
			if got := n.sent.reads.Load() - reads; got > 3 {
				t.Errorf("%d reads told them", got)
			}
			if got := n.sent.writes.Load() - writes; got != 1 {
				t.Errorf("%d writes, and one Complete", got)
			}
		})
	}
}

// C09: a key that is free again is given to one, who came first, by one write, and the
// others wait on.
func TestC09OneOfTenThousandIsGivenTheKey(t *testing.T) {
	const many = 10_000
	n := startNode(t)
	changed := newChanges()
	room := n.room(t, changed)
	first := n.held(t, "k")
	last := n.begin(t, request("k", "b"), claim.InProgress)
	var waiters crowd
	begin := func(i int) {
		req := request("k", fmt.Sprint(i))
		req.Wait = 2500 * time.Millisecond
		waiters.wait(t, room, i, req, last)
	}
	begin(0)
	nodetest.Eventually(t, 5*time.Second, "the first to wait", func() error {
		if changed.following() == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	for i := 1; i < many; i++ {
		begin(i)
	}
	pass(time.Second)
	writes := n.sent.writes.Load()
	if _, err := n.Finish(t.Context(), &claim.FinishRequest{Namespace: "a", Key: "k", Token: first.Claim.Token, Failure: &claim.Failure{Class: claim.Retryable}}); err != nil {
		t.Fatal(err)
	}
	changed.of("k")
	waiters.end.Wait()
	given := 0
	for i, got := range waiters.told {
		switch {
		case got.err != nil:
			t.Fatal(got.err)
		case got.Verdict == claim.First:
			given++
			if waiters.of[i] != 0 || got.Claim.Attempt != 2 || got.Claim.Previous != claim.PreviousReleased {
				t.Errorf("number %d was given %+v", waiters.of[i], got.Claim)
			}
		case got.Verdict != claim.InProgress:
			t.Fatalf("told %d", got.Verdict)
		}
	}
	if got := n.sent.writes.Load() - writes; given != 1 || got != 2 {
		t.Errorf("%d were given the claim, by %d writes", given, got-1)
	}
}

// C09: ten thousand keys that are waited for cost a read a second for each hundred.
func TestC09TenThousandKeysAreWaitedFor(t *testing.T) {
	const many = 10_000
	n := startNode(t)
	room := n.room(t, newChanges())
	lasts := make([]claim.Answer, many)
	tokens := make([]string, many)
	key := func(i int) string { return fmt.Sprint("k", i) }
	each := func(f func(i int)) {
		var all sync.WaitGroup
		for c := range 200 {
			all.Go(func() {
				for i := c; i < many; i += 200 {
					f(i)
				}
			})
		}
		all.Wait()
	}
	each(func(i int) {
		req, lease := request(key(i), "holder"), time.Hour
		req.Lease = &lease
		a, err := n.Begin(t.Context(), req)
		if err != nil || a.Verdict != claim.First {
			t.Errorf("%+v %v", a, err)
			return
		}
		tokens[i] = a.Claim.Token
	})
	each(func(i int) {
		var err error
		if lasts[i], err = n.Begin(t.Context(), request(key(i), "b")); err != nil || lasts[i].Verdict != claim.InProgress {
			t.Errorf("%+v %v", lasts[i], err)
		}
	})
	if t.Failed() {
		return
	}
	reads, writes := n.sent.reads.Load(), n.sent.writes.Load()
	began := time.Now()
	var waiters crowd
	for i := range many {
		waiters.wait(t, room, i, request(key(i), fmt.Sprint(i)), lasts[i])
	}
	const seconds = 3
	pass(seconds * time.Second)
	took := time.Since(began)
	got := n.sent.reads.Load() - reads
	t.Logf("%d reads in %v", got, took)
	// A first look at each, and then one a second.
	if most := int64((took.Seconds()+1)*many/100) + 20; got > most || got < many/100 {
		t.Errorf("%d reads in %v, want %d at most", got, took, most)
	}
	if got := n.sent.writes.Load() - writes; got != 0 {
		t.Errorf("%d writes", got)
	}
	// All are finished, and nobody tells: the looks find it.
	each(func(i int) {
		if _, err := n.Finish(t.Context(), &claim.FinishRequest{Namespace: "a", Key: key(i), Token: tokens[i], Result: &claim.Result{}}); err != nil {
			t.Error(err)
		}
	})
	done := time.Now()
	waiters.end.Wait()
	late := waiters.check(t, claim.Replay).Sub(done)
	t.Logf("the last was told %v after the last finish", late)
	if late > 10*time.Second {
		t.Errorf("the last was told after %v", late)
	}
}

// With the feed that a node has: who waits is told as soon as another node has stored the
// finish, key after key.
func TestTheFeedWakesWhoWaits(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	room := n.room(t, n.Feed)
	// Somebody waits all the time, and the feed is live.
	n.held(t, "other")
	var other crowd
	req := request("other", "b")
	req.Wait = 20 * time.Second
	otherCtx, enough := context.WithCancel(t.Context())
	other.end.Go(func() { _, _ = room.Wait(otherCtx, req, n.begin(t, req, claim.InProgress), nil) })
	defer func() { enough(); other.end.Wait() }()
	nodetest.Eventually(t, 10*time.Second, "the feed to be live", func() error {
		if !n.Feed.Live() {
			return errors.New("it is not")
		}
		return nil
	})
	const keys, each = 30, 50
	var late []time.Duration
	for i := range keys {
		key := fmt.Sprint("k", i)
		first := n.held(t, key)
		last := n.begin(t, request(key, "b"), claim.InProgress)
		var waiters crowd
		for w := range each {
			waiters.wait(t, room, w, request(key, fmt.Sprint(w)), last)
		}
		nodetest.Eventually(t, 10*time.Second, "them to wait", func() error {
			if waiters.joined.Load() < each {
				return errors.New("they do not")
			}
			return nil
		})
		pass(20 * time.Millisecond)
		if _, err := n.other.Finish(t.Context(), &claim.FinishRequest{Namespace: "a", Key: key, Token: first.Claim.Token, Result: &claim.Result{}}); err != nil {
			t.Fatal(err)
		}
		done := time.Now()
		waiters.end.Wait()
		late = append(late, waiters.check(t, claim.Replay).Sub(done))
	}
	slices.Sort(late)
	t.Logf("the last of %d was told %v after the finish was answered in the median, %v at most", each, late[keys/2], late[keys-1])
	if late[keys/2] > 300*time.Millisecond {
		t.Errorf("told %v late in the median", late[keys/2])
	}
}

// H24, and the lease's end on etcd's clock.
func TestALeasesEndInEtcd(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	room := n.room(t, newChanges())
	req, lease := request("k", "holder"), 2*time.Second
	req.Lease = &lease
	n.begin(t, req, claim.First)
	began := time.Now()
	last := n.begin(t, request("k", "b"), claim.InProgress)
	a, err := room.Wait(t.Context(), request("k", "b"), last, nil)
	if err != nil || a.Verdict != claim.First || a.Claim.Previous != claim.PreviousLapsed {
		t.Fatalf("%+v %v", a, err)
	}
	// Cluster time is at most half a second behind.
	if took := time.Since(began); took < lease || took > lease+claim.Grace+1500*time.Millisecond {
		t.Errorf("given after %v", took)
	}
}

// A policy that changes is obeyed within a second, though the key does not change: the looks
// read the guard as well.
func TestAPolicyThatChangesIsAskedFor(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	room := n.room(t, newChanges())
	n.held(t, "k")
	last := n.begin(t, request("k", "b"), claim.InProgress)
	end := make(chan told, 1)
	go func() {
		a, err := room.Wait(t.Context(), request("k", "b"), last, nil)
		end <- told{a, err, time.Now()}
	}()
	pass(1500 * time.Millisecond)
	if _, err := n.Behind.PutNamespace(t.Context(), policy.Namespace{Name: "a", Policy: policy.Policy{RequireFingerprint: true}}); err != nil {
		t.Fatal(err)
	}
	put := time.Now()
	got := <-end
	if claim.ReasonOf(got.err) != claim.FingerprintRequired || got.at.Sub(put) > 2*time.Second {
		t.Errorf("told %d, %v, %v later", got.Verdict, got.err, got.at.Sub(put))
	}
}

// Revisions are of many keys at once, within what etcd allows a transaction, and hold for
// keys that are not there.
func TestRevisions(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	n.Behind.Fit(16)
	var keys []string
	for i := range 40 {
		keys = append(keys, fmt.Sprint("/test/", i))
	}
	reads := n.sent.reads.Load()
	revisions, err := n.Behind.Revisions(t.Context(), keys)
	if err != nil || len(revisions) != 40 || revisions[7] != 0 || n.sent.reads.Load()-reads != 3 {
		t.Errorf("%v %v, by %d reads", revisions, err, n.sent.reads.Load()-reads)
	}
	n.held(t, "k")
	found, err := n.Get(t.Context(), &claim.GetRequest{Namespace: "a", Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	keys[23] = layout.NameOf("a", "k").Key
	revisions, err = n.Behind.Revisions(t.Context(), keys)
	if err != nil || revisions[23] != found.Record.Revision || revisions[22] != 0 {
		t.Errorf("%v %v, want %d", revisions, err, found.Record.Revision)
	}
	// What etcd allows was not known, and is once it has refused.
	n.Behind.Fit(1 << 10)
	for len(keys) < 200 {
		keys = append(keys, keys...)
	}
	nodetest.Eventually(t, 5*time.Second, "etcd to take it", func() error {
		_, err := n.Behind.Revisions(t.Context(), keys)
		return err
	})
	if none, err := n.Behind.Revisions(t.Context(), nil); err != nil || len(none) != 0 {
		t.Errorf("%v %v", none, err)
	}
}
