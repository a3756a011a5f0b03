package memory_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// TestSuite: what every Store must do, done with memory in front, over two nodes that take
// turns; with Redis behind it, and without.
func TestSuite(t *testing.T) {
	for _, c := range []struct {
		name  string
		redis func(t *testing.T) rediscache.Server
	}{
		{"WithRedis", func(t *testing.T) rediscache.Server {
			return rediscache.Server{Mode: rediscache.Standalone, Addrs: []string{redistest.Start(t).Addr()}}
		}},
		{"WithoutRedis", func(*testing.T) rediscache.Server { return rediscache.Server{} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			etcd, redis := etcdtest.Start(t, 1), c.redis(t)
			all := []*nodetest.Node{
				nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: redis, Memory: 1 << 20}),
				nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: redis, Memory: 1 << 20, Idle: true}),
			}
			t.Cleanup(func() {
				for _, n := range all {
					if t.Log(n.Seen); n.Seen.Of("remembered hit") == 0 {
						t.Error("memory never answered: nothing was tested")
					}
				}
			})
			var next atomic.Int64
			claimtest.Suite(t, func(*testing.T) claimtest.Harness {
				n := all[next.Add(1)%2]
				return claimtest.Harness{Store: n, Clock: nodetest.Clock{Node: n}, PutPolicy: func(t *testing.T, namespace string, p claim.Policy) { nodetest.Declare(t, n, namespace, p) }}
			})
		})
	}
}

// site is a node that a test asks about one namespace.
type site struct {
	*nodetest.Node
	t testing.TB
}

func start(t testing.TB, o nodetest.Options) site {
	o.Memory = 1 << 20
	return site{nodetest.Start(t, o), t}
}

func (s site) begin(key string, within time.Duration) (claim.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	return s.Begin(ctx, &claim.BeginRequest{Namespace: "ns", Key: key})
}

// told is what a Begin is told: the result of a REPLAY, or the verdict.
func told(a claim.Answer) string {
	if a.Verdict != claim.Replay {
		return fmt.Sprintf("<verdict %d>", a.Verdict)
	}
	return string(a.Record.Result.Body)
}

func (s site) take(key string) string {
	s.t.Helper()
	a, err := s.begin(key, 20*time.Second)
	if err != nil || a.Verdict != claim.First {
		s.t.Fatalf("begin %s: %s, %v, want FIRST", key, told(a), err)
	}
	return a.Claim.Token
}

func (s site) complete(key, token, body string) {
	s.t.Helper()
	if _, err := s.Finish(nodetest.Within(s.t, 20*time.Second), &claim.FinishRequest{Namespace: "ns", Key: key, Token: token, Result: &claim.Result{Body: []byte(body)}}); err != nil {
		s.t.Errorf("complete %s: %v", key, err)
	}
}

func (s site) forget(key string) error {
	_, err := s.Forget(nodetest.Within(s.t, 30*time.Second), &claim.ForgetRequest{Namespace: "ns", Key: key, Reason: "test"})
	return err
}

// fromMemory asks until memory answers with this result.
func (s site) fromMemory(key, body string) claim.Answer {
	s.t.Helper()
	var a claim.Answer
	nodetest.Eventually(s.t, 20*time.Second, "memory to answer for "+key, func() (err error) {
		if a, err = s.begin(key, 20*time.Second); err != nil || told(a) != body {
			s.t.Errorf("%s: %s, %v, want %q", key, told(a), err, body)
		}
		if a.Source != claim.SourceMemory {
			return fmt.Errorf("source %d; %v", a.Source, s.Seen)
		}
		return nil
	})
	return a
}

// H05, G4: three keys are forgotten while two nodes keep asking for them. Both remember one;
// of another the node that finished it is told only later, of the third one that read it.
// Nobody is told the old result of any once its forget has answered; each is FIRST once,
// and then its new result is told, from memory too.
func TestH05MemoryBringsNothingBack(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	p := &nodetest.Holding{}
	n1 := start(t, nodetest.Options{Client: etcd.Client()})
	n2 := start(t, nodetest.Options{Client: etcd.Client(), Cache: p.Around, Idle: true})
	nodes := []site{n1, n2}
	keys := []string{"seen", "finished late", "read late"}
	for _, k := range []string{"seen", "read late"} {
		n1.complete(k, n1.take(k), "r1")
		n1.fromMemory(k, "r1")
	}
	n2.fromMemory("seen", "r1")
	token := n2.take("finished late")
	p.Hold()
	n2.complete("finished late", token, "r1")
	if a, err := n2.begin("read late", 20*time.Second); err != nil || told(a) != "r1" || a.Source != claim.SourceEtcd {
		t.Fatalf("%s from %d, %v", told(a), a.Source, err)
	}
	n1.fromMemory("finished late", "r1")

	var forgotten [3]atomic.Bool
	var firsts [3]atomic.Int64
	var tokens sync.Map
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
					late := forgotten[i].Load()
					a, err := n.begin(k, 20*time.Second)
					switch {
					case err != nil:
						t.Errorf("begin %s: %v", k, err)
					case a.Verdict == claim.First:
						firsts[i].Add(1)
						tokens.Store(k, a.Claim.Token)
					case a.Verdict == claim.Replay && late:
						t.Errorf("%s: the old result was told after its forget had answered, by %d", k, a.Source)
					}
					late = forgotten[i].Load()
					f, err := n.Get(nodetest.Within(t, 20*time.Second), &claim.GetRequest{Namespace: "ns", Key: k, Cached: late})
					if late && err == nil && f.Record.State.Finished() {
						t.Errorf("%s: a Get was told of it after its forget had answered, by %d", k, f.Source)
					}
				}
			})
		}
	}
	var forgetting sync.WaitGroup
	for i, k := range keys {
		forgetting.Go(func() {
			if err := nodes[i%2].forget(k); err != nil {
				t.Errorf("forget %s: %v", k, err)
			}
			forgotten[i].Store(true)
		})
	}
	forgetting.Wait()
	if p.Release() < 2 {
		t.Error("nothing was held")
	}
	nodetest.Eventually(t, 20*time.Second, "each key to be given", func() error {
		for i, k := range keys {
			if _, ok := tokens.Load(k); !ok {
				return fmt.Errorf("%s: %d", k, firsts[i].Load())
			}
		}
		if n2.Seen.Of("remembered epoch") < 2 {
			return errors.New("what came in late was not met")
		}
		return nil
	})
	close(stop)
	asking.Wait()
	for i, k := range keys {
		if n := firsts[i].Load(); n != 1 {
			t.Errorf("%s: %d FIRST", k, n)
		}
		token, _ := tokens.Load(k)
		n2.complete(k, token.(string), "r2")
	}
	for _, n := range nodes {
		for _, k := range keys {
			n.fromMemory(k, "r2")
		}
	}
}

// slow is a Viewer whose clock is behind the others'.
type slow struct{ rediscache.Viewer }

func (s slow) View() (claim.View, error) {
	v, err := s.Viewer.View()
	v.Now = v.Now.Add(-2900 * time.Millisecond)
	return v, err
}

// H15, G4: a key's time ends, and both nodes remember its result; one's clock is as far
// behind as that of a node which believes may be. From memory it is told until CacheMargin
// before its deadline, by whoever's clock; once the key is FIRST again, by nobody.
func TestH15MemoryNearTheDeadlines(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	n1 := start(t, nodetest.Options{Client: etcd.Client()})
	n2 := start(t, nodetest.Options{Client: etcd.Client(), Idle: true, View: func(v rediscache.Viewer) rediscache.Viewer { return slow{v} }})
	nodes := []site{n1, n2}
	brief := 10 * time.Second
	if _, err := n1.Behind.PutNamespace(nodetest.Within(t, 20*time.Second), policy.Namespace{Name: "ns", Policy: policy.Policy{ResultRetention: &brief, KeyRetention: &brief}}); err != nil {
		t.Fatal(err)
	}
	nodetest.Eventually(t, 20*time.Second, "the policy to be followed", func() error {
		if v, err := n2.Follower.View(); err != nil || v.Policies["ns"].ResultRetention != brief {
			return errors.New("not yet")
		}
		return nil
	})
	n1.complete("k", n1.take("k"), "r1")
	until := n1.fromMemory("k", "r1").Record.ResultUntil
	n2.fromMemory("k", "r1")
	var remembered, asked int
	var token string
	for again := time.NewTicker(10 * time.Millisecond); token == ""; <-again.C {
		for _, n := range nodes {
			a, err := n.begin("k", 20*time.Second)
			switch {
			case err != nil:
				t.Errorf("begin: %v", err)
			case a.Verdict == claim.First:
				token = a.Claim.Token
			case told(a) != "r1" && a.Verdict != claim.InProgress:
				t.Errorf("told %s", told(a))
			case a.Source == claim.SourceMemory:
				if remembered++; a.Now >= until.Add(-claim.CacheMargin) {
					t.Errorf("memory was believed %v before the deadline", until.Sub(a.Now))
				}
			default:
				asked++
			}
		}
	}
	if remembered == 0 || asked == 0 || n1.Seen.Of("remembered expired") == 0 || n2.Seen.Of("remembered expired") == 0 {
		t.Errorf("%d from memory, %d from etcd: nothing was tested: %v, %v", remembered, asked, n1.Seen, n2.Seen)
	}
	for _, n := range nodes {
		if a, err := n.begin("k", 20*time.Second); err != nil || a.Verdict != claim.InProgress {
			t.Errorf("after FIRST: %s, %v", told(a), err)
		}
	}
	n2.complete("k", token, "r2")
	for _, n := range nodes {
		n.fromMemory("k", "r2")
	}
}

// H34, G4: a node hears nothing of etcd's changes any more, though it can ask. It goes on
// to tell what it remembers for as long as it believes, and no longer by the time that a
// forget has answered.
func TestH34MemoryIsBelievedNoLongerThanForgetWaits(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	proxy := etcdtest.NewProxy(t, etcd.Endpoint(0))
	n1 := start(t, nodetest.Options{Client: etcd.Client()})
	n2 := start(t, nodetest.Options{Client: etcd.Client(), Watch: etcd.Client(proxy.Addr()), Idle: true})
	n1.complete("k", n1.take("k"), "r1")
	n2.fromMemory("k", "r1")

	proxy.SwallowAnswers()
	cut := time.Now()
	forgotten := make(chan error, 1)
	var after atomic.Bool
	go func() {
		err := n1.forget("k")
		after.Store(true)
		forgotten <- err
	}()
	var token string
	ask := func() (remembered bool) {
		late, began := after.Load(), time.Since(cut)
		a, err := n2.begin("k", 500*time.Millisecond)
		switch {
		case err != nil && claim.ReasonOf(err) != claim.StoreUnavailable:
			t.Errorf("begin: %v", err)
		case err == nil && told(a) == "r1" && late:
			t.Errorf("the old result was told by %d after the forget had answered", a.Source)
		case err == nil && a.Source == claim.SourceMemory && began > claim.BelievedFor:
			t.Errorf("memory was believed %v after the node last heard", began)
		case err == nil && a.Verdict == claim.First:
			token = a.Claim.Token
		}
		return err == nil && a.Source == claim.SourceMemory
	}
	remembered := 0
	for waiting := true; waiting; {
		select {
		case err := <-forgotten:
			if err != nil {
				t.Fatal(err)
			}
			waiting = false
		default:
			if ask() {
				remembered++
			}
		}
	}
	if remembered == 0 || n2.Seen.Of("remembered disbelieved") == 0 {
		t.Errorf("nothing was tested: %v", n2.Seen)
	}
	for range 3 {
		ask()
	}
	if token == "" {
		token = n1.take("k")
	}
	n1.complete("k", token, "r2")
	proxy.Heal()
	nodetest.Eventually(t, 20*time.Second, "the node to believe again", n2.Believes)
	n2.fromMemory("k", "r2")
	n1.fromMemory("k", "r2")
}

// G4: a raised epoch drops all that any node remembers; a switch keeps memory out of it and
// lets it in again. Each holds once it has answered.
func TestG4EpochAndSwitch(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	n1 := start(t, nodetest.Options{Client: etcd.Client()})
	n2 := start(t, nodetest.Options{Client: etcd.Client(), Idle: true})
	keys := []string{"a", "b", "c"}
	for _, k := range keys {
		n1.complete(k, n1.take(k), "r")
	}
	each := func(what string, f func(n site, k string)) {
		t.Helper()
		for _, n := range []site{n1, n2} {
			for _, k := range keys {
				f(n, k)
			}
		}
	}
	remember := func() { each("", func(n site, k string) { n.fromMemory(k, "r") }) }
	ask := func(what string) {
		each(what, func(n site, k string) {
			if a, err := n.begin(k, 20*time.Second); err != nil || told(a) != "r" || a.Source == claim.SourceMemory {
				t.Errorf("%s: %s: %s from %d, %v", what, k, told(a), a.Source, err)
			}
		})
	}
	remember()
	ctx := nodetest.Within(t, 60*time.Second)
	if _, err := n1.Behind.RaiseEpoch(ctx, "test"); err != nil {
		t.Fatal(err)
	}
	ask("the epoch was raised")
	remember()
	if _, err := n1.Behind.PutSwitch(ctx, policy.Switch{Name: policy.BypassMemory, On: true, Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	ask("bypassed")
	ask("bypassed")
	if status := n2.Follower.Status(); !status.BypassMemory || status.BypassRedis {
		t.Errorf("%+v", status)
	}
	if _, err := n1.Behind.PutSwitch(ctx, policy.Switch{Name: policy.BypassMemory, Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	remember()
}

// What Redis tells fills memory, whatever it tells: a conflict too.
func TestRedisFillsMemory(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	redis := rediscache.Server{Mode: rediscache.Standalone, Addrs: []string{redistest.Start(t).Addr()}}
	n1 := start(t, nodetest.Options{Client: etcd.Client(), Redis: redis})
	n2 := start(t, nodetest.Options{Client: etcd.Client(), Redis: redis, Idle: true})
	for i := range 20 { // Redis may be slow
		k := fmt.Sprint("k", i)
		a, err := n1.Begin(t.Context(), &claim.BeginRequest{Namespace: "ns", Key: k, Operation: "pay"})
		if err != nil {
			t.Fatal(err)
		}
		confirmed := n1.Seen.Of("confirm ok")
		n1.complete(k, a.Claim.Token, "r")
		nodetest.Eventually(t, 20*time.Second, "the confirm", func() error {
			if n1.Seen.Of("confirm ok") == confirmed {
				return errors.New(n1.Seen.String())
			}
			return nil
		})
		if a, err = n2.Begin(t.Context(), &claim.BeginRequest{Namespace: "ns", Key: k, Operation: "refund"}); err != nil || a.Verdict != claim.Conflict {
			t.Fatalf("%s, %v, want a conflict", told(a), err)
		}
		if from := a.Source; from == claim.SourceRedis {
			if a, err = n2.begin(k, 20*time.Second); err != nil || told(a) != "r" || a.Source != claim.SourceMemory {
				t.Errorf("%s from %d, %v", told(a), a.Source, err)
			}
			return
		}
	}
	t.Errorf("Redis never answered: %v", n2.Seen)
}
