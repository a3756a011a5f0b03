package etcdtxn

import (
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/time/rate"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

const (
	// finishWithin bounds how long an accepted finish goes on without its caller.
	finishWithin = 30 * time.Second
	// rememberedClaims and rememberedMarks bound what a node keeps in memory, as
	// numbers of records.
	rememberedClaims = 1 << 16
	// rememberedBytes is the largest record that is remembered; the finish of a larger
	// one reads it.
	rememberedBytes = 1 << 10
	rememberedMarks = 1 << 12
	pacedNamespaces = 1 << 12
)

// Viewer tells what this node has applied; watch.Follower is one.
type Viewer interface {
	// View is STORE_UNAVAILABLE until there is one.
	View() (claim.View, error)
	// CatchUp returns once what a refused transaction saw has been applied.
	CatchUp(ctx context.Context, used claim.View, saw claim.Seen) error
}

// Observer is told what happens, for metrics.
type Observer interface {
	// Call is one call to etcd: begin, complete, …, read; ok, lost, refused (by the
	// guard or the window), ambiguous, full, busy.
	Call(kind, outcome string, took time.Duration)
	// Settled is an ambiguous commit whose fate was established.
	Settled(kind string)
	// Refused is a transaction decided under an old guard or tick.
	Refused(cause string)
	// Undated is a record that lacks a deadline.
	Undated()
	// Sent is a transaction of so many members, one of which has waited that long for it:
	// a write or a read. Landed is its answer, or that there is none.
	Sent(kind string, members int, waited time.Duration)
	Landed(kind string)
	// Behind is a write that waits for another of the same key.
	Behind()
	// Crowded is a write or a read that was not let in to wait.
	Crowded(kind string)
}

// Cache is shown finished records as the very bytes that etcd holds; rediscache.Cache
// is one. Its methods wait for nothing, and no answer depends on them.
type Cache interface {
	// Stage is shown a finished record that is about to be proposed under this view.
	// What it returns is called if it was committed, with its revision.
	Stage(v *claim.View, rec *claim.Record, value []byte) (committed func(revision int64))
	// Found is shown one that was read, under a view from before the read.
	Found(v *claim.View, rec *claim.Record, value []byte)
}

// Config is what a Store is made of.
type Config struct {
	Client *clientv3.Client
	View   Viewer
	Log    *slog.Logger
	// Observe and Cache may be nil.
	Observe Observer
	Cache   Cache
	// WaitingMost is how many Begins, and how many reads, wait to be sent to etcd before
	// more are OVERLOADED; 0: 10,000. A namespace is let in beyond it for as long as it
	// has less than its share. Finishes and extensions are not counted.
	WaitingMost int
	// Wall and Monotonic are the process's clocks; nil are the real ones.
	Wall      func() time.Time
	Monotonic func() time.Duration
}

// Store is claim.Store in etcd.
type Store struct {
	cfg Config
	kv  pb.KVClient
	log *slog.Logger

	// claims are those this node gave, by etcd key: a finish needs no read.
	claims claims
	// known are keys that were found to have a record: a repeat is likely, so they are
	// read first.
	known known
	// marks are held marks of forgets that this node has met, by etcd key.
	marks   *lru.Cache[string, metMark]
	pace    *lru.Cache[string, *pace]
	commits commits
	flights flights

	// work is what goes on without its caller; sends are what it, and all others,
	// share. Work is no longer taken on once Close has begun, sends once it is done.
	work, sends crew
	closing     context.Context
	abandon     context.CancelFunc

	// What would be said with every call is said seldom; metrics count each.
	seldomFull, seldomUndated rate.Sometimes
}

// bounded returns a context that ends within claim.AnswerWithin: ctx itself if that does,
// since a timer is a good part of what a call costs.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if until, ok := ctx.Deadline(); ok && time.Until(until) <= claim.AnswerWithin {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, claim.AnswerWithin)
}

// known remembers keys, and forgets one when another takes its place: it is only a hint,
// and must cost next to nothing, the collector included.
type known [1 << 16]atomic.Uint64

var knownSeed = maphash.MakeSeed()

func (k *known) place(key string) (*atomic.Uint64, uint64) {
	h := maphash.String(knownSeed, key) | 1<<63 // never 0, which is no key
	return &k[h%uint64(len(k))], h
}

func (k *known) add(key string) {
	if at, h := k.place(key); at.Load() != h {
		at.Store(h)
	}
}

func (k *known) has(key string) bool {
	at, h := k.place(key)
	return at.Load() == h
}

// crew is a group of goroutines that ends for good.
type crew struct {
	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup
}

// start runs f; DRAINING once the crew is closed.
func (c *crew) start(f func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return &claim.Error{Reason: claim.Draining, Message: "this node is going away: send the same call to another", RetryAfter: time.Second}
	}
	c.running.Go(f)
	return nil
}

// close takes nothing on any more and waits for what runs.
func (c *crew) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.running.Wait()
}

var _ claim.Store = (*Store)(nil)

// remembered is a claim as it was written, good for one generation of the view.
type remembered struct {
	generation uint64
	id         claim.ID
	there      found
}

// claims are those that a node gave. They are kept in two generations: once as many as
// are to be kept are in the younger, the elder is dropped. A claim is asked for once, soon
// or never, so that an order of use would cost more than it tells.
type claims struct {
	mu             sync.Mutex
	younger, elder map[string]remembered
}

func (c *claims) add(key string, r remembered) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.younger) >= rememberedClaims || c.younger == nil {
		c.younger, c.elder = make(map[string]remembered, len(c.younger)), c.younger
	}
	c.younger[key] = r
}

func (c *claims) get(key string) (remembered, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r, ok := c.younger[key]; ok {
		return r, true
	}
	r, ok := c.elder[key]
	return r, ok
}

func (c *claims) remove(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.younger, key)
	delete(c.elder, key)
}

// metMark is when this node first met a held mark.
type metMark struct {
	revision int64
	at       time.Duration
}

// New makes a Store.
func New(cfg Config) *Store {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Observe == nil {
		cfg.Observe = nobody{}
	}
	if cfg.Cache == nil {
		cfg.Cache = noCache{}
	}
	if cfg.WaitingMost == 0 {
		cfg.WaitingMost = waitingMost
	}
	if cfg.Wall == nil {
		cfg.Wall = time.Now
	}
	if cfg.Monotonic == nil {
		start := time.Now()
		cfg.Monotonic = func() time.Duration { return time.Since(start) }
	}
	s := &Store{
		cfg: cfg, kv: clientv3.RetryKVClient(cfg.Client), log: cfg.Log,
		seldomFull: rate.Sometimes{Interval: 10 * time.Second}, seldomUndated: rate.Sometimes{Interval: 10 * time.Second},
	}
	s.closing, s.abandon = context.WithCancel(context.Background())
	s.commits.busy, s.commits.ops = map[string]*proposal{}, usualOps
	s.flights.next, s.flights.flying = map[string]*flight{}, map[string]bool{}
	s.marks = mustLRU[metMark](rememberedMarks)
	s.pace = mustLRU[*pace](pacedNamespaces)
	return s
}

func mustLRU[V any](size int) *lru.Cache[string, V] {
	c, err := lru.New[string, V](size)
	if err != nil {
		panic(err) // only for a size below 1
	}
	return c
}

// Close waits for accepted finishes and forgets; when ctx ends, they are abandoned
// and their callers must repeat them.
func (s *Store) Close(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		s.work.close()
		s.sends.close()
		close(done)
	}()
	select {
	case <-done:
		s.abandon()
		return nil
	case <-ctx.Done():
		s.abandon()
		<-done
		return ctx.Err()
	}
}

// detach carries on though ctx ends, for at most this long, and answers the caller
// if it is still there.
func detach[T any](ctx context.Context, s *Store, within time.Duration, f func(context.Context) (T, error)) (T, error) {
	var zero T
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	err := s.work.start(func() {
		work, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
		defer cancel()
		stop := context.AfterFunc(s.closing, cancel)
		defer stop()
		value, err := unpanicked(func() (T, error) { return f(work) })
		done <- result{value, err}
	})
	if err != nil {
		return zero, err
	}
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		return zero, claim.Unavailable("the call ended before its answer; it was accepted and goes on: send the same call again", ctx.Err())
	}
}

// elapsed is cluster time now, as far as a lease is concerned: the tick that etcd
// answered with and all the time since it was asked. A process that was stopped in
// between tells of no lease that is over.
func (s *Store) elapsed(o outcome) claim.Instant { return o.tick.Add(s.cfg.Monotonic() - o.asked) }

// unpanicked makes an error of a panic, in goroutines that no interceptor guards.
func unpanicked[T any](f func() (T, error)) (value T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &claim.Error{Reason: claim.Internal, Message: "internal error", Err: fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
		}
	}()
	return f()
}

// judge decides on a record; nil is none. It returns the record to write, or nil.
type judge func(rec *claim.Record, m claim.Moment) (*claim.Record, error)

// concluded is how an operation on a record ended.
type concluded struct {
	outcome
	// record is as it was written, or as it is; nil: none.
	record *claim.Record
}

// guess is what a record is taken to be before it is read: absent, or as this node
// wrote it in a generation of its view. A nil guess is read first.
type guess struct {
	there      found
	generation uint64
}

// business is what is to be done with one record.
type business struct {
	kind, namespace, key string
	name                 layout.Name // of these
	// id is for the claim, if one is given.
	id    claim.ID
	guess *guess
	// urgent: it ends or keeps a claim.
	urgent bool
	// takesBack: it may take back something finished, and so moves the slot's epoch.
	takesBack bool
}

// onRecord settles an operation on one record.
func (s *Store) onRecord(ctx context.Context, b business, decide judge) (concluded, error) {
	var last, proposed *claim.Record // as it was found, and as it is to be
	var value []byte                 // of proposed
	var committed func(revision int64)
	op := &operation{kind: b.kind, namespace: b.namespace, key: b.name.Key, urgent: b.urgent}
	if b.guess != nil {
		op.guess, op.generation = &b.guess.there, b.guess.generation
	}
	op.decide = func(there found, v *claim.View, now claim.Instant) ([]put, error) {
		m, err := s.moment(v, now, b.namespace, b.id)
		if err != nil {
			return nil, err
		}
		rec, err := s.decode(there, b.namespace, b.key)
		if err != nil {
			return nil, err
		}
		last = rec
		write, err := decide(rec, m)
		if err != nil || write == nil {
			return nil, err
		}
		if value, err = layout.EncodeRecord(write); err != nil {
			return nil, err
		}
		proposed = write
		if write.State.Finished() {
			committed = s.cfg.Cache.Stage(v, write, value)
		}
		puts := []put{{key: b.name.Key, value: value}}
		if b.takesBack {
			puts = append(puts, put{key: b.name.SlotEpoch()})
		}
		return puts, nil
	}
	end, err := s.settle(ctx, op)
	if err != nil {
		return concluded{outcome: end}, err
	}
	if last != nil || end.written {
		s.known.add(b.name.Key)
	}
	out := concluded{outcome: end, record: last}
	// Else it was written by an earlier try than the last, whose bytes are not these.
	latest := end.written && bytes.Equal(value, end.there.value)
	switch {
	case latest: // as it would be read
		proposed.Revision = end.there.revision
		out.record = proposed
	case end.written:
		if out.record, err = s.decode(end.there, b.namespace, b.key); err != nil {
			return out, err
		}
	}
	switch {
	case out.record == nil || !out.record.State.Finished():
	case latest:
		committed(end.there.revision)
	case !out.record.Gone(end.now):
		s.cfg.Cache.Found(end.view, out.record, end.there.value)
	}
	return out, nil
}

func (s *Store) decode(there found, namespace, key string) (*claim.Record, error) {
	if there.revision == 0 {
		return nil, nil
	}
	rec, err := layout.DecodeRecord(there.value, there.revision, namespace, key)
	if err != nil {
		return nil, err
	}
	if rec.Undated() {
		s.cfg.Observe.Undated()
		s.seldomUndated.Do(func() {
			s.log.Error("a record lacks a deadline and is held until it is resolved", "namespace", namespace, "state", rec.State.String())
		})
	}
	return rec, nil
}

func (s *Store) moment(v *claim.View, now claim.Instant, namespace string, id claim.ID) (claim.Moment, error) {
	p, err := v.Policy(namespace)
	if err != nil {
		return claim.Moment{}, err
	}
	return claim.Moment{
		Now: now, Wall: s.cfg.Wall(), Policy: p, ClaimID: id, FenceBase: v.FenceBase,
		Usual: s.usual(namespace), Jitter: rand.Float64(),
	}, nil
}

// remember keeps a claim that this node has given, so that its finish is one
// conditional write.
func (s *Store) remember(name layout.Name, c concluded) {
	if c.view.Generation != 0 && len(c.there.value) <= rememberedBytes {
		s.claims.add(name.Key, remembered{c.view.Generation, c.record.ClaimID, c.there})
	}
}

// recall returns a claim that this node gave, as a guess; nil if it remembers none.
func (s *Store) recall(name layout.Name, id claim.ID) *guess {
	if got, ok := s.claims.get(name.Key); ok && got.id == id {
		return &guess{got.there, got.generation}
	}
	return nil
}

// pace is what a namespace's work is usually like, as moving averages.
type pace struct {
	mu sync.Mutex
	// usual is how long a claim takes to be finished; 0: not known.
	usual time.Duration
	// repeats is the share of Begins that found a record; surprises that of those that
	// were expected to find none.
	repeats, surprises float64
}

func (s *Store) paceOf(namespace string) *pace {
	if p, ok := s.pace.Get(namespace); ok {
		return p
	}
	p := &pace{}
	if there, ok, _ := s.pace.PeekOrAdd(namespace, p); ok {
		return there
	}
	return p
}

func (s *Store) usual(namespace string) time.Duration {
	p := s.paceOf(namespace)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.usual
}

// took notes how long one claim took to be finished.
func (s *Store) took(namespace string, d time.Duration) {
	p := s.paceOf(namespace)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.usual == 0 {
		p.usual = d
	}
	p.usual += (d - p.usual) / 8
}

// mostlyRepeats reports whether the namespace's Begins, of those with this hint, find a
// record more often than not, so that reading first is the cheaper order. A Redis that
// was flushed expects every key to be new.
func (s *Store) mostlyRepeats(namespace string, hint claim.Hint) bool {
	p := s.paceOf(namespace)
	p.mu.Lock()
	defer p.mu.Unlock()
	if hint == claim.LikelyNew {
		return p.surprises >= 0.5
	}
	return p.repeats >= 0.5
}

// began notes whether a Begin found a record.
func (s *Store) began(namespace string, hint claim.Hint, found bool) {
	share := 0.0
	if found {
		share = 1
	}
	p := s.paceOf(namespace)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.repeats += (share - p.repeats) / 16
	if hint == claim.LikelyNew {
		p.surprises += (share - p.surprises) / 16
	}
}

type nobody struct{}

func (nobody) Call(string, string, time.Duration) {}
func (nobody) Settled(string)                     {}
func (nobody) Refused(string)                     {}
func (nobody) Undated()                           {}
func (nobody) Sent(string, int, time.Duration)    {}
func (nobody) Landed(string)                      {}
func (nobody) Behind()                            {}
func (nobody) Crowded(string)                     {}

type noCache struct{}

func (noCache) Stage(*claim.View, *claim.Record, []byte) func(int64) { return func(int64) {} }
func (noCache) Found(*claim.View, *claim.Record, []byte)             {}
