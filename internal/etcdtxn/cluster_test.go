package etcdtxn_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/policy"
)

type mvccKV = mvccpb.KeyValue

// three starts an etcd of three members and a node on each.
func three(t *testing.T) (*etcdtest.Cluster, []*node) {
	t.Helper()
	c := etcdtest.Start(t, 3)
	var all []*node
	for i := range 3 {
		all = append(all, startNode(t, c.Client(c.Endpoint(i), c.Endpoint((i+1)%3)), options{keeps: true}))
	}
	return c, all
}

// The leader is killed while claims and finishes are in flight: each key has one
// FIRST, and what was told finished stays so (G1, G2, G6).
func TestLeaderKilledMidFlight(t *testing.T) {
	t.Parallel()
	c, all := three(t)
	var firsts, finished sync.Map // key → how many; key → body
	var progress atomic.Int64
	var callers sync.WaitGroup
	stop := make(chan struct{})
	for w := range 12 {
		callers.Go(func() {
			n := all[w%3]
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				key := fmt.Sprintf("k%d", (i*7+w)%40)
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				a, err := n.Begin(ctx, fill(&claim.BeginRequest{Key: key, RequestID: fmt.Sprintf("%d-%d", w, i), Owner: fmt.Sprint(w)}))
				if err == nil && a.Verdict == claim.First {
					if _, again := firsts.LoadOrStore(key, w); again && !a.Repeat {
						t.Errorf("%s: a second FIRST", key)
					}
					body := fmt.Sprintf("%d-%d", w, i)
					for {
						if _, err = n.Finish(ctx, completion(key, a.Claim.Token, body)); err == nil || ctx.Err() != nil {
							break
						}
						if claim.ReasonOf(err) != claim.StoreUnavailable {
							t.Errorf("%s: finish: %v", key, err)
							break
						}
					}
					if err == nil {
						finished.Store(key, body)
					}
				}
				cancel()
				progress.Add(1)
			}
		})
	}
	awaitProgress(t, &progress, 20)
	c.Kill(c.Leader())
	c.Leader()
	awaitProgress(t, &progress, 100)
	close(stop)
	callers.Wait()
	checked := 0
	finished.Range(func(key, body any) bool {
		checked++
		f, err := all[0].Get(within(t, 20*time.Second), &claim.GetRequest{Namespace: "ns", Key: key.(string)})
		if err != nil || string(f.Record.Result.Body) != body.(string) {
			t.Errorf("%s: %v, told %q", key, err, body)
		}
		return true
	})
	if checked == 0 {
		t.Error("nothing was finished")
	}
}

func awaitProgress(t *testing.T, progress *atomic.Int64, more int64) {
	t.Helper()
	goal := progress.Load() + more
	eventually(t, time.Minute, "calls to be answered", func() error {
		if at := progress.Load(); at < goal {
			return fmt.Errorf("%d of %d", at, goal)
		}
		return nil
	})
}

// C08, G7: a member is cut off while its clients still reach it: through it nobody is
// told FIRST or a false IN_PROGRESS; it says UNAVAILABLE, and recovers by itself.
func TestC08MemberCutOffGuessesNothing(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 3)
	lead := c.Leader()
	far := (lead + 1) % 3
	near := startNode(t, c.Client(c.Endpoint(lead)), options{keeps: true})
	lonely := startNode(t, c.Client(c.Endpoint(far)), options{})
	a := near.begin(t, claim.BeginRequest{})
	c.Cut(far)
	near.complete(t, "k", a.Claim.Token, "done")
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Second)
	_, err := lonely.Begin(ctx, fill(&claim.BeginRequest{}))
	cancel()
	wantReason(t, err, claim.StoreUnavailable)
	eventually(t, 10*time.Second, "the node to say that it is not ready", func() error {
		if lonely.follower.Ready() == nil {
			return fmt.Errorf("still ready")
		}
		return nil
	})
	c.Mend(far)
	lonely.awaitReady(t)
	want(t, lonely.begin(t, claim.BeginRequest{}), claim.Replay)
}

// C21: an election delays the owner's extensions by more than its lease: no ticks,
// no time. The owner keeps its claim or cleanly loses it; never do two hold it.
func TestC21ElectionDelaysExtensions(t *testing.T) {
	t.Parallel()
	c, all := three(t)
	a := all[0].begin(t, claim.BeginRequest{Lease: seconds(2)})
	c.Kill(c.Leader())
	ctx := within(t, 40*time.Second)
	var extended error
	var second claim.Answer
	var both sync.WaitGroup
	both.Go(func() {
		for {
			_, extended = all[0].Extend(ctx, &claim.ExtendRequest{Namespace: "ns", Key: "k", Token: a.Claim.Token, Lease: seconds(30)})
			if claim.ReasonOf(extended) != claim.StoreUnavailable {
				return
			}
		}
	})
	both.Go(func() {
		for {
			got, err := all[1].Begin(ctx, fill(&claim.BeginRequest{}))
			if err == nil {
				second = got
				return
			}
			if ctx.Err() != nil {
				return
			}
		}
	})
	both.Wait()
	switch {
	case extended == nil:
		want(t, second, claim.InProgress)
		all[0].complete(t, "k", a.Claim.Token, "done")
	case claim.ReasonOf(extended) == claim.ClaimLost:
		want(t, second, claim.First)
		_, err := all[0].Finish(ctx, completion("k", a.Claim.Token, "late"))
		wantReason(t, err, claim.ClaimLost)
	default:
		t.Fatal(extended)
	}
}

// Compaction every 20 ms under load changes no answer: nothing here reads the past,
// and a watch that was compacted away lists anew.
func TestCompactionUnderLoad(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	ctx, cancel := context.WithCancel(context.Background())
	compactions := 0
	var compacting sync.WaitGroup
	compacting.Go(func() {
		every := time.NewTicker(20 * time.Millisecond)
		defer every.Stop()
		client := c.Client()
		for {
			select {
			case <-ctx.Done():
				return
			case <-every.C:
			}
			now, err := client.Get(ctx, "x")
			if err != nil {
				continue
			}
			if _, err := client.Compact(ctx, now.Header.Revision); err == nil {
				compactions++
			}
		}
	})
	for i := range 300 {
		key := fmt.Sprintf("k%d", i)
		a := n.begin(t, claim.BeginRequest{Key: key})
		want(t, a, claim.First)
		n.complete(t, key, a.Claim.Token, "done")
		want(t, n.begin(t, claim.BeginRequest{Key: key}), claim.Replay)
	}
	cancel()
	compacting.Wait()
	if compactions == 0 {
		t.Error("nothing was compacted")
	}
}

// H17: the policy changes between the decision and the commit: the write is refused
// by the guard and decided again by the new policy.
func TestH17PolicyChangedBetweenDecisionAndCommit(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	var between failpoint
	n := startNode(t, c.Client(), options{keeps: true, wall: between.wall})
	other := startNode(t, c.Client(), options{})
	n.put(t, policy.Policy{DefaultLease: seconds(10)})
	between.arm(func() { other.put(t, policy.Policy{DefaultLease: seconds(20), RequireFingerprint: true}) })
	_, err := n.Begin(within(t, 20*time.Second), fill(&claim.BeginRequest{}))
	wantReason(t, err, claim.FingerprintRequired)
	if n.seen.refusals() == 0 {
		t.Error("the write was not refused")
	}
	a := n.begin(t, claim.BeginRequest{Fingerprint: make([]byte, 32)})
	if a.Claim.Left < 15*time.Second {
		t.Errorf("lease left %v: by the old policy", a.Claim.Left)
	}
	if rec, err := raw(n, "k"); err != nil || rec.Attempt != 1 {
		t.Errorf("record %+v, %v", rec, err)
	}
}

// H16: what happens to a lapsed claim is what its namespace said when it was given.
func TestH16JudgedByTheClaimsPolicy(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	n.put(t, policy.Policy{Takeover: policy.NeverTakeOver})
	n.begin(t, claim.BeginRequest{Lease: seconds(1)})
	n.put(t, policy.Policy{Takeover: policy.Auto})
	n.passes(t, 1600*time.Millisecond)
	want(t, n.begin(t, claim.BeginRequest{}), claim.OutcomeUnknown)
}

// H35: policies are put as fast as nodes put them, under load: writes are refused no
// more often than policies change for each caller, and throughput stays above half.
func TestH35PolicyStormUnderLoad(t *testing.T) {
	_, n := one(t)
	const callers, window = 16, 4 * time.Second
	measure := func(label string) int64 {
		var done, key atomic.Int64
		ctx, cancel := context.WithTimeout(context.Background(), window)
		defer cancel()
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				for ctx.Err() == nil {
					k := fmt.Sprintf("%s-%d", label, key.Add(1))
					call, stop := context.WithTimeout(context.Background(), 10*time.Second)
					if _, err := n.Begin(call, fill(&claim.BeginRequest{Key: k})); err != nil {
						t.Errorf("%s: %v", k, err)
					}
					stop()
					done.Add(1)
				}
			})
		}
		all.Wait()
		return done.Load()
	}
	calm := measure("calm")
	refusedBefore := n.seen.refusals()
	ctx, cancel := context.WithCancel(context.Background())
	puts := 0
	var putting sync.WaitGroup
	putting.Go(func() {
		for ctx.Err() == nil {
			call, stop := context.WithTimeout(context.Background(), 10*time.Second)
			if _, err := n.PutNamespace(call, policy.Namespace{Name: "other", Policy: policy.Policy{MaxAttempts: int32(puts)}}); err != nil {
				t.Error(err)
			}
			stop()
			puts++
		}
	})
	storm := measure("storm")
	cancel()
	putting.Wait()
	refused := n.seen.refusals() - refusedBefore
	t.Logf("calls in %v: calm %d, storm %d; %d policies, %d refusals", window, calm, storm, puts, refused)
	if puts < 10 || puts > 45 {
		t.Errorf("%d policies in %v, want about ten a second", puts, window)
	}
	if storm < calm/2 {
		t.Errorf("throughput fell from %d to %d", calm, storm)
	}
	if refused > puts*(callers+1) {
		t.Errorf("%d refusals for %d changes and %d callers", refused, puts, callers)
	}
}
