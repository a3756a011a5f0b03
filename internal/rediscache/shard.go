package rediscache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
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
	askers, writers               = 2, 2

	// A breaker opens after so many failures in a row, or if half of at least so many
	// pipelines of the last seconds failed or came late: a few late ones are this node
	// being busy, at its start for one. It lets three through a second later.
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
	inARow   int   // failures since the last success, without late answers
	suspects map[string]bool
	// writing is what a rehearsal last met, faults how many in a row met anything.
	writing error
	faults  int
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
				return s.failedInARow() >= failuresInARow || n.Requests >= fewestCalls && 2*n.TotalFailures >= n.Requests
			},
			IsSuccessful:  func(err error) bool { s.judge(err); return err == nil },
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

// probe rehearses now and then what is done to an entry, through the breaker as
// everyone: a node without calls notices that Redis went away, takes no writes, or does
// not let it do what it must, and a breaker closes though nobody calls.
func (s *shard) probe(ctx context.Context) {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for i := 0; ; i++ {
		v, err := s.cache.cfg.View.View()
		if s.cache.heard(v, err); err != nil || !v.BypassRedis {
			key := "dc:{" + strconv.Itoa(s.slots[i%len(s.slots)]) + "}:probe"
			s.inspect(ctx)
			if s.breaker.State() != gobreaker.StateClosed {
				s.visit(ctx, key)
			}
			s.rehearse(ctx, key)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// rehearse marks, stages, confirms and discards an entry of nothing.
func (s *shard) rehearse(ctx context.Context, key string) {
	entry := stagedEntry(nil)
	header := bytes.Clone(entry)
	stamp(header, claim.NewSealer(nil), key, 1)
	ttl := probeFor.Milliseconds()
	var fault error
	steps := []*command{
		{args: []any{"SET", key, markKind, "PX", ttl}},
		{script: stageScript, args: []any{entry, ttl}},
		{script: confirmScript, args: []any{header, ttl}},
		{script: discardScript, args: []any{header}},
	}
	for _, c := range steps {
		c.key = key
		c.done = func(_ string, err error) {
			if ofRedis(err) {
				fault = err
			}
		}
	}
	s.asks.send(context.WithoutCancel(ctx), steps)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.faults++; fault == nil {
		s.faults, s.writing = 0, nil
		s.cache.greeted.Do(func() { s.cache.cfg.Log.Info("Redis is used", "redis", s.cache.cfg.Server) })
	}
	if s.faults >= 2 && !errors.Is(fault, errOpen) { // not a single hiccup
		s.writing = fault
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
func (s *shard) visit(ctx context.Context, key string) {
	ctx, cancel := context.WithTimeout(ctx, visitWithin)
	defer cancel()
	_, err := s.cache.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.Do(ctx, "SET", key, markKind, "PX", probeFor.Milliseconds())
		return nil
	})
	if ofRedis(err) && ctx.Err() == nil {
		s.note(err)
	}
}

// judge counts how a pipeline of the breaker's ended.
func (s *shard) judge(err error) {
	s.note(err)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil:
		s.inARow = 0
	case !errors.Is(err, errSlow):
		s.inARow++
	}
}

func (s *shard) failedInARow() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inARow
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

// turned tells of breakers, loudly: when the first opens, when the last one does, and when
// all are closed again. The shard's breaker is locked meanwhile.
func (c *Cache) turned(s *shard, from, to gobreaker.State) {
	c.cfg.Observe.Breaker(from.String(), to.String())
	all := int32(len(c.shards))
	switch {
	case from == gobreaker.StateClosed:
		switch c.away.Add(1) {
		case all:
			c.cfg.Log.Warn("Redis is not used: etcd answers what memory does not, correctly and more slowly, until Redis is well", "redis", c.cfg.Server, "cause", told(s.lastFault()))
		case 1:
			c.cfg.Log.Warn("a part of Redis is not used: etcd answers for it, correctly and more slowly, until it is well", "redis", c.cfg.Server, "cause", told(s.lastFault()))
		}
	case to == gobreaker.StateClosed:
		if c.away.Add(-1) == 0 {
			c.cfg.Log.Warn("Redis is used again", "redis", c.cfg.Server)
		}
	}
}

// heard tells of the switch, once when it is turned.
func (c *Cache) heard(v claim.View, err error) {
	if err != nil || c.bypassed.Swap(v.BypassRedis) == v.BypassRedis {
		return
	}
	if v.BypassRedis {
		c.cfg.Log.Warn("Redis is bypassed by an operator's switch: etcd answers what memory does not", "redis", c.cfg.Server)
	} else {
		c.cfg.Log.Warn("Redis is no longer bypassed", "redis", c.cfg.Server)
	}
}

// Degraded says why Redis, or a part of it, is not used or not written; nil: it is.
func (c *Cache) Degraded() error {
	if v, err := c.cfg.View.View(); err == nil && v.BypassRedis {
		return errors.New("bypassed by an operator's switch: etcd answers what memory does not")
	}
	var cause, writing error
	away := 0
	for _, s := range c.shards {
		closed := s.breaker.State() == gobreaker.StateClosed // before s.mu: the breaker's lock is the outer one
		s.mu.Lock()
		if !closed {
			away++
			cause = s.last
		} else if s.writing != nil {
			writing = s.writing
		}
		s.mu.Unlock()
	}
	switch {
	case away == len(c.shards):
		return fmt.Errorf("not used, etcd answers what memory does not: %s (%v)", told(cause), c.cfg.Server)
	case away > 0:
		return fmt.Errorf("%d of %d parts not used, etcd answers for them: %s (%v)", away, len(c.shards), told(cause), c.cfg.Server)
	case writing != nil:
		return fmt.Errorf("asked, but not all that must be can be done there: %s (%v)", told(writing), c.cfg.Server)
	}
	return nil
}

// hints are what usually is behind an error, by a part of its text.
var hints = []struct{ part, hint string }{
	{"cluster support disabled", "is it a standalone Redis? see redis-mode"},
	{"unknown command 'SET'", "is that a sentinel? see redis-mode"},
	{"first record does not look like a TLS handshake", "does it speak TLS? see redis-tls"},
	{"EOF", "does it want TLS? see redis-tls"},
	{"deadline exceeded", "does it answer, and does it speak TLS or not? see redis-tls"},
	{"i/o timeout", "it does not answer in time"},
	{"can't run this command", "its rights are too few: see docs/redis.md"},
	{"NOPERM", "its rights are too few: see docs/redis.md"},
}

// told says on one line what ails Redis.
func told(err error) string {
	if err == nil {
		return "it is being tried"
	}
	line, _, _ := strings.Cut(err.Error(), "\n")
	for _, h := range hints {
		if strings.Contains(line, h.part) {
			return line + " (" + h.hint + ")"
		}
	}
	return line
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
