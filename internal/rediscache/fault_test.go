package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// cheap reports whether a repeat takes about what it takes behind: with the breaker
// open a node waits for nothing, else for 5 ms. The machine may be busy.
func cheap(t *testing.T, n *nodetest.Node, key string) {
	t.Helper()
	if through, behind := price(t, n, key); through > behind+behind/2+8*time.Millisecond {
		t.Errorf("E64: a repeat takes %v, and %v behind", through, behind)
	}
}

// G5, E66, C62: Redis is killed under load and started again, without what it had or
// with it. What it brings back of a key that was forgotten meanwhile, and done anew,
// is told to nobody.
func TestG5KilledRedis(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
	}{{"empty", nil}, {"with its data", []string{"--appendonly", "yes"}}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			redis := redistest.Start(t, c.args...)
			all := nodes(t, standalone(redis.Addr()))
			work := stillRight(t, 100, all, redis)
			old := work.old()
			completes(t, all[0], "twice", "r1")
			for _, n := range all {
				hit(t, n, old)
				hit(t, n, "twice")
			}
			redis.Kill()
			degrades(t, all, "connection refused")
			if _, err := all[0].Forget(nodetest.Within(t, 20*time.Second), &claim.ForgetRequest{Namespace: "crowd", Key: "twice", Reason: "a test"}); err != nil {
				t.Fatal(err)
			}
			completes(t, all[1], "twice", "r2")
			redis.Restart()
			if back := len(redis.Keys("dc:*")); back > 0 != (c.args != nil) {
				t.Errorf("%d entries are back", back)
			}
			hitsReturn(t, all)
			for _, n := range all {
				hit(t, n, old)
				if a := hit(t, n, "twice"); string(a.Record.Result.Body) != "r2" {
					t.Errorf("G4: %q is told after a forget", a.Record.Result.Body)
				}
			}
			work.stop()
		})
	}
}

// C67, G5: Redis is emptied again and again under load. It is used all the same.
func TestC67FlushedUnderLoad(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	all := nodes(t, standalone(redis.Addr()))
	work := stillRight(t, 100, all, redis)
	// Until each node has had a flush between its stage and its confirm.
	nodetest.Eventually(t, time.Minute, "flushes to fall in between", func() error {
		work.during(200, redis.Flush)
		for _, n := range all {
			if n.Seen.Of("confirm lost") == 0 || n.Seen.Of("look hit") == 0 {
				return fmt.Errorf("%v", n.Seen)
			}
		}
		return nil
	})
	hitsReturn(t, all)
}

// E64, E65, G5: Redis is stopped for a while. Calls wait 5 ms for it at most, and for
// nothing once the breaker is open, which is at once. What it does late does no harm.
func TestE64PausedRedis(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	all := nodes(t, standalone(redis.Addr()))
	work := stillRight(t, 100, all, redis)
	old := work.old()
	paused := time.Now()
	redis.Pause()
	degrades(t, all, "deadline exceeded", "i/o timeout", "late")
	if took := time.Since(paused); took > 2*time.Second {
		t.Errorf("the breakers took %v to open", took)
	}
	// While it is, it lets three pipelines through each second.
	cheap(t, all[0], old)
	nodetest.Pass(t, all[0].Follower, 3*time.Second-min(time.Since(paused), 2*time.Second))
	redis.Resume()
	hitsReturn(t, all)
	for _, n := range all {
		hit(t, n, old)
	}
}

// E64: nobody waits 80 ms for a Redis that needs them, from the first call on, before
// any breaker opens; and a finish does not wait for Redis at all.
func TestE64NobodyWaits(t *testing.T) {
	t.Parallel()
	const late = 80 * time.Millisecond
	redis := redistest.Start(t)
	way := redistest.NewProxy(t, redis.Addr())
	n := nodetest.Start(t, nodetest.Options{Client: etcdtest.Start(t, 1).Client(), Redis: standalone(way.Addr())})
	var begun, done []time.Duration
	for round := range 3 {
		key := fmt.Sprintf("known-%d", round)
		completes(t, n, key, "known")
		hit(t, n, key)
		nodetest.Eventually(t, soon, "the node to say that Redis is used", n.Cache.Degraded)
		way.SetDelay(late)
		for i := range 4 {
			start := time.Now()
			a := begins(t, n, key)
			if n.Cache.Degraded() == nil && a.Source == claim.SourceEtcd {
				begun = append(begun, time.Since(start))
			}
			start = time.Now()
			completes(t, n, fmt.Sprintf("new-%d-%d", round, i), "new")
			if n.Cache.Degraded() == nil {
				done = append(done, time.Since(start))
			}
		}
		way.SetDelay(0)
		hit(t, n, key)
	}
	for what, took := range map[string][]time.Duration{"a repeat": begun, "new work": done} {
		slices.Sort(took)
		if len(took) < 3 || took[len(took)/2] > late*3/4 {
			t.Errorf("%s takes %v", what, took)
		}
	}
	if n.Seen.Of("look slow") == 0 {
		t.Errorf("nothing was tested: %v", n.Seen)
	}
}

// E65: a Redis that answers within its 5 ms is used; one that needs 50 ms is not.
func TestE65SlowRedis(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	way := redistest.NewProxy(t, redis.Addr())
	all := nodes(t, standalone(way.Addr()))
	work := stillRight(t, 100, all, redis)
	old := work.old()
	way.SetDelay(2 * time.Millisecond)
	for range 10 {
		for _, n := range all {
			hit(t, n, old)
		}
	}
	way.SetDelay(50 * time.Millisecond)
	degrades(t, all, "late", "deadline exceeded", "i/o timeout")
	cheap(t, all[0], old)
	work.more(300)
	way.SetDelay(0)
	hitsReturn(t, all)
}

// G5: Redis is full and may evict nothing.
func TestG5RedisIsFull(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
	all := nodes(t, standalone(redis.Addr()))
	work := stillRight(t, 100, all, redis)
	client := redis.Client()
	filler := strings.Repeat("x", 64<<10)
	var full error
	fill := func() {
		for i := 0; full == nil && i < 1000; i++ {
			full = client.Set(context.Background(), fmt.Sprintf("filler-%d", i), filler, time.Hour).Err()
		}
	}
	if fill(); full == nil || !strings.HasPrefix(full.Error(), "OOM") {
		t.Fatalf("it is not full: %v", full)
	}
	redis.Do("CONFIG", "SET", "maxmemory", "1mb") // nor will it have room by chance
	degrades(t, all, "OOM")
	work.more(300)
	redis.Do("CONFIG", "SET", "maxmemory", "64mb")
	hitsReturn(t, all)
}

// E71, C67: Redis evicts entries under load. It is used all the same.
func TestE71Evicted(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, "--maxmemory", "2500kb", "--maxmemory-policy", "allkeys-lru")
	all := nodes(t, standalone(redis.Addr()))
	work := stillRight(t, 20<<10, all, redis)
	evicted := func() error {
		info := redis.Do("INFO", "stats").(string)
		_, after, _ := strings.Cut(info, "evicted_keys:")
		if n, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(after, "\n", 2)[0])); err != nil || n < 30 {
			return fmt.Errorf("%d keys were evicted, %v", n, err)
		}
		return nil
	}
	nodetest.Eventually(t, time.Minute, "keys to be evicted", evicted)
	work.more(300)
	hitsReturn(t, all)
}

// G5, E66: the server becomes a replica of another, with other data; then a master.
func TestG5ReadOnlyRedis(t *testing.T) {
	t.Parallel()
	redis, other := redistest.Start(t), redistest.Start(t)
	all := nodes(t, standalone(redis.Addr()))
	work := stillRight(t, 100, all, redis)
	host, port, _ := net.SplitHostPort(other.Addr())
	redis.Do("REPLICAOF", host, port)
	degrades(t, all, "READONLY")
	work.more(300)
	redis.Do("REPLICAOF", "NO", "ONE")
	hitsReturn(t, all)
}

// G5: the server loads for a while after a restart.
func TestG5LoadingRedis(t *testing.T) {
	t.Parallel()
	// Each key takes a millisecond to load, and clients are heard after each few.
	redis := redistest.Start(t, "--appendonly", "yes", "--aof-use-rdb-preamble", "yes",
		"--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024", "--rdbcompression", "no")
	all := nodes(t, standalone(redis.Addr()))
	client := redis.Client()
	pipe := client.Pipeline()
	for i := range 2500 {
		pipe.Set(context.Background(), fmt.Sprintf("filler-%d", i), strings.Repeat("x", 500), time.Hour)
	}
	if _, err := pipe.Exec(context.Background()); err != nil {
		t.Fatal(err)
	}
	redis.Do("BGREWRITEAOF")
	nodetest.Eventually(t, soon, "the file to be rewritten", func() error {
		info := redis.Do("INFO", "persistence").(string)
		if !strings.Contains(info, "aof_rewrite_in_progress:0") || !strings.Contains(info, "aof_rewrite_scheduled:0") {
			return errors.New("it is being rewritten")
		}
		return nil
	})
	work := stillRight(t, 100, all, redis)
	redis.Kill()
	var loading sync.WaitGroup
	loading.Go(redis.Restart)
	defer loading.Wait()
	degrades(t, all, "LOADING")
	loading.Wait()
	work.more(100)
	hitsReturn(t, all)
}

// ours are the ids of the nodes' own connections.
func ours(redis *redistest.Server) (ids []string, others int) {
	for line := range strings.Lines(redis.Do("CLIENT", "LIST").(string)) {
		id, rest, _ := strings.Cut(strings.TrimPrefix(line, "id="), " ")
		if strings.Contains(rest, " name=dualcheck ") {
			ids = append(ids, id)
		} else {
			others++
		}
	}
	return ids, others
}

// hangUp closes the nodes' connections.
func hangUp(redis *redistest.Server) {
	ids, _ := ours(redis)
	for _, id := range ids {
		redis.Do("CLIENT", "KILL", "ID", id)
	}
}

// G5: others hold every connection that the server allows.
func TestG5NoConnectionLeft(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	all := nodes(t, standalone(redis.Addr()))
	work := stillRight(t, 100, all, redis)
	_, others := ours(redis)
	redis.Do("CONFIG", "SET", "maxclients", others)
	hangUp(redis)
	// It is told so as the connection is closed: that may be noticed first.
	degrades(t, all, "max number of clients", "broken pipe", "connection reset", "EOF")
	work.more(300)
	redis.Do("CONFIG", "SET", "maxclients", 1000)
	hitsReturn(t, all)
}

// G5: the nodes' rights are taken away while they run, and given back.
func TestG5NoRights(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	user := func(password string, rules ...string) { redis.SetUser("dualcheck", password, rules...) }
	user("secret", "~dc:*", "+@all")
	at := standalone(redis.Addr())
	at.User, at.Password = "dualcheck", "secret"
	all := nodes(t, at)
	work := stillRight(t, 100, all, redis)
	for _, c := range []struct {
		name, want string
		take       func()
	}{
		{"no commands", "NOPERM", func() { user("secret", "~dc:*", "-@all") }},
		{"another password", "WRONGPASS", func() { user("changed", "~dc:*", "+@all"); hangUp(redis) }},
		{"no user", "WRONGPASS", func() { redis.Do("ACL", "DELUSER", "dualcheck") }},
	} {
		c.take()
		nodetest.Eventually(t, soon, c.name, func() error {
			for _, n := range all {
				if err := n.Cache.Degraded(); err == nil || !strings.Contains(err.Error(), c.want) {
					return fmt.Errorf("it says: %w", err)
				}
			}
			return nil
		})
		work.more(100)
		user("secret", "~dc:*", "+@all")
		hitsReturn(t, all)
	}
}

// G5: a password is set that the nodes do not have.
func TestG5NoPassword(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	all := nodes(t, standalone(redis.Addr()))
	work := stillRight(t, 100, all, redis)
	redis.Do("CONFIG", "SET", "requirepass", "secret") // old connections keep their rights
	hangUp(redis)
	degrades(t, all, "NOAUTH")
	work.more(100)
	redis.Do("CONFIG", "SET", "requirepass", "")
	hitsReturn(t, all)
}

// G5: the way to Redis is cut and mended. At the cut answers were held back, so that
// what was done is asked for again.
func TestG5CutWay(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	way := redistest.NewProxy(t, redis.Addr())
	all := nodes(t, standalone(way.Addr()))
	work := stillRight(t, 100, all, redis)
	for round, lost := 0, 0; lost < 3; round++ {
		if round == 10 {
			t.Fatalf("only %d stages were done and not answered", lost)
		}
		key := fmt.Sprintf("lost-%d", round)
		name := entryOf(t, all[0], key)
		way.HoldAnswers()
		completes(t, all[0], key, key)
		for end := time.Now().Add(time.Second); time.Now().Before(end); <-time.After(time.Millisecond) {
			if redis.Do("GETRANGE", name, 0, 1) == "s1" {
				lost++
				break
			}
		}
		way.Cut()
		way.Release()
		way.Mend()
		hitsReturn(t, all)
		for _, n := range all {
			if a := hit(t, n, key); string(a.Record.Result.Body) != key {
				t.Errorf("G4: %s is told as %q", key, a.Record.Result.Body)
			}
		}
	}
	way.Cut()
	degrades(t, all, "connection refused", "EOF")
	work.more(300)
	way.Mend()
	hitsReturn(t, all)
}

// F8: scripts are forgotten all the time. They go whole then, and nobody notices.
func TestF8ScriptsAreFlushedUnderLoad(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	all := nodes(t, standalone(redis.Addr()))
	work := stillRight(t, 100, all, redis)
	work.during(1000, func() { redis.Do("SCRIPT", "FLUSH", "SYNC") })
	redis.Do("SCRIPT", "FLUSH", "SYNC")
	hitsReturn(t, all)
	work.stop()
	for _, n := range all {
		for _, kind := range []string{"stage", "confirm", "fill"} { // some were late
			if failed, ok := n.Seen.Of(kind+" failed"), n.Seen.Of(kind+" ok"); failed > ok/4 {
				t.Errorf("%s: %d failed, %d did not: %v", kind, failed, ok, n.Seen)
			}
		}
	}
	if stats := redis.Do("INFO", "errorstats").(string); !strings.Contains(stats, "errorstat_NOSCRIPT") {
		t.Errorf("nothing was tested: %s", stats)
	}
}

// leastRights are what a user must have: the nodes' keys, and these commands. HELLO
// is allowed to everyone.
var leastRights = []string{"~dc:*", "-@all", "+client|setname", "+get", "+set", "+eval", "+evalsha", "+getrange", "+setrange", "+pexpire", "+del"}

// E70: a node to whom nobody talks notices that Redis died, and that it is back.
func TestE70IdleNode(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	n := nodetest.Start(t, nodetest.Options{Client: etcdtest.Start(t, 1).Client(), Redis: standalone(redis.Addr())})
	redis.Kill()
	start := time.Now()
	degrades(t, []*nodetest.Node{n}, "connection refused", "EOF")
	gone := time.Since(start)
	redis.Restart()
	start = time.Now()
	nodetest.Eventually(t, soon, "the node to say that Redis is used", n.Cache.Degraded)
	t.Logf("gone after %v, back after %v", gone, time.Since(start))
	if asked := n.Seen.Of("look hit") + n.Seen.Of("look absent") + n.Seen.Of("look failed"); asked != 0 {
		t.Errorf("somebody talked: %v", n.Seen)
	}
}

// E70: a Redis that takes no writes is not well: no Begin can ask it. A node to whom
// hardly anybody talks says so too.
func TestE70NoWrites(t *testing.T) {
	t.Parallel()
	redis, other := redistest.Start(t), redistest.Start(t)
	n := nodetest.Start(t, nodetest.Options{Client: etcdtest.Start(t, 1).Client(), Redis: standalone(redis.Addr())})
	completes(t, n, "done", "done")
	hit(t, n, "done")
	host, port, _ := net.SplitHostPort(other.Addr())
	redis.Do("REPLICAOF", host, port)
	if a := begins(t, n, "done"); a.Source != claim.SourceEtcd {
		t.Errorf("told from %d", a.Source)
	}
	nodetest.Eventually(t, 8*time.Second, "the node to say that Redis is not used", func() error {
		if err := n.Cache.Degraded(); err != nil && strings.Contains(err.Error(), "READONLY") {
			return nil
		}
		return fmt.Errorf("%v", n.Seen)
	})
}

// C62: Redis is away, then etcd too: nobody is told a guess. Then both are back.
func TestC62BothAway(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	way := etcdtest.NewProxy(t, etcd.Endpoint(0))
	n := nodetest.Start(t, nodetest.Options{Client: etcd.Client(way.Addr()), Redis: standalone(redis.Addr())})
	completes(t, n, "done", "done")
	hit(t, n, "done")
	redis.Kill()
	degrades(t, []*nodetest.Node{n}, "connection refused", "EOF")
	if a := begins(t, n, "done"); a.Verdict != claim.Replay || a.Source != claim.SourceEtcd {
		t.Errorf("verdict %d from %d", a.Verdict, a.Source)
	}
	way.HoldRequests()
	var asking sync.WaitGroup
	for _, key := range []string{"done", "new"} {
		asking.Go(func() {
			_, err := n.Begin(nodetest.Within(t, time.Second), &claim.BeginRequest{Namespace: "crowd", Key: key, RequestID: "away", Owner: "test"})
			var told *claim.Error
			if !errors.As(err, &told) || told.Reason != claim.StoreUnavailable || told.RetryAfter == 0 {
				t.Errorf("G7: %s: %v", key, err)
			}
		})
	}
	asking.Wait()
	way.Heal()
	redis.Restart()
	nodetest.Eventually(t, 30*time.Second, "the node to believe", n.Believes)
	hitsReturn(t, []*nodetest.Node{n})
	if a := hit(t, n, "done"); string(a.Record.Result.Body) != "done" {
		t.Errorf("told %q", a.Record.Result.Body)
	}
	if a := begins(t, n, "new"); a.Verdict != claim.First {
		t.Errorf("verdict %d", a.Verdict)
	}
}

// A node that is stopped right after a Complete confirms it first.
func TestDrainConfirms(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	other := nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())})
	const some = 50
	n := nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Idle: true})
	var working sync.WaitGroup
	for i := range some {
		working.Go(func() { completes(t, n, fmt.Sprintf("last-%d", i), "last") })
	}
	working.Wait()
	n.Stop()
	if confirmed := n.Seen.Of("confirm ok"); confirmed != some {
		t.Errorf("%d of %d are confirmed: %v", confirmed, some, n.Seen)
	}
	for i := range some {
		if a := begins(t, other, fmt.Sprintf("last-%d", i)); a.Source != claim.SourceRedis {
			t.Errorf("last-%d: verdict %d from %d", i, a.Verdict, a.Source)
		}
	}
}
