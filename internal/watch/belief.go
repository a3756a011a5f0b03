package watch

import (
	"slices"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// belief is since when this node is known to know all: it may act by the epochs and
// switches it has applied for claim.BelievedFor from then.
type belief struct {
	Reach
	// disowned is the epoch in which etcd was seen to have gone back: revisions are
	// used again, so that an entry's slot epoch may be another's. Nothing cached in it
	// is believed until it has been raised.
	disowned claim.ID
}

// Reach is since when a watch is known to have brought everything. A linearizable read
// that was sent at some time saw everything committed before; once the watch has brought
// all up to that read's revision, its reader has it too.
type Reach struct {
	// since is when the newest read was sent that the watch has reached; known: one
	// was.
	since time.Duration
	known bool
	// waiting are reads that the watch has yet to reach, oldest first.
	waiting []asking
}

// asking is a linearizable read: when it was sent, and etcd's revision that it saw.
type asking struct {
	sent     time.Duration
	revision int64
}

// mostWaiting bounds the reads that are remembered while the watch is behind; it
// reaches the oldest first.
const mostWaiting = 16

// Asked takes note of a read that was answered.
func (b *Reach) Asked(sent time.Duration, revision int64) {
	if len(b.waiting) < mostWaiting {
		b.waiting = append(b.waiting, asking{sent, revision})
	}
}

// Reached takes note of the revision up to which everything has been applied.
func (b *Reach) Reached(applied int64) {
	b.waiting = slices.DeleteFunc(b.waiting, func(a asking) bool {
		if a.revision > applied {
			return false
		}
		if !b.known || a.sent > b.since {
			b.since, b.known = a.sent, true
		}
		return true
	})
}

// Within reports whether everything is known that was committed until so long ago.
func (b *Reach) Within(d, now time.Duration) bool { return b.known && now-b.since <= d }

// wentBack drops everything: etcd has gone back, to this epoch.
func (b *belief) wentBack(epoch claim.ID) { *b = belief{disowned: epoch} }

// believed reports whether what is cached may be told; f.mu is held.
func (f *Follower) believed(now time.Duration) bool {
	b := &f.belief
	return b.Within(claim.BelievedFor, now) && f.state != nil && f.state.epoch != b.disowned
}
