package claim

import (
	"math"
	"time"
)

// Instant is a point in cluster time: nanoseconds since the first start, not
// counting the time in which nobody ticked. It has nothing to do with wall
// clocks. Zero means "none" in a record's deadlines.
type Instant int64

// Never is later than every deadline.
const Never Instant = math.MaxInt64

// Add returns i + d, and Never rather than overflowing.
func (i Instant) Add(d time.Duration) Instant {
	if d > 0 && i > Never-Instant(d) {
		return Never
	}
	return i + Instant(d)
}

// Sub returns i - j.
func (i Instant) Sub(j Instant) time.Duration { return time.Duration(i - j) }

// The cluster's clock moves by ticks that one node writes into etcd.
const (
	// TickEvery is the least a tick moves the clock, and the most by which a node
	// goes beyond the newest tick on its own monotonic time.
	TickEvery = 500 * time.Millisecond
	// tickMost is the most one tick moves the clock, however long its writer was
	// away: time stands still while nobody ticks.
	tickMost = 600 * time.Millisecond
	// TickTakeover is how long any node waits for the clock to move before it
	// writes the tick itself.
	TickTakeover = 2 * time.Second
	// TickWindow bounds how many ticks may pass between the one a write was
	// decided by and the one it commits under.
	TickWindow = 10
	// Grace is how long after its time a lease counts as lapsed, and a result and
	// a key as expired. A node's clock is at most 0.6 s ahead of the tick that a
	// commit has read plus the time since: half a second of its own, and a tick that
	// is as late as one may be. Grace and the 0.1 s by which every lease is told
	// short (shave) are that 0.6 s: neither can be trimmed.
	Grace = 500 * time.Millisecond
	// BelievedFor is for how long a node may act by what it has applied of epochs and
	// switches, counted from when it sent the linearizable read that its watch has
	// reached. Whoever takes something back waits as long before saying so.
	BelievedFor = 3 * time.Second
	// CacheMargin is how long before a deadline caches stop answering. A node's clock
	// is behind etcd's by BelievedFor at most, another's ahead by half a second.
	CacheMargin = 4 * time.Second
)

// Tick is the clock as etcd holds it.
type Tick struct {
	Time Instant
	// Version counts the writes of the tick; it only falls when etcd is restored.
	Version int64
	// Revision is the ModRevision of this tick.
	Revision int64
}

// Next returns the time of the next tick, given how long ago by its own monotonic
// clock its writer read t. It reports false if it is too early to tick.
func (t Tick) Next(elapsed time.Duration) (Instant, bool) {
	if elapsed < TickEvery {
		return 0, false
	}
	return t.Time.Add(min(elapsed, tickMost)), true
}

// Now is cluster time for a node that saw t this long ago.
func (t Tick) Now(sinceSeen time.Duration) Instant {
	return t.Time.Add(min(max(sinceSeen, 0), TickEvery))
}

// Admits reports whether what was decided by t may be told when etcd's tick has
// this version: not behind it, and fewer than TickWindow ahead.
func (t Tick) Admits(version int64) bool {
	return t.Version-1 < version && version < t.Version+TickWindow
}

// past reports whether the deadline, if there is one, is over by the grace.
func past(deadline, now Instant) bool {
	return deadline != 0 && now >= deadline.Add(Grace)
}
