package feed

import (
	"github.com/dualcheck/dualcheck/internal/claim"
)

// Request is what a subscriber asks for.
type Request struct {
	Namespace string
	// Prefix is of keys; "" for all.
	Prefix string
	// Token is from the last Batch that was handled; "": from now on, or, with Snapshot,
	// beginning with what is there.
	Token    string
	Snapshot bool
}

// Batch is what a subscriber is told at once. It has events, or is one of the marks.
type Batch struct {
	// Token is where to go on after this batch; Partial: that is to begin anew, for what
	// is there has not all been told.
	Token   string
	Partial bool
	Events  []Event
	// Progress: with this, everything was told that etcd had a moment ago; it may come
	// with events.
	Progress bool
	// Begin: what the reader holds is void, for this Cause. What is there follows, with
	// changes since as they come: of each key the newer revision counts. At End, what was
	// not named since Begin is not there.
	Begin, End bool
	Cause      string
}

// Event is one change of a key, or, between Begin and End, that it is there.
type Event struct {
	// Deleted: the key was forgotten.
	Deleted bool
	// Record has its names and Revision at least; not to be changed. It is told as of
	// Now, which is cluster time.
	Record *claim.Record
	Now    claim.Instant
}
