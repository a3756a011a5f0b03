package etcdtxn_test

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
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/watch"
)

// H03, H21: nobody ticks for a minute: time stands still, no claim lapses in the
// gap; when ticks resume it goes on from where it stood.
func TestH03NoTickForAMinute(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	client := c.Client()
	ctx, cancel := context.WithCancel(context.Background())
	var skipped atomic.Int64 // what the fake clock is ahead of the real one
	start := time.Now()
	mono := func() time.Duration { return time.Since(start) + time.Duration(skipped.Load()) }
	f := watch.New(watch.Config{Client: client, Default: policy.Namespace{}.Claim(), Monotonic: mono})
	if err := etcdtxn.Bootstrap(ctx, client); err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() { report(t, f.Run(ctx)) })
	defer running.Wait()
	defer cancel()
	n := &node{Store: etcdtxn.New(etcdtxn.Config{Client: client, View: f, Monotonic: mono}), client: client, follower: f}
	eventually(t, 10*time.Second, "the first list", func() error {
		if tick, _, _ := f.Tick(); tick.Version == 0 {
			return errors.New("not listed")
		}
		return nil
	})
	ticks(t, n, 2)
	a := n.begin(t, claim.BeginRequest{Lease: seconds(1)})
	before, err := f.View()
	if err != nil {
		t.Fatal(err)
	}
	skipped.Add(int64(time.Minute))
	after, err := f.View()
	if err != nil {
		t.Fatal(err)
	}
	if moved := after.Now.Sub(before.Now); moved > claim.TickEvery {
		t.Errorf("time moved by %v though nobody ticked", moved)
	}
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress)
	// A ticker that comes back after the minute moves the clock by 0.6 s at most.
	from, since, _ := f.Tick()
	if since < time.Minute {
		t.Fatalf("the fake clock did not move: %v", since)
	}
	if err := etcdtxn.Tick(ctx, client, from, since); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "the tick", func() error {
		if now, _, _ := f.Tick(); now.Version == from.Version {
			return errors.New("not seen")
		}
		return nil
	})
	if now, _, _ := f.Tick(); now.Time.Sub(from.Time) > 600*time.Millisecond {
		t.Errorf("one tick moved the clock by %v", now.Time.Sub(from.Time))
	}
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress)
	ticks(t, n, 3)
	b := n.begin(t, claim.BeginRequest{})
	want(t, b, claim.First)
	if b.Claim.Attempt != a.Claim.Attempt+1 {
		t.Errorf("attempt %d", b.Claim.Attempt)
	}
}

// H03: two tickers at once, one of them with a wild clock: the clock never goes back
// and no tick moves it by more than 0.6 s.
func TestH03TwoTickersAndAWildClock(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{keeps: true})
	ctx := within(t, 30*time.Second)
	steps := n.client.Watch(ctx, layout.Tick)
	wild := 0
	last, _, _ := n.follower.Tick()
	asleep := last
	for seen := 0; seen < 12; {
		from, _, _ := other.follower.Tick()
		if err := etcdtxn.Tick(ctx, other.client, from, time.Hour); err != nil {
			t.Fatal(err)
		}
		wild++
		resp, ok := <-steps
		if !ok || resp.Err() != nil {
			t.Fatalf("watch: %v", resp.Err())
		}
		for _, e := range resp.Events {
			got, err := layout.See(claim.Seen{}, []*mvccKV{e.Kv})
			if err != nil {
				t.Fatal(err)
			}
			if step := got.Tick.Time.Sub(last.Time); last.Version+1 == got.Tick.Version && (step < 500*time.Millisecond || step > 600*time.Millisecond) {
				t.Errorf("tick %d moved the clock by %v", got.Tick.Version, step)
			}
			last = got.Tick
			seen++
		}
	}
	if wild == 0 {
		t.Error("the wild ticker did not tick")
	}
	// A ticker that was paused meanwhile wakes and writes what it was about to.
	if err := etcdtxn.Tick(ctx, n.client, asleep, time.Hour); err != nil {
		t.Fatal(err)
	}
	resp, err := n.client.Get(ctx, layout.Tick)
	if err != nil {
		t.Fatal(err)
	}
	if now, err := layout.See(claim.Seen{}, resp.Kvs); err != nil || now.Tick.Time < last.Time {
		t.Errorf("the clock went back from %+v to %+v, %v", last, now.Tick, err)
	}
}

// H40: the node whose business the tick is dies without a word; the others, and the
// same one restarted, tick within seconds though its registration still stands.
func TestH40TickerKilled(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	client := c.Client()
	// A registration that nobody renews, older than any other, is what a killed node
	// leaves behind.
	lease, err := client.Grant(within(t, 5*time.Second), 60)
	if err != nil {
		t.Fatal(err)
	}
	ghost, err := layout.EncodeNode(layout.Node{ID: "ghost"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Put(within(t, 5*time.Second), layout.NodeOf("ghost"), ghost, clientv3.WithLease(lease.ID)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	alive := startNode(t, c.Client(), options{keeps: true})
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("ready after %v", took)
	}
	if alive.follower.FirstNode() != "ghost" {
		t.Errorf("the first node is %q", alive.follower.FirstNode())
	}
	n := startNode(t, client, options{})
	want(t, n.begin(t, claim.BeginRequest{Lease: seconds(1)}), claim.First)
	n.passes(t, 1600*time.Millisecond)
	want(t, n.begin(t, claim.BeginRequest{}), claim.First)
}

// Wall clocks ten minutes apart: nothing changes.
func TestWallClocksTenMinutesApart(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	n := startNode(t, c.Client(), options{keeps: true})
	ahead := startNode(t, c.Client(), options{wall: func() time.Time { return time.Now().Add(10 * time.Minute) }})
	n.put(t, policy.Policy{ResultRetention: seconds(2), KeyRetention: seconds(60)})
	a := n.begin(t, claim.BeginRequest{Lease: seconds(2)})
	want(t, ahead.begin(t, claim.BeginRequest{}), claim.InProgress)
	ahead.passes(t, 2600*time.Millisecond)
	b := ahead.begin(t, claim.BeginRequest{Lease: seconds(2)})
	want(t, b, claim.First)
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress)
	_, err := n.Finish(within(t, 10*time.Second), completion("k", a.Claim.Token, "late"))
	wantReason(t, err, claim.ClaimLost)
	ahead.complete(t, "k", b.Claim.Token, "done")
	want(t, n.begin(t, claim.BeginRequest{}), claim.Replay)
	n.passes(t, 2600*time.Millisecond)
	want(t, n.begin(t, claim.BeginRequest{}), claim.Expired)
	want(t, ahead.begin(t, claim.BeginRequest{}), claim.Expired)
}

// H02: the node's watch is seconds behind though ticks still come: what it decides
// by the old clock is refused, it catches up, and the claim's lease is true.
func TestH02WatchLaggingBySeconds(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	keeper := startNode(t, c.Client(), options{keeps: true})
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	lagging := startLagging(t, c, p)
	p.SwallowAnswers() // the watch hears nothing more
	ticks(t, keeper, claim.TickWindow+2)
	a := lagging.begin(t, claim.BeginRequest{Lease: seconds(5)})
	want(t, a, claim.First)
	if lagging.seen.refusals() == 0 {
		t.Error("no write was refused: the watch did not lag")
	}
	now, err := keeper.follower.View()
	if err != nil {
		t.Fatal(err)
	}
	rec, err := raw(keeper, "k")
	if err != nil {
		t.Fatal(err)
	}
	// What is told may exceed what is left by this clock, but not what is left until
	// any clock counts it as lapsed.
	if left := rec.LeaseUntil.Sub(now.Now); a.Claim.Left > left+claim.Grace || left < 4*time.Second {
		t.Errorf("told %v, and %v is left", a.Claim.Left, left)
	}
}

// H33: the node's clock is behind by less than the window, so its write commits with
// little of the lease left: the deadline is set anew on that very claim.
func TestH33LittleLeaseLeftIsSetAnew(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	keeper := startNode(t, c.Client(), options{keeps: true})
	keeper.put(t, policy.Policy{Takeover: policy.NeverTakeOver})
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	lagging := startLagging(t, c, p)
	p.SwallowAnswers()
	ticks(t, keeper, claim.TickWindow-4) // 3 s, within the window
	a := lagging.begin(t, claim.BeginRequest{Lease: seconds(3)})
	want(t, a, claim.First)
	if a.Claim.Left < 1500*time.Millisecond {
		t.Errorf("told of a claim with %v left", a.Claim.Left)
	}
	rec, err := raw(keeper, "k")
	if err != nil {
		t.Fatal(err)
	}
	if rec.ClaimRevision == 0 || rec.Attempt != 1 {
		t.Errorf("record %+v: the deadline was not set anew on that claim", rec)
	}
	if got := keeper.begin(t, claim.BeginRequest{}); got.Verdict != claim.InProgress {
		t.Errorf("verdict %d", got.Verdict)
	}
	lagging.complete(t, "k", a.Claim.Token, "paid")
}

// startLagging starts a node that watches through the proxy; it reads and writes
// directly.
func startLagging(t *testing.T, c *etcdtest.Cluster, p *etcdtest.Proxy) *node {
	t.Helper()
	return startNode(t, c.Client(), options{watchOnly: c.Client(p.Addr())})
}

// C68: the watch hears nothing and says nothing: the node notices and lists anew.
func TestC68SilentWatchIsReplaced(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	keeper := startNode(t, c.Client(), options{keeps: true})
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	n := startLagging(t, c, p)
	stuck := n.follower.Status().Applied
	p.SwallowAnswers()
	eventually(t, 15*time.Second, "a fresh list", func() error {
		if n.follower.Status().Applied <= stuck+2 {
			return errors.New("still stuck")
		}
		return nil
	})
	p.Heal()
	keeper.put(t, policy.Policy{MaxAttempts: 7})
	eventually(t, 15*time.Second, "the watch to live again", func() error {
		v, err := n.follower.View()
		if err == nil && v.Policies["ns"].MaxAttempts != 7 {
			err = fmt.Errorf("policy %+v", v.Policies["ns"])
		}
		return err
	})
}
