package rediscache_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// Whatever Redis answers to a script, what becomes a metric's label is one of a few
// words.
func TestOutcomesAreFewWords(t *testing.T) {
	for answer, want := range map[string]string{"ok": "ok", "kept": "kept", "lost": "lost", "": "failed", "\xff\xfe": "failed", "OK": "failed", strings.Repeat("x", 1<<20): "failed"} {
		if got := rediscache.OutcomeOf(answer, nil); got != want {
			t.Errorf("%.10q counts as %q, want %q", answer, got, want)
		}
	}
}

// Where Redis is may be logged, and no secret with it.
func TestServerIsToldWithoutSecrets(t *testing.T) {
	at := rediscache.Server{Mode: rediscache.Sentinel, Addrs: []string{"a:1", "b:2"}, MasterName: "m", User: "u", Password: "hush", SentinelPassword: "hush"}
	var out bytes.Buffer
	slog.New(slog.NewJSONHandler(&out, nil)).Info("x", "redis", at)
	slog.New(slog.NewTextHandler(&out, nil)).Info("x", "redis", at)
	fmt.Fprint(&out, at)
	if strings.Contains(out.String(), "hush") || strings.Count(out.String(), "sentinel a:1,b:2 master m user u") != 3 {
		t.Error(out.String())
	}
}

// A master that the sentinels do not know is told as such: it is no key that is absent.
func TestUnknownMasterIsTold(t *testing.T) {
	t.Parallel()
	etcd, s := etcdtest.Start(t, 1), redistest.StartSentinel(t)
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: rediscache.Server{Mode: rediscache.Sentinel, Addrs: s.Addrs(), MasterName: "misspelt"}}))
	n.finish("k", "r")
	degrades(t, []*nodetest.Node{n.Node}, `the sentinels know no master "misspelt"`)
	if a := n.begin("k"); a.Source != claim.SourceEtcd {
		t.Errorf("source %d", a.Source)
	}
}

// Rights that are too few for the scripts are told, though Redis answers questions.
func TestTooFewRightsForScriptsAreTold(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	redis.SetUser("few", "p", "~dc:*", "-@all", "+client|setname", "+get", "+set", "+eval", "+evalsha", "+getrange", "+del")
	server := standalone(redis.Addr())
	server.User, server.Password = "few", "p"
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: server}))
	degrades(t, []*nodetest.Node{n.Node}, "its rights are too few")
	redis.Do("ACL", "SETUSER", "few", "+setrange", "+pexpire")
	nodetest.Eventually(t, soon, "nothing to be wrong", n.Cache.Degraded)
}

// G5: a value that is larger than any entry is removed once it has held somebody up, so
// that asking for it does not keep Redis from being used.
func TestG5HugeValueIsRemoved(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	n.finish("other", "r")
	n.finish("victim", "r")
	n.fromRedis("victim", "r")
	redis.Do("SETRANGE", n.name("victim"), 64<<20, "x")
	nodetest.Eventually(t, 30*time.Second, "both to be told from Redis again", func() error {
		for _, key := range []string{"victim", "other"} {
			a := n.begin(key)
			if n.wantReplay(a, key, "r"); a.Source != claim.SourceRedis {
				return fmt.Errorf("%s is told by etcd; %v", key, n.Seen)
			}
		}
		return nil
	})
}

// E65: a Redis that answers too late for every caller is of no use, and that is told.
func TestE65LateForEveryCaller(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	p := redistest.NewProxy(t, redis.Addr())
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(p.Addr())}))
	n.finish("k", "r")
	n.fromRedis("k", "r")
	p.SetDelay(12 * time.Millisecond)
	nodetest.Eventually(t, soon, "the node to say so", func() error {
		n.wantReplay(n.begin("k"), "k", "r")
		if n.Cache.Degraded() == nil {
			return fmt.Errorf("%v", n.Seen)
		}
		return nil
	})
	p.SetDelay(0)
	n.fromRedis("k", "r")
}

// H31: after a flush Redis expects every key to be new. Repeats are then read first all
// the same, once that has been wrong for a while.
func TestH31FlushedRedisIsNotBelieved(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	writer := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	const keys = 200
	var group sync.WaitGroup
	for c := range 8 {
		group.Go(func() {
			for i := c; i < keys; i += 8 {
				writer.finish(fmt.Sprint("k", i), "r")
			}
		})
	}
	group.Wait()
	reader := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Idle: true}))
	redis.Flush()
	for i := range keys {
		key := fmt.Sprint("k", i)
		reader.wantReplay(reader.begin(key), key, "r")
	}
	if lost, reads := reader.Seen.Of("etcd begin lost"), reader.Seen.Of("etcd read ok"); lost > keys/4 || reads < keys/2 {
		t.Errorf("%d repeats went through raft, %d were read: %v", lost, reads, reader.Seen)
	}
}

// What several callers ask of one key at once goes to Redis once a round trip, and large
// answers do not make a pipeline that takes longer than anyone waits.
func TestLargeAnswersDoNotCrowdOut(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	large := strings.Repeat("x", 200<<10)
	n.finish("large", large)
	n.fromRedis("large", large)
	n.finish("small", "r")
	n.fromRedis("small", "r")
	hits := n.Seen.Of("look hit")
	var group sync.WaitGroup
	const callers, each = 32, 20
	for range callers {
		group.Go(func() {
			for range each {
				n.wantReplay(n.begin("large"), "large", large)
				n.wantReplay(n.begin("small"), "small", "r")
			}
		})
	}
	group.Wait()
	t.Logf("%d hits of %d", n.Seen.Of("look hit")-hits, 2*callers*each)
	n.fromRedis("small", "r")
}
