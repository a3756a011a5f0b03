package claim

import (
	"encoding/hex"
	"strconv"
	"time"
)

// State is where a key stands in its life. The numbers are stored.
type State uint8

// The states.
const (
	Pending State = iota + 1
	Released
	Unknown
	Succeeded
	Failed
)

// String returns the state's name in the contract.
func (s State) String() string {
	switch s {
	case Pending:
		return "STATE_PENDING"
	case Released:
		return "STATE_RELEASED"
	case Unknown:
		return "STATE_UNKNOWN"
	case Succeeded:
		return "STATE_SUCCEEDED"
	case Failed:
		return "STATE_FAILED"
	}
	return "STATE_UNSPECIFIED"
}

// Finished reports whether the state is final.
func (s State) Finished() bool { return s == Succeeded || s == Failed }

// Previous is what became of the claim before. The numbers are stored.
type Previous uint8

// What became of the claim before.
const (
	PreviousNone Previous = iota + 1
	PreviousReleased
	PreviousLapsed
)

// FailureClass says what a failure means for its key. The numbers are stored.
type FailureClass uint8

// The failure classes.
const (
	Retryable FailureClass = iota + 1
	Terminal
	UnknownOutcome
)

// Source is who answered.
type Source uint8

// The sources.
const (
	SourceEtcd Source = iota + 1
	SourceRedis
	SourceMemory
)

// ID is a claim's identity: 128 random bits.
type ID [16]byte

// Result is what the work produced.
type Result struct {
	Code        int32
	ContentType string
	Body        []byte
	Metadata    map[string]string
}

// Omitted stands for a result that was too large to be sent.
type Omitted struct {
	Digest []byte
	Size   int64
}

// Failure is how the work failed.
type Failure struct {
	Class   FailureClass
	Code    int32
	Message string
	Details []Detail
}

// Detail is one typed detail of a failure, kept as the bytes that were given.
type Detail struct {
	TypeURL string
	Value   []byte
}

// Record is what is known of one key. A Record is never changed once it has been
// read or written: each decision makes a new one.
type Record struct {
	Namespace, Key, Operation string
	State                     State
	// Fingerprint is 32 bytes, or none.
	Fingerprint []byte
	Owner       string
	// Attempt counts the claims given, from 1; those up to AttemptsForgiven do
	// not count against max_attempts.
	Attempt, AttemptsForgiven int32
	// ClaimID is the newest claim; zero once an operator released it, so that no
	// token fits any more. ReleasedClaimID is the claim directly before, if its
	// own holder released it, or the newest if that was finished after its own
	// release; zero otherwise.
	ClaimID, ReleasedClaimID ID
	Previous                 Previous
	// RequestID is the call that was given the newest claim, until that is finished
	// or released.
	RequestID string
	// Spent holds hashes of request ids whose claims were released, newest last.
	Spent []uint64
	// Of the policy, as it was at the claim.
	TakeoverNever                 bool
	ResultRetention, KeyRetention time.Duration
	// Cluster time; 0: none. Claimed is kept while the record is PENDING.
	Claimed, LeaseUntil, ResultUntil, KeyUntil Instant
	// Wall clock, for people.
	CreatedAt, ClaimedAt, FinishedAt time.Time
	Result                           *Result
	ResultOmitted                    bool
	ResultSize                       int64
	Failure                          *Failure
	// Digest is 32 bytes once finished.
	Digest []byte
	// Revision is etcd's ModRevision; it is not stored. ClaimRevision and
	// FinishRevision are those of the claim and the finish where a later write
	// hides them; 0: Revision.
	Revision, ClaimRevision, FinishRevision int64
	// FenceBase is what the epoch of the claim adds to its revision.
	FenceBase int64
	// TraceID is 16 bytes, or none.
	TraceID []byte
	Labels  map[string]string
	// Forgotten is set once the key is to be forgotten: nothing else counts.
	Forgotten *Forgotten
	// Encoded is set by a cache that keeps records as they are sent: what a caller is told
	// of this one, all but its deadlines. Result and Failure are in it alone.
	Encoded []byte
}

// Forgotten is the mark of a forget.
type Forgotten struct {
	// Opened: the key is new again. Until then Begin is held.
	Opened bool
	// AtOnce: it was opened from the start, and no held mark has told of the forget.
	AtOnce bool
	At     time.Time
}

// Fence returns the number that grows with each new claim of the key.
func (r *Record) Fence() int64 {
	if r.ClaimRevision != 0 {
		return r.FenceBase + r.ClaimRevision
	}
	return r.FenceBase + r.Revision
}

// Gone reports whether the record no longer says anything: there is none, its
// time is over, or it was forgotten and opened. Physical removal may come late.
func (r *Record) Gone(now Instant) bool {
	if r == nil {
		return true
	}
	if r.Forgotten != nil {
		return r.Forgotten.Opened
	}
	return !r.Undated() && past(r.KeyUntil, now)
}

// Forgets reports whether writing this record forgot the key: it is the first mark of a
// forget, held or opened at once.
func (r *Record) Forgets() bool {
	return r.Forgotten != nil && (!r.Forgotten.Opened || r.Forgotten.AtOnce)
}

// held reports whether a forget is under way.
func (r *Record) held() bool { return r.Forgotten != nil && !r.Forgotten.Opened }

// lapsed reports whether a pending claim's lease is over. A claim without a
// deadline never lapses: it is held until somebody resolves it.
func (r *Record) lapsed(now Instant) bool {
	return r.State == Pending && past(r.LeaseUntil, now)
}

// live reports whether somebody holds the key.
func (r *Record) live(now Instant) bool {
	return r.State == Pending && r.LeaseUntil != 0 && !r.lapsed(now)
}

// Undated reports whether a deadline is missing where one is due. Such a record
// never expires, and such a claim is never taken over.
func (r *Record) Undated() bool {
	if r.Forgotten != nil {
		return false
	}
	switch r.State {
	case Pending:
		return r.LeaseUntil == 0 || (r.KeyUntil == 0 && !r.TakeoverNever)
	case Succeeded, Failed:
		return r.KeyUntil == 0 || r.ResultUntil == 0
	case Released:
		return r.KeyUntil == 0
	}
	return false
}

// StateAt is the state as a caller sees it: a claim that nobody may take over is
// UNKNOWN once it is no longer live, though that is never written.
func (r *Record) StateAt(now Instant) State {
	if r.State == Pending && !r.live(now) && (r.TakeoverNever || r.Undated()) {
		return Unknown
	}
	return r.State
}

// CachedUntil is the first moment at which a cache may no longer answer with a finished
// record; 0 if that lacks a deadline, and no cache may.
func (r *Record) CachedUntil() Instant {
	if r.Undated() {
		return 0
	}
	return min(r.ResultUntil, r.KeyUntil).Add(-CacheMargin)
}

// usedUp reports whether the key may not be claimed again without an operator.
func (r *Record) usedUp(p Policy) bool {
	return p.MaxAttempts > 0 && r.Attempt-r.AttemptsForgiven >= p.MaxAttempts
}

// At returns the record as a caller may see it now: its state computed, its
// result dropped once that is no longer kept.
func (r *Record) At(now Instant) *Record {
	over := past(r.ResultUntil, now)
	if r.State.Finished() && r.FinishRevision != 0 && !over {
		return r // as it is: a cache tells one many times
	}
	seen := *r
	seen.State = r.StateAt(now)
	if over {
		seen.Result, seen.Encoded = nil, nil
		if r.State == Failed {
			seen.Failure = nil
		}
	}
	if seen.FinishRevision == 0 && r.State.Finished() {
		seen.FinishRevision = r.Revision
	}
	return &seen
}

// standing describes a record in an error's metadata.
func (r *Record) standing(now Instant) map[string]string {
	m := map[string]string{
		"state":   r.StateAt(now).String(),
		"attempt": strconv.Itoa(int(r.Attempt)),
	}
	if len(r.Digest) > 0 {
		m["digest"] = hex.EncodeToString(r.Digest)
	}
	if !r.FinishedAt.IsZero() {
		m["finished_at"] = r.FinishedAt.UTC().Format(time.RFC3339Nano)
	}
	return m
}
