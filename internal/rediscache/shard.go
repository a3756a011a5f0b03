package rediscache

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"
	"golang.org/x/sync/errgroup"

	"github.com/dualcheck/dualcheck/internal/claim"
)

const (
	// A Cluster is used in so many parts, each with this many workers a lane; anything
	// else is one part with more of them.
	clusterShards                 = 16
	clusterAskers, clusterWriters = 2, 1
	askers, writers               = 4, 2

	// A breaker opens after so many failures in a row, or if half of at least so many
	// pipelines of the last seconds failed; it lets three through a second later.
	failuresInARow = 5
	fewestCalls    = 20
	breakerWindow  = 4 * time.Second
	breakerBucket  = time.Second
	breakerPause   = time.Second
	breakerProbes  = 3
	// probeEvery is how often Redis is written though nobody calls.
	probeEvery   = 500 * time.Millisecond
	probeFor     = time.Second
	visitWithin  = 2 * time.Second
	mostSuspects = mostTogether
)

// shard is a part of Redis that is well or not as one: all of it; or, of a Cluster, a
// sixteenth of its hash slots, which one master holds as a rule, so that a master that
// is away does not take the others' answers with it.
type shard struct {
	cache        *Cache
	asks, writes *lane
	breaker      *gobreaker.CircuitBreaker[struct{}]
	// slots are those of dualcheck's that are kept here.
	slots []int

	mu       sync.Mutex
	last     error // why the breaker last counted a failure
	suspects map[string]bool
}

// shardsOf makes the shards, and the shard of each slot.
func shardsOf(c *Cache) (all []*shard, of [claim.Slots]*shard) {
	n := 1
	if c.cfg.Server.Mode == Cluster {
		n = clusterShards
	}
	for range n {
		s := &shard{cache: c, suspects: map[string]bool{}}
		s.breaker = gobreaker.NewCircuitBreaker[struct{}](gobreaker.Settings{
			Name:        "redis",
			MaxRequests: breakerProbes, Interval: breakerWindow, BucketPeriod: breakerBucket, Timeout: breakerPause,
			ReadyToTrip: func(n gobreaker.Counts) bool {
				return n.ConsecutiveFailures >= failuresInARow || n.Requests >= fewestCalls && 2*n.TotalFailures >= n.Requests
			},
			IsSuccessful:  func(err error) bool { s.note(err); return err == nil },
			OnStateChange: func(_ string, from, to gobreaker.State) { c.turned(s, from, to) },
		})
		s.asks, s.writes = s.lane("ask"), s.lane("write")
		s.asks.late = s.suspect
		c.cfg.Observe.Breaker("", gobreaker.StateClosed.String())
		all = append(all, s)
	}
	for slot := range of {
		s := all[hashSlot(strconv.Itoa(slot))*n/hashSlots]
		s.slots = append(s.slots, slot)
		of[slot] = s
	}
	return all, of
}

func (s *shard) lane(name string) *lane {
	c := s.cache
	return &lane{
		name: name, client: c.client, breaker: s.breaker, observe: c.cfg.Observe,
		queue: make(chan *command, mostQueued),
		panicked: func(value any, stack []byte) {
			c.cfg.Log.Error("a panic was caught", "error", fmt.Sprint(value), "stack", string(stack))
		},
	}
}

// run carries out what is asked of this part until ctx ends, and then what is queued.
func (s *shard) run(ctx context.Context) error {
	ask, write := askers, writers
	if s.cache.cfg.Server.Mode == Cluster {
		ask, write = clusterAskers, clusterWriters
	}
	var g errgroup.Group
	for range ask {
		g.Go(func() error { s.asks.work(ctx); return nil })
	}
	for range write {
		g.Go(func() error { s.writes.work(ctx); return nil })
	}
	g.Go(func() error { s.probe(ctx); return nil })
	return g.Wait()
}

// probe writes now and then, through the breaker as everyone: a node without calls
// notices that Redis went away, or takes no writes, and a breaker closes though nobody
// calls.
func (s *shard) probe(ctx context.Context) {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for i := 0; ; i++ {
		key := "dc:{" + strconv.Itoa(s.slots[i%len(s.slots)]) + "}:probe"
		args := []any{"SET", key, markKind, "PX", probeFor.Milliseconds()}
		if v, err := s.cache.cfg.View.View(); err != nil || !v.BypassRedis {
			s.inspect(ctx)
			if s.breaker.State() != gobreaker.StateClosed {
				s.visit(ctx, args)
			}
			s.asks.submit(&command{key: key, args: args, size: overhead, done: func(string, error) {}})
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// suspect remembers keys that were not answered in time: an entry that is larger than
// any of ours may be why, and would keep Redis from being used for as long as somebody
// asks for it.
func (s *shard) suspect(batch []*command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range batch {
		if len(s.suspects) < mostSuspects {
			s.suspects[c.key] = true
		}
	}
}

// inspect removes what was rightly suspected, past the breaker, which it may have opened.
func (s *shard) inspect(ctx context.Context) {
	s.mu.Lock()
	keys := slices.Collect(maps.Keys(s.suspects))
	clear(s.suspects)
	s.mu.Unlock()
	if len(keys) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, visitWithin)
	defer cancel()
	var sent []*redis.Cmd
	_, failed := s.cache.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, key := range keys {
			sent = append(sent, oversizeScript.Eval(ctx, p, []string{key}, mostEntry))
		}
		return nil
	})
	for _, cmd := range sent {
		answer, err := cmd.Text()
		if failed != nil && err == nil && answer == "" {
			err = failed
		}
		s.cache.cfg.Observe.Wrote(kindSuspect, outcomeOf(answer, err))
	}
}

// visit asks with more patience than a call has, past the breaker: to learn why Redis
// is not well, and so that a connection that takes long to make is there for others.
func (s *shard) visit(ctx context.Context, args []any) {
	ctx, cancel := context.WithTimeout(ctx, visitWithin)
	defer cancel()
	_, err := s.cache.client.Pipelined(ctx, func(p redis.Pipeliner) error { p.Do(ctx, args...); return nil })
	if ofRedis(err) && ctx.Err() == nil {
		s.note(err)
	}
}

// note keeps why this part last failed.
func (s *shard) note(err error) {
	if err == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = err
}

func (s *shard) lastFault() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// turned tells of breakers, loudly when the first opens and when all are closed again.
// The shard's breaker is locked meanwhile.
func (c *Cache) turned(s *shard, from, to gobreaker.State) {
	c.cfg.Observe.Breaker(from.String(), to.String())
	switch {
	case from == gobreaker.StateClosed:
		if c.away.Add(1) == 1 {
			c.cfg.Log.Warn(c.partly()+" is not used: etcd answers instead, correctly and more slowly, until it is well", "cause", s.lastFault())
		}
	case to == gobreaker.StateClosed:
		if c.away.Add(-1) == 0 {
			c.cfg.Log.Warn("Redis is used again")
		}
	}
}

func (c *Cache) partly() string {
	if len(c.shards) > 1 {
		return "a part of Redis"
	}
	return "Redis"
}

// Degraded says why Redis, or a part of it, is not used; nil: it is.
func (c *Cache) Degraded() error {
	if v, err := c.cfg.View.View(); err == nil && v.BypassRedis {
		return errors.New("bypassed by an operator's switch: etcd answers everything")
	}
	var cause error
	away := 0
	for _, s := range c.shards {
		if s.breaker.State() != gobreaker.StateClosed {
			away++
			cause = s.lastFault()
		}
	}
	switch {
	case away == 0:
		return nil
	case away == len(c.shards):
		return fmt.Errorf("not used, etcd answers everything: %s", fault(cause))
	}
	return fmt.Errorf("%d of %d parts not used, etcd answers for them: %s", away, len(c.shards), fault(cause))
}

// hashSlots is how many parts a Redis Cluster has.
const hashSlots = 16384

// hashSlot is where a Redis Cluster keeps a hash tag: CRC-16 (XMODEM), as its
// specification says: https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/
func hashSlot(tag string) int {
	crc := uint16(0)
	for i := range len(tag) {
		crc ^= uint16(tag[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc) % hashSlots
}
