package claim

import "time"

// Slots is how many parts the key space has; each has an epoch of its own.
const Slots = 4096

// View is what a node has applied of the cluster's state, at one moment and
// consistent in itself. Every write compares Guard and Tick, so that nothing
// decided by an older view is ever written.
type View struct {
	// Guard is the ModRevision of the guard.
	Guard int64
	// GuardAge is how long ago this node saw the guard move.
	GuardAge time.Duration
	Tick     Tick
	// TickAge is how long ago this node saw that tick.
	TickAge time.Duration
	// Now is the node's clock: the newest tick and at most TickEvery more.
	Now       Instant
	FenceBase int64
	// Epoch is a random id of everything remembered.
	Epoch ID
	// SlotEpochs are the revisions at which something finished was last taken back
	// in each slot; 0, or nil for all: never. Not changed once seen.
	SlotEpochs *[Slots]int64
	// Believed: this node knows of every change of the epochs that was committed
	// until BelievedFor ago. Only then may what is cached under them be told.
	Believed bool
	// BypassRedis is a switch: Redis is neither asked nor written. BypassMemory is another:
	// a node's memory is not.
	BypassRedis, BypassMemory bool
	Sealer                    Sealer
	// Policies are those of declared namespaces; never changed once seen.
	Policies map[string]Policy
	// Default is the policy of every other namespace, unless RefuseUndeclared.
	Default          Policy
	RefuseUndeclared bool
	// Generation changes whenever what a node remembers of claims is void: it
	// listed anew, the epoch was raised, or no tick was seen for a while. 0: nothing
	// remembered may be used now.
	Generation uint64
}

// Policy returns what governs a namespace. Error: NAMESPACE_NOT_FOUND, if nobody
// declared it and it must be declared.
func (v *View) Policy(namespace string) (Policy, error) {
	if p, ok := v.Policies[namespace]; ok {
		return p, nil
	}
	if v.RefuseUndeclared {
		return Policy{}, Errorf(NamespaceNotFound, "nobody declared namespace %q, and this server serves declared ones only", namespace)
	}
	return v.Default, nil
}

// SlotEpoch is the revision at which something finished was last taken back in a
// slot; 0: never.
func (v *View) SlotEpoch(slot int) int64 {
	if v.SlotEpochs == nil {
		return 0
	}
	return v.SlotEpochs[slot]
}

// Epochs are those under which something of one slot is cached. They stand for all that
// was taken back: what is cached under others is not to be told.
type Epochs struct {
	Cluster ID
	Slot    int64
}

// Epochs are those of a slot.
func (v *View) Epochs(slot int) Epochs { return Epochs{v.Epoch, v.SlotEpoch(slot)} }

// Latest is the newest tick and all the time since, by which what is cached is told while
// etcd cannot be asked: it is never told for too long.
func (v *View) Latest() Instant { return v.Tick.Time.Add(v.TickAge) }

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
