package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// changing is a Viewer whose views are changed, each by its number since it was armed,
// from 1 on.
type changing struct {
	rediscache.Viewer

	mu     sync.Mutex
	views  int
	change func(number int, v *claim.View)
}

func (c *changing) around(v rediscache.Viewer) rediscache.Viewer { c.Viewer = v; return c }

func (c *changing) arm(change func(number int, v *claim.View)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.views, c.change = 0, change
}

func (c *changing) View() (claim.View, error) {
	v, err := c.Viewer.View()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.change != nil && err == nil {
		c.views++
		c.change(c.views, &v)
	}
	return v, err
}

// away is a Store that etcd does not answer.
type away struct{ claim.Store }

func (away) Begin(context.Context, *claim.BeginRequest) (claim.Answer, error) {
	return claim.Answer{}, claim.Unavailable("away", nil)
}

func (away) BeginTogether(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	return claim.NoneBegun(len(reqs), claim.Unavailable("away", nil))
}

func (away) Get(context.Context, *claim.GetRequest) (claim.Found, error) {
	return claim.Found{}, claim.Unavailable("away", nil)
}

// What a node knows may change while Redis is asked. Whatever changes: it is judged by
// what the node knows when Redis has answered, and by the namespace's policy.
func TestKnowledgeChangesWhileRedisIsAsked(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	c := &changing{}
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), View: c.around}))
	closed, open := n.in("closed"), n.in("open")
	open.put(policy.Policy{WithoutEtcd: policy.ReplayOnly})
	for _, s := range []site{closed, open} {
		s.finish("k", "r")
		s.fromRedis("k", "r")
	}
	asked := n.Cache.Front(away{n.Behind})
	later := func(change func(v *claim.View)) func(int, *claim.View) {
		return func(number int, v *claim.View) {
			if number > 1 {
				change(v)
			}
		}
	}
	for _, c2 := range []struct {
		name string
		// change is made to every view after the first.
		change func(v *claim.View)
		// found is what the look comes to.
		found rediscache.Finding
		// stale: a REPLAY_ONLY namespace is told of it, marked stale.
		stale bool
	}{
		{"it believes no longer", func(v *claim.View) { v.Believed = false }, rediscache.Disbelieved, true},
		{"the epoch was raised", func(v *claim.View) { v.Epoch = claim.NewID() }, rediscache.Epoch, false},
		{"the slot's epoch moved", func(v *claim.View) {
			moved := *v.SlotEpochs
			for i := range moved {
				moved[i]++
			}
			v.SlotEpochs = &moved
		}, rediscache.Epoch, false},
		{"bypassed", func(v *claim.View) { v.BypassRedis = true }, rediscache.Bypassed, false},
		{"the result's time is nearly over", func(v *claim.View) { v.Now = v.Now.Add(24*time.Hour - claim.CacheMargin) }, rediscache.Expired, false},
	} {
		t.Run(c2.name, func(t *testing.T) {
			for _, s := range []site{closed, open} {
				for what, call := range map[string]func(ctx context.Context) (stale bool, err error){
					"begin": func(ctx context.Context) (bool, error) {
						a, err := asked.Begin(ctx, &claim.BeginRequest{Namespace: s.ns, Key: "k"})
						return a.Stale, err
					},
					"get": func(ctx context.Context) (bool, error) {
						f, err := asked.Get(ctx, &claim.GetRequest{Namespace: s.ns, Key: "k"})
						return f.Stale, err
					},
				} {
					// Again if Redis was too slow for what it said to be looked at.
					nodetest.Eventually(t, 20*time.Second, "Redis to say something", func() error {
						met := s.Seen.Of("look " + string(c2.found))
						c.arm(later(c2.change))
						defer c.arm(nil)
						stale, err := call(nodetest.Within(t, 5*time.Second))
						if s.Seen.Of("look "+string(c2.found)) == met {
							return errors.New(s.Seen.String())
						}
						if c2.stale && s.ns == "open" {
							if err != nil || !stale {
								t.Errorf("%s: stale %t, %v; want a stale answer", what, stale, err)
							}
						} else if claim.ReasonOf(err) != claim.StoreUnavailable {
							t.Errorf("%s in %q: stale %t, %v; want STORE_UNAVAILABLE", what, s.ns, stale, err)
						}
						return nil
					})
				}
			}
		})
	}
}

// A switch keeps Redis out of it: it gets no command, and etcd answers.
func TestBypassSendsNothing(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	c := &changing{}
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), View: c.around}))
	n.finish("before", "r")
	n.fromRedis("before", "r")
	n.take("pending")
	c.arm(func(_ int, v *claim.View) { v.BypassRedis = true })
	if err := n.Cache.Degraded(); err == nil {
		t.Error("it does not say that Redis is bypassed")
	}
	redis.Do("CONFIG", "SET", "slowlog-max-len", 100000, "slowlog-log-slower-than", 0)
	// commands are those that Redis got since the last call, but for ours.
	commands := func() (all []string) {
		for _, one := range redis.Do("SLOWLOG", "GET", -1).([]any) {
			var words []string
			for _, w := range one.([]any)[3].([]any) {
				words = append(words, w.(string))
			}
			line := strings.Join(words, " ")
			if strings.HasPrefix(line, "SLOWLOG") || strings.HasPrefix(line, "CONFIG") ||
				strings.HasPrefix(strings.ToUpper(line), "HELLO") || strings.HasPrefix(strings.ToUpper(line), "CLIENT") {
				continue
			}
			all = append(all, line)
		}
		redis.Do("SLOWLOG", "RESET")
		return all
	}
	rounds := 0
	nodetest.Eventually(t, 20*time.Second, "Redis to hear nothing", func() error {
		rounds++
		commands() // what was on its way is none of this round's
		key := "k" + strings.Repeat("x", rounds)
		n.finish(key, "r")
		for range 3 {
			for _, k := range []string{key, "before"} {
				a := n.begin(k)
				if n.wantReplay(a, k, "r"); a.Source != claim.SourceEtcd {
					t.Errorf("%s: source %d", k, a.Source)
				}
				if f, err := n.Get(nodetest.Within(t, 10*time.Second), &claim.GetRequest{Namespace: "ns", Key: k}); err != nil || f.Source != claim.SourceEtcd {
					t.Errorf("get %s: source %d, %v", k, f.Source, err)
				}
			}
			if a := n.begin("pending"); a.Verdict != claim.InProgress {
				t.Errorf("verdict %d", a.Verdict)
			}
		}
		got := commands()
		for _, line := range got {
			if !strings.Contains(line, n.name("before")) && !strings.Contains(line, n.name("pending")) {
				t.Errorf("Redis got %.100q", line)
			}
		}
		if len(got) > 0 {
			return fmt.Errorf("it got %.100q", got[0])
		}
		return nil
	})
	if n.Seen.Of("look bypassed") == 0 {
		t.Error("nothing was bypassed")
	}
	c.arm(nil)
	n.fromRedis("before", "r")
	if err := n.Cache.Degraded(); err != nil {
		t.Errorf("degraded: %v", err)
	}
}

// A switch that is put between a stage and its commit: the confirm is not sent either.
func TestBypassSendsNoLateConfirm(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	c, p := &changing{}, &nodetest.Holding{}
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), View: c.around, Cache: p.Around}))
	key := finishUnconfirmed(p, n, redis)
	staged := stored(redis, n.name(key))
	c.arm(func(_ int, v *claim.View) { v.BypassRedis = true })
	confirms := n.Seen.Of("confirm ok")
	if p.Release() == 0 {
		t.Fatal("nothing was held")
	}
	c.arm(nil) // probes again, which would overtake nothing
	pipelines := n.Seen.Of("pipeline ask")
	nodetest.Eventually(t, 10*time.Second, "probes", func() error {
		if n.Seen.Of("pipeline ask") < pipelines+3 {
			return errors.New("none yet")
		}
		return nil
	})
	if stored(redis, n.name(key)) != staged || n.Seen.Of("confirm ok") != confirms {
		t.Error("Redis was written while it was bypassed: its stage was confirmed")
	}
}

// C65, G5: fingerprint and operation are compared before Redis answers too: CONFLICT,
// which shows nothing of the other request, and then REPLAY.
func TestC65ComparedOnTheRedisPath(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	print1, print2 := []byte(strings.Repeat("1", 32)), []byte(strings.Repeat("2", 32))
	first := claim.BeginRequest{Namespace: "ns", Key: "k", Fingerprint: print1, Operation: "pay"}
	a, err := n.Begin(nodetest.Within(t, 20*time.Second), &first)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.complete("k", a.Claim.Token, "r"); err != nil {
		t.Fatal(err)
	}
	done := n.fromRedis("k", "r").Record
	for _, c := range []struct {
		print     []byte
		operation string
		want      claim.Verdict
	}{
		{print2, "pay", claim.Conflict},
		{print1, "pay", claim.Replay},
		{print1, "refund", claim.Conflict},
		{nil, "refund", claim.Conflict},
		{print2, "", claim.Conflict},
		{print2, "refund", claim.Conflict},
		{print1, "", claim.Replay},
		{nil, "pay", claim.Replay},
		{nil, "", claim.Replay},
	} {
		req := claim.BeginRequest{Namespace: "ns", Key: "k", Fingerprint: c.print, Operation: c.operation}
		nodetest.Eventually(t, 20*time.Second, "Redis to answer", func() error {
			a, err := n.Begin(nodetest.Within(t, 20*time.Second), &req)
			if err != nil {
				return err
			}
			if a.Verdict != c.want {
				t.Errorf("%q, %q: verdict %d by %d, want %d", c.print, c.operation, a.Verdict, a.Source, c.want)
			}
			if a.Verdict == claim.Conflict {
				shown := *a.Record
				if !shown.CreatedAt.Equal(done.CreatedAt) {
					t.Errorf("created at %v, not %v", shown.CreatedAt, done.CreatedAt)
				}
				if shown.Result != nil || shown.Fingerprint != nil || shown.Digest != nil || shown.Operation != "" || shown.Key != "" || shown.State != 0 || !shown.FinishedAt.IsZero() || shown.Revision != 0 {
					t.Errorf("a CONFLICT shows %+v", shown)
				}
			}
			if a.Source != claim.SourceRedis {
				return errors.New("etcd answered")
			}
			return nil
		})
	}
}
