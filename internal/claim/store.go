package claim

import (
	"context"
	"time"
)

// AnswerWithin is how long a Store tries to establish an answer at most, whatever its
// caller's patience.
const AnswerWithin = 7 * time.Second

// Store carries out decisions. Every implementation passes the suite in
// internal/claimtest.
//
// Errors are *Error values; RecordUnreadable, KeyCollision and StoreUnavailable
// may come from any method. An answer that could not be established is
// StoreUnavailable, and the same call can be repeated until it is.
type Store interface {
	// Begin judges at once; Wait is the server's business.
	Begin(ctx context.Context, req *BeginRequest) (Answer, error)
	// BeginTogether judges Begins of one key, one or more, in their order and at one
	// moment, see Together. They share one fate: where the outcome of one that is given
	// the claim cannot be established, none is told anything but that.
	BeginTogether(ctx context.Context, reqs []*BeginRequest) []Begun
	// Finish goes on after ctx has ended, once it has been accepted.
	Finish(ctx context.Context, req *FinishRequest) (Found, error)
	// Extend returns the claim with its new deadline.
	Extend(ctx context.Context, req *ExtendRequest) (*Grant, error)
	// Get is linearizable, unless the request says otherwise.
	Get(ctx context.Context, req *GetRequest) (Found, error)
	// Resolve carries out an operator's word.
	Resolve(ctx context.Context, req *ResolveRequest) (Found, error)
	// Forget returns the revision of the mark, once no cache can replay the old
	// answer any more and Begin is First.
	Forget(ctx context.Context, req *ForgetRequest) (int64, error)
	// List returns a namespace's records in pages, without bodies.
	List(ctx context.Context, req *ListRequest) (Page, error)
}

// NoneBegun is what each of so many Begins is told that met the same error.
func NoneBegun(n int, err error) []Begun {
	begun := make([]Begun, n)
	for i := range begun {
		begun[i].Err = err
	}
	return begun
}

// Found is a record as it is told.
type Found struct {
	Record *Record
	// Now is the time by which the record's deadlines are told.
	Now Instant
	// Revision is etcd's revision at which this was true.
	Revision int64
	Source   Source
	// Stale: etcd could not be asked, and this was true when it last could.
	Stale bool
}

// ListRequest asks for a page of a namespace's records.
type ListRequest struct {
	Namespace string
	// State is 0 for all.
	State State
	Size  int
	// Page is Next of the page before; "" for the first.
	Page string
}

// Page is a page of records. It may be empty and not the last.
type Page struct {
	Records []*Record
	Now     Instant
	// Next is "" on the last page.
	Next string
}

// Piece is a namespace's records in a part of the key space, as they were at one
// revision. Pieces that are read one after another have revisions that never fall; no
// one revision is all of theirs.
type Piece struct {
	Records  []*Record
	Now      Instant
	Revision int64
	// Before is where the part ends: it has all of etcd's keys that are less, and not in
	// the part before. "" with the last one.
	Before string
	// Next is where the next piece begins; "" with the last one.
	Next string
}
