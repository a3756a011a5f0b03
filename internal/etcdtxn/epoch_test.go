package etcdtxn_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

const fenceStep = 1 << 40

func (n *node) view(t testing.TB) claim.View {
	t.Helper()
	v, err := n.follower.View()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// committed waits until the node has been told of a commit of this kind, and returns a
// moment before it was.
func (n *node) committed(t testing.TB, kind string) (before time.Time) {
	t.Helper()
	before = time.Now()
	eventually(t, 10*time.Second, "the commit", func() error {
		at := time.Now()
		if n.seen.count(kind, "ok") == 0 {
			before = at
			return errors.New("not yet")
		}
		return nil
	})
	return before
}

// raised waits until the node follows another epoch than that one.
func (n *node) raised(t testing.TB, old claim.ID) claim.View {
	t.Helper()
	var v claim.View
	eventually(t, 20*time.Second, "another epoch", func() (err error) {
		if v, err = n.follower.View(); err == nil && v.Epoch == old {
			err = errors.New("the old one")
		}
		return err
	})
	return v
}

type raising struct {
	id  claim.ID
	err error
	at  time.Time
}

func (n *node) raise(ctx context.Context) <-chan raising {
	done := make(chan raising, 1)
	go func() {
		id, err := n.RaiseEpoch(ctx, "test")
		done <- raising{id, err, time.Now()}
	}()
	return done
}

// The epoch and the guard move in one revision; the answer comes when no node acts by
// the old epoch; fences grow over it; a claim given before is finished as any other.
func TestRaiseEpoch(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	before := n.view(t)
	old := n.begin(t, claim.BeginRequest{Key: "old"})
	elsewhere := n.begin(t, claim.BeginRequest{Key: "elsewhere"})
	done := n.raise(within(t, 20*time.Second))
	commit := n.committed(t, "epoch")
	got := <-done
	if got.err != nil {
		t.Fatal(got.err)
	}
	if took := got.at.Sub(commit); took < claim.BelievedFor {
		t.Errorf("answered %v after its commit", took)
	}
	for _, m := range []*node{n, other} {
		if v := m.view(t); v.Epoch != got.id || v.Epoch == before.Epoch || v.FenceBase != before.FenceBase+fenceStep {
			t.Errorf("epoch %x and fence base %d, told %x after %x and %d", v.Epoch, v.FenceBase, got.id, before.Epoch, before.FenceBase)
		}
	}
	if epoch, guard := revision(t, n, layout.Epoch), revision(t, n, layout.Guard); epoch != guard {
		t.Errorf("the epoch moved at revision %d, the guard at %d", epoch, guard)
	}
	n.complete(t, "old", old.Claim.Token, "done")
	other.complete(t, "elsewhere", elsewhere.Claim.Token, "done")
	a := n.begin(t, claim.BeginRequest{Key: "new"})
	if a.Claim.Fence <= fenceStep || a.Claim.Fence <= old.Claim.Fence {
		t.Errorf("fence %d after %d", a.Claim.Fence, old.Claim.Fence)
	}
	n.complete(t, "new", a.Claim.Token, "done")
}

// Each call raises, also two at once on two nodes; none shares an epoch.
func TestEachCallRaisesTheEpoch(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	before := n.view(t)
	seen := map[claim.ID]bool{before.Epoch: true}
	one, two := n.raise(within(t, 20*time.Second)), other.raise(within(t, 20*time.Second))
	for _, done := range []<-chan raising{one, two} {
		got := <-done
		if got.err != nil || seen[got.id] {
			t.Errorf("epoch %x, %v", got.id, got.err)
		}
		seen[got.id] = true
	}
	if v := n.view(t); v.FenceBase != before.FenceBase+2*fenceStep || !seen[v.Epoch] {
		t.Errorf("epoch %x with fence base %d after %d", v.Epoch, v.FenceBase, before.FenceBase)
	}
}

// What was decided before the raise is refused and decided again: its fence is of the
// new epoch.
func TestWriteDecidedBeforeTheRaiseIsRedone(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	var between failpoint
	n := startNode(t, c.Client(), options{keeps: true, wall: between.wall})
	other := startNode(t, c.Client(), options{})
	var done <-chan raising
	between.arm(func() {
		done = other.raise(within(t, 20*time.Second))
		other.committed(t, "epoch")
	})
	a := n.begin(t, claim.BeginRequest{})
	want(t, a, claim.First)
	if n.seen.refusals() == 0 || a.Claim.Fence <= fenceStep || a.Claim.Attempt != 1 {
		t.Errorf("%d refusals, claim %+v", n.seen.refusals(), a.Claim)
	}
	if got := <-done; got.err != nil {
		t.Error(got.err)
	}
}

// A raise that was accepted goes on though its caller hangs up.
func TestRaiseGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	before := direct.view(t)
	p.HoldRequests()
	ctx, cancel := context.WithCancel(context.Background())
	done := n.raise(ctx)
	p.AwaitHeld(layout.Epoch)
	cancel()
	wantReason(t, (<-done).err, claim.StoreUnavailable)
	if v := direct.view(t); v.Epoch != before.Epoch {
		t.Error("it was raised before")
	}
	p.Heal()
	direct.raised(t, before.Epoch)
}

// The answer to the commit is lost: the epoch found is this call's own, and raised
// once.
func TestRaiseWhoseAnswerIsLostIsOneRaise(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	before := direct.view(t)
	n.seen.onceRead(p.SwallowAnswers)
	done := n.raise(within(t, 25*time.Second))
	v := direct.raised(t, before.Epoch)
	p.Heal()
	got := <-done
	if got.err != nil || got.id != v.Epoch {
		t.Errorf("told %x, %v; etcd has %x", got.id, got.err, v.Epoch)
	}
	if n.seen.count("epoch", "ambiguous") == 0 || n.seen.ambiguities() != 1 {
		t.Errorf("ambiguous %d, settled %d: the fault was not met", n.seen.count("epoch", "ambiguous"), n.seen.ambiguities())
	}
	if last := direct.view(t); last.Epoch != got.id || last.FenceBase != before.FenceBase+fenceStep {
		t.Errorf("epoch %x with fence base %d after %d", last.Epoch, last.FenceBase, before.FenceBase)
	}
}

// A switch moves with the guard; the answer comes when every node has it; the last put
// counts.
func TestPutSwitch(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	if all := n.follower.Switches(); len(all) != 2 || all[1].Name != policy.BypassRedis || all[1].On || n.view(t).BypassRedis {
		t.Fatalf("before any put: %+v", all)
	}
	type answer struct {
		sw  policy.Switch
		err error
		at  time.Time
	}
	done := make(chan answer, 1)
	ctx := within(t, 30*time.Second)
	go func() {
		sw, err := n.PutSwitch(ctx, policy.Switch{Name: policy.BypassRedis, On: true, Reason: "test"})
		done <- answer{sw, err, time.Now()}
	}()
	commit := n.committed(t, "switch")
	got := <-done
	if got.err != nil || !got.sw.On || got.sw.ChangedAt.IsZero() {
		t.Fatalf("%+v, %v", got.sw, got.err)
	}
	if took := got.at.Sub(commit); took < claim.BelievedFor {
		t.Errorf("answered %v after its commit", took)
	}
	for _, m := range []*node{n, other} {
		if all := m.follower.Switches(); !m.view(t).BypassRedis || m.view(t).BypassMemory || all[1] != got.sw {
			t.Errorf("a node has %+v, told was %+v", all, got.sw)
		}
	}
	key := layout.SwitchOf(policy.BypassRedis)
	if at, guard := revision(t, n, key), revision(t, n, layout.Guard); at == 0 || at != guard {
		t.Errorf("the switch moved at revision %d, the guard at %d", at, guard)
	}
	if _, err := other.PutSwitch(ctx, policy.Switch{Name: policy.BypassRedis, Reason: "over"}); err != nil {
		t.Fatal(err)
	}
	if n.view(t).BypassRedis || other.view(t).BypassRedis {
		t.Error("still on")
	}
	_, err := n.PutSwitch(ctx, policy.Switch{Name: "read-only", On: true, Reason: "test"})
	wantReason(t, err, claim.RequestInvalid)
	_, err = n.PutSwitch(ctx, policy.Switch{Name: policy.BypassRedis, On: true})
	wantReason(t, err, claim.RequestInvalid)
}

// The answer to a put is lost: it is stored once.
func TestSwitchWhoseAnswerIsLostIsStoredOnce(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	ctx := within(t, 25*time.Second)
	n.seen.onceRead(p.SwallowAnswers)
	done := make(chan error, 1)
	go func() {
		_, err := n.PutSwitch(ctx, policy.Switch{Name: policy.BypassRedis, On: true, Reason: "test"})
		done <- err
	}()
	eventually(t, 10*time.Second, "the switch to be stored", func() error {
		if v, err := direct.follower.View(); err != nil || !v.BypassRedis {
			return fmt.Errorf("off, %v", err)
		}
		return nil
	})
	p.Heal()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n.seen.count("switch", "ambiguous") == 0 || n.seen.ambiguities() != 1 {
		t.Errorf("ambiguous %d, settled %d: the fault was not met", n.seen.count("switch", "ambiguous"), n.seen.ambiguities())
	}
	stored, err := direct.client.Get(within(t, 5*time.Second), layout.SwitchOf(policy.BypassRedis))
	if err != nil || len(stored.Kvs) != 1 || stored.Kvs[0].Version != 1 {
		t.Errorf("stored %v, %v", stored, err)
	}
}

// A put whose caller has hung up does not go on: the opposite that the caller puts
// next stands.
func TestSwitchPutEndsWithItsCaller(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	p.HoldRequests()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := n.PutSwitch(ctx, policy.Switch{Name: policy.BypassRedis, On: true, Reason: "test"})
		done <- err
	}()
	p.AwaitHeld(layout.SwitchOf(policy.BypassRedis))
	cancel()
	wantReason(t, <-done, claim.StoreUnavailable)
	p.Heal()
	if _, err := n.PutSwitch(within(t, 20*time.Second), policy.Switch{Name: policy.BypassRedis, Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	if at, guard := revision(t, n, layout.SwitchOf(policy.BypassRedis)), revision(t, n, layout.Guard); at != guard || direct.view(t).BypassRedis {
		t.Errorf("on %v, the switch at revision %d, the guard at %d", direct.view(t).BypassRedis, at, guard)
	}
}
