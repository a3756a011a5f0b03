package rediscache_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

func (s site) forget(key string) error {
	_, err := s.Forget(nodetest.Within(s.t, 30*time.Second), &claim.ForgetRequest{Namespace: s.ns, Key: key, Reason: "test"})
	return err
}

// H05, G4: three keys are forgotten while all nodes keep asking for them. One was in
// Redis and comes back, under its old name and its new one; one is confirmed only
// later, by a node that was paused after its commit; one is filled later by a node
// that was paused after its read. Nobody is told the old result of any once its forget
// has answered; each is FIRST once, and then its new result is told, from Redis too.
func TestH05ForgottenIsNeverToldAgain(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	p := &nodetest.Holding{}
	n1 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	n2 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Cache: p.Around, Idle: true}))
	nodes := []site{n1, n2}
	for _, k := range []string{"seen", "filled late"} {
		n1.finish(k, "r1")
		n2.fromRedis(k, "r1")
		n1.fromRedis(k, "r1")
	}
	keys := []string{"seen", finishUnconfirmed(p, n2, redis), "filled late"}
	before := n1.view()
	old := map[string]string{}
	for _, k := range keys {
		old[k] = n1.name(k)
	}
	dump := redis.Do("DUMP", old["seen"]).(string)
	entry := stored(redis, old["seen"])
	redis.Do("DEL", old["filled late"])
	n2.wantReplay(n2.begin("filled late"), "filled late", "r1")

	var forgotten [3]atomic.Bool
	var firsts [3]atomic.Int64
	var tokens sync.Map
	given := func(i int, a claim.Answer) {
		firsts[i].Add(1)
		tokens.Store(keys[i], a.Claim.Token)
	}
	stop := make(chan struct{})
	var asking sync.WaitGroup
	for _, n := range nodes {
		for i, k := range keys {
			asking.Go(func() {
				for again := time.NewTicker(3 * time.Millisecond); ; {
					select {
					case <-stop:
						again.Stop()
						return
					case <-again.C:
					}
					after := forgotten[i].Load()
					a := n.begin(k)
					switch a.Verdict {
					case claim.First:
						given(i, a)
					case claim.Replay:
						if after {
							t.Errorf("%s: the old result was told after its forget had answered, by %d", k, a.Source)
						}
					}
				}
			})
		}
	}
	each([]int{0, 1, 2}, func(i int) {
		if err := nodes[i%2].forget(keys[i]); err != nil {
			t.Errorf("forget %s: %v", keys[i], err)
		}
		forgotten[i].Store(true)
	})
	if p.Release() == 0 {
		t.Error("nothing was held")
	}
	redis.Do("RESTORE", old["seen"], 3600_000, dump, "REPLACE")
	for _, k := range keys {
		nodetest.Eventually(t, 10*time.Second, "the old entry to be back under its old name", func() error {
			return authentic(redis, before, old[k], "ns", k)
		})
	}
	back := func() {
		for _, k := range keys {
			if n1.name(k) == old[k] {
				t.Errorf("%s: its name has not moved", k)
			}
			redis.Do("SET", n1.name(k), stored(redis, old[k]), "PX", 3600_000)
		}
	}
	for range 5 {
		back()
		for _, n := range nodes {
			n.listen("seen", 3, func(a claim.Answer) {
				switch a.Verdict {
				case claim.First:
					given(0, a)
				case claim.InProgress:
				default:
					t.Errorf("verdict %d", a.Verdict)
				}
				f, err := n.Get(nodetest.Within(t, 10*time.Second), &claim.GetRequest{Namespace: "ns", Key: "seen"})
				if err == nil && f.Record.State.Finished() || err != nil && claim.ReasonOf(err) != claim.RecordNotFound {
					t.Errorf("get: %+v, %v", f.Record, err)
				}
			})
		}
	}
	nodetest.Eventually(t, 20*time.Second, "each key to be given", func() error {
		for i, k := range keys {
			if _, ok := tokens.Load(k); !ok {
				return fmt.Errorf("%s: %d", k, firsts[i].Load())
			}
		}
		return nil
	})
	close(stop)
	asking.Wait()
	if n := n1.Seen.Of("look hmac") + n2.Seen.Of("look hmac"); n == 0 {
		t.Error("the old entry was never met under the new name")
	}
	for i, k := range keys {
		if n := firsts[i].Load(); n != 1 {
			t.Errorf("%s: %d FIRST", k, n)
		}
		token, _ := tokens.Load(k)
		if err := n2.complete(k, token.(string), "r2"); err != nil {
			t.Fatal(err)
		}
	}
	back()
	for _, n := range nodes {
		for _, k := range keys {
			n.listen(k, 2, func(a claim.Answer) { n.wantReplay(a, k, "r2") })
			n.fromRedis(k, "r2")
		}
	}
	if entry == stored(redis, n1.name("seen")) {
		t.Error("the old entry was not removed")
	}
}

// H34, H05, G4: a node hears nothing of etcd's changes any more, though it can ask.
// It goes on to tell from Redis what it knew, for as long as it believes, and no longer
// by the time that a forget has answered, though the old entry is still where that node
// looks for it.
func TestH34NodeBehindBelievesNoLongerThanForgetWaits(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	proxy := etcdtest.NewProxy(t, etcd.Endpoint(0))
	n1 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	n2 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Watch: etcd.Client(proxy.Addr()), Redis: standalone(redis.Addr()), Idle: true}))
	n1.finish("k", "r1")
	n2.fromRedis("k", "r1")
	old := n2.name("k")
	dump := redis.Do("DUMP", old).(string)

	proxy.SwallowAnswers()
	cut := time.Now()
	forgotten := make(chan error, 1)
	var after atomic.Bool
	go func() {
		err := n1.forget("k")
		after.Store(true)
		forgotten <- err
	}()
	// ask has n2 answer while it may be unable to, and tells whether Redis answered.
	var token string
	ask := func() (fromRedis bool) {
		late, began := after.Load(), time.Since(cut)
		a, err := n2.ask("k", 500*time.Millisecond)
		switch {
		case err != nil && claim.ReasonOf(err) != claim.StoreUnavailable:
			t.Errorf("begin: %v", err)
		case err == nil && told(a) == "r1" && late:
			t.Errorf("the old result was told by %d after the forget had answered", a.Source)
		case err == nil && a.Verdict == claim.Replay && a.Source == claim.SourceRedis && began > claim.BelievedFor:
			t.Errorf("Redis was believed %v after the node last heard", began)
		case err == nil && a.Verdict == claim.First:
			if token != "" {
				t.Error("a second FIRST")
			}
			token = a.Claim.Token
		}
		late = after.Load()
		f, gone := n2.Get(nodetest.Within(t, 500*time.Millisecond), &claim.GetRequest{Namespace: "ns", Key: "k"})
		if gone == nil && late && f.Record.Result != nil && string(f.Record.Result.Body) == "r1" {
			t.Errorf("a Get was told the old result by %d after the forget had answered", f.Source)
		}
		return err == nil && a.Source == claim.SourceRedis
	}
	fromRedis := 0
	for waiting := true; waiting; {
		select {
		case err := <-forgotten:
			if err != nil {
				t.Fatal(err)
			}
			waiting = false
		default:
			if ask() {
				fromRedis++
			}
		}
	}
	if fromRedis == 0 {
		t.Error("the node that was behind never answered from Redis: nothing was tested")
	}
	t.Logf("%d answers from Redis while behind", fromRedis)
	redis.Do("RESTORE", old, 3600_000, dump, "REPLACE")
	if n2.name("k") != old {
		t.Fatal("the node is not behind")
	}
	for range 3 {
		ask()
	}
	if token == "" {
		token = n1.take("k")
	}
	for range 3 {
		ask()
	}
	if err := n1.complete("k", token, "r2"); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		ask()
	}
	if err := authentic(redis, n1.view(), old, "ns", "k"); err != nil {
		t.Errorf("the old entry was not there all the time: %v", err)
	}
	if n2.Seen.Of("look disbelieved") == 0 {
		t.Error("the node that was behind never disbelieved")
	}
	proxy.Heal()
	nodetest.Eventually(t, 20*time.Second, "the node to follow again", func() error {
		if err := n2.Believes(); err != nil {
			return err
		}
		return n2.Follower.Ready()
	})
	redis.Do("SET", n1.name("k"), stored(redis, old), "PX", 3600_000)
	n2.fromRedis("k", "r2")
	n1.fromRedis("k", "r2")
}

// G5: a raised epoch voids what is in Redis, under whatever name it turns up, and
// Redis answers again under the new one.
func TestRaisedEpochVoidsEntries(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	p := &nodetest.Holding{}
	n1 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	n2 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Cache: p.Around, Idle: true}))
	n1.finish("k", "r")
	n2.fromRedis("k", "r")
	late := finishUnconfirmed(p, n2, redis)
	old := map[string]string{"k": n1.name("k"), late: n1.name(late)}
	before := n1.view()
	if _, err := n1.Behind.RaiseEpoch(nodetest.Within(t, 30*time.Second), "test"); err != nil {
		t.Fatal(err)
	}
	p.Release()
	for k, name := range old {
		nodetest.Eventually(t, 20*time.Second, "the old entries to be there", func() error { return authentic(redis, before, name, "ns", k) })
	}
	for _, n := range []site{n1, n2} {
		met := n.Seen.Of("look hmac")
		nodetest.Eventually(t, 20*time.Second, "the old entry to be met under the new name", func() error {
			if n.name("k") == old["k"] {
				t.Fatal("the name has not moved")
			}
			redis.Do("SET", n.name("k"), stored(redis, old["k"]), "PX", 3600_000)
			if n.wantReplay(n.begin("k"), "k", "r"); n.Seen.Of("look hmac") == met {
				return errors.New(n.Seen.String())
			}
			return nil
		})
		n.fromRedis("k", "r")
		n.fromRedis(late, "r1")
	}
}
