package recency

import (
	"hash/maphash"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Label is the label of a record whose values have habits of their own.
const Label = "supplier"

const (
	// shards keep the cores from one lock. A namespace and its suppliers share one, so
	// that each call takes one lock once.
	shards = 16
	// perShard bounds what suppliers that are invented call by call can take: 3.7 MB
	// for all shards together. Who is used least is forgotten first, which costs a TTL
	// that is longer than it would have to be.
	perShard = 256
)

// What a TTL was chosen by, as an Observer is told.
const (
	BySupplier  = "supplier"
	ByNamespace = "namespace"
	// ByNothing: nothing is known yet, and the TTL is the longest.
	ByNothing = "nothing"
)

// Observer is told of the TTLs that are chosen, for metrics.
type Observer interface {
	TTL(by string, ttl time.Duration)
}

// Habits is what a node has seen of how keys come back. Its methods may be called at
// once. A nil one knows nothing, and every TTL is the longest.
type Habits struct {
	observe Observer
	seed    maphash.Seed
	shards  [shards]shard
}

type shard struct {
	mu  sync.Mutex
	lru *simplelru.LRU[whose, *histogram]
}

// whose habit: a namespace's if supplier is "".
type whose struct{ namespace, supplier string }

// New makes Habits that know nothing; the observer may be nil.
func New(observe Observer) *Habits {
	h := &Habits{observe: observe, seed: maphash.MakeSeed()}
	for i := range h.shards {
		h.shards[i].lru, _ = simplelru.NewLRU[whose, *histogram](perShard, nil) // it fails for a size below one alone
	}
	return h
}

func (h *Habits) shard(namespace string) *shard {
	return &h.shards[maphash.String(h.seed, namespace)%shards]
}

// Observe notes that the outcome of a finished record was told again at this moment of
// cluster time, from wherever it came.
func (h *Habits) Observe(rec *claim.Record, now claim.Instant) {
	if h == nil {
		return
	}
	age, ok := ageOf(rec, now)
	if !ok {
		return
	}
	supplier := rec.Labels[Label]
	s := h.shard(rec.Namespace)
	s.mu.Lock()
	defer s.mu.Unlock()
	if supplier != "" {
		s.of(rec.Namespace, supplier).add(age, now)
	}
	s.of(rec.Namespace, "").add(age, now) // last, so that it goes after all its suppliers
}

// of returns a habit, an empty one if it was not known.
func (s *shard) of(namespace, supplier string) *histogram {
	if h, ok := s.lru.Get(whose{namespace, supplier}); ok {
		return h
	}
	h := new(histogram)
	s.lru.Add(whose{strings.Clone(namespace), strings.Clone(supplier)}, h) // a record's strings may be part of a larger one
	return h
}

// TTL is for how long an entry of a finished record that is written at this moment
// should live. What is left of the record is the caller's to compare.
//
// The reach of a habit counts from the finish. So an entry written when the key is
// found missing has the rest of it, or as long again as the key took to come back,
// whichever is longer: who comes back late and yet again comes at growing distances, as
// retries that back off do, and so misses at most once for each doubling of its age.
func (h *Habits) TTL(rec *claim.Record, now claim.Instant, p claim.Policy) time.Duration {
	reach, by := h.reach(rec, now, p.CacheTTLMax)
	age, ok := ageOf(rec, now)
	ttl := p.CacheTTLMax
	if ok && reach < p.CacheTTLMax {
		ttl = min(max(reach-age, age, p.CacheTTLMin), p.CacheTTLMax)
	}
	if h != nil && h.observe != nil {
		h.observe.TTL(by, ttl)
	}
	return ttl
}

// reach is how long after a finish keys like this one come back, and by what that is
// known; longest if it is not.
func (h *Habits) reach(rec *claim.Record, now claim.Instant, longest time.Duration) (time.Duration, string) {
	if h == nil {
		return longest, ByNothing
	}
	s := h.shard(rec.Namespace)
	s.mu.Lock()
	defer s.mu.Unlock()
	var late time.Duration
	if supplier := rec.Labels[Label]; supplier != "" {
		if one, ok := s.known(rec.Namespace, supplier, now, longest); ok {
			return one.reach(longest), BySupplier
		} else if one != nil {
			late = one.reach(longest) // that it is late counts before it is known; that it is early does not
		}
	}
	all, ok := s.known(rec.Namespace, "", now, longest)
	if !ok {
		return longest, ByNothing
	}
	if reach := all.reach(longest); late <= reach {
		return reach, ByNamespace
	}
	return late, BySupplier
}

// known returns a habit, nil if there is none, and whether it may shorten a TTL.
func (s *shard) known(namespace, supplier string, now claim.Instant, longest time.Duration) (*histogram, bool) {
	h, ok := s.lru.Get(whose{namespace, supplier})
	if !ok {
		return nil, false
	}
	h.turn(now)
	return h, h.known(now, longest)
}

// Len is how many habits are kept.
func (h *Habits) Len() (n int) {
	for i := range h.shards {
		s := &h.shards[i]
		s.mu.Lock()
		n += s.lru.Len()
		s.mu.Unlock()
	}
	return n
}

// ageOf is how long ago a record was finished, in cluster time; false if it was not, or
// does not say. A node's clock may be behind that of the node that finished it.
func ageOf(rec *claim.Record, now claim.Instant) (time.Duration, bool) {
	if rec == nil || !rec.State.Finished() || rec.ResultUntil == 0 || rec.ResultUntil == claim.Never {
		return 0, false
	}
	return max(now.Sub(rec.ResultUntil.Add(-rec.ResultRetention)), 0), true
}
