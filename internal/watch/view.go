package watch

import (
	"context"
	"fmt"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// View returns what this node has applied. Until it has listed everything and then
// seen the tick move, it is STORE_UNAVAILABLE.
func (f *Follower) View() (claim.View, error) {
	now := f.cfg.Monotonic()
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.state
	if s == nil {
		return claim.View{}, claim.Unavailable("this node has not reached etcd yet: send the same call again, or to another node", f.lastErr)
	}
	if err := s.check(); err != nil {
		return claim.View{}, err
	}
	if !f.moved {
		return claim.View{}, claim.Unavailable("this node has just started and waits for the cluster's clock to move: send the same call again", f.lastErr)
	}
	away := now - f.tickSeen
	v := claim.View{
		Guard:     s.guard,
		GuardAge:  now - f.guardSeen,
		Tick:      s.tick,
		TickAge:   away,
		Now:       s.tick.Now(away),
		Epoch:     s.epoch,
		FenceBase: s.fenceBase,
		Sealer:    s.sealer,
		Policies:  s.effective,
		Default:   f.cfg.Default,

		SlotEpochs:       s.slots,
		Believed:         f.believed(now),
		BypassRedis:      s.switches[policy.BypassRedis].On,
		BypassMemory:     s.switches[policy.BypassMemory].On,
		RefuseUndeclared: f.cfg.RefuseUndeclared,
	}
	if away <= claim.TickTakeover {
		v.Generation = f.generation
	}
	return v, nil
}

// CatchUp returns once this node has applied what a transaction saw that was
// refused under the view it used, or ctx ends: then STORE_UNAVAILABLE.
func (f *Follower) CatchUp(ctx context.Context, used claim.View, saw claim.Seen) error {
	f.mu.Lock()
	lists := f.lists
	goneBack := saw.Guard < used.Guard || saw.Tick.Version < used.Tick.Version
	if goneBack && f.state != nil && f.state.epoch == used.Epoch {
		f.wentBack("guard", saw.Guard, "guard_seen", used.Guard, "tick", saw.Tick.Version, "tick_seen", used.Tick.Version)
	}
	f.mu.Unlock()
	if goneBack {
		f.source.Again(errAsked)
	}
	patience := time.NewTimer(catchUpPatience)
	defer patience.Stop()
	for {
		f.mu.Lock()
		changed, s, listed := f.changed, f.state, f.lists > lists
		f.mu.Unlock()
		if goneBack && listed || !goneBack && s != nil && s.applied >= saw.Revision() {
			return nil
		}
		select {
		case <-changed:
		case <-patience.C:
			f.source.Again(errAsked)
		case <-ctx.Done():
			return claim.Unavailable("this node has not caught up with a change of policy or clock: send the same call again", ctx.Err())
		}
	}
}

// Ready reports nil if this node can serve: it has a View and etcd answers.
func (f *Follower) Ready() error {
	if _, err := f.View(); err != nil {
		return err
	}
	now := f.cfg.Monotonic()
	f.mu.Lock()
	defer f.mu.Unlock()
	if silent := now - f.answered; !f.probed || silent > unansweredMost {
		return claim.Unavailable(fmt.Sprintf("etcd has not answered for %v: see whether it runs and has a leader", silent.Round(time.Millisecond)), f.lastErr)
	}
	if behind := f.source.Following().BehindFor; behind > 2*behindMost {
		return claim.Unavailable(fmt.Sprintf("this node has not followed etcd for %v: see whether etcd answers watches", behind.Round(time.Millisecond)), f.lastErr)
	}
	return nil
}

// Status is how far a node follows.
type Status struct {
	// Applied is the revision up to which all is applied; TickAge is how long ago
	// the tick was seen to move. Restored counts how often etcd went back.
	TickAge  time.Duration
	Applied  int64
	Restored uint64
	// Believed: what is cached may be told. BypassRedis and BypassMemory: switches keep Redis
	// and memory out.
	Believed, BypassRedis, BypassMemory bool
}

// Status tells how far this node follows.
func (f *Follower) Status() Status {
	now := f.cfg.Monotonic()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state == nil {
		return Status{}
	}
	return Status{
		Applied: f.state.applied, TickAge: now - f.tickSeen, Restored: f.restored, Believed: f.believed(now),
		BypassRedis: f.state.switches[policy.BypassRedis].On, BypassMemory: f.state.switches[policy.BypassMemory].On,
	}
}

// Disowned reports whether etcd was seen to have gone back in the epoch that there is:
// revisions mean two things until it is raised.
func (f *Follower) Disowned() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state != nil && f.state.epoch == f.belief.disowned
}

// Following tells how far its watch is.
func (f *Follower) Following() Following { return f.source.Following() }

// Tick returns the newest tick and how long ago it was seen; its Version is 0
// until it has been listed. changed is closed when anything moves.
func (f *Follower) Tick() (tick claim.Tick, since time.Duration, changed <-chan struct{}) {
	now := f.cfg.Monotonic()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state == nil {
		return claim.Tick{}, 0, f.changed
	}
	return f.state.tick, now - f.tickSeen, f.changed
}

// Namespaces returns the declared namespaces by name.
func (f *Follower) Namespaces() []policy.Namespace {
	if s := f.current(); s != nil {
		return s.namespaces()
	}
	return nil
}

// Switches returns all switches by name; one that was never put is off.
func (f *Follower) Switches() []policy.Switch {
	if s := f.current(); s != nil {
		return s.allSwitches()
	}
	return nil
}

// Nodes returns the registered nodes, the one that ticks first.
func (f *Follower) Nodes() []Node {
	if s := f.current(); s != nil {
		return s.sortedNodes()
	}
	return nil
}

// FirstNode is the id of the node that has been registered longest, whose business
// the tick is; "" if there is none.
func (f *Follower) FirstNode() string {
	if nodes := f.Nodes(); len(nodes) > 0 {
		return nodes[0].ID
	}
	return ""
}

func (f *Follower) current() *state {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}
