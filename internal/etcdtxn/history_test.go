package etcdtxn_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// pausing is a Viewer that stops its caller after so many Views, once, until it is
// let go: a process stopped between two of its steps.
type pausing struct {
	etcdtxn.Viewer
	mu      sync.Mutex
	left    int // Views until the pause; 0: none
	reached chan struct{}
	letGo   chan struct{}
}

func (p *pausing) arm(views int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left, p.reached, p.letGo = views, make(chan struct{}), make(chan struct{})
}

func (p *pausing) View() (claim.View, error) {
	v, err := p.Viewer.View()
	p.mu.Lock()
	pause := p.left == 1
	if p.left > 0 {
		p.left--
	}
	reached, letGo := p.reached, p.letGo
	p.mu.Unlock()
	if pause {
		close(reached)
		<-letGo
	}
	return v, err
}

// H38, H07: etcd is restored to before a claim that a node remembers, and the key is
// claimed anew at that very revision. Whether the node slept through it all between
// reading the token and taking its view, between its view and its write, or not at
// all: its late Complete is refused.
func TestH38RevisionUsedAgainAfterARestore(t *testing.T) {
	for name, views := range map[string]int{"awake": 0, "asleep before its view": 1, "asleep before its write": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			revisionUsedAgain(t, views)
		})
	}
}

func revisionUsedAgain(t *testing.T, pauseAfterViews int) {
	c := etcdtest.Start(t, 1)
	p := &pausing{}
	n := startNode(t, c.Client(), options{byHand: true, view: func(v etcdtxn.Viewer) etcdtxn.Viewer { p.Viewer = v; return p }})
	other := startNode(t, c.Client(), options{byHand: true})
	snapshot := c.Backup(0)
	n.awaitReady(t)
	other.awaitReady(t)
	fillUp := func() int64 {
		resp, err := n.client.Put(within(t, 10*time.Second), "/filler", "x")
		if err != nil {
			t.Fatal(err)
		}
		return resp.Header.Revision
	}
	for range 20 {
		fillUp()
	}
	ticks(t, n, 1) // a node that has not seen the clock move of late remembers nothing
	a := n.begin(t, claim.BeginRequest{})
	want(t, a, claim.First)
	ticks(t, n, 5)
	late := func() error {
		_, err := n.Finish(within(t, 60*time.Second), completion("k", a.Claim.Token, "late"))
		return err
	}
	done := make(chan error, 1)
	if pauseAfterViews > 0 {
		p.arm(pauseAfterViews)
		go func() { done <- late() }()
		<-p.reached
	}
	c.Restore(0, snapshot)
	for _, one := range []*node{n, other} {
		eventually(t, 30*time.Second, "the restore to be noticed", func() error {
			if s := one.follower.Status(); s.Restored == 0 || s.Applied >= a.Revision {
				return fmt.Errorf("not noticed, or not listed since: %+v", s)
			}
			return nil
		})
	}
	ticks(t, n, 2)
	other.awaitReady(t)
	for fillUp() < a.Revision-1 {
	}
	b := other.begin(t, claim.BeginRequest{})
	want(t, b, claim.First)
	if b.Revision != a.Revision {
		t.Fatalf("claimed anew at revision %d, not %d", b.Revision, a.Revision)
	}
	if pauseAfterViews > 0 {
		// The caller may have been told by now that nothing is established; what counts
		// is what the work that goes on without it does.
		close(p.letGo)
		if err := <-done; claim.ReasonOf(err) != claim.ClaimLost && claim.ReasonOf(err) != claim.StoreUnavailable {
			t.Errorf("the paused Complete: %v", err)
		}
	}
	wantReason(t, late(), claim.ClaimLost)
	if err := n.Close(within(t, 40*time.Second)); err != nil {
		t.Error(err)
	}
	other.complete(t, "k", b.Claim.Token, "good")
	if r := other.begin(t, claim.BeginRequest{}); string(r.Record.Result.Body) != "good" {
		t.Errorf("body %q", r.Record.Result.Body)
	}
}

// H06: B's read of the key is under way; A completes through another node and is
// told so; C asks the first node before B's answer is in: C is told REPLAY, since it
// may not share a read that was sent before it asked.
func TestH06NobodySharesAReadSentBeforeTheyAsked(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	a := direct.begin(t, claim.BeginRequest{})
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress) // the node knows the key now
	p.HoldAnswers()
	b, c := make(chan claim.Answer, 1), make(chan claim.Answer, 1)
	go func() { b <- n.begin(t, claim.BeginRequest{}) }()
	p.AwaitAnswer(layout.NameOf("ns", "k").Key) // etcd has read the key for B
	direct.complete(t, "k", a.Claim.Token, "done")
	go func() { c <- n.begin(t, claim.BeginRequest{}) }()
	eventually(t, 10*time.Second, "C to wait for a read of its own", func() error {
		if !n.Queued("ns", "k") {
			return errors.New("not yet")
		}
		return nil
	})
	if err := p.ReleaseAnswers(); err != nil {
		t.Fatal(err)
	}
	want(t, <-b, claim.InProgress)
	want(t, <-c, claim.Replay)
}

// A node that dies while it holds a mark leaves the key held; another that has met
// the mark for 10 s opens it.
func TestHeldMarkIsOpenedByWhoeverMetItForLong(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	var skipped atomic.Int64
	start := time.Now()
	n := startNode(t, c.Client(), options{keeps: true, mono: func() time.Duration { return time.Since(start) + time.Duration(skipped.Load()) }})
	a := n.begin(t, claim.BeginRequest{})
	n.complete(t, "k", a.Claim.Token, "old")
	v, err := n.follower.View()
	if err != nil {
		t.Fatal(err)
	}
	rec, err := raw(n, "k")
	if err != nil {
		t.Fatal(err)
	}
	mark, err := layout.EncodeRecord(claim.Mark(rec, false, claim.Moment{Now: v.Now, Wall: time.Now()}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.Put(within(t, 5*time.Second), layout.NameOf("ns", "k").Key, string(mark)); err != nil {
		t.Fatal(err)
	}
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress)
	skipped.Add(int64(9 * time.Second))
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress)
	skipped.Add(int64(2 * time.Second))
	b := n.begin(t, claim.BeginRequest{})
	want(t, b, claim.First)
	if b.Claim.Attempt != 1 {
		t.Errorf("attempt %d", b.Claim.Attempt)
	}
}

// Two operators forget one key at once, and callers keep asking: both are answered,
// nobody is told the old result after either, and there is one FIRST.
func TestH05TwoForgetsAtOnce(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	a := n.begin(t, claim.BeginRequest{})
	n.complete(t, "k", a.Claim.Token, "old")
	var forgotten atomic.Bool
	var both, asking sync.WaitGroup
	for _, one := range []*node{n, other} {
		both.Go(func() {
			if _, err := one.Forget(within(t, 30*time.Second), &claim.ForgetRequest{Namespace: "ns", Key: "k", Reason: "test", Force: true}); err != nil && claim.ReasonOf(err) != claim.RecordNotFound && claim.ReasonOf(err) != claim.ClaimLive {
				t.Error(err)
			}
			forgotten.Store(true)
		})
	}
	stop := make(chan struct{})
	var firsts atomic.Int64
	for _, one := range []*node{n, other} {
		asking.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				after := forgotten.Load()
				got := one.begin(t, claim.BeginRequest{})
				if got.Verdict == claim.First {
					firsts.Add(1)
				}
				if after && got.Verdict == claim.Replay {
					t.Error("the old result was told after a forget had answered")
				}
			}
		})
	}
	both.Wait()
	close(stop)
	asking.Wait()
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress)
	if firsts.Load() != 1 {
		t.Errorf("%d FIRST", firsts.Load())
	}
}

// Close waits for what was accepted: a forget in its hold opens its mark, and a
// finish whose first try was lost is stored.
func TestCloseWaitsForAcceptedWork(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	done := n.begin(t, claim.BeginRequest{Key: "done"})
	n.complete(t, "done", done.Claim.Token, "old")
	running := direct.begin(t, claim.BeginRequest{Key: "running"})
	var work sync.WaitGroup
	work.Go(func() {
		if _, err := n.Forget(within(t, 30*time.Second), &claim.ForgetRequest{Namespace: "ns", Key: "done", Reason: "test"}); err != nil {
			t.Errorf("forget: %v", err)
		}
	})
	stored(t, direct, "done", func(r *claim.Record) bool { return r.Forgotten != nil })
	p.HoldRequests()
	work.Go(func() {
		if _, err := n.Finish(within(t, 30*time.Second), completion("running", running.Claim.Token, "done")); err != nil {
			t.Errorf("finish: %v", err)
		}
	})
	p.AwaitHeld(layout.NameOf("ns", "running").Key)
	closed := make(chan error, 1)
	go func() { closed <- n.Close(within(t, 30*time.Second)) }()
	eventually(t, 10*time.Second, "the node to take nothing on", func() error {
		_, err := n.Finish(within(t, 5*time.Second), completion("running", running.Claim.Token, "done"))
		if claim.ReasonOf(err) != claim.Draining {
			return fmt.Errorf("not yet: %w", err)
		}
		return nil
	})
	p.Heal()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	work.Wait()
	want(t, direct.begin(t, claim.BeginRequest{Key: "done"}), claim.First)
	want(t, direct.begin(t, claim.BeginRequest{Key: "running"}), claim.Replay)
}

// E48 and G6: a try whose fate is not known, then a full database: the answer is that
// nothing is established, not that nothing was stored.
func TestFullDatabaseAfterAnAmbiguousTry(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	p.HoldRequests()
	done := make(chan error, 1)
	go func() {
		_, err := n.Begin(within(t, 20*time.Second), fill(&claim.BeginRequest{}))
		done <- err
	}()
	p.AwaitHeld(layout.NameOf("ns", "k").Key)
	if _, err := direct.client.Put(within(t, 5*time.Second), "/x", "y"); err != nil {
		t.Fatal(err)
	}
	raiseNoSpace(t, direct)
	p.Heal()
	wantReason(t, <-done, claim.StoreUnavailable)
}

// After a restore everything is listed anew once, not until etcd has passed its old
// revision.
func TestRestoreIsListedOnce(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	n := startNode(t, c.Client(), options{keeps: true})
	snapshot := c.Backup(0)
	n.awaitReady(t)
	for i := range 2000 {
		if _, err := n.client.Put(within(t, 10*time.Second), "/filler", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	n.passes(t, time.Second)
	c.Restore(0, snapshot)
	eventually(t, 30*time.Second, "the restore to be noticed", func() error {
		if n.follower.Status().Restored == 0 {
			return errors.New("not noticed")
		}
		return n.follower.Ready()
	})
	first, err := n.follower.View()
	if err != nil {
		t.Fatal(err)
	}
	n.passes(t, 5*time.Second)
	if last, err := n.follower.View(); err != nil || last.Generation > first.Generation+1 {
		t.Errorf("generation %d, then %d: listed again and again, %v", first.Generation, last.Generation, err)
	}
}

// A claim is taken away while its deadline is being set anew: the Begin is judged
// again, and nobody is told of the claim that is gone.
func TestH33TakenAwayWhileItIsSetAnew(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	keeper := startNode(t, c.Client(), options{keeps: true})
	keeper.put(t, policy.Policy{})
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	var walls atomic.Int64
	var taken claim.Answer
	lagging := startNode(t, c.Client(), options{watchOnly: c.Client(p.Addr()), wall: func() time.Time {
		if walls.Add(1) == 2 { // it is about to set the deadline anew
			ticks(t, keeper, 6)
			taken = keeper.begin(t, claim.BeginRequest{})
		}
		return time.Now()
	}})
	p.SwallowAnswers()
	ticks(t, keeper, claim.TickWindow-4)
	a := lagging.begin(t, claim.BeginRequest{Lease: seconds(3)})
	want(t, taken, claim.First)
	want(t, a, claim.InProgress)
	if taken.Claim.Attempt != 2 {
		t.Errorf("attempt %d", taken.Claim.Attempt)
	}
}

// raiseNoSpace raises the alarm that a full database does.
func raiseNoSpace(t *testing.T, n *node) {
	t.Helper()
	alarm := pb.NewMaintenanceClient(n.client.ActiveConnection())
	if _, err := alarm.Alarm(within(t, 10*time.Second), &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, Alarm: pb.AlarmType_NOSPACE}); err != nil {
		t.Fatal(err)
	}
}

// The process is stopped between its claim's commit and its answer, for longer than
// the lease, and another takes over: on waking it tells of no claim that is not its
// own any more.
func TestH33StoppedBetweenCommitAndAnswer(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	p.HoldAnswers()
	done := make(chan claim.Answer, 1)
	go func() { done <- n.begin(t, claim.BeginRequest{Lease: seconds(1), RequestID: "r", Owner: "a"}) }()
	stored(t, direct, "k", func(r *claim.Record) bool { return r.State == claim.Pending })
	direct.passes(t, 1600*time.Millisecond)
	b := direct.begin(t, claim.BeginRequest{Lease: seconds(60), Owner: "b"})
	want(t, b, claim.First)
	if err := p.ReleaseAnswers(); err != nil { // within the 2 s that the call has
		t.Fatal(err)
	}
	want(t, <-done, claim.InProgress)
	direct.complete(t, "k", b.Claim.Token, "done")
}

// A repeated forced delete meets a namespace that the first one has already ended:
// claims that were given since are left alone (G1).
func TestForcedDeleteLeavesWhatCameAfterAnother(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	p := &pausing{}
	n := startNode(t, c.Client(), options{keeps: true})
	late := startNode(t, c.Client(), options{view: func(v etcdtxn.Viewer) etcdtxn.Viewer { p.Viewer = v; return p }})
	n.put(t, policy.Policy{})
	for i := range 20 {
		n.begin(t, claim.BeginRequest{Key: fmt.Sprintf("k%d", i)})
	}
	ctx := within(t, 60*time.Second)
	// The late one has set the namespace to be deleted, and is stopped on its way
	// through the records.
	p.arm(10)
	lateDone := make(chan error, 1)
	go func() {
		_, err := late.DeleteNamespace(ctx, "ns", true)
		lateDone <- err
	}()
	<-p.reached
	if _, err := n.DeleteNamespace(ctx, "ns", true); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		want(t, n.begin(t, claim.BeginRequest{Key: fmt.Sprintf("k%d", i)}), claim.First)
	}
	n.put(t, policy.Policy{MaxAttempts: 3})
	close(p.letGo)
	wantReason(t, <-lateDone, claim.PolicyStale)
	for i := range 20 {
		want(t, n.begin(t, claim.BeginRequest{Key: fmt.Sprintf("k%d", i)}), claim.InProgress)
	}
	if v, err := n.follower.View(); err != nil || v.Policies["ns"].MaxAttempts != 3 {
		t.Errorf("the new declaration is gone: %+v, %v", v.Policies["ns"], err)
	}
}

// One record that cannot be read does not hide the others from a list.
func TestListPassesOverWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	n.begin(t, claim.BeginRequest{Key: "good"})
	if _, err := n.client.Put(within(t, 5*time.Second), layout.NameOf("ns", "bad").Key, "garbage"); err != nil {
		t.Fatal(err)
	}
	got, err := n.List(within(t, 20*time.Second), &claim.ListRequest{Namespace: "ns", Size: 10})
	if err != nil || len(got.Records) != 1 || got.Records[0].Key != "good" {
		t.Errorf("%+v, %v", got, err)
	}
	_, err = n.Begin(within(t, 5*time.Second), fill(&claim.BeginRequest{Key: "bad"}))
	wantReason(t, err, claim.RecordUnreadable)
}
