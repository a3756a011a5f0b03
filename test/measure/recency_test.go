package measure

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/recency"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

var (
	longest = flag.Duration("measure.longest", 4*time.Second, "cache_ttl_max where TTLs are measured")
	perSec  = flag.Int("measure.finishes", 50, "keys finished a second there, on each node")
	lost    = flag.Float64("measure.lost", 0.5, "the largest share of hits that may be lost there; 0.02 with TTLs that are longer than a busy machine takes for a call")
	kept    = flag.Float64("measure.kept", 0.9, "the largest share of entries that may be kept there; 0.6 likewise")
)

// TestTTLsSaveMemory: of two nodes, each with a Redis of its own, that meet the same keys
// at the same time, the one whose TTLs follow how keys come back holds fewer entries, and
// answers as many repeats from them.
func TestTTLsSaveMemory(t *testing.T) {
	for name, kinds := range map[string][]kind{
		"one habit":     {{"", 0, *longest / 30}},
		"two suppliers": {{"hasty", 0, *longest / 30}, {"slow", *longest * 2 / 5, *longest / 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			etcd := etcdtest.Start(t, 1, durable)
			var sides [2]*side
			for i, name := range []string{"longest", "adaptive"} {
				server := redistest.Start(t)
				at := rediscache.Server{Mode: rediscache.Standalone, Addrs: []string{server.Addr()}}
				sides[i] = &side{name: name, redis: server, node: nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: at, LongestTTL: i == 0})}
				sides[i].client, sides[i].empty = server.Client(), sides[i].held()
			}
			compare(t, name, sides[0], sides[1], kinds)
		})
	}
}

// kind is keys of one supplier: each comes back three times, first after low to high,
// then twice within a tenth of that.
type kind struct {
	supplier  string
	low, high time.Duration
}

// known reports whether the node knows when keys of this kind come back.
func (k kind) known(n *nodetest.Node) error {
	v, err := n.Follower.View()
	if err != nil {
		return err
	}
	rec := &claim.Record{Namespace: "ns", State: claim.Succeeded, ResultUntil: v.Now.Add(time.Hour), ResultRetention: time.Hour, Labels: map[string]string{recency.Label: k.supplier}}
	p, err := v.Policy("ns")
	if err != nil {
		return err
	}
	if ttl := n.Habits.TTL(rec, v.Now, p); ttl > (*longest+k.high)/2 { // a busy machine has its calls come later than they should
		return fmt.Errorf("%q has %v", k.supplier, ttl)
	}
	return nil
}

func compare(t *testing.T, name string, fixed, adaptive *side, kinds []kind) {
	declared := policy.Namespace{Name: "ns", Policy: policy.Policy{CacheTTLMin: new(time.Second), CacheTTLMax: longest}}
	if _, err := fixed.node.Behind.PutNamespace(nodetest.Within(t, 20*time.Second), declared); err != nil {
		t.Fatal(err)
	}
	sides := []*side{fixed, adaptive}
	var group sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer group.Wait()
	defer cancel()
	group.Go(func() { drive(ctx, t, sides, kinds) })
	nodetest.Eventually(t, 10**longest+time.Minute, "the habits to be known", func() error {
		for _, k := range kinds {
			if err := k.known(adaptive.node); err != nil {
				return err
			}
		}
		return nil
	})
	until(t, *longest+2*time.Second, func() {}) // what was written before is gone by then
	for _, s := range sides {
		s.hits.Store(0)
		s.there.Store(0)
		s.repeats.Store(0)
	}
	samples := 0
	until(t, *longest, func() {
		samples++
		for _, s := range sides {
			s.sample()
		}
	})
	for _, s := range sides {
		s.entries /= float64(samples)
		s.bytes = s.bytes/float64(samples) - s.empty
		t.Logf("%s, %s: %.0f entries in Redis, %.0f kB, %d repeats, for a share of %.4f the entry was there, and %.4f were answered from it", name, s.name, s.entries, s.bytes/1000, s.repeats.Load(), s.share(), float64(s.hits.Load())/float64(s.repeats.Load()))
	}
	t.Logf("%s, TTLs of 1s to %v, %d keys a second: adaptive TTLs hold %.2f of the entries and %.2f of the memory, and lose %.4f of the hits",
		name, *longest, *perSec, adaptive.entries/fixed.entries, adaptive.bytes/fixed.bytes, 1-adaptive.share()/fixed.share())
	if adaptive.share() < (1-*lost)*fixed.share() {
		t.Errorf("too many hits are lost")
	}
	if adaptive.entries > *kept*fixed.entries {
		t.Errorf("too few entries are saved")
	}
}

// side is one of two nodes that meet the same.
type side struct {
	name           string
	node           *nodetest.Node
	redis          *redistest.Server
	client         *redis.Client
	repeats        atomic.Int64
	there, hits    atomic.Int64 // of them
	empty          float64      // bytes
	entries, bytes float64      // sums of samples, then means
}

// share is of how many repeats the entry was there. Not all of them were answered by it:
// on a busy machine Redis is too slow for some, whatever the TTLs are.
func (s *side) share() float64 { return float64(s.there.Load()) / float64(s.repeats.Load()) }

// has reports whether its Redis holds an entry of a key, more than a mark.
func (s *side) has(key string) bool {
	v, err := s.node.Follower.View()
	if err != nil {
		return false
	}
	name := layout.NameOf("ns", key)
	size, err := s.client.StrLen(context.Background(), fmt.Sprintf("dc:{%d}:%x:%d:%s", name.Slot, v.Epoch[:], v.SlotEpoch(name.Slot), name.Hash())).Result()
	return err == nil && size > 2
}

var dataset = regexp.MustCompile(`used_memory_dataset:(\d+)`)

// sample adds what its Redis holds now.
func (s *side) sample() {
	s.entries += float64(s.redis.Do("DBSIZE").(int64))
	s.bytes += s.held()
}

// held is how many bytes its Redis takes for what it holds, and for being there.
func (s *side) held() (bytes float64) {
	if m := dataset.FindStringSubmatch(s.redis.Do("INFO", "memory").(string)); m != nil {
		bytes, _ = strconv.ParseFloat(m[1], 64) // digits
	}
	return bytes
}

// drive has keys of each kind in turn finish on all sides, and come back, until ctx ends.
func drive(ctx context.Context, t *testing.T, sides []*side, kinds []kind) {
	var group sync.WaitGroup
	defer group.Wait()
	next := time.NewTicker(time.Second / time.Duration(*perSec))
	defer next.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		k := kinds[i%len(kinds)]
		gaps := [3]time.Duration{k.low + rand.N(k.high-k.low), rand.N(k.high / 10), rand.N(k.high / 10)}
		for _, s := range sides {
			group.Go(func() { s.life(ctx, t, fmt.Sprint(s.name, "-", i), k.supplier, gaps) })
		}
	}
}

// life is a key's: it is begun, finished, and comes back.
func (s *side) life(ctx context.Context, t *testing.T, key, supplier string, gaps [3]time.Duration) {
	req := &claim.BeginRequest{Namespace: "ns", Key: key}
	if supplier != "" {
		req.Labels = map[string]string{recency.Label: supplier}
	}
	a, err := s.node.Begin(context.Background(), req)
	if err != nil || a.Verdict != claim.First {
		t.Errorf("begin %s: %v, %v", key, a.Verdict, err)
		return
	}
	if _, err := s.node.Finish(context.Background(), &claim.FinishRequest{Namespace: "ns", Key: key, Token: a.Claim.Token, Result: &claim.Result{Body: make([]byte, 200)}}); err != nil {
		t.Errorf("complete %s: %v", key, err)
		return
	}
	for _, gap := range gaps {
		select {
		case <-ctx.Done():
			return
		case <-time.After(gap):
		}
		there := s.has(key)
		a, err := s.node.Begin(context.Background(), req)
		if err != nil || a.Verdict != claim.Replay {
			t.Errorf("%s: %v, %v", key, a.Verdict, err)
			return
		}
		s.repeats.Add(1)
		if there {
			s.there.Add(1)
		}
		if a.Source == claim.SourceRedis {
			s.hits.Add(1)
		}
	}
}

// until does something ten times a second for so long.
func until(t *testing.T, d time.Duration, do func()) {
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for end := time.After(d); ; {
		select {
		case <-end:
			return
		case <-t.Context().Done():
			return
		case <-again.C:
			do()
		}
	}
}
