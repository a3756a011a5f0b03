package claim

import "time"

// View is what a node has applied of the cluster's state, at one moment and
// consistent in itself. Every write compares Guard and Tick, so that nothing
// decided by an older view is ever written.
type View struct {
	// Guard is the ModRevision of the guard.
	Guard int64
	// GuardAge is how long ago this node saw the guard move.
	GuardAge time.Duration
	Tick     Tick
	// Now is the node's clock: the newest tick and at most TickEvery more.
	Now       Instant
	FenceBase int64
	// Epoch is a random id of everything remembered.
	Epoch  ID
	Sealer Sealer
	// Policies are those of declared namespaces; never changed once seen.
	Policies map[string]Policy
	// Default is the policy of every other namespace.
	Default Policy
	// Generation changes whenever what a node remembers of claims is void: it
	// listed anew, the epoch was raised, or no tick was seen for a while. 0: nothing
	// remembered may be used now.
	Generation uint64
}

// Policy returns what governs a namespace, and whether it was declared.
func (v *View) Policy(namespace string) (Policy, bool) {
	if p, ok := v.Policies[namespace]; ok {
		return p, true
	}
	return v.Default, false
}

// Seen is what a transaction read of the guard and the tick.
type Seen struct {
	// Guard is the ModRevision of the guard.
	Guard int64
	Tick  Tick
}

// Revision is that of the newer of both.
func (s Seen) Revision() int64 { return max(s.Guard, s.Tick.Revision) }

// Matches reports whether what was decided under the view may be told.
func (s Seen) Matches(v *View) bool { return s.Guard == v.Guard && v.Tick.Admits(s.Tick.Version) }
