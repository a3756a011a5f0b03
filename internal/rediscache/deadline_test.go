package rediscache_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// slow is a Viewer whose clock is behind the others'.
type slow struct {
	rediscache.Viewer
	by time.Duration
}

func (s slow) View() (claim.View, error) {
	v, err := s.Viewer.View()
	v.Now = v.Now.Add(-s.by)
	return v, err
}

// H15, G4: a key's time ends; its entry is kept in Redis far longer, and one node's
// clock is as far behind as that of a node which believes may be. From Redis the result
// is told until CacheMargin before its deadline, by whoever's clock; then etcd tells
// it, until it is over; once the key is FIRST again the old result is told by nobody,
// and then the new one is.
func TestH15NearTheDeadlines(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	n1 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	n2 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Idle: true,
		View: func(v rediscache.Viewer) rediscache.Viewer { return slow{v, 2900 * time.Millisecond} }}))
	nodes := []site{n1, n2}
	n1.put(policy.Policy{ResultRetention: seconds(9), KeyRetention: seconds(9)})
	n2.knows()
	n1.finish("k", "r1")
	first := n1.fromRedis("k", "r1")
	until := first.Record.ResultUntil
	if first.Record.KeyUntil != until {
		t.Fatalf("the key's time ends at %d, the result's at %d", first.Record.KeyUntil, until)
	}
	name := n1.name("k")
	entry := stored(redis, name)
	if err := authentic(redis, n1.view(), name, "ns", "k"); err != nil {
		t.Fatal(err)
	}
	var fromEtcd, fromRedis int
	var late time.Duration // how close to the deadline Redis was believed
	var token string
	for token == "" {
		redis.Do("SET", name, entry, "PX", 3600_000) // whoever keeps it
		for _, n := range nodes {
			a := n.begin("k")
			switch {
			case a.Verdict == claim.First:
				if now := n1.view().Now; now < until.Add(claim.Grace) {
					t.Errorf("FIRST %v after the deadline", now.Sub(until))
				}
				token = a.Claim.Token
			case a.Verdict != claim.Replay:
				t.Errorf("verdict %d", a.Verdict)
			case told(a) != "r1":
				t.Errorf("told %q", told(a))
			case a.Source == claim.SourceRedis:
				fromRedis++
				if a.Now >= until.Add(-claim.CacheMargin) {
					t.Errorf("Redis was believed %v before the deadline", until.Sub(a.Now))
				}
				late = until.Sub(a.Now)
			default:
				fromEtcd++
			}
			if token != "" {
				break
			}
		}
	}
	if fromRedis == 0 || fromEtcd == 0 || n1.Seen.Of("look expired") == 0 || n2.Seen.Of("look expired") == 0 {
		t.Errorf("%d from Redis, %d from etcd: nothing was tested: %v, %v", fromRedis, fromEtcd, n1.Seen, n2.Seen)
	}
	t.Logf("%d from Redis, the last %v before the deadline, %d from etcd", fromRedis, late, fromEtcd)
	for _, n := range nodes {
		redis.Do("SET", name, entry, "PX", 3600_000)
		n.listen("k", 3, func(a claim.Answer) {
			if a.Verdict != claim.InProgress {
				t.Errorf("after FIRST: %s", told(a))
			}
			f, err := n.Get(nodetest.Within(t, 20*time.Second), &claim.GetRequest{Namespace: "ns", Key: "k"})
			if err != nil || f.Record.State != claim.Pending {
				t.Errorf("get after FIRST: %+v, %v", f.Record, err)
			}
		})
	}
	if err := n2.complete("k", token, "r2"); err != nil {
		t.Fatal(err)
	}
	redis.Do("SET", name, entry, "PX", 3600_000)
	n1.wantReplay(n1.begin("k"), "k", "r2")
	n2.wantReplay(n2.begin("k"), "k", "r2")
	nodetest.Eventually(t, 10*time.Second, "the new entry to take the old one's place", func() error {
		for _, n := range nodes {
			n.wantReplay(n.begin("k"), "k", "r2")
		}
		if stored(redis, name) == entry {
			return errors.New("it is the old one")
		}
		return nil
	})
	n1.fromRedis("k", "r2")
	// The old entry under the new one: it is not told, whatever it replaces.
	redis.Do("SET", name, entry, "PX", 3600_000)
	for _, n := range nodes {
		n.wantReplay(n.begin("k"), "k", "r2")
	}
}

// H14, G7: etcd goes away. While the node believes, Redis answers as ever. After that
// FAIL_CLOSED namespaces are told that nothing is established; REPLAY_ONLY ones get
// what was surely finished, marked stale, until its time is over by the last tick and
// all the time since. When etcd is back all is as before.
func TestH14EtcdAway(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	proxy := etcdtest.NewProxy(t, etcd.Endpoint(0))
	keeper := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	n := nodetest.Start(t, nodetest.Options{Client: etcd.Client(proxy.Addr()), Watch: etcd.Client(proxy.Addr()), Redis: standalone(redis.Addr()), Idle: true})
	closed, open, brief := at(t, n).in("closed"), at(t, n).in("open"), at(t, n).in("brief")
	keeper.in("open").put(policy.Policy{WithoutEtcd: policy.ReplayOnly})
	keeper.in("brief").put(policy.Policy{WithoutEtcd: policy.ReplayOnly, ResultRetention: seconds(13), KeyRetention: seconds(60)})
	open.knows()
	brief.knows()
	for _, s := range []site{closed, open, brief} {
		s.finish("k", "r")
		s.fromRedis("k", "r")
	}
	until := brief.fromRedis("k", "r").Record.ResultUntil
	// Its entry is kept for longer than it counts.
	redis.Do("SET", brief.name("k"), stored(redis, brief.name("k")), "PX", 3600_000)

	proxy.SwallowAnswers()
	cut := time.Now()
	believed := 0
	for {
		began := time.Since(cut)
		a, err := closed.ask("k", time.Second)
		if err != nil {
			if claim.ReasonOf(err) != claim.StoreUnavailable {
				t.Errorf("begin: %v", err)
			}
			if n.Believes() != nil { // or Redis was slow, once
				break
			}
			continue
		}
		if closed.wantReplay(a, "k", "r"); a.Source != claim.SourceRedis || a.Stale {
			t.Errorf("source %d, stale %t", a.Source, a.Stale)
		}
		if began > claim.BelievedFor {
			t.Errorf("Redis was believed %v after etcd went away", began)
			break
		}
		believed++
	}
	if believed == 0 {
		t.Error("Redis never answered while the node believed: nothing was tested")
	}
	// stale asks until Redis tells of it, marked stale.
	stale := func(s site) claim.Answer {
		t.Helper()
		var got claim.Answer
		nodetest.Eventually(t, 20*time.Second, "an answer without etcd", func() error {
			a, err := s.ask("k", 600*time.Millisecond)
			got = a
			return err
		})
		if s.wantReplay(got, "k", "r"); !got.Stale || got.Source != claim.SourceRedis {
			t.Errorf("source %d, stale %t", got.Source, got.Stale)
		}
		return got
	}
	if a := stale(brief); a.Now >= until.Add(-claim.CacheMargin) {
		t.Errorf("told %v before its deadline", until.Sub(a.Now))
	}
	stale(open)
	nodetest.Eventually(t, 20*time.Second, "a Get without etcd", func() error {
		f, err := open.Get(nodetest.Within(t, 600*time.Millisecond), &claim.GetRequest{Namespace: "open", Key: "k"})
		if err == nil && (!f.Stale || f.Source != claim.SourceRedis || string(f.Record.Result.Body) != "r") {
			t.Errorf("%+v", f)
		}
		return err
	})
	conflicting := func() error {
		ctx := nodetest.Within(t, 600*time.Millisecond)
		a, err := open.Begin(ctx, &claim.BeginRequest{Namespace: "open", Key: "k", Operation: "o"})
		if err == nil && !a.Stale {
			t.Errorf("%+v", a)
		}
		return err
	}
	nodetest.Eventually(t, 20*time.Second, "an answer without etcd", conflicting)
	unavailable := func(what string, err error) {
		t.Helper()
		if claim.ReasonOf(err) != claim.StoreUnavailable {
			t.Errorf("%s: %v", what, err)
		}
	}
	for range 3 {
		_, err := open.ask("unknown", 300*time.Millisecond)
		unavailable("an unknown key", err)
		_, err = closed.ask("k", 300*time.Millisecond)
		unavailable("FAIL_CLOSED", err)
		_, err = closed.Get(nodetest.Within(t, 300*time.Millisecond), &claim.GetRequest{Namespace: "closed", Key: "k"})
		unavailable("a Get under FAIL_CLOSED", err)
	}
	// The node's clock stands still, and yet the time of this one ends.
	nodetest.Eventually(t, 30*time.Second, "its time to be over", func() error {
		a, err := brief.ask("k", 300*time.Millisecond)
		v := brief.view()
		if over := v.Tick.Time.Add(v.TickAge) >= until.Add(-claim.CacheMargin); err == nil && a.Now >= until.Add(-claim.CacheMargin) {
			t.Errorf("told %v before its deadline", until.Sub(a.Now))
		} else if !over {
			return fmt.Errorf("it has %v", until.Add(-claim.CacheMargin).Sub(v.Tick.Time.Add(v.TickAge)))
		}
		return nil
	})
	if err := authentic(redis, brief.view(), brief.name("k"), "brief", "k"); err != nil {
		t.Fatal(err)
	}
	met := n.Seen.Of("look disbelieved")
	nodetest.Eventually(t, 20*time.Second, "its entry to be met", func() error {
		_, err := brief.ask("k", 300*time.Millisecond)
		if unavailable("a result whose time is over", err); n.Seen.Of("look disbelieved") < met+3 {
			return errors.New(n.Seen.String())
		}
		return nil
	})
	stale(open)
	proxy.Heal()
	nodetest.Eventually(t, 20*time.Second, "the node to believe again", n.Believes)
	for _, s := range []site{closed, open} {
		if a := s.fromRedis("k", "r"); a.Stale {
			t.Error("stale although etcd is back")
		}
	}
}
