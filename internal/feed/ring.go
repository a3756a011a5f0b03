package feed

import (
	"sort"
	"sync"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// change is one write of a record, as etcd's watch brought it.
type change struct {
	revision  int64
	namespace string // its id, see layout
	key       string // etcd's
	value     []byte

	once   sync.Once
	record *claim.Record
	err    error
}

// decoded is the record that was written; it is decoded once, however many want it.
func (c *change) decoded() (*claim.Record, error) {
	c.once.Do(func() { c.record, c.err = layout.DecodeRecord(c.value, c.revision, "", "") })
	return c.record, c.err
}

// overhead is what a change takes besides its value, in bytes, roughly.
const overhead = 256

func (c *change) size() int64 { return int64(len(c.value)) + overhead }

// ring holds the newest changes, all of those after floor. It is bounded in bytes and in
// number. Each change has a number; those of one revision come and go together.
type ring struct {
	mostBytes int64
	most      int

	changes []*change // the first one has number first
	first   int64
	bytes   int64
	// floor is the revision after which nothing is missing; applied is the one up to
	// which everything is there.
	floor, applied int64
}

// reset forgets everything up to a revision.
func (r *ring) reset(revision int64) {
	r.first += int64(len(r.changes)) + 1 // whoever had a place has none
	r.changes, r.bytes = nil, 0
	r.floor, r.applied = revision, revision
}

// add takes changes over, oldest first.
func (r *ring) add(changes []*change) {
	for _, c := range changes {
		r.changes = append(r.changes, c)
		r.bytes += c.size()
		r.applied = c.revision
	}
	drop := 0
	for drop < len(r.changes) && (r.bytes > r.mostBytes || len(r.changes)-drop > r.most) {
		r.floor = r.changes[drop].revision
		for drop < len(r.changes) && r.changes[drop].revision == r.floor {
			r.bytes -= r.changes[drop].size()
			drop++
		}
	}
	clear(r.changes[:drop]) // what is dropped is not kept alive by what is not
	r.changes = r.changes[drop:]
	r.first += int64(drop)
}

// next is the number that the next change will have.
func (r *ring) next() int64 { return r.first + int64(len(r.changes)) }

// after is the number of the first change after a revision; false if some of them are
// no longer there.
func (r *ring) after(revision int64) (int64, bool) {
	if revision < r.floor {
		return 0, false
	}
	return r.first + int64(sort.Search(len(r.changes), func(i int) bool { return r.changes[i].revision > revision })), true
}

// from returns the changes from a number on; false if some of them are no longer there.
func (r *ring) from(number int64) ([]*change, bool) {
	if number < r.first || number > r.next() {
		return nil, false
	}
	return r.changes[number-r.first:], true
}
