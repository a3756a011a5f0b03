package rediscache

import (
	"bytes"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Kinds of writes, and how they end, as Observer.Wrote is told. The scripts answer the
// first three.
const (
	kindStage   = "stage"
	kindConfirm = "confirm"
	kindFill    = "fill"
	kindDiscard = "discard"
	kindSuspect = "suspect" // to be discarded if it is too large

	outcomeOK      = "ok"
	outcomeKept    = "kept"    // what is there stays
	outcomeLost    = "lost"    // the stage is gone, or another's
	outcomeOpen    = "open"    // the breaker is
	outcomeDropped = "dropped" // the queue is full
	outcomeFailed  = "failed"
)

// Stage writes finished bytes that are about to be proposed to etcd. What it returns
// is to be called once they were committed, with their revision. Neither waits.
//
// The entry's name has the epochs that were known before the proposal: should the
// record be taken back before the confirm arrives, nobody looks under that name.
func (c *Cache) Stage(v *claim.View, rec *claim.Record, value []byte) func(revision int64) {
	at, ok := c.place(kindStage, v, rec)
	if !ok {
		return func(int64) {}
	}
	entry := stagedEntry(value)
	s := &stage{cache: c, place: at, began: time.Now(), sealer: v.Sealer, header: bytes.Clone(entry[:headerSize])}
	c.submit(kindStage, stageScript, at.key, at.shard, entry, min(stageFor, at.ttl), s.written)
	return s.committed
}

// stage is one on its way. Its confirm goes out once both Redis has it and etcd has
// committed it: sent earlier, it could arrive before.
type stage struct {
	cache *Cache
	place
	began  time.Time // the time to live is from then on
	sealer claim.Sealer
	header []byte

	mu       sync.Mutex
	there    bool
	revision int64
}

func (s *stage) written(outcome string) {
	s.mu.Lock()
	s.there = outcome == outcomeOK
	due := s.there && s.revision != 0
	s.mu.Unlock()
	if due {
		s.confirm()
	}
}

func (s *stage) committed(revision int64) {
	s.mu.Lock()
	s.revision = revision
	due := s.there
	s.mu.Unlock()
	if due {
		s.confirm()
	}
}

func (s *stage) confirm() {
	left := s.ttl - time.Since(s.began)
	v, err := s.cache.cfg.View.View()
	if left <= 0 || err != nil || v.BypassRedis { // a finish may take longer than a switch
		return
	}
	stamp(s.header, s.sealer, s.key, s.revision)
	s.cache.submit(kindConfirm, confirmScript, s.key, s.shard, s.header, left, nil)
}

// Found writes a finished record that was read from etcd under this view.
func (c *Cache) Found(v *claim.View, rec *claim.Record, value []byte) {
	at, ok := c.place(kindFill, v, rec)
	if !ok {
		return
	}
	entry := stagedEntry(value)
	stamp(entry[:headerSize], v.Sealer, at.key, rec.Revision)
	c.submit(kindFill, fillScript, at.key, at.shard, entry, at.ttl, nil)
}

// place is where a record is cached, and for how long.
type place struct {
	shard *shard
	key   string
	ttl   time.Duration
}

// place says where a write of this kind has a record cached; false if it has not. It is
// asked before an entry is made: to hash and copy a result for a Redis that is away would
// cost the calls that etcd answers.
func (c *Cache) place(kind string, v *claim.View, rec *claim.Record) (place, bool) {
	if v.BypassRedis || !v.Believed {
		return place{}, false
	}
	p, err := v.Policy(rec.Namespace)
	left := rec.CachedUntil().Sub(v.Now)
	if err != nil || left <= 0 {
		return place{}, false
	}
	name := layout.NameOf(rec.Namespace, rec.Key)
	if c.of[name.Slot].breaker.State() == gobreaker.StateOpen {
		c.cfg.Observe.Wrote(kind, outcomeOpen)
		return place{}, false
	}
	return place{c.of[name.Slot], keyOf(v, name), min(c.cfg.Habits.TTL(rec, v.Now, p), left)}, true
}

// discard removes an entry that should not be there, so that the next fill is not
// taken for older than it.
func (c *Cache) discard(slot int, key, entry string, why Finding) {
	c.damaged.Add(1)
	c.seldom.Do(func() {
		c.cfg.Log.Warn("an entry in Redis is not what was written there: it is not believed, and is to be removed", "redis_key", key, "finding", string(why), "since_last_told", c.damaged.Swap(0))
	})
	header := entry[:min(len(entry), headerSize)]
	c.of[slot].writes.submit(&command{
		key: key, script: discardScript, args: []any{header}, size: int64(len(header)) + overhead,
		done: func(answer string, err error) { c.cfg.Observe.Wrote(kindDiscard, outcomeOf(answer, err)) },
	})
}

// submit writes an entry or a header; then, if set, is told how that ended.
func (c *Cache) submit(kind string, script *redis.Script, key string, at *shard, entry []byte, ttl time.Duration, then func(outcome string)) {
	at.writes.submit(&command{
		key: key, script: script, args: []any{entry, max(ttl.Milliseconds(), 1)}, size: int64(len(entry)) + overhead,
		done: func(answer string, err error) {
			outcome := outcomeOf(answer, err)
			c.cfg.Observe.Wrote(kind, outcome)
			if then != nil {
				then(outcome)
			}
		},
	})
}

func outcomeOf(answer string, err error) string {
	switch {
	case err == nil && (answer == outcomeOK || answer == outcomeKept || answer == outcomeLost):
		return answer
	case errors.Is(err, errOpen):
		return outcomeOpen
	case errors.Is(err, errCrowded):
		return outcomeDropped
	}
	return outcomeFailed
}
