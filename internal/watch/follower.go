package watch

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

const (
	// unansweredMost is how long etcd may go without answering before the node is not
	// ready.
	unansweredMost = 3 * time.Second
	// catchUpPatience is how long a refused write waits for the watch before it has
	// everything listed anew.
	catchUpPatience = 300 * time.Millisecond
	listTimeout     = 5 * time.Second
)

var errAsked = errors.New("a refused write has seen more than the watch has brought")

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
	source *Source

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
	lastErr    error
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
	f := &Follower{cfg: cfg, changed: make(chan struct{})}
	// One range covers /m/ and /p/: what one revision changed comes in one piece.
	f.source = NewSource(SourceConfig{
		Name: "policies and clock", Client: cfg.WatchClient, Key: layout.Meta, End: clientv3.GetPrefixRangeEnd(layout.Policies),
		Reader: reader{f}, Log: cfg.Log, Monotonic: cfg.Monotonic,
	})
	return f
}

// Run follows until ctx ends. It returns nil then, and nothing else ends it.
func (f *Follower) Run(ctx context.Context) error { return f.source.Run(ctx) }

// reader is the Follower as its Source sees it.
type reader struct{ *Follower }

// List reads everything at one revision.
func (f reader) List(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	sent := f.cfg.Monotonic()
	resp, err := f.cfg.Client.Txn(ctx).Then(
		clientv3.OpGet(layout.Meta, clientv3.WithPrefix()),
		clientv3.OpGet(layout.Policies, clientv3.WithPrefix()),
	).Commit()
	if err != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.lastErr = err
		return 0, err
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
	f.belief.Asked(sent, revision)
	f.belief.Reached(revision)
	f.mu.Unlock()
	return revision, nil
}

// Apply takes over what the watch brought.
func (f reader) Apply(events []*clientv3.Event) {
	f.publish(f.current().next(events[len(events)-1].Kv.ModRevision, events), false)
}

// Told keeps why this node does not follow.
func (f reader) Told(_ State, cause error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lastErr = cause
}

// publish makes a state the node's own. Only the Source's one goroutine has it called.
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
	}
	f.state = next
	f.belief.Reached(next.applied)
	f.signal()
}

// Progressed takes note that the watch has brought all changes up to a revision.
func (f reader) Progressed(revision int64) {
	f.publish(f.current().next(revision, nil), false)
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

// Ask reads the tick and the guard, linearizably.
func (f reader) Ask(ctx context.Context) (revision, goal int64, err error) {
	before := f.current()
	sent := f.cfg.Monotonic()
	resp, err := f.cfg.Client.Txn(ctx).Then(clientv3.OpGet(layout.Guard), clientv3.OpGet(layout.Tick)).Commit()
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		f.lastErr = err
		return 0, 0, err
	}
	f.answered, f.probed, f.lastErr = sent, true, nil
	f.signal()
	revision = resp.Header.Revision
	if before == nil {
		return revision, 0, nil
	}
	var seen claim.Seen
	for _, r := range resp.Responses {
		if seen, err = layout.See(seen, r.GetResponseRange().GetKvs()); err != nil {
			f.lastErr = err
			return 0, 0, err
		}
	}
	if revision < before.applied || seen.Tick.Version < before.tick.Version {
		f.wentBack("revision", revision, "seen", before.applied, "tick", seen.Tick.Version, "tick_seen", before.tick.Version)
		return 0, 0, ErrWentBack
	}
	f.belief.Asked(sent, revision)
	f.belief.Reached(f.state.applied)
	return revision, seen.Revision(), nil
}
