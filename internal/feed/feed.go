package feed

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/watch"
)

// The usual bounds and times.
const (
	ringBytes   = 64 << 20
	ringChanges = 1 << 16
	linger      = 2 * time.Minute
	heartbeat   = 5 * time.Second
	idleEvery   = time.Second
	listTimeout = 5 * time.Second
)

// Governor tells what this node has applied; watch.Follower is one.
type Governor interface {
	// View is STORE_UNAVAILABLE until there is one.
	View() (claim.View, error)
	Status() watch.Status
	// Disowned: etcd was seen to have gone back in this epoch.
	Disowned() bool
	// Tick returns a channel that is closed when anything moves.
	Tick() (tick claim.Tick, since time.Duration, changed <-chan struct{})
}

// Records reads what is there; etcdtxn.Store does.
type Records interface {
	// Piece reads a part of what a namespace has; "" is the first.
	Piece(ctx context.Context, namespace, at string) (claim.Piece, error)
	// CountNames counts the keys of all records in etcd.
	CountNames(ctx context.Context) (int64, error)
	// Names returns the keys of records in etcd's order, after one of them; fewer than
	// asked for: there are no more.
	Names(ctx context.Context, after string, most int) ([]string, error)
}

// Config is what a Feed is made of.
type Config struct {
	// Client is the feed's own, so that its watch starves no other.
	Client  *clientv3.Client
	Govern  Governor
	Records Records
	Log     *slog.Logger
	// RingBytes and RingChanges bound what is kept for readers who are behind, and for
	// those who come back; 0: 64 MiB, 65,536.
	RingBytes   int64
	RingChanges int
	// Linger is for how long etcd is watched after the last one has gone; Heartbeat how
	// long a subscriber goes without hearing anything, FilterEvery how often it is asked
	// whether a filter of names is worth it. 0: two minutes, five and ten seconds.
	Linger, Heartbeat, FilterEvery time.Duration
	// Monotonic is the process's own clock; nil is the real one.
	Monotonic func() time.Duration
}

// Feed tells of records' changes.
type Feed struct {
	cfg Config
	// wanted has a value when there is somebody.
	wanted chan struct{}
	// reading has a value for each piece that is being read.
	reading chan struct{}
	// id is of this feed alone: what it told it knows, whatever has become of etcd since.
	id    uint64
	asked atomic.Int64 // how often Absent was asked of late

	mu sync.RWMutex
	// demand is how many want to be told; idle is when the last of them went.
	demand int
	idle   time.Duration
	// subscribers is how many of them are.
	subscribers int
	source      *watch.Source // while etcd is watched
	state       watch.State
	ring        ring
	// era is the number of this beginning: what was told in another is void, for this
	// cause. 0: there is no ring now.
	era, eras uint64
	cause     string
	restored  uint64
	// doubt is up to which revision an etcd that was seen to have gone back had been
	// followed, in this epoch: revisions up to there may mean two things. lost is when the
	// feed was last live, if it is not.
	doubt int64
	lost  time.Duration
	known bool     // the epoch is
	epoch claim.ID // the newest that is known
	reach watch.Reach
	// waiters are by etcd's keys, readers by namespace ids.
	waiters map[string]map[*waiter]struct{}
	readers map[string]map[*Subscription]struct{}
	scans   map[string]*scan
	kept    []*scan // all whose pieces may still be held
	filter  *filter // of names; nil: there is none
	counts  counts
}

type counts struct{ changes, scans, pieces uint64 }

// New makes a Feed; Run makes it work.
func New(cfg Config) *Feed {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.RingBytes == 0 {
		cfg.RingBytes = ringBytes
	}
	if cfg.RingChanges == 0 {
		cfg.RingChanges = ringChanges
	}
	if cfg.Linger == 0 {
		cfg.Linger = linger
	}
	if cfg.Heartbeat == 0 {
		cfg.Heartbeat = heartbeat
	}
	if cfg.FilterEvery == 0 {
		cfg.FilterEvery = filterEvery
	}
	if cfg.Monotonic == nil {
		start := time.Now()
		cfg.Monotonic = func() time.Duration { return time.Since(start) }
	}
	return &Feed{
		cfg: cfg, wanted: make(chan struct{}, 1), reading: make(chan struct{}, scanReads), id: rand.Uint64(), ring: ring{mostBytes: cfg.RingBytes, most: cfg.RingChanges},
		waiters: map[string]map[*waiter]struct{}{}, readers: map[string]map[*Subscription]struct{}{}, scans: map[string]*scan{},
	}
}

// Run watches etcd for as long as anybody wants to be told, until ctx ends.
func (f *Feed) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-f.wanted:
		}
		f.watch(ctx)
	}
}

// watch watches etcd until nobody wants to be told.
func (f *Feed) watch(ctx context.Context) {
	source := watch.NewSource(watch.SourceConfig{
		Name: "records", Client: f.cfg.Client, Key: layout.Records, End: clientv3.GetPrefixRangeEnd(layout.Statuses),
		Reader: reader{f}, Resumes: true, Log: f.cfg.Log, Monotonic: f.cfg.Monotonic,
	})
	f.mu.Lock()
	f.source = source
	f.mu.Unlock()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var g errgroup.Group
	g.Go(func() error { return source.Run(ctx) })
	g.Go(func() error { f.govern(ctx); return nil })
	g.Go(func() error { f.keepFilter(ctx); return nil })
	idle := time.NewTicker(idleEvery)
	defer idle.Stop()
	for over := false; !over; {
		select {
		case <-ctx.Done():
			over = true
		case <-idle.C:
			over = f.lone()
			f.tidy()
		}
	}
	stop()
	_ = g.Wait() // neither returns an error
	f.mu.Lock()
	f.source, f.state = nil, watch.Off
	f.ring.reset(f.ring.applied)
	f.renew(causeOff) // nothing that was told can be gone on from
	f.era, f.known, f.kept = 0, false, nil
	again := f.demand > 0
	f.mu.Unlock()
	if again {
		f.want()
	}
}

// lone reports whether nobody has wanted anything for a while.
func (f *Feed) lone() bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.demand == 0 && f.cfg.Monotonic()-f.idle >= f.cfg.Linger
}

// tidy drops scans that nobody new may join, and the pieces of those that are long over.
func (f *Feed) tidy() {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.cfg.Monotonic()
	for namespace, s := range f.scans {
		if now-s.began >= scanShared {
			delete(f.scans, namespace)
		}
	}
	f.kept = slices.DeleteFunc(f.kept, func(s *scan) bool { return s.dropped(now) })
}

// want has etcd watched.
func (f *Feed) want() {
	select {
	case f.wanted <- struct{}{}:
	default:
	}
}

// join counts one more who wants to be told; f.mu is held.
func (f *Feed) join() {
	f.demand++
	if f.source == nil {
		f.want()
	}
}

// leave counts one less; f.mu is held.
func (f *Feed) leave() {
	f.demand--
	f.idle = f.cfg.Monotonic()
}

// The causes of a beginning.
const (
	causeAsked    = "asked-for"
	causeToken    = "token-not-kept"
	causeCut      = "snapshot-cut-off"
	causeSlow     = "reader-too-slow"
	causeEpoch    = "epoch-raised"
	causeRestored = "etcd-went-back"
	causeLost     = "changes-lost"
	causeOff      = "not-followed"
)

// renew begins an era: everything that was told before is void. f.mu is held.
func (f *Feed) renew(cause string) {
	f.eras++
	f.era, f.cause = f.eras, cause
	f.filter = nil
	clear(f.scans)
	f.wakeAll()
}

// wakeAll wakes everyone; f.mu is held.
func (f *Feed) wakeAll() {
	for _, all := range f.readers {
		for s := range all {
			s.wake()
		}
	}
	for _, all := range f.waiters {
		for w := range all {
			w.wake()
		}
	}
}

// govern follows the epoch and the signs that etcd went back.
func (f *Feed) govern(ctx context.Context) {
	for {
		_, _, changed := f.cfg.Govern.Tick()
		restored := f.cfg.Govern.Status().Restored
		v, err := f.cfg.Govern.View()
		f.mu.Lock()
		if err == nil && v.Epoch != f.epoch {
			f.epoch, f.doubt = v.Epoch, 0
			if f.era > 0 && f.known {
				f.renew(causeEpoch)
			}
		}
		f.known = f.known || err == nil
		if restored != f.restored {
			f.restored, f.doubt = restored, max(f.doubt, f.ring.applied)
			if f.era > 0 {
				f.source.Again(watch.ErrWentBack)
			}
		}
		f.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// reader is the Feed as its Source sees it.
type reader struct{ *Feed }

// List begins with nothing, at etcd's revision.
func (f reader) List(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	sent, revision, err := f.revision(ctx)
	if err != nil {
		return 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if revision < f.ring.applied {
		f.cause, f.doubt = causeRestored, max(f.doubt, f.ring.applied)
	}
	f.ring.reset(revision)
	f.reach = watch.Reach{}
	f.reach.Asked(sent, revision)
	f.reach.Reached(revision)
	f.renew(f.cause)
	return revision, nil
}

// Ask reads etcd's revision.
func (f reader) Ask(ctx context.Context) (revision, goal int64, err error) {
	f.mu.RLock()
	before := f.ring.applied
	f.mu.RUnlock()
	sent, revision, err := f.revision(ctx)
	if err != nil {
		return 0, 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if revision >= before { // else it went back
		f.reach.Asked(sent, revision)
		f.reach.Reached(f.ring.applied)
	}
	return revision, revision, nil
}

// revision is etcd's, at a linearizable read that was sent then.
func (f reader) revision(ctx context.Context) (sent time.Duration, revision int64, err error) {
	sent = f.cfg.Monotonic()
	resp, err := f.cfg.Client.Get(ctx, layout.Tick, clientv3.WithKeysOnly())
	if err != nil {
		return sent, 0, err
	}
	return sent, resp.Header.Revision, nil
}

// Apply puts changes into the ring, and wakes those whom they concern.
func (f reader) Apply(events []*clientv3.Event) {
	changes := make([]*change, 0, len(events))
	for _, e := range events {
		// A key that is removed had expired, or been forgotten, before: nobody is told.
		if namespace, ok := layout.NamespaceIn(string(e.Kv.Key)); ok && e.Type == mvccpb.Event_PUT {
			changes = append(changes, &change{revision: e.Kv.ModRevision, namespace: namespace, key: string(e.Kv.Key), value: e.Kv.Value})
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ring.add(changes)
	f.counts.changes += uint64(len(changes))
	f.advance(events[len(events)-1].Kv.ModRevision)
	for _, e := range events {
		for w := range f.waiters[string(e.Kv.Key)] {
			w.wake()
		}
	}
	touched := map[string]struct{}{}
	for _, c := range changes {
		if f.filter != nil {
			f.filter.add(c.key)
		}
		touched[c.namespace] = struct{}{}
	}
	for namespace := range touched {
		for s := range f.readers[namespace] {
			s.wake()
		}
	}
}

// Progressed takes note that nothing was missed up to a revision.
func (f reader) Progressed(revision int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.advance(revision)
}

// advance takes note of how far the feed is; f.mu is held.
func (f *Feed) advance(revision int64) {
	f.ring.applied = max(f.ring.applied, revision)
	f.reach.Reached(f.ring.applied)
}

// Told takes note of how far the feed can be relied on.
func (f reader) Told(state watch.State, cause error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state == watch.Live {
		f.lost = f.cfg.Monotonic()
	}
	f.state = state
	switch {
	case state == watch.Resyncing && errors.Is(cause, watch.ErrWentBack):
		f.cause, f.doubt = causeRestored, max(f.doubt, f.ring.applied)
	case state == watch.Resyncing:
		f.cause = causeLost
	case state == watch.Live:
		f.wakeAll() // what was missed is known by now
	}
	f.cfg.Log.Debug("records are followed", "state", state.String(), "cause", cause)
}

// Live reports whether changes are told as they come.
func (f *Feed) Live() bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.state == watch.Live
}

// waiter is one who waits for a key.
type waiter struct{ c chan struct{} }

func (w *waiter) wake() { signal(w.c) }

// signal leaves a value, unless there is one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Follow returns a channel that has a value when a key of etcd's may have changed since
// the last one was taken: it has, or changes may have been missed. end ends it. While the
// feed is not Live, it may tell nothing.
func (f *Feed) Follow(key string) (changed <-chan struct{}, end func()) {
	w := &waiter{make(chan struct{}, 1)}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.waiters[key] == nil {
		f.waiters[key] = map[*waiter]struct{}{}
	}
	f.waiters[key][w] = struct{}{}
	f.join()
	return w.c, sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.waiters[key], w)
		if len(f.waiters[key]) == 0 {
			delete(f.waiters, key)
		}
		f.leave()
	})
}

// Status is how the feed is.
type Status struct {
	watch.Following
	// Waiters and Readers are those who are told now.
	Waiters, Readers int
	// Changes counts what was brought, Scans looks at what is there, and Pieces what
	// these read.
	// Names are those in the filter.
	Changes, Scans, Pieces, Names uint64
	RingBytes                     int64
	RingChanges                   int
}

// Status tells how the feed is.
func (f *Feed) Status() Status {
	f.mu.RLock()
	defer f.mu.RUnlock()
	s := Status{
		Changes: f.counts.changes, Scans: f.counts.scans, Pieces: f.counts.pieces,
		RingBytes: f.ring.bytes, RingChanges: len(f.ring.changes),
	}
	if f.filter != nil && f.filter.whole {
		s.Names = uint64(f.filter.added)
	}
	if f.source != nil {
		s.Following = f.source.Following()
	}
	s.Readers, s.Waiters = f.subscribers, f.demand-f.subscribers
	return s
}
