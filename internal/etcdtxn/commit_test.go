package etcdtxn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// busy puts as many batches in flight as may be, and keeps their answers back until
// release, which returns how many members each batch had that went since.
func busy(t *testing.T, n *node, p *etcdtest.Proxy) (release func() []int) {
	t.Helper()
	before := len(n.seen.sent("write"))
	p.HoldAnswers()
	var blockers sync.WaitGroup
	for i := range etcdtxn.WritesInFlight {
		key := fmt.Sprintf("blocker-%d-%d", before, i)
		blockers.Go(func() { n.begin(t, claim.BeginRequest{Key: key}) })
		eventually(t, 10*time.Second, "a batch to be in flight", func() error {
			if got := len(n.seen.sent("write")) - before; got <= i {
				return fmt.Errorf("%d are", got)
			}
			return nil
		})
	}
	return func() []int {
		t.Helper()
		if err := p.ReleaseAnswers(); err != nil {
			t.Fatal(err)
		}
		blockers.Wait()
		return n.seen.sent("write")[before+etcdtxn.WritesInFlight:]
	}
}

// queued returns once so many writes wait to be sent.
func (n *node) queued(t *testing.T, writes int) {
	t.Helper()
	eventually(t, 10*time.Second, "writes to wait", func() error {
		if got := n.WritesWaiting(); got < writes {
			return fmt.Errorf("%d do", got)
		}
		return nil
	})
}

// gathered has so many calls wait while a node is busy, and returns how many members
// each batch had that they then went in.
func gathered(t *testing.T, n *node, p *etcdtest.Proxy, calls int, call func(i int)) []int {
	t.Helper()
	before := len(n.seen.sent("write"))
	release := busy(t, n, p)
	var all sync.WaitGroup
	for i := range calls {
		all.Go(func() { call(i) })
	}
	n.queued(t, calls)
	release()
	all.Wait()
	return n.seen.sent("write")[before+etcdtxn.WritesInFlight:]
}

// An idle node sends at once; what arrives meanwhile goes together, as much at once as
// etcd allows: N members of width w, and the read of the tick, are N + 1 + w.
func TestBatchesAreAsFullAsEtcdAllows(t *testing.T) {
	_, n, p := behindProxy(t)
	n.begin(t, claim.BeginRequest{Key: "alone"})
	if got := n.seen.sent("write"); !slices.Equal(got, []int{1}) {
		t.Errorf("an idle node sent %v", got)
	}
	const calls = 300
	claims := make([]claim.Answer, calls)
	sizes := gathered(t, n, p, calls, func(i int) { claims[i] = n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)}) })
	if !slices.Equal(sizes, []int{126, 126, 48}) && !slices.Equal(sizes, []int{126, 48, 126}) {
		t.Errorf("300 Begins went as %v", sizes)
	}
	ids := map[string]bool{}
	for _, a := range claims {
		want(t, a, claim.First)
		ids[a.Claim.Token] = true
	}
	if len(ids) != calls {
		t.Errorf("%d claims for %d keys", len(ids), calls)
	}
	sizes = gathered(t, n, p, calls, func(i int) { n.complete(t, fmt.Sprint("k", i), claims[i].Claim.Token, "done") })
	if !slices.Equal(sizes, []int{126, 126, 48}) && !slices.Equal(sizes, []int{126, 48, 126}) {
		t.Errorf("300 Completes went as %v", sizes)
	}
	for i := range calls {
		if got := n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)}); got.Verdict != claim.Replay {
			t.Fatalf("k%d: verdict %d", i, got.Verdict)
		}
	}
	if n.seen.count("begin", "denied")+n.seen.count("finish", "denied") > 0 {
		t.Error("etcd refused a batch")
	}
}

// N members of width w, and the read of the tick, are N + 1 + w: etcd takes that, and no
// more, and that is what goes together.
func TestTheBoundaryOfMaxTxnOps(t *testing.T) {
	_, n := one(t)
	ctx := within(t, 20*time.Second)
	for width, most := range map[int]int{1: 126, 2: 125} {
		if err := n.WriteRaw(ctx, most, width); err != nil {
			t.Errorf("%d members of width %d: %v", most, width, err)
		}
		if err := n.WriteRaw(ctx, most+1, width); err == nil {
			t.Errorf("etcd took %d members of width %d", most+1, width)
		}
		if got := etcdtxn.Takes(128, 1000, width); got != most {
			t.Errorf("%d members of width %d go together, not %d", got, width, most)
		}
	}
}

// Forgets write two keys each, one of which others of their slot write too.
func TestBatchesOfMembersThatWriteTwoKeys(t *testing.T) {
	_, n := one(t)
	const calls = 300
	var all sync.WaitGroup
	for i := range calls {
		all.Go(func() {
			key := fmt.Sprint("k", i)
			a := n.begin(t, claim.BeginRequest{Key: key})
			n.complete(t, key, a.Claim.Token, "done")
			if _, err := n.Forget(within(t, 30*time.Second), &claim.ForgetRequest{Namespace: "ns", Key: key, Reason: "test"}); err != nil {
				t.Error(err)
			}
			want(t, n.begin(t, claim.BeginRequest{Key: key}), claim.First)
		})
	}
	all.Wait()
	if n.seen.count("forget", "busy")+n.seen.count("forget", "denied") > 0 {
		t.Error("etcd refused a batch")
	}
	if sizes := n.seen.sent("write"); slices.Max(sizes) < 10 {
		t.Errorf("nothing went together: %v", sizes)
	}
}

// E61: however many write one key at once, a batch has it once, and nobody's answer is
// another's.
func TestE61OneKeyOnceABatch(t *testing.T) {
	_, n, p := behindProxy(t)
	hot := n.begin(t, claim.BeginRequest{Key: "hot"})
	const calls = 60
	answers := make([]claim.Answer, calls)
	release := busy(t, n, p)
	var all sync.WaitGroup
	for i := range calls {
		all.Go(func() {
			if _, err := n.Extend(within(t, 20*time.Second), &claim.ExtendRequest{Namespace: "ns", Key: "hot", Token: hot.Claim.Token, Lease: seconds(60 + i)}); err != nil {
				t.Errorf("extension %d: %v", i, err)
			}
		})
		all.Go(func() { answers[i] = n.begin(t, claim.BeginRequest{Key: "new", RequestID: fmt.Sprint(i)}) })
	}
	n.queued(t, 2)
	eventually(t, 10*time.Second, "the others to wait behind them", func() error {
		if got := n.seen.waitedBehind(); got < 2*calls-2 {
			return fmt.Errorf("%d do", got)
		}
		return nil
	})
	release()
	all.Wait()
	for _, kind := range []string{"extend", "begin"} {
		if n.seen.count(kind, "denied")+n.seen.count(kind, "busy") > 0 {
			t.Error("etcd refused a batch: a key was in it twice")
		}
	}
	first := 0
	for _, a := range answers {
		if a.Verdict == claim.First {
			first++
		}
	}
	if first != 1 {
		t.Errorf("%d FIRST for one key", first)
	}
	if rec, err := raw(n, "hot"); err != nil || rec.LeaseUntil.Sub(rec.Claimed) < (60+calls-1)*time.Second {
		t.Errorf("the longest extension does not stand: %+v, %v", rec, err)
	}
}

// A request stays well under what etcd takes: large members go few at a time.
func TestBatchesAreBoundedInBytes(t *testing.T) {
	_, n, p := behindProxy(t)
	const calls, size = 30, 100 << 10
	tokens := make([]string, calls)
	for i := range calls {
		tokens[i] = n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)}).Claim.Token
	}
	body := strings.Repeat("x", size)
	sizes := gathered(t, n, p, calls, func(i int) { n.complete(t, fmt.Sprint("k", i), tokens[i], body) })
	if slices.Max(sizes) > 10 || len(sizes) < 3 {
		t.Errorf("30 results of 100 KiB went as %v", sizes)
	}
	if n.seen.count("finish", "denied") > 0 {
		t.Error("etcd refused a batch")
	}
	if got := n.begin(t, claim.BeginRequest{Key: "k7"}); len(got.Record.Result.Body) != size {
		t.Errorf("%d bytes came back", len(got.Record.Result.Body))
	}
}

// One member that etcd refuses has all of its batch refused, with nothing applied: the
// others are sent again at once, and it alone is told.
func TestAPoisonedMemberHoldsNobodyUp(t *testing.T) {
	c := etcdtest.Start(t, 1, func(e *embed.Config) { e.MaxRequestBytes = 64 << 10 })
	startNode(t, c.Client(), options{keeps: true})
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	n := startNode(t, c.Client(p.Addr()), options{watch: c.Client()})
	const calls, poisoned = 50, 17
	tokens := make([]string, calls)
	for i := range calls {
		tokens[i] = n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)}).Claim.Token
	}
	var told error
	gathered(t, n, p, calls, func(i int) {
		body := "small"
		if i == poisoned {
			body = strings.Repeat("x", 100<<10)
		}
		_, err := n.Finish(within(t, 20*time.Second), completion(fmt.Sprint("k", i), tokens[i], body))
		if i == poisoned {
			told = err
		} else if err != nil {
			t.Errorf("k%d: %v", i, err)
		}
	})
	wantReason(t, told, claim.StoreUnavailable)
	if rec, err := raw(n, fmt.Sprint("k", poisoned)); err != nil || rec.State != claim.Pending {
		t.Errorf("the refused one: %+v, %v", rec, err)
	}
	for i := range calls {
		if i != poisoned {
			want(t, n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)}), claim.Replay)
		}
	}
}

// How much goes together follows what etcd allows, which it does not tell.
func TestBatchesFitAnotherMaxTxnOps(t *testing.T) {
	for _, c := range []struct {
		name     string
		ops      uint
		asked    bool
		most     int // members of the largest batch
		after    int // operations that the node takes to be allowed then
		maxCalls int
	}{
		{"fewer, and asked", 40, true, 38, 40, 100},
		{"fewer, and found out", 40, false, 98, 32, 100},
		{"more, and asked", 512, true, 300, 512, 300},
		{"the default, and asked", 128, true, 126, 128, 300},
	} {
		t.Run(c.name, func(t *testing.T) {
			cluster := etcdtest.Start(t, 1, func(e *embed.Config) { e.MaxTxnOps = c.ops })
			startNode(t, cluster.Client(), options{keeps: true})
			p := etcdtest.NewProxy(t, cluster.Endpoint(0))
			n := startNode(t, cluster.Client(p.Addr()), options{watch: cluster.Client()})
			if c.asked {
				ops, err := etcdtxn.MaxTxnOps(within(t, 10*time.Second), cluster.Client())
				if err != nil || ops != int(c.ops) {
					t.Fatalf("found out %d, %v", ops, err)
				}
				n.Fit(ops)
			}
			for round := range 2 {
				sizes := gathered(t, n, p, c.maxCalls, func(i int) {
					want(t, n.begin(t, claim.BeginRequest{Key: fmt.Sprint(round, "k", i)}), claim.First)
				})
				if most := slices.Max(sizes); c.asked && most != c.most {
					t.Errorf("%d calls went as %v", c.maxCalls, sizes)
				} else if round == 1 && most > int(c.ops)-2 {
					t.Errorf("%v, once it is known", sizes)
				}
			}
			if got := n.TxnOps(); c.asked && got != c.after || !c.asked && got > int(c.ops) {
				t.Errorf("it takes %d operations to be allowed", got)
			}
			// Lists and reads keep to it too.
			if _, err := n.List(within(t, 20*time.Second), &claim.ListRequest{Namespace: "ns", Size: 500}); err != nil {
				t.Errorf("list: %v", err)
			}
		})
	}
}

// E45-E48: etcd is killed while a batch is on its way, its answers lost, and comes back:
// each member is settled by itself, and no key is given twice.
func TestE45EtcdDiesBetweenBatches(t *testing.T) {
	c := etcdtest.Start(t, 1)
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	n := startNode(t, c.Client(p.Addr()), options{keeps: true, watch: c.Client()})
	const calls = 200
	answers := make([]claim.Answer, calls)
	var all sync.WaitGroup
	p.SwallowAnswers()
	before := len(n.seen.sent("write"))
	for i := range calls {
		all.Go(func() {
			ctx := within(t, time.Minute)
			for {
				a, err := n.Begin(ctx, fill(&claim.BeginRequest{Key: fmt.Sprint("k", i), RequestID: "r", Owner: "o"}))
				if claim.ReasonOf(err) == claim.StoreUnavailable && ctx.Err() == nil {
					continue // the same call again
				}
				if err != nil {
					t.Errorf("k%d: %v", i, err)
				}
				answers[i] = a
				return
			}
		})
	}
	eventually(t, 10*time.Second, "batches to be on their way", func() error {
		if got := len(n.seen.sent("write")) - before; got < etcdtxn.WritesInFlight {
			return fmt.Errorf("%d are", got)
		}
		return nil
	})
	c.Kill(0)
	p.Heal()
	c.Restart(0)
	all.Wait()
	ids := map[string]bool{}
	for i, a := range answers {
		if a.Verdict != claim.First {
			t.Fatalf("k%d: verdict %d", i, a.Verdict)
		}
		ids[a.Claim.Token] = true
		if rec, err := raw(n, fmt.Sprint("k", i)); err != nil || rec.Attempt != 1 {
			t.Errorf("k%d: %+v, %v", i, rec, err)
		}
	}
	if len(ids) != calls {
		t.Errorf("%d claims for %d keys", len(ids), calls)
	}
	if n.seen.count("begin", "ambiguous") < calls/2 {
		t.Error("no outcome was ambiguous: the fault was not met")
	}
}

// H17 in a batch: a policy changes while a batch waits; the guard refuses the whole, and
// each member is decided again by the policy that it then has.
func TestH17ABatchThatTheGuardRefuses(t *testing.T) {
	direct, n, p := behindProxy(t)
	n.put(t, policy.Policy{DefaultLease: seconds(10)})
	refused := n.seen.refusals()
	const calls = 40
	errs := make([]error, calls)
	release := busy(t, n, p)
	var all sync.WaitGroup
	for i := range calls {
		all.Go(func() {
			_, errs[i] = n.Begin(within(t, 20*time.Second), &claim.BeginRequest{Namespace: []string{"ns", "other"}[i%2], Key: fmt.Sprint("k", i)})
		})
	}
	n.queued(t, calls)
	direct.put(t, policy.Policy{DefaultLease: seconds(20), RequireFingerprint: true})
	release()
	all.Wait()
	for i, err := range errs {
		if i%2 == 0 {
			wantReason(t, err, claim.FingerprintRequired)
		} else if err != nil {
			t.Errorf("k%d, whose policy did not change: %v", i, err)
		}
	}
	if got := n.seen.refusals() - refused; got < calls {
		t.Errorf("%d of %d were refused", got, calls)
	}
}

// What waits behind too much is OVERLOADED, with a time to come back; finishes and
// extensions never are (H27), and neither is a namespace that has little waiting.
func TestH27AFullQueueRefusesNoFinish(t *testing.T) {
	c := etcdtest.Start(t, 1)
	startNode(t, c.Client(), options{keeps: true})
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	const most = 20
	n := startNode(t, c.Client(p.Addr()), options{watch: c.Client(), waitingMost: most})
	running := n.begin(t, claim.BeginRequest{Key: "running"})
	ended := n.begin(t, claim.BeginRequest{Key: "ended"})
	release := busy(t, n, p)
	var all sync.WaitGroup
	for i := range most {
		all.Go(func() { n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)}) })
	}
	n.queued(t, most)
	_, err := n.Begin(within(t, 20*time.Second), fill(&claim.BeginRequest{Key: "one too many"}))
	wantReason(t, err, claim.Overloaded)
	if e, ok := errors.AsType[*claim.Error](err); !ok || e.RetryAfter <= 0 {
		t.Errorf("%v tells no time to come back", err)
	}
	all.Go(func() { n.complete(t, "ended", ended.Claim.Token, "done") })
	all.Go(func() {
		if _, err := n.Extend(within(t, 20*time.Second), &claim.ExtendRequest{Namespace: "ns", Key: "running", Token: running.Claim.Token}); err != nil {
			t.Errorf("extend: %v", err)
		}
	})
	all.Go(func() {
		if _, err := n.Begin(within(t, 20*time.Second), &claim.BeginRequest{Namespace: "calm", Key: "k"}); err != nil {
			t.Errorf("another namespace: %v", err)
		}
	})
	n.queued(t, most+3)
	release()
	all.Wait()
	if n.seen.overloads() != 1 {
		t.Errorf("%d were refused", n.seen.overloads())
	}
	want(t, n.begin(t, claim.BeginRequest{Key: "one too many"}), claim.First)
}

// A storm in one namespace: what another asks goes with the next batch, not behind it.
func TestAStormIsNotTheWaitOfAnotherNamespace(t *testing.T) {
	_, n, p := behindProxy(t)
	const storm = 500
	release := busy(t, n, p)
	var all sync.WaitGroup
	for i := range storm {
		all.Go(func() { n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)}) })
	}
	n.queued(t, storm)
	var calm claim.Answer
	all.Go(func() {
		var err error
		if calm, err = n.Begin(within(t, 20*time.Second), &claim.BeginRequest{Namespace: "calm", Key: "k"}); err != nil {
			t.Error(err)
		}
	})
	n.queued(t, storm+1)
	release()
	all.Wait()
	after := 0 // of the storm, those that were stored after the calm one
	for i := range storm {
		rec, err := raw(n, fmt.Sprint("k", i))
		if err != nil {
			t.Fatal(err)
		}
		if rec.Revision > calm.Revision {
			after++
		}
	}
	if after < storm-2*126 {
		t.Errorf("only %d of a storm of %d came after it", after, storm)
	}
}

// A caller that leaves while its write waits takes it along: it is never sent.
func TestAWriteThatNobodyWaitsForIsNotSent(t *testing.T) {
	_, n, p := behindProxy(t)
	ctx, leave := context.WithCancel(context.Background())
	release := busy(t, n, p)
	told := make(chan error, 1)
	go func() {
		_, err := n.Begin(ctx, fill(&claim.BeginRequest{Key: "left"}))
		told <- err
	}()
	n.queued(t, 1)
	leave()
	wantReason(t, <-told, claim.StoreUnavailable)
	release()
	want(t, n.begin(t, claim.BeginRequest{Key: "another"}), claim.First)
	if rec, err := raw(n, "left"); err != nil || rec != nil {
		t.Errorf("it was stored: %+v, %v", rec, err)
	}
	want(t, n.begin(t, claim.BeginRequest{Key: "left"}), claim.First)
}

// H06 for writes: B's create is under way and finds A's claim; A completes through
// another node and is told so; C asks before B's answer is in: C is told REPLAY.
func TestH06NobodySharesAWriteSentBeforeTheyAsked(t *testing.T) {
	direct, n, p := behindProxy(t)
	a := direct.begin(t, claim.BeginRequest{}) // which n has not heard of
	p.HoldAnswers()
	b, c := make(chan claim.Answer, 1), make(chan claim.Answer, 1)
	before := len(n.seen.sent("write"))
	go func() { b <- n.begin(t, claim.BeginRequest{}) }()
	p.AwaitAnswer(layout.NameOf("ns", "k").Key)
	if len(n.seen.sent("write")) == before {
		t.Fatal("B did not try to write")
	}
	direct.complete(t, "k", a.Claim.Token, "done")
	go func() { c <- n.begin(t, claim.BeginRequest{}) }()
	eventually(t, 10*time.Second, "C to wait behind B", func() error {
		if n.seen.waitedBehind() == 0 {
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

// C09 for a key that nobody knows: a thousand ask at once, and it costs one write and a
// read or two.
func TestC09HotNewKeyIsOneWrite(t *testing.T) {
	_, n, p := behindProxy(t)
	const calls = 1000
	answers := make([]claim.Answer, calls)
	reads, before := n.seen.count("read", "ok"), len(n.seen.sent("write"))
	release := busy(t, n, p)
	var all sync.WaitGroup
	for i := range calls {
		all.Go(func() { answers[i] = n.begin(t, claim.BeginRequest{Key: "hot", RequestID: fmt.Sprint(i)}) })
	}
	eventually(t, 10*time.Second, "all but one to wait behind it", func() error {
		if got := n.seen.waitedBehind(); got < calls-1 {
			return fmt.Errorf("%d do", got)
		}
		return nil
	})
	release()
	all.Wait()
	if sizes := n.seen.sent("write")[before+etcdtxn.WritesInFlight:]; !slices.Equal(sizes, []int{1}) {
		t.Errorf("for one key writes went as %v", sizes)
	}
	if got := n.seen.count("read", "ok") - reads; got > 20 {
		t.Errorf("%d reads for one key", got)
	}
	first := 0
	for _, a := range answers {
		if a.Verdict == claim.First {
			first++
		} else if a.Verdict != claim.InProgress {
			t.Errorf("verdict %d", a.Verdict)
		}
	}
	if first != 1 {
		t.Errorf("%d FIRST", first)
	}
}

// On the node that gave the claim a Complete is one conditional put, without a read;
// elsewhere it reads once.
func TestAFinishIsOnePutWhereTheClaimWasGiven(t *testing.T) {
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	for i, at := range []*node{n, other} {
		a := n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)})
		reads, writes := at.seen.count("read", "ok"), len(at.seen.sent("write"))
		at.complete(t, fmt.Sprint("k", i), a.Claim.Token, "done")
		if got := at.seen.count("read", "ok") - reads; got != i {
			t.Errorf("node %d read %d times", i, got)
		}
		if got := len(at.seen.sent("write")) - writes; got != 1 || at.seen.count("finish", "lost") > 0 {
			t.Errorf("node %d wrote %d times", i, got)
		}
	}
}

// What is stored through a batch is what is stored alone, byte for byte: no member's
// value ends up under another's key.
func TestBatchedValuesStayWithTheirKeys(t *testing.T) {
	_, n, p := behindProxy(t)
	const calls = 126
	tokens := make([]string, calls)
	gathered(t, n, p, calls, func(i int) {
		tokens[i] = n.begin(t, claim.BeginRequest{Key: fmt.Sprint("k", i)}).Claim.Token
	})
	body := func(i int) string { return strings.Repeat(fmt.Sprint(i, " "), 1+i%7) }
	gathered(t, n, p, calls, func(i int) { n.complete(t, fmt.Sprint("k", i), tokens[i], body(i)) })
	for i := range calls {
		rec, err := raw(n, fmt.Sprint("k", i))
		if err != nil || !bytes.Equal(rec.Result.Body, []byte(body(i))) {
			t.Fatalf("k%d: %+v, %v", i, rec, err)
		}
	}
}
