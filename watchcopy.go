package dualcheck

import (
	"container/heap"
	"fmt"
	"hash/maphash"
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// State is where a key stands, as it was written. Time alone makes no change: a claim
// whose lease has lapsed is still StatePending here.
type State int32

// Where a key can stand.
const (
	StatePending   State = 1 // a claim was given and is not finished
	StateReleased  State = 2 // nothing happened: the key is free
	StateUnknown   State = 3 // nobody can say whether the work happened
	StateSucceeded State = 4 // done
	StateFailed    State = 5 // failed for good
)

func (s State) String() string {
	return name([]string{"UNSPECIFIED", "PENDING", "RELEASED", "UNKNOWN", "SUCCEEDED", "FAILED"}, int32(s))
}

// Entry is what a Watch has of a key. With WithValues it has the record besides, which
// stays encoded until it is asked for.
type Entry struct {
	State State
	// Revision is the record's in etcd: the newer one counts.
	Revision int64
	// Digest is the SHA-256 of what came of it, nil unless it is finished. It is shared,
	// and not to be changed.
	Digest []byte
	// KeyUntil is until when the key is known, by the server's clock; zero where only a
	// finish, a resolve or a forget ends it.
	KeyUntil time.Time

	encoded
}

// Result decodes the result alone. It is ErrExpired if it is no longer kept.
func (e Entry) Result() (Result, error) {
	if e.State != StateSucceeded {
		return Result{}, fmt.Errorf("dualcheck: no result of a key that is %v", e.State)
	}
	if e.past() {
		return Result{}, ErrExpired
	}
	return e.encoded.Result()
}

// Failure decodes the failure alone. It is ErrExpired if it is no longer kept.
func (e Entry) Failure() (*Failure, error) {
	if e.State != StateFailed && e.State != StateUnknown {
		return nil, fmt.Errorf("dualcheck: no failure of a key that is %v", e.State)
	}
	if e.past() {
		return nil, ErrExpired
	}
	return e.encoded.Failure()
}

// past says whether the record's result_until is.
func (e Entry) past() bool {
	for c := walk(e.encoded); c.next(); {
		if c.num == 12 {
			return !time.Now().Before(timestamp(c.data))
		}
	}
	return false
}

// item is what is held of a key. It does not change once it can be found, but for at,
// which readers do not look at.
type item struct {
	key        string
	data       []byte // the digest, then the record
	revision   int64
	until      int64 // Unix time in nanoseconds, 0 for no end
	generation uint32
	at         int32 // where it is among those that expire, -1: nowhere
	state      State
	digest     uint8 // how much of data is the digest
}

func (it *item) entry() Entry {
	e := Entry{State: it.state, Revision: it.revision}
	if n := it.digest; n > 0 {
		e.Digest = it.data[:n:n]
	}
	if it.until != 0 {
		e.KeyUntil = time.Unix(0, it.until)
	}
	if int(it.digest) < len(it.data) {
		e.encoded = it.data[it.digest:len(it.data):len(it.data)]
	}
	return e
}

// What a key takes besides its bytes, and one that is only remembered, about.
const (
	itemBytes   = 200
	forgetBytes = 80
)

func (it *item) bytes() int64 { return int64(len(it.key)+len(it.data)) + itemBytes }

// localCopy is what a Watch holds. Its Watch's lock is held by whoever changes it; who
// reads needs that of a shard.
//
// Between begin and end of a snapshot what was held before is void and still served. Of
// what is named since begin the newer revision counts, whichever way it came; but
// revisions from before do not compare with those since, because etcd may have been
// restored, and its revisions have begun again. So:
//
//   - what has the generation of the snapshot was named since its begin;
//   - a key that is named at a revision below the one held from before stands aside until
//     the end, so that what is served does not go back while it may only be that the
//     snapshot lags behind;
//   - a key that was forgotten since begin is remembered until the end, with its
//     revision: a page that was read before must not bring it back.
type localCopy struct {
	seed      maphash.Seed
	shards    [64]shard
	keys      atomic.Int64
	mostKeys  int
	mostBytes int64
	tell      func(kind ChangeKind, it *item)

	bytes      int64
	generation uint32
	building   bool
	aside      map[string]*item
	forgotten  map[string]int64
	expiring   expiring
}

type shard struct {
	mu    sync.RWMutex
	items map[string]*item
}

func (c *localCopy) init(mostKeys int, mostBytes int64, tell func(ChangeKind, *item)) {
	c.seed, c.mostKeys, c.mostBytes, c.tell = maphash.MakeSeed(), mostKeys, mostBytes, tell
	for i := range c.shards {
		c.shards[i].items = make(map[string]*item)
	}
}

func (c *localCopy) shard(key string) *shard {
	return &c.shards[maphash.String(c.seed, key)%uint64(len(c.shards))]
}

// get is for readers.
func (c *localCopy) get(key string) *item {
	s := c.shard(key)
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.items[key]
}

func (c *localCopy) all() iter.Seq2[string, Entry] {
	return func(yield func(string, Entry) bool) {
		var items []*item
		for i := range c.shards {
			s := &c.shards[i]
			items = items[:0]
			s.mu.RLock()
			for _, it := range s.items {
				items = append(items, it)
			}
			s.mu.RUnlock()
			for _, it := range items {
				if it.until != 0 && time.Now().UnixNano() >= it.until {
					continue
				}
				if !yield(it.key, it.entry()) {
					return
				}
			}
		}
	}
}

// begin voids what is held.
func (c *localCopy) begin() {
	c.generation++
	c.building = true
	for _, it := range c.aside {
		c.bytes -= it.bytes()
	}
	for key := range c.forgotten {
		c.bytes -= int64(len(key)) + forgetBytes
	}
	c.aside, c.forgotten = make(map[string]*item), make(map[string]int64)
}

// put notes that a key is there.
func (c *localCopy) put(it *item) {
	it.generation = c.generation
	old := c.shard(it.key).items[it.key]
	if !c.building {
		// A change may come again after a snapshot that had it, or a newer one.
		if old == nil || old.revision < it.revision {
			c.hold(it, old)
			c.tell(ChangePut, it)
		}
		return
	}
	if gone, ok := c.forgotten[it.key]; ok {
		if gone >= it.revision {
			return
		}
		delete(c.forgotten, it.key)
		c.bytes -= int64(len(it.key)) + forgetBytes
	}
	switch {
	case old == nil:
		c.hold(it, nil)
	case old.generation == c.generation:
		if old.revision < it.revision {
			c.hold(it, old)
		}
	case old.revision <= it.revision:
		c.unaside(it.key)
		c.hold(it, old)
	default:
		if other := c.aside[it.key]; other == nil || other.revision < it.revision {
			c.unaside(it.key)
			c.aside[it.key] = it
			c.bytes += it.bytes()
		}
	}
}

// remove notes that a key was forgotten.
func (c *localCopy) remove(key string, revision int64) {
	old := c.shard(key).items[key]
	if !c.building {
		if old != nil && old.revision <= revision {
			c.drop(old)
			c.tell(ChangeGone, old)
		}
		return
	}
	if old != nil && old.generation == c.generation && old.revision > revision {
		return
	}
	if other := c.aside[key]; other != nil {
		if other.revision > revision {
			return
		}
		c.unaside(key)
	}
	// One from before that is newer is served until the end, which drops it.
	if old != nil && old.revision <= revision {
		c.drop(old)
	}
	gone, ok := c.forgotten[key]
	if !ok {
		c.bytes += int64(len(key)) + forgetBytes
	}
	c.forgotten[key] = max(gone, revision)
}

// end drops what was not named since begin.
func (c *localCopy) end() {
	c.settle()
	for key := range c.forgotten {
		c.bytes -= int64(len(key)) + forgetBytes
	}
	c.building, c.aside, c.forgotten = false, nil, nil
}

// settle leaves what was named since begin.
func (c *localCopy) settle() {
	for key, it := range c.aside {
		c.unaside(key)
		c.hold(it, c.shard(key).items[key])
	}
	var void []*item
	for i := range c.shards {
		void = void[:0]
		for _, it := range c.shards[i].items {
			if it.generation != c.generation {
				void = append(void, it)
			}
		}
		for _, it := range void {
			c.drop(it)
		}
	}
}

// full says whether there is more than is allowed. What is void makes room first.
func (c *localCopy) full() bool {
	over := func() bool {
		return int(c.keys.Load())+len(c.aside)+len(c.forgotten) > c.mostKeys || c.bytes > c.mostBytes
	}
	if c.building && over() {
		c.settle()
	}
	return over()
}

// expire drops what has. In a snapshot nothing is dropped, as a page that was read
// before could bring it back: who reads is not given it anyway.
func (c *localCopy) expire(now time.Time) {
	for !c.building && len(c.expiring) > 0 && c.expiring[0].until <= now.UnixNano() {
		it := c.expiring[0]
		c.drop(it)
		c.tell(ChangeGone, it)
	}
}

func (c *localCopy) unaside(key string) {
	if it := c.aside[key]; it != nil {
		c.bytes -= it.bytes()
		delete(c.aside, key)
	}
}

// hold lets readers find an item, in place of old if there was one.
func (c *localCopy) hold(it, old *item) {
	if old != nil {
		it.key = old.key // the map keeps that one; a second would be in memory for nothing
		c.bytes -= old.bytes()
		c.never(old)
	} else {
		c.keys.Add(1)
	}
	c.bytes += it.bytes()
	if it.until != 0 {
		heap.Push(&c.expiring, it)
	}
	s := c.shard(it.key)
	s.mu.Lock()
	s.items[it.key] = it
	s.mu.Unlock()
}

func (c *localCopy) drop(it *item) {
	c.keys.Add(-1)
	c.bytes -= it.bytes()
	c.never(it)
	s := c.shard(it.key)
	s.mu.Lock()
	delete(s.items, it.key)
	s.mu.Unlock()
}

// never takes an item from those that expire.
func (c *localCopy) never(it *item) {
	if it.at >= 0 {
		heap.Remove(&c.expiring, int(it.at))
	}
}

// expiring is a heap of items by when they expire. Each knows its place, so that one
// that is replaced leaves at once: a claim that is extended a thousand times is in it
// once.
type expiring []*item

func (h expiring) Len() int           { return len(h) }
func (h expiring) Less(i, j int) bool { return h[i].until < h[j].until }

func (h expiring) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = int32(i), int32(j)
}

func (h *expiring) Push(x any) {
	it := x.(*item)
	it.at = int32(len(*h))
	*h = append(*h, it)
}

func (h *expiring) Pop() any {
	last := len(*h) - 1
	it := (*h)[last]
	(*h)[last] = nil
	*h, it.at = (*h)[:last], -1
	return it
}
