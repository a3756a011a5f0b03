package rediscache_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// G5: all entries are damaged, each in one of many ways, while two nodes run. Every
// answer is still right, and without a restart Redis answers again for every key.
func TestG5DamagedEntries(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	n1 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	n2 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Idle: true}))
	attacker := someView() // knows the format and has no secret
	set := func(change func(e []byte) []byte) func(name, entry string) {
		return func(name, entry string) { redis.Do("SET", name, string(change([]byte(entry))), "PX", 3600_000) }
	}
	digits := func(revision string) func([]byte) []byte {
		return func(e []byte) []byte { copy(e[rediscache.RevisionAt:rediscache.TagAt], revision); return e }
	}
	forged := func(name string, revision int64) []byte {
		e := rediscache.StagedEntry(encoded(t, finished("forged")))
		rediscache.Stamp(e[:rediscache.HeaderSize], attacker.Sealer, name, revision)
		return e
	}
	ways := []struct {
		name   string
		damage func(name, entry string)
	}{
		{"the last bit flipped", set(func(e []byte) []byte { e[len(e)-1] ^= 1; return e })},
		{"a bit of the HMAC flipped", set(func(e []byte) []byte { e[rediscache.TagAt] ^= 1; return e })},
		{"a bit of the digest flipped", set(func(e []byte) []byte { e[rediscache.DigestAt] ^= 1; return e })},
		{"cut in the header", set(func(e []byte) []byte { return e[:50] })},
		{"cut after the header", set(func(e []byte) []byte { return e[:rediscache.HeaderSize] })},
		{"cut in the body", set(func(e []byte) []byte { return e[:len(e)-1] })},
		{"longer", set(func(e []byte) []byte { return append(e, 0) })},
		{"empty", set(func([]byte) []byte { return nil })},
		{"text", set(func([]byte) []byte { return []byte(`{"status":"done","result":"forged"}`) })},
		{"zeros", set(func(e []byte) []byte { return make([]byte, len(e)) })},
		{"another format", set(func(e []byte) []byte { e[1] = '2'; return e })},
		{"the largest revision", set(digits("9223372036854775807"))},
		{"larger than the largest", set(digits("9999999999999999999"))},
		{"no digits", set(digits(strings.Repeat("\xff", 19)))},
		{"forged, the largest revision", func(name, _ string) { redis.Do("SET", name, forged(name, 1<<63-1), "PX", 3600_000) }},
		{"forged, for ever", func(name, _ string) { redis.Do("SET", name, forged(name, 1<<63-1)) }},
		{"a forged stage, for ever", func(name, _ string) { redis.Do("SET", name, rediscache.StagedEntry(encoded(t, finished("forged")))) }},
		{"a mark, for ever", func(name, _ string) { redis.Do("SET", name, rediscache.MarkKind) }},
		{"a list", func(name, _ string) { redis.Do("DEL", name); redis.Do("RPUSH", name, "forged") }},
		{"a hash", func(name, _ string) { redis.Do("DEL", name); redis.Do("HSET", name, "result", "forged") }},
		{"gone", func(name, _ string) { redis.Do("DEL", name) }},
		{"evicted soon", func(name, _ string) { redis.Do("PEXPIRE", name, 1) }},
	}
	const swapped = 4 // keys, each with the entry of the next
	var keys []string
	for i := range len(ways) + swapped {
		keys = append(keys, fmt.Sprintf("k%02d", i))
	}
	body := func(key string) string { return "result of " + key }
	each(keys, func(k string) { n1.finish(k, body(k)) })
	entries := map[string]string{}
	for _, k := range keys {
		n1.fromRedis(k, body(k))
		entries[k] = stored(redis, n1.name(k))
	}
	for range 2 {
		for i, k := range keys {
			if i < len(ways) {
				ways[i].damage(n1.name(k), entries[k])
				continue
			}
			other := keys[len(ways)+(i-len(ways)+1)%swapped]
			redis.Do("SET", n1.name(k), entries[other], "PX", 3600_000)
		}
		each([]site{n1, n2}, func(n site) {
			for _, k := range keys {
				for range 3 {
					n.wantReplay(n.begin(k), k, body(k))
				}
				f, err := n.Get(nodetest.Within(t, 20*time.Second), &claim.GetRequest{Namespace: "ns", Key: k})
				if err != nil || string(f.Record.Result.Body) != body(k) {
					t.Errorf("get %s: %+v, %v", k, f.Record, err)
				}
			}
		})
		for _, k := range keys {
			n1.fromRedis(k, body(k))
			n2.fromRedis(k, body(k))
		}
	}
	if left := redis.NoTTL(); len(left) > 0 {
		t.Errorf("C66: entries without an expiry: %q", left)
	}
	for _, f := range []rediscache.Finding{rediscache.Digest, rediscache.HMAC, rediscache.Revision, rediscache.Garbage, rediscache.Staged} {
		if n1.Seen.Of("look "+string(f))+n2.Seen.Of("look "+string(f)) == 0 {
			t.Errorf("%q was never found", f)
		}
	}
}

// C66, G4: the connection to Redis is cut again and again in the middle of what nodes
// do. At no time is there an entry without an expiry, and each key was FIRST once and
// has one result.
func TestC66NoEntryWithoutExpiry(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	proxy := redistest.NewProxy(t, redis.Addr())
	n1 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(proxy.Addr())}))
	n2 := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(proxy.Addr()), Idle: true}))
	stop := make(chan struct{})
	var working sync.WaitGroup
	var finished atomic.Int64
	for w, n := range []site{n1, n2, n1, n2} {
		working.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				k := fmt.Sprintf("w%d-%d", w, i)
				n.finish(k, k)
				n1.wantReplay(n1.begin(k), k, k)
				n2.wantReplay(n2.begin(k), k, k)
				finished.Add(1)
			}
		})
	}
	wrote := func() (n int) {
		for _, s := range []site{n1, n2} {
			n += s.Seen.Of("stage ok") + s.Seen.Of("confirm ok") + s.Seen.Of("fill ok")
		}
		return n
	}
	for cut := range 6 {
		had := wrote()
		nodetest.Eventually(t, 20*time.Second, "writes to Redis", func() error {
			if n := wrote(); n < had+20 {
				return fmt.Errorf("%d; %v; %v", n-had, n1.Seen, n2.Seen)
			}
			return nil
		})
		if cut%3 == 0 {
			proxy.HoldAnswers() // Redis does what it is asked, and nobody learns of it
			done := finished.Load()
			nodetest.Eventually(t, 10*time.Second, "work without Redis", func() error {
				if finished.Load() < done+4 {
					return fmt.Errorf("%d", finished.Load()-done)
				}
				return nil
			})
		}
		proxy.Cut()
		if left := redis.NoTTL(); len(left) > 0 {
			t.Errorf("entries without an expiry: %q", left)
		}
		proxy.Release()
		proxy.Mend()
		if left := redis.NoTTL(); len(left) > 0 {
			t.Errorf("entries without an expiry: %q", left)
		}
	}
	close(stop)
	working.Wait()
	t.Logf("%d keys, %d writes", finished.Load(), wrote())
}

// H08, G5: two clusters have one Redis and the same names, and one of them has begun
// from nothing when the other's entries were there. Neither believes what the other
// wrote, under whatever name it turns up.
func TestH08TwoClustersOneRedis(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	keys := []string{"a", "b", "c"}
	start := func() site {
		return at(t, nodetest.Start(t, nodetest.Options{Client: etcdtest.Start(t, 1).Client(), Redis: standalone(redis.Addr())}))
	}
	one := start()
	for _, k := range keys {
		one.finish(k, "one's")
		one.fromRedis(k, "one's")
	}
	// The other begins from nothing: all its keys are new, though the entries of the
	// first lie there under its names as well.
	two := start()
	for _, k := range keys {
		if one.name(k) == two.name(k) {
			t.Errorf("both call %s %q", k, one.name(k))
		}
		redis.Do("SET", two.name(k), stored(redis, one.name(k)), "PX", 3600_000)
	}
	tokens := map[string]string{}
	for _, k := range keys {
		tokens[k] = two.take(k)
		redis.Do("SET", two.name(k), stored(redis, one.name(k)), "PX", 3600_000)
		two.listen(k, 2, func(a claim.Answer) {
			if a.Verdict != claim.InProgress {
				t.Errorf("%s: %s by %d", k, told(a), a.Source)
			}
		})
	}
	if two.Seen.Of("look hmac") == 0 {
		t.Errorf("the other's entries were never met: %v", two.Seen)
	}
	for _, k := range keys {
		redis.Do("SET", two.name(k), stored(redis, one.name(k)), "PX", 3600_000)
		if err := two.complete(k, tokens[k], "two's"); err != nil {
			t.Fatal(err)
		}
		two.fromRedis(k, "two's")
		// Each in the other's place.
		names := []string{one.name(k), two.name(k)}
		entries := []string{stored(redis, names[0]), stored(redis, names[1])}
		redis.Do("SET", names[0], entries[1], "PX", 3600_000)
		redis.Do("SET", names[1], entries[0], "PX", 3600_000)
		one.listen(k, 2, func(a claim.Answer) { one.wantReplay(a, k, "one's") })
		two.listen(k, 2, func(a claim.Answer) { two.wantReplay(a, k, "two's") })
		one.fromRedis(k, "one's")
		two.fromRedis(k, "two's")
	}
}

// H01, G2, G4: two nodes race, each with a result of its own for one claim, while
// callers of both ask. Whatever anybody is told is what etcd took, and so is what Redis
// tells afterwards.
func TestH01TwoNodesRace(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	nodes := []site{
		at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())})),
		at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Idle: true})),
	}
	var won [2]atomic.Int64
	var keys []string
	for i := range 80 {
		keys = append(keys, fmt.Sprintf("k%d", i))
	}
	truth := map[string]string{}
	var mu sync.Mutex
	race := func(i int, k string) {
		token := nodes[i%2].take(k)
		var heard [2][]string
		var winners []int
		var racing sync.WaitGroup
		for j, n := range nodes {
			racing.Go(func() {
				switch err := n.complete(k, token, fmt.Sprintf("%s by %d", k, j)); {
				case err == nil:
					mu.Lock()
					winners = append(winners, j)
					mu.Unlock()
				case claim.ReasonOf(err) != claim.AlreadyFinished:
					t.Errorf("complete %s: %v", k, err)
				}
			})
			racing.Go(func() {
				for range 20 {
					if a := n.begin(k); a.Verdict != claim.InProgress {
						heard[j] = append(heard[j], told(a))
					}
				}
			})
		}
		racing.Wait()
		if len(winners) != 1 {
			t.Errorf("%s: %d finishes were accepted", k, len(winners))
			return
		}
		won[winners[0]].Add(1)
		f, err := nodes[0].Behind.Get(nodetest.Within(t, 20*time.Second), &claim.GetRequest{Namespace: "ns", Key: k})
		if err != nil {
			t.Errorf("get %s: %v", k, err)
			return
		}
		is := string(f.Record.Result.Body)
		if is != fmt.Sprintf("%s by %d", k, winners[0]) {
			t.Errorf("%s: etcd holds %q, and %d was accepted", k, is, winners[0])
		}
		for _, h := range slices.Concat(heard[0], heard[1]) {
			if h != is {
				t.Errorf("%s: told %q, and etcd holds %q", k, h, is)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		truth[k] = is
	}
	var racing sync.WaitGroup
	for w := range 6 {
		racing.Go(func() {
			for i := w; i < len(keys); i += 6 {
				race(i, keys[i])
			}
		})
	}
	racing.Wait()
	for _, k := range keys {
		for _, n := range nodes {
			n.fromRedis(k, truth[k])
		}
		f, err := nodes[0].Behind.Get(nodetest.Within(t, 20*time.Second), &claim.GetRequest{Namespace: "ns", Key: k})
		if err != nil || !bytes.Equal(f.Record.Result.Body, []byte(truth[k])) {
			t.Errorf("%s: etcd holds %+v, %v", k, f.Record, err)
		}
	}
	if won[0].Load() == 0 || won[1].Load() == 0 {
		t.Errorf("%d and %d: one node won every race", won[0].Load(), won[1].Load())
	}
	lost := 0
	for _, n := range nodes {
		lost += n.Seen.Of("confirm lost")
	}
	t.Logf("won %d and %d; %d confirms found another's stage", won[0].Load(), won[1].Load(), lost)
	if left := redis.NoTTL(); len(left) > 0 {
		t.Errorf("C66: entries without an expiry: %q", left)
	}
}

// C02, G1: a hundred callers ask for one key at once, through two nodes, while Redis is
// flushed: one FIRST, whatever Redis held.
func TestC02FlushedWhileAHundredAsk(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	all := []site{
		at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())})),
		at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Idle: true})),
	}
	for round := range 10 {
		key := fmt.Sprint("k", round)
		var firsts, others atomic.Int64
		var callers sync.WaitGroup
		for i := range 100 {
			callers.Go(func() {
				switch a := all[i%2].begin(key); a.Verdict {
				case claim.First:
					firsts.Add(1)
				case claim.InProgress:
					others.Add(1)
				default:
					t.Errorf("verdict %d", a.Verdict)
				}
			})
			if i%10 == 0 {
				callers.Go(redis.Flush)
			}
		}
		callers.Wait()
		if firsts.Load() != 1 || others.Load() != 99 {
			t.Errorf("%s: %d FIRST, %d IN_PROGRESS", key, firsts.Load(), others.Load())
		}
	}
}
