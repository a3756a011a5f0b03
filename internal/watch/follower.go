package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

const (
	// probeEvery is how often the tick and the guard are read linearizably.
	probeEvery = time.Second
	// behindMost is how long the watch may take to reach what a read has seen.
	behindMost = 2 * time.Second
	// silentMost is how long etcd may go without answering before the node is not
	// ready.
	silentMost = 3 * time.Second
	// catchUpPatience is how long a refused write waits for the watch before it has
	// everything listed anew.
	catchUpPatience = 300 * time.Millisecond
	listTimeout     = 5 * time.Second
	probeTimeout    = time.Second
)

// Config says what to follow and how.
type Config struct {
	// Client reads; WatchClient watches, and is one of its own so that nothing
	// starves the watch. Nil is Client.
	Client, WatchClient *clientv3.Client
	// Default is the policy of namespaces that nobody declared, unless
	// RefuseUndeclared.
	Default          claim.Policy
	RefuseUndeclared bool
	Log              *slog.Logger
	// Monotonic is the process's own clock; nil is the real one.
	Monotonic func() time.Duration
}

// Follower follows etcd and tells what it has applied.
type Follower struct {
	cfg    Config
	relist chan struct{} // asks Run to list anew; holds one request

	mu         sync.Mutex
	changed    chan struct{} // closed when anything below moves
	state      *state        // nil until listed
	generation uint64
	tickSeen   time.Duration
	guardSeen  time.Duration
	moved      bool // the tick was seen to move
	lists      uint64
	answered   time.Duration // when the last probe that was answered was sent
	probed     bool          // one was
	goal       int64         // the revision that the watch has to reach
	goalSince  time.Duration
	lastErr    error
	watches    bool   // the watch was created and has not ended
	restored   uint64 // how often etcd was seen to have gone back
	gone       bool   // it was, and has not been listed since
	belief     belief
}

// New makes a Follower; Run makes it follow.
func New(cfg Config) *Follower {
	if cfg.WatchClient == nil {
		cfg.WatchClient = cfg.Client
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Monotonic == nil {
		start := time.Now()
		cfg.Monotonic = func() time.Duration { return time.Since(start) }
	}
	return &Follower{cfg: cfg, relist: make(chan struct{}, 1), changed: make(chan struct{})}
}

// Run follows until ctx ends. It returns nil then, and nothing else ends it.
func (f *Follower) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { f.probe(ctx); return nil })
	g.Go(func() error { f.follow(ctx); return nil })
	return g.Wait()
}

// follow lists and watches, again and again.
func (f *Follower) follow(ctx context.Context) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 50*time.Millisecond, 2*time.Second
	again := rate.Sometimes{Interval: 10 * time.Second}
	for ctx.Err() == nil {
		began := f.cfg.Monotonic()
		err := f.listAndWatch(ctx)
		if ctx.Err() != nil {
			return
		}
		f.mu.Lock()
		f.lastErr = err
		f.mu.Unlock()
		again.Do(func() {
			f.cfg.Log.Warn("policies and clock are no longer followed from etcd; they are read anew", "cause", err)
		})
		if f.cfg.Monotonic()-began > wait.MaxInterval {
			wait.Reset()
		}
		if errors.Is(err, errAsked) {
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait.NextBackOff()):
		}
	}
}

var (
	errAsked  = errors.New("asked for")
	errClosed = errors.New("the watch was closed")
	// errNotCreated: etcd answers reads and not the watch.
	errNotCreated = errors.New("etcd does not answer the watch")
)

// listAndWatch lists, then follows from the next revision until it cannot.
func (f *Follower) listAndWatch(ctx context.Context) error {
	revision, err := f.list(ctx)
	if err != nil {
		return err
	}
	watching, stop := context.WithCancel(clientv3.WithRequireLeader(ctx))
	// Watch returns once etcd has answered, which it may never do: it is waited for
	// here, so that the node can live on lists meanwhile.
	created := make(chan clientv3.WatchChan, 1)
	var creating sync.WaitGroup
	creating.Go(func() {
		// One range covers /m/ and /p/: what one revision changed comes in one piece.
		created <- f.cfg.WatchClient.Watch(watching, layout.Meta,
			clientv3.WithRange(clientv3.GetPrefixRangeEnd(layout.Policies)),
			clientv3.WithRev(revision+1))
	})
	defer creating.Wait()
	defer stop()
	patience := time.NewTimer(behindMost)
	defer patience.Stop()
	var watch clientv3.WatchChan
	defer f.watching(false)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.relist:
			return errAsked
		case <-patience.C:
			if watch == nil {
				return errNotCreated
			}
		case watch = <-created:
			f.watching(true)
		case resp, ok := <-watch:
			if !ok {
				return errClosed
			}
			if err := resp.Err(); err != nil {
				return fmt.Errorf("watch: %w", err)
			}
			if resp.IsProgressNotify() { // all up to here has been brought
				f.progressed(resp.Header.Revision)
				continue
			}
			f.apply(resp.Events)
		}
	}
}

// list reads everything at one revision.
func (f *Follower) list(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), listTimeout)
	defer cancel()
	select {
	case <-f.relist: // this list answers it
	default:
	}
	sent := f.cfg.Monotonic()
	resp, err := f.cfg.Client.Txn(ctx).Then(
		clientv3.OpGet(layout.Meta, clientv3.WithPrefix()),
		clientv3.OpGet(layout.Policies, clientv3.WithPrefix()),
	).Commit()
	if err != nil {
		return 0, fmt.Errorf("list: %w", err)
	}
	var events []*mvccpb.Event
	for _, r := range resp.Responses {
		for _, kv := range r.GetResponseRange().GetKvs() {
			events = append(events, &mvccpb.Event{Type: mvccpb.Event_PUT, Kv: kv})
		}
	}
	revision := resp.Header.Revision
	f.publish(newState().next(revision, events), true)
	f.mu.Lock()
	f.belief.asked(sent, revision)
	f.belief.reached(revision)
	f.mu.Unlock()
	return revision, nil
}

// apply takes over what the watch brought; all of a revision comes together.
func (f *Follower) apply(events []*clientv3.Event) {
	if len(events) == 0 {
		return
	}
	f.mu.Lock()
	current := f.state
	f.mu.Unlock()
	revision := current.applied
	fresh := make([]*mvccpb.Event, 0, len(events))
	for _, e := range events {
		if e.Kv.ModRevision <= current.applied {
			continue // the watch went back in time
		}
		revision = max(revision, e.Kv.ModRevision)
		fresh = append(fresh, e)
	}
	f.publish(current.next(revision, fresh), false)
}

// publish makes a state the node's own. Only follow calls it.
func (f *Follower) publish(next *state, listed bool) {
	now := f.cfg.Monotonic()
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.state
	if old != nil && listed {
		if next.applied < old.applied || next.epoch == old.epoch && next.tick.Version < old.tick.Version {
			f.wentBack("revision", next.applied, "seen", old.applied, "tick", next.tick.Version, "tick_seen", old.tick.Version)
		}
		if f.gone {
			f.moved, f.gone = false, false
			f.belief.wentBack(next.epoch) // the epoch that came back
		}
	}
	if old == nil || listed || next.epoch != old.epoch {
		f.generation++
	}
	if old == nil || next.tick != old.tick {
		if old != nil && now-f.tickSeen > claim.TickTakeover {
			f.generation++ // away for a while: what was remembered may be void
		}
		f.tickSeen = now
		f.moved = f.moved || old != nil && next.tick.Version > old.tick.Version && next.tick.Revision > old.tick.Revision
	}
	if old == nil || next.guard != old.guard {
		f.guardSeen = now
	}
	if listed {
		f.lists++
		f.goal = 0 // a list answers every goal
	}
	f.state = next
	f.belief.reached(next.applied)
	f.signal()
}

// progressed takes note that the watch has brought all changes up to a revision.
func (f *Follower) progressed(revision int64) {
	f.mu.Lock()
	current := f.state
	f.mu.Unlock()
	if revision > current.applied {
		f.publish(current.next(revision, nil), false)
	}
}

// watching takes note of whether there is a watch that can be asked how far it is.
func (f *Follower) watching(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watches = on
}

// wentBack takes note that etcd is no longer the one that was followed: it was restored
// from a snapshot, or is another. What tells of it is seen once, and a list may come
// too late to see it again, for etcd goes on. f.mu is held.
func (f *Follower) wentBack(seen ...any) {
	if f.gone {
		return
	}
	f.gone, f.moved = true, false
	f.restored++
	f.generation++
	f.belief.wentBack(f.state.epoch)
	f.cfg.Log.Error("etcd went back: it was restored from a snapshot, or is another etcd; nothing remembered or cached is believed until the epoch is raised", seen...)
	f.signal()
}

// signal wakes all who wait for a change; f.mu is held.
func (f *Follower) signal() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// probe reads the tick and the guard once a second, linearizably, and has
// everything listed anew if the watch does not get as far.
func (f *Follower) probe(ctx context.Context) {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for {
		f.probeOnce(ctx)
		f.askProgress(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (f *Follower) probeOnce(ctx context.Context) {
	call, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), probeTimeout)
	defer cancel()
	f.mu.Lock()
	before := f.state
	f.mu.Unlock()
	sent := f.cfg.Monotonic()
	resp, err := f.cfg.Client.Txn(call).Then(clientv3.OpGet(layout.Guard), clientv3.OpGet(layout.Tick)).Commit()
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		f.lastErr = err
		return
	}
	f.answered, f.probed, f.lastErr = sent, true, nil
	f.signal()
	if before == nil {
		return
	}
	var seen claim.Seen
	for _, r := range resp.Responses {
		if seen, err = layout.See(seen, r.GetResponseRange().GetKvs()); err != nil {
			f.lastErr = err
			return
		}
	}
	if resp.Header.Revision < before.applied || seen.Tick.Version < before.tick.Version {
		f.wentBack("revision", resp.Header.Revision, "seen", before.applied, "tick", seen.Tick.Version, "tick_seen", before.tick.Version)
		f.askRelist()
		return
	}
	f.belief.asked(sent, resp.Header.Revision)
	f.belief.reached(f.state.applied)
	if f.goal <= f.state.applied {
		f.goal, f.goalSince = seen.Revision(), sent
	} else if sent-f.goalSince >= behindMost {
		f.cfg.Log.Warn("the watch is behind", "applied", f.state.applied, "seen", f.goal)
		f.askRelist()
	}
}

// askProgress has the watch tell how far it is: without it, silence and having
// nothing to bring look alike.
func (f *Follower) askProgress(ctx context.Context) {
	f.mu.Lock()
	on := f.watches
	f.mu.Unlock()
	if !on {
		return
	}
	// The context's metadata names the stream: it must be as the watch's own.
	call, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), probeTimeout)
	defer cancel()
	if err := f.cfg.WatchClient.RequestProgress(call); err != nil && ctx.Err() == nil {
		f.cfg.Log.Debug("the watch was not asked how far it is", "cause", err)
	}
}

// askRelist has Run list anew; asking twice is asking once.
func (f *Follower) askRelist() {
	select {
	case f.relist <- struct{}{}:
	default:
	}
}
