package etcdtxn_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// behindProxy starts an etcd, a node that keeps it, and one whose transactions go
// through a proxy; its watch does not.
func behindProxy(t *testing.T) (direct, proxied *node, p *etcdtest.Proxy) {
	t.Helper()
	c := etcdtest.Start(t, 1)
	direct = startNode(t, c.Client(), options{keeps: true})
	p = etcdtest.NewProxy(t, c.Endpoint(0))
	proxied = startNode(t, c.Client(p.Addr()), options{watch: c.Client()})
	return direct, proxied, p
}

// stored waits until etcd holds a value for the key that satisfies ok.
func stored(t *testing.T, n *node, key string, ok func(*claim.Record) bool) {
	t.Helper()
	eventually(t, 10*time.Second, "etcd to hold it", func() error {
		rec, err := raw(n, key)
		if err == nil && (rec == nil || !ok(rec)) {
			err = fmt.Errorf("record %+v", rec)
		}
		return err
	})
}

// raw reads a record past every node.
func raw(n *node, key string) (*claim.Record, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	resp, err := n.client.Get(ctx, layout.NameOf("ns", key).Key)
	if err != nil || len(resp.Kvs) == 0 {
		return nil, err
	}
	return layout.DecodeRecord(resp.Kvs[0].Value, resp.Kvs[0].ModRevision, "ns", key)
}

// C11, E45: the answer to a commit is lost; the same transaction again finds its own
// claim: FIRST once, not marked as a repeat, and one record.
func TestC11AnswerLostAfterTheClaimWasCommitted(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	p.SwallowAnswers()
	done := make(chan claim.Answer, 1)
	go func() { done <- n.begin(t, claim.BeginRequest{RequestID: "r"}) }()
	stored(t, direct, "k", func(r *claim.Record) bool { return r.State == claim.Pending })
	p.Heal()
	a := <-done
	want(t, a, claim.First)
	if a.Repeat || a.Claim.Attempt != 1 {
		t.Errorf("answer %+v, claim %+v", a, a.Claim)
	}
	if n.seen.count("begin", "ambiguous") == 0 || n.seen.ambiguities() != 1 {
		t.Errorf("ambiguous %d, settled %d: the fault was not met", n.seen.count("begin", "ambiguous"), n.seen.ambiguities())
	}
	want(t, direct.begin(t, claim.BeginRequest{}), claim.InProgress)
	direct.complete(t, "k", a.Claim.Token, "done")
}

// C11: the same for each kind of finish, and for Extend.
func TestC11AnswerLostAfterTheFinishWasCommitted(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	for _, c := range []struct {
		key    string
		finish func(token string) error
		state  claim.State
	}{
		{"complete", func(token string) error {
			_, err := n.Finish(within(t, 20*time.Second), completion("complete", token, "r"))
			return err
		}, claim.Succeeded},
		{"terminal", func(token string) error {
			_, err := n.Finish(within(t, 20*time.Second), failure("terminal", token, claim.Terminal))
			return err
		}, claim.Failed},
		{"release", func(token string) error {
			_, err := n.Finish(within(t, 20*time.Second), failure("release", token, claim.Retryable))
			return err
		}, claim.Released},
		{"unknown", func(token string) error {
			_, err := n.Finish(within(t, 20*time.Second), failure("unknown", token, claim.UnknownOutcome))
			return err
		}, claim.Unknown},
	} {
		t.Run(c.key, func(t *testing.T) {
			a := n.begin(t, claim.BeginRequest{Key: c.key})
			before := n.seen.ambiguities()
			p.SwallowAnswers()
			done := make(chan error, 1)
			go func() { done <- c.finish(a.Claim.Token) }()
			stored(t, direct, c.key, func(r *claim.Record) bool { return r.State == c.state })
			p.Heal()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if n.seen.ambiguities() != before+1 {
				t.Error("the fault was not met")
			}
			if err := c.finish(a.Claim.Token); err != nil {
				t.Errorf("the same finish again: %v", err)
			}
		})
	}
}

// G6: while it cannot be established the answer is an error that says so, and the
// same call gets the claim later, marked as the repeat that it is.
func TestG6UnestablishedIsAnErrorAndTheRepeatGetsTheClaim(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	p.SwallowAnswers()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := n.Begin(ctx, fill(&claim.BeginRequest{RequestID: "r", Owner: "o"}))
		done <- err
	}()
	stored(t, direct, "k", func(*claim.Record) bool { return true })
	cancel()
	wantReason(t, <-done, claim.StoreUnavailable)
	p.Heal()
	a := n.begin(t, claim.BeginRequest{RequestID: "r", Owner: "o"})
	want(t, a, claim.First)
	if !a.Repeat {
		t.Error("not marked as a repeat")
	}
	want(t, n.begin(t, claim.BeginRequest{RequestID: "r", Owner: "other"}), claim.InProgress)
}

// C11, G2: a finish that was accepted goes on though its caller hangs up.
func TestFinishGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	direct, n, p := behindProxy(t)
	a := n.begin(t, claim.BeginRequest{})
	p.HoldRequests()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := n.Finish(ctx, completion("k", a.Claim.Token, "done"))
		done <- err
	}()
	p.AwaitHeld(layout.NameOf("ns", "k").Key)
	cancel()
	wantReason(t, <-done, claim.StoreUnavailable)
	p.Heal()
	stored(t, direct, "k", func(r *claim.Record) bool { return r.State == claim.Succeeded })
}

// H04: a create hangs in the network; the caller's repeat gets the key elsewhere,
// completes, the key expires and is removed; now the create arrives. The tick
// window has closed on it. Without time passing it would have been applied, which
// the first case shows.
func TestH04LateCreateIsRefusedByTheTickWindow(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("late=%v", late), func(t *testing.T) {
			direct, n, p := behindProxy(t)
			direct.put(t, policy.Policy{ResultRetention: seconds(1), KeyRetention: seconds(1)})
			// Else it is the guard that refuses what is held, and not the window.
			n.knowsPolicy(t, func(p claim.Policy) bool { return p.KeyRetention == time.Second })
			p.HoldRequests()
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() {
				_, err := n.Begin(ctx, fill(&claim.BeginRequest{RequestID: "r"}))
				done <- err
			}()
			name := layout.NameOf("ns", "k").Key
			pieces := p.AwaitHeld(name)
			if late {
				a := direct.begin(t, claim.BeginRequest{RequestID: "r"})
				want(t, a, claim.First)
				direct.complete(t, "k", a.Claim.Token, "done")
				ticks(t, direct, claim.TickWindow+1)
				if _, err := direct.client.Delete(within(t, 5*time.Second), name); err != nil {
					t.Fatal(err)
				}
			}
			before := revision(t, direct, name)
			if err := p.Release(pieces); err != nil {
				t.Fatal(err)
			}
			if late {
				// Its own node is behind the proxy; what it asks next is answered after.
				ticks(t, direct, 2)
				if after := revision(t, direct, name); after != before {
					t.Errorf("the late create was applied at revision %d", after)
				}
			} else {
				stored(t, direct, "k", func(r *claim.Record) bool { return r.RequestID == "r" })
			}
			cancel()
			<-done
			p.Heal()
		})
	}
}

// ticks moves the clock by this many ticks at once.
func ticks(t testing.TB, n *node, count int) {
	t.Helper()
	for range count {
		eventually(t, 10*time.Second, "a tick", func() error {
			from, _, _ := n.follower.Tick()
			if err := etcdtxn.Tick(within(t, 5*time.Second), n.client, from, claim.TickEvery); err != nil {
				return err
			}
			for {
				now, _, changed := n.follower.Tick()
				if now.Version > from.Version {
					return nil
				}
				<-changed
			}
		})
	}
}

func revision(t testing.TB, n *node, key string) int64 {
	t.Helper()
	resp, err := n.client.Get(within(t, 5*time.Second), key)
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Kvs) == 0 {
		return 0
	}
	return resp.Kvs[0].ModRevision
}

// C19: the takeover falls exactly between the old holder's check and its write:
// compare and put are one transaction, so it fails.
func TestC19TakeoverBetweenCheckAndWrite(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	var between failpoint
	n := startNode(t, c.Client(), options{keeps: true, wall: between.wall})
	other := startNode(t, c.Client(), options{})
	a := n.begin(t, claim.BeginRequest{Lease: seconds(1)})
	other.passes(t, 1600*time.Millisecond)
	var b claim.Answer
	between.arm(func() { b = other.begin(t, claim.BeginRequest{}) })
	_, err := n.Finish(within(t, 20*time.Second), completion("k", a.Claim.Token, "late"))
	wantReason(t, err, claim.ClaimLost)
	want(t, b, claim.First)
	if n.seen.count("finish", "lost") != 1 {
		t.Error("the write did not meet the takeover")
	}
	other.complete(t, "k", b.Claim.Token, "good")
}

// C06: the key is removed while two callers claim it anew; the loser is told what
// became of it, not a guess.
func TestC06LoserOfARemovedKeySeesTheTrueState(t *testing.T) {
	t.Parallel()
	_, n := one(t)
	n.put(t, policy.Policy{ResultRetention: seconds(1), KeyRetention: seconds(1)})
	old := n.begin(t, claim.BeginRequest{})
	n.complete(t, "k", old.Claim.Token, "old")
	n.passes(t, 1600*time.Millisecond)
	n.put(t, policy.Policy{})
	prints := [][]byte{make([]byte, 32), append(make([]byte, 31), 1)}
	expired := revision(t, n, layout.NameOf("ns", "k").Key) // only that is removed
	answers := make([]claim.Answer, 2)
	var callers sync.WaitGroup
	for i := range 2 {
		callers.Go(func() {
			answers[i] = n.begin(t, claim.BeginRequest{Fingerprint: prints[i]})
			if answers[i].Verdict == claim.First {
				n.complete(t, "k", answers[i].Claim.Token, "new")
			}
		})
	}
	callers.Go(func() {
		if _, err := n.client.Txn(within(t, 5*time.Second)).
			If(clientv3.Compare(clientv3.ModRevision(layout.NameOf("ns", "k").Key), "=", expired)).
			Then(clientv3.OpDelete(layout.NameOf("ns", "k").Key)).Commit(); err != nil {
			t.Error(err)
		}
	})
	callers.Wait()
	winner := 0
	if answers[1].Verdict == claim.First {
		winner = 1
	}
	want(t, answers[winner], claim.First)
	want(t, answers[1-winner], claim.Conflict)
	r := n.begin(t, claim.BeginRequest{Fingerprint: prints[winner]})
	want(t, r, claim.Replay)
	if string(r.Record.Result.Body) != "new" {
		t.Errorf("body %q", r.Record.Result.Body)
	}
}

// C03: a lost race is an answer, never "unavailable".
func TestC03LostRaceIsAnAnswer(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	a := other.begin(t, claim.BeginRequest{})
	want(t, n.begin(t, claim.BeginRequest{}), claim.InProgress) // its create loses
	if n.seen.count("begin", "lost") != 1 {
		t.Error("the create did not lose")
	}
	other.complete(t, "k", a.Claim.Token, "done")
	want(t, n.begin(t, claim.BeginRequest{}), claim.Replay)
}

// C09: however many ask for a key that is in progress, a node reads it once at a
// time and writes nothing.
func TestC09HotKeyIsOneReadInFlight(t *testing.T) {
	_, n := one(t)
	a := n.begin(t, claim.BeginRequest{})
	writes := n.seen.count("begin", "ok") + n.seen.count("begin", "lost")
	before := n.seen.count("read", "ok")
	const callers, each = 200, 10
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for range each {
				if got := n.begin(t, claim.BeginRequest{}); got.Verdict != claim.InProgress {
					t.Errorf("verdict %d", got.Verdict)
				}
			}
		})
	}
	all.Wait()
	if got := n.seen.count("begin", "ok") + n.seen.count("begin", "lost"); got != writes {
		t.Errorf("%d writes for a key that is held", got-writes)
	}
	if got := n.seen.count("read", "ok") - before; got > callers*each/4 {
		t.Errorf("%d reads in etcd for %d questions", got, callers*each)
	}
	n.complete(t, "k", a.Claim.Token, "done")
}

// Quota: NOSPACE may have been applied; what it was is told from a read. A finished
// key is still replayed, a new one is STORE_FULL, and all goes on by itself once
// there is room.
func TestH25FullDatabase(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1, func(e *embed.Config) { e.QuotaBackendBytes = 4 << 20 })
	n := startNode(t, c.Client(), options{keeps: true})
	done := n.begin(t, claim.BeginRequest{Key: "done"})
	n.complete(t, "done", done.Claim.Token, "done")
	running := n.begin(t, claim.BeginRequest{Key: "running"})
	ctx := within(t, 60*time.Second)
	var full bool
	for i := 0; i < 200 && !full; i++ {
		_, err := n.client.Put(ctx, fmt.Sprintf("/filler/%d", i), string(make([]byte, 64<<10)))
		full = err != nil
	}
	if !full {
		t.Fatal("the database was not filled")
	}
	want(t, n.begin(t, claim.BeginRequest{Key: "done"}), claim.Replay)
	want(t, n.begin(t, claim.BeginRequest{Key: "running"}), claim.InProgress)
	_, err := n.Begin(ctx, fill(&claim.BeginRequest{Key: "new"}))
	wantReason(t, err, claim.StoreFull)
	if rec, err := raw(n, "new"); err != nil || rec != nil {
		t.Errorf("refused, and stored: %+v, %v", rec, err)
	}
	if _, err := n.client.Delete(ctx, "/filler/", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	now, err := n.client.Get(ctx, layout.Guard)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.Defragment(ctx, c.Endpoint(0)); err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
		t.Fatal(err)
	}
	n.complete(t, "running", running.Claim.Token, "late but stored")
	want(t, n.begin(t, claim.BeginRequest{Key: "new"}), claim.First)
}

// The very write that trips the quota is applied and answered with an error: it is
// this caller's claim all the same (engines: quota applier; E48).
func TestE48NoSpaceThatWasApplied(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1, func(e *embed.Config) { e.QuotaBackendBytes = 4 << 20 })
	n := startNode(t, c.Client(), options{keeps: true})
	ctx := within(t, 60*time.Second)
	applied, refused := 0, 0
	for i := 0; i < 400 && refused == 0; i++ {
		key := fmt.Sprintf("k%d", i)
		a, err := n.Begin(ctx, fill(&claim.BeginRequest{Key: key}))
		if err == nil && a.Verdict == claim.First {
			_, err = n.Finish(ctx, completion(key, a.Claim.Token, string(make([]byte, 64<<10))))
		}
		rec, rawErr := raw(n, key)
		if rawErr != nil {
			t.Fatal(rawErr)
		}
		switch {
		case err == nil:
			applied++
			if rec == nil {
				t.Fatalf("%s: told stored, and is not", key)
			}
		case claim.ReasonOf(err) == claim.StoreFull:
			refused++
			if rec != nil && rec.State == claim.Succeeded {
				t.Errorf("%s: told STORE_FULL, and is finished", key)
			}
		default:
			t.Fatal(err)
		}
	}
	if applied == 0 || refused == 0 {
		t.Errorf("applied %d, refused %d: the quota was not met", applied, refused)
	}
}
