package memory

import (
	"hash/maphash"
	"sync/atomic"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

const (
	// absentFor is how long it is remembered that there is no such key.
	absentFor = claim.BelievedFor
	// absencePlaces is how many such keys are remembered at most: one a place.
	absencePlaces = 1 << 16
)

// What says that there is no such key, as Observer.Absent is told.
const (
	byRead   = "read"
	byFilter = "filter"
)

// absences remembers which keys there were not. Each key has its place, by its hash, which
// it shares with others: that one takes another's place, or is not told of because another
// was written, costs a read and no more.
type absences struct {
	places []absencePlace
	seed   maphash.Seed
	now    func() time.Duration
}

// absencePlace is where the keys of one hash are.
type absencePlace struct {
	// met is when this node last wrote a key of this place, or met one; 0: never. What was
	// read before is not told after, however late that read's answer comes.
	met     atomic.Int64
	missing atomic.Pointer[missing]
}

// missing is a key that a read did not find, and when that was sent.
type missing struct {
	name
	sent time.Duration
}

func newAbsences(now func() time.Duration) absences {
	return absences{places: make([]absencePlace, absencePlaces), seed: maphash.MakeSeed(), now: now}
}

func (a *absences) place(at name) *absencePlace {
	return &a.places[maphash.Comparable(a.seed, at)%absencePlaces]
}

// met notes that there is such a key, or may be: it was written, or found. It is to be
// called before anybody is told so.
func (a *absences) met(at name) { a.place(at).met.Store(int64(a.now())) }

// missed notes that a read that was sent then has not found the key.
func (a *absences) missed(at name, sent time.Duration) {
	a.place(at).missing.Store(&missing{at, sent})
}

// read reports whether a read that was sent lately has not found the key, and nobody here
// has met it since.
func (a *absences) read(at name) bool {
	p := a.place(at)
	m := p.missing.Load()
	return m != nil && m.name == at && a.now()-m.sent < absentFor && int64(m.sent) > p.met.Load()
}

// metLately reports whether this node has met the key within the time for which a filter
// may lag behind.
func (a *absences) metLately(at name) bool {
	met := time.Duration(a.place(at).met.Load())
	return met != 0 && a.now()-met < absentFor
}
