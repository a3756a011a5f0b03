package etcdtxn_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/policy"
)

func TestUsualCaseIsOneRoundTrip(t *testing.T) {
	_, n := one(t)
	a := n.begin(t, claim.BeginRequest{})
	want(t, a, claim.First)
	if a.Claim.Attempt != 1 || a.Claim.Previous != claim.PreviousNone || a.Claim.Fence <= 0 {
		t.Errorf("claim %+v", a.Claim)
	}
	if left := a.Claim.Left; left <= 29*time.Second || left > 30*time.Second-100*time.Millisecond {
		t.Errorf("lease left %v", left)
	}
	n.complete(t, "k", a.Claim.Token, "done")
	if got := [...]int{n.seen.count("begin", "ok"), n.seen.count("finish", "ok"), n.seen.count("read", "ok")}; got != [...]int{1, 1, 0} {
		t.Errorf("etcd calls (begin, finish, read) %v, want one transaction each and no read", got)
	}
	r := n.begin(t, claim.BeginRequest{})
	want(t, r, claim.Replay)
	if string(r.Record.Result.Body) != "done" || r.Record.FinishRevision != r.Revision {
		t.Errorf("record %+v", r.Record)
	}
}

// G1 over three nodes and three members.
func TestC01OneFirstAmongAHundredCallers(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 3)
	var all []*node
	for i := range 3 {
		all = append(all, startNode(t, c.Client(c.Endpoint(i)), options{keeps: true}))
	}
	var mu sync.Mutex
	got := map[claim.Verdict]int{}
	var callers sync.WaitGroup
	for i := range 100 {
		callers.Go(func() {
			a, err := all[i%3].Begin(within(t, 20*time.Second), fill(&claim.BeginRequest{}))
			if err != nil {
				t.Error(err)
				return
			}
			if a.Verdict == claim.InProgress && (a.RetryAfter <= 0 || a.RetryAfter > 30*time.Second) {
				t.Errorf("retry after %v", a.RetryAfter)
			}
			mu.Lock()
			defer mu.Unlock()
			got[a.Verdict]++
		})
	}
	callers.Wait()
	if got[claim.First] != 1 || got[claim.InProgress] != 99 {
		t.Fatalf("verdicts %v", got)
	}
}

// C12, C16, C17: a caller that dies holds the key for its lease; what it does after
// another took over changes nothing.
func TestC16ZombieChangesNothingAfterTakeover(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	a := n.begin(t, claim.BeginRequest{Lease: seconds(1)})
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress)
	n.passes(t, 1600*time.Millisecond)
	b := n.begin(t, claim.BeginRequest{})
	want(t, b, claim.First)
	if b.Claim.Attempt != 2 || b.Claim.Previous != claim.PreviousLapsed || b.Claim.Fence <= a.Claim.Fence {
		t.Errorf("claim %+v after %+v", b.Claim, a.Claim)
	}
	ctx := within(t, 20*time.Second)
	_, err := n.Finish(ctx, completion("k", a.Claim.Token, "late"))
	wantReason(t, err, claim.ClaimLost)
	_, err = n.Extend(ctx, &claim.ExtendRequest{Namespace: "ns", Key: "k", Token: a.Claim.Token})
	wantReason(t, err, claim.ClaimLost)
	_, err = n.Finish(ctx, failure("k", a.Claim.Token, claim.Retryable))
	wantReason(t, err, claim.ClaimLost)
	n.complete(t, "k", b.Claim.Token, "good")
	r := n.begin(t, claim.BeginRequest{})
	want(t, r, claim.Replay)
	if string(r.Record.Result.Body) != "good" || r.Record.Attempt != 2 {
		t.Errorf("record %+v", r.Record)
	}
}

// C15: an owner that extends keeps its claim for as long as it does.
func TestC15OwnerThatExtendsKeepsItsClaim(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	a := n.begin(t, claim.BeginRequest{Lease: seconds(1)})
	for range 6 {
		n.passes(t, 500*time.Millisecond)
		g, err := n.Extend(within(t, 20*time.Second), &claim.ExtendRequest{Namespace: "ns", Key: "k", Token: a.Claim.Token, Lease: seconds(1)})
		if err != nil {
			t.Fatal(err)
		}
		if g.Fence != a.Claim.Fence || g.Attempt != 1 {
			t.Errorf("extended claim %+v, was %+v", g, a.Claim)
		}
		want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress)
	}
	n.complete(t, "k", a.Claim.Token, "done")
}

func TestTokenOfAnotherKeyIsRefused(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	a := n.begin(t, claim.BeginRequest{Key: "a"})
	want(t, n.begin(t, claim.BeginRequest{Key: "b"}), claim.First)
	_, err := n.Finish(within(t, 5*time.Second), completion("b", a.Claim.Token, "x"))
	wantReason(t, err, claim.TokenInvalid)
}

// A finish through another node, which remembers nothing, reads once.
func TestFinishThroughAnotherNode(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	a := n.begin(t, claim.BeginRequest{RequestID: "r"})
	again := other.begin(t, claim.BeginRequest{RequestID: "r"})
	want(t, again, claim.First)
	if !again.Repeat || again.Claim.Token != a.Claim.Token || again.Claim.Fence != a.Claim.Fence {
		t.Fatalf("repeat %+v of %+v", again.Claim, a.Claim)
	}
	other.complete(t, "k", a.Claim.Token, "done")
	if other.seen.count("read", "ok") != 1 {
		t.Errorf("reads %d, want 1", other.seen.count("read", "ok"))
	}
	n.complete(t, "k", a.Claim.Token, "done") // its guess is old: still right
	_, err := n.Finish(within(t, 5*time.Second), completion("k", a.Claim.Token, "other"))
	wantReason(t, err, claim.AlreadyFinished)
}

// H05, G4: after forget has answered, Begin is FIRST, on every node; before it, held.
func TestForgetHoldsThenFrees(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	a := n.begin(t, claim.BeginRequest{})
	ctx := within(t, 30*time.Second)
	_, err := n.Forget(ctx, &claim.ForgetRequest{Namespace: "ns", Key: "k", Reason: "test"})
	wantReason(t, err, claim.ClaimLive)
	n.complete(t, "k", a.Claim.Token, "old")
	done := make(chan error, 1)
	go func() {
		_, err := n.Forget(ctx, &claim.ForgetRequest{Namespace: "ns", Key: "k", Reason: "test"})
		done <- err
	}()
	eventually(t, 2*time.Second, "the mark", func() error {
		if a := other.begin(t, claim.BeginRequest{}); a.Verdict != claim.InProgress {
			return fmt.Errorf("verdict %d", a.Verdict)
		}
		return nil
	})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	b := other.begin(t, claim.BeginRequest{})
	want(t, b, claim.First)
	if b.Claim.Attempt != 1 || b.Claim.Previous != claim.PreviousNone {
		t.Errorf("claim %+v", b.Claim)
	}
	_, err = n.Finish(ctx, completion("k", a.Claim.Token, "old"))
	wantReason(t, err, claim.ClaimLost)
}

// G4: two forgets wait on one mark; the first opens it, the key lives again and is
// forgotten anew. The second must leave the new mark alone: it has its own 3 s.
func TestForgetOpensItsOwnMarkAlone(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	ctx := within(t, 30*time.Second)
	forget := func(n *node) func() error {
		done := make(chan error, 1)
		go func() {
			_, err := n.Forget(ctx, &claim.ForgetRequest{Namespace: "ns", Key: "k", Reason: "test"})
			done <- err
		}()
		return func() error { return <-done }
	}
	held := func() {
		t.Helper()
		eventually(t, 2*time.Second, "the mark", func() error {
			if a := n.begin(t, claim.BeginRequest{}); a.Verdict != claim.InProgress {
				return fmt.Errorf("verdict %d", a.Verdict)
			}
			return nil
		})
	}
	a := n.begin(t, claim.BeginRequest{})
	n.complete(t, "k", a.Claim.Token, "r1")
	first := forget(n)
	held()
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
	second := forget(other) // waits on the same mark, for longer
	if err := first(); err != nil {
		t.Fatal(err)
	}
	a = n.begin(t, claim.BeginRequest{})
	want(t, a, claim.First)
	n.complete(t, "k", a.Claim.Token, "r2")
	began := time.Now()
	third := forget(n)
	held()
	if err := second(); err != nil {
		t.Fatal(err)
	}
	if a := n.begin(t, claim.BeginRequest{}); a.Verdict != claim.InProgress && time.Since(began) < claim.BelievedFor {
		t.Errorf("verdict %d, %v after the forget began", a.Verdict, time.Since(began))
	}
	if err := third(); err != nil {
		t.Fatal(err)
	}
	want(t, n.begin(t, claim.BeginRequest{}), claim.First)
}

func TestResolveThroughTheStore(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	n.put(t, policy.Policy{Takeover: policy.NeverTakeOver})
	a := n.begin(t, claim.BeginRequest{Lease: seconds(1)})
	ctx := within(t, 30*time.Second)
	resolve := &claim.ResolveRequest{Namespace: "ns", Key: "k", State: claim.Succeeded, Result: &claim.Result{Body: []byte("paid")}, Reason: "bank statement"}
	_, err := n.Resolve(ctx, resolve)
	wantReason(t, err, claim.ClaimLive)
	n.passes(t, 1600*time.Millisecond)
	want(t, n.begin(t, claim.BeginRequest{}), claim.OutcomeUnknown)
	if f, err := n.Get(ctx, &claim.GetRequest{Namespace: "ns", Key: "k"}); err != nil || f.Record.State != claim.Unknown {
		t.Fatalf("get: %+v, %v", f.Record, err)
	}
	if f, err := n.Resolve(ctx, resolve); err != nil || f.Record.State != claim.Succeeded {
		t.Fatalf("resolve: %+v, %v", f.Record, err)
	}
	_, err = n.Finish(ctx, failure("k", a.Claim.Token, claim.Retryable))
	wantReason(t, err, claim.AlreadyFinished)
	want(t, n.begin(t, claim.BeginRequest{}), claim.Replay)
}

func TestListPages(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	const total = 57
	for i := range total {
		n.begin(t, claim.BeginRequest{Key: fmt.Sprintf("k%d", i)})
	}
	n.begin(t, claim.BeginRequest{Namespace: "other", Key: "k0"})
	seen := map[string]bool{}
	for page := ""; ; {
		got, err := n.List(within(t, 20*time.Second), &claim.ListRequest{Namespace: "ns", Size: 10, Page: page})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range got.Records {
			if seen[r.Key] || r.Namespace != "ns" {
				t.Errorf("record %s of %s listed twice or misplaced", r.Key, r.Namespace)
			}
			seen[r.Key] = true
		}
		if page = got.Next; page == "" {
			break
		}
	}
	if len(seen) != total {
		t.Errorf("listed %d, want %d", len(seen), total)
	}
	_, err := n.List(within(t, 5*time.Second), &claim.ListRequest{Namespace: "ns", Size: 10, Page: "nonsense"})
	wantReason(t, err, claim.RequestInvalid)
}

func TestNamespaceLife(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	ctx := within(t, 60*time.Second)
	first, err := n.PutNamespace(ctx, policy.Namespace{Name: "ns", Policy: policy.Policy{DefaultLease: seconds(5)}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = n.PutNamespace(ctx, policy.Namespace{Name: "ns", Revision: first.Revision + 1000})
	wantReason(t, err, claim.PolicyStale)
	second, err := n.PutNamespace(ctx, policy.Namespace{Name: "ns", Policy: policy.Policy{DefaultLease: seconds(6)}, Revision: first.Revision})
	if err != nil || second.Revision <= first.Revision {
		t.Fatalf("%+v, %v", second, err)
	}
	a := n.begin(t, claim.BeginRequest{})
	if a.Claim.Left > 6*time.Second || a.Claim.Left < 5*time.Second {
		t.Errorf("lease left %v, want the new default of 6s", a.Claim.Left)
	}
	_, err = n.DeleteNamespace(ctx, "ns", false)
	wantReason(t, err, claim.NamespaceNotEmpty)
	before, err := n.follower.View()
	if err != nil {
		t.Fatal(err)
	}
	forgotten, err := n.DeleteNamespace(ctx, "ns", true)
	if err != nil || forgotten != 1 {
		t.Fatalf("forgot %d, %v", forgotten, err)
	}
	after, err := n.follower.View()
	if err != nil || after.Epoch == before.Epoch || after.FenceBase != before.FenceBase+1<<40 {
		t.Errorf("epoch raised: %v, fence base %d, %v", after.Epoch != before.Epoch, after.FenceBase, err)
	}
	_, err = n.DeleteNamespace(ctx, "ns", false)
	wantReason(t, err, claim.NamespaceNotFound)
	b := n.begin(t, claim.BeginRequest{})
	want(t, b, claim.First)
	if b.Claim.Attempt != 1 || b.Claim.Fence <= a.Claim.Fence {
		t.Errorf("claim %+v after %+v", b.Claim, a.Claim)
	}
}

func TestUndeclaredNamespaceRefused(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	n := startNode(t, c.Client(), options{keeps: true, refuseUndeclared: true})
	_, err := n.Begin(within(t, 10*time.Second), fill(&claim.BeginRequest{}))
	wantReason(t, err, claim.NamespaceNotFound)
	n.put(t, policy.Policy{})
	want(t, n.begin(t, claim.BeginRequest{}), claim.First)
}

// H12: a key finished on one node a moment ago is found by a linearizable Get on
// another, every time.
func TestH12FinishedElsewhereAMomentAgo(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	for i := range 100 {
		key := fmt.Sprintf("k%d", i)
		a := n.begin(t, claim.BeginRequest{Key: key})
		n.complete(t, key, a.Claim.Token, key)
		f, err := other.Get(within(t, 10*time.Second), &claim.GetRequest{Namespace: "ns", Key: key})
		if err != nil || f.Record.State != claim.Succeeded || string(f.Record.Result.Body) != key {
			t.Fatalf("%s: %+v, %v", key, f.Record, err)
		}
	}
}
