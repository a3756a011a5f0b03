package claim

import (
	"bytes"
	"math"
	"slices"
	"time"
)

// Verdict is the answer to Begin.
type Verdict uint8

// The verdicts, numbered as in the contract.
const (
	First Verdict = iota + 1
	InProgress
	Replay
	ReplayFailure
	Conflict
	Expired
	OutcomeUnknown
)

// KeyAction says what the caller should do with its key.
type KeyAction uint8

// The key actions, numbered as in the contract.
const (
	Proceed KeyAction = iota + 1
	Reuse
	Stop
	Rotate
)

// Moment is when and under what a request is judged.
type Moment struct {
	// Now is cluster time; Wall is the node's wall clock, for people.
	Now    Instant
	Wall   time.Time
	Policy Policy
	// ClaimID and FenceBase are for the claim, if one is given.
	ClaimID   ID
	FenceBase int64
	// Usual is how long this namespace's work usually takes; 0: not known.
	Usual time.Duration
	// Jitter is 0 ... 1, to spread callers that come back.
	Jitter float64
}

// Answer is what a Begin is told.
type Answer struct {
	Verdict    Verdict
	RetryAfter time.Duration
	// Claim is set with First.
	Claim *Grant
	// Repeat: this very call had been given this claim before.
	Repeat bool
	// Record is the part of the record that this verdict shows.
	Record *Record
	// Now is the time of the answer, by which the record's deadlines are told.
	Now      Instant
	Revision int64
	Source   Source
	// Stale: etcd could not be asked, and this was true when it last could.
	Stale  bool
	Detail string

	// What follows is for those who wait, and not told.

	// LapsesIn is how long after Now the claim counts as lapsed that is in the way, with
	// InProgress; 0: not known.
	LapsesIn time.Duration
	// Guard is the revision of the guard under which etcd was asked; 0: not known.
	Guard int64
}

// Grant is a claim as its holder is told of it.
type Grant struct {
	Token    string
	ID       ID
	Attempt  int32
	Fence    int64
	Left     time.Duration
	Previous Previous
}

// KeyAction is what the caller should do with its key.
func (a *Answer) KeyAction() KeyAction {
	switch a.Verdict {
	case First:
		return Proceed
	case Replay:
		return Stop
	case ReplayFailure, Conflict:
		return Rotate
	case Expired:
		if a.Record != nil && a.Record.State == Failed {
			return Rotate
		}
		return Stop
	}
	return Reuse
}

// How long callers are sent away.
const (
	retryLeast   = 50 * time.Millisecond
	retryGuess   = time.Second      // while the usual time is not known
	retryHeld    = 3 * time.Second  // while a key is being forgotten
	retryUnknown = 10 * time.Second // until an operator has looked
	// shave is taken off what is left of a lease: with Grace, the most by which any
	// node's clock is ahead of what a commit has read. See Grace.
	shave = 100 * time.Millisecond
)

// Begin judges a Begin. It returns the record to write, if the answer needs one
// written: the answer is First then, and stands only once exactly that record has
// been committed in place of rec.
func Begin(rec *Record, req *BeginRequest, m Moment) (Answer, *Record, error) {
	if m.Policy.RequireFingerprint && len(req.Fingerprint) == 0 {
		return Answer{}, nil, invalid(FingerprintRequired, "fingerprint", "namespace %q requires a fingerprint: send the SHA-256 of the canonical request, 32 bytes", req.Namespace)
	}
	lease, err := m.Policy.Lease(req.Lease)
	if err != nil {
		return Answer{}, nil, err
	}
	if m.Policy.Held {
		return m.inProgress(retryHeld, "the namespace is being deleted"), nil, nil
	}
	if rec.Gone(m.Now) {
		return m.give(nil, req, lease, PreviousNone)
	}
	if rec.held() {
		return m.inProgress(retryHeld, "the key is being forgotten"), nil, nil
	}
	if differ(rec.Fingerprint, req.Fingerprint) || differ([]byte(rec.Operation), []byte(req.Operation)) {
		a := m.answer(Conflict, rec)
		a.Record = &Record{CreatedAt: rec.CreatedAt}
		return a, nil, nil
	}
	if rec.State == Pending && req.RequestID != "" && rec.RequestID == req.RequestID && rec.Owner == req.Owner && m.Now < rec.LeaseUntil {
		a := m.answer(First, rec)
		a.Claim, a.Repeat = rec.Grant(rec.LeaseUntil.Sub(rec.Claimed), m.Now), true
		return a, nil, nil
	}
	switch rec.StateAt(m.Now) {
	case Succeeded, Failed:
		return m.replay(rec), nil, nil
	case Unknown:
		a := m.answer(OutcomeUnknown, rec)
		a.RetryAfter = m.spread(retryUnknown)
		a.Detail = "the outcome of an earlier attempt is not known: its holder may still finish it, or an operator resolve it"
		if rec.Undated() {
			a.Detail = "the claim has no deadline: it is held until an operator resolves it"
		}
		return a, nil, nil
	case Pending:
		if rec.live(m.Now) {
			a := m.inProgress(min(rec.LeaseUntil.Sub(m.Now), m.patience()), "")
			a.Revision, a.LapsesIn = rec.Revision, rec.LeaseUntil.Add(Grace).Sub(m.Now)
			return a, nil, nil
		}
		return m.next(rec, req, lease, PreviousLapsed)
	case Released:
		return m.next(rec, req, lease, PreviousReleased)
	}
	return Answer{}, nil, Errorf(RecordUnreadable, "the record is in state %d, which this version does not know: ask a node of the version that wrote it, or upgrade this one", rec.State)
}

// Begun is what became of one of several Begins.
type Begun struct {
	Answer Answer
	Err    error
}

// Together judges Begins of one key in their order, each by what those before it leave
// behind. At most one of them is given a claim: that of number writer, whose record is
// write. Its answer and all after it stand only once that has been committed in place of
// rec, and then with its revision. Without one, write is nil and writer len(reqs).
func Together(rec *Record, reqs []*BeginRequest, m Moment) (begun []Begun, write *Record, writer int) {
	begun, writer = make([]Begun, len(reqs)), len(reqs)
	for i, req := range reqs {
		answer, next, err := Begin(rec, req, m)
		if next != nil {
			rec, write, writer = next, next, i
		}
		begun[i] = Begun{answer, err}
		_, m.Jitter = math.Modf(m.Jitter + goldenRatio) // they come back one by one
	}
	return begun, write, writer
}

// Replayed answers Begins of one key from a finished record in a cache, by the rules that
// hold for all. It reports false if the record answers one of them in another way than by
// telling what became of the key: then it answers none of them, and etcd is to be asked.
func Replayed(rec *Record, reqs []*BeginRequest, m Moment, source Source, stale bool) ([]Begun, bool) {
	begun, _, _ := Together(rec, reqs, m)
	for i := range begun {
		if begun[i].Err != nil {
			return nil, false
		}
		switch a := &begun[i].Answer; a.Verdict {
		case Replay, ReplayFailure, Conflict:
			a.Source, a.Stale = source, stale
		default:
			return nil, false
		}
	}
	return begun, true
}

// goldenRatio spreads numbers that are added to it over and over, modulo 1 (Knuth, The Art
// of Computer Programming, volume 3, section 6.4).
const goldenRatio = 0.6180339887498949

// differ reports whether both sides are given and not the same.
func differ(a, b []byte) bool { return len(a) > 0 && len(b) > 0 && !bytes.Equal(a, b) }

func (m Moment) answer(v Verdict, rec *Record) Answer {
	return Answer{Verdict: v, Now: m.Now, Revision: rec.Revision}
}

// inProgress sends the caller away for this long at most.
func (m Moment) inProgress(after time.Duration, detail string) Answer {
	return Answer{Verdict: InProgress, Now: m.Now, RetryAfter: m.spread(after), Detail: detail}
}

// patience is how long it makes sense to stay away from work that is running:
// twice what it usually takes.
func (m Moment) patience() time.Duration {
	if m.Usual > 0 {
		return 2 * m.Usual
	}
	return retryGuess
}

func (m Moment) spread(d time.Duration) time.Duration {
	return max(retryLeast, time.Duration(float64(d)*(0.5+0.5*m.Jitter)))
}

func (m Moment) replay(rec *Record) Answer {
	if past(rec.ResultUntil, m.Now) {
		a := m.answer(Expired, rec)
		a.Record = &Record{State: rec.State, FinishedAt: rec.FinishedAt, Digest: rec.Digest}
		return a
	}
	v := Replay
	if rec.State == Failed {
		v = ReplayFailure
	}
	a := m.answer(v, rec)
	a.Record = rec.At(m.Now)
	return a
}

// next gives the key's next claim, unless its attempts are used up or the caller
// comes back with the id of a call whose claim was released.
func (m Moment) next(rec *Record, req *BeginRequest, lease time.Duration, previous Previous) (Answer, *Record, error) {
	if rec.usedUp(m.Policy) {
		a := m.answer(OutcomeUnknown, rec)
		a.RetryAfter = m.spread(retryUnknown)
		a.Detail = "its attempts are used up: an operator may resolve it as released to allow more"
		return a, nil, nil
	}
	if req.RequestID != "" && slices.Contains(rec.Spent, spentHash(req.Owner, req.RequestID)) {
		return Answer{}, nil, invalid(RequestIDSpent, "request_id", "the claim of this request id was released: a new attempt is a new call and needs a new request id")
	}
	return m.give(rec, req, lease, previous)
}

// give makes the record of a new claim.
func (m Moment) give(old *Record, req *BeginRequest, lease time.Duration, previous Previous) (Answer, *Record, error) {
	rec := &Record{
		Namespace:       req.Namespace,
		Key:             req.Key,
		Operation:       req.Operation,
		State:           Pending,
		Fingerprint:     req.Fingerprint,
		Owner:           req.Owner,
		Attempt:         1,
		ClaimID:         m.ClaimID,
		Previous:        previous,
		RequestID:       req.RequestID,
		TakeoverNever:   m.Policy.TakeoverNever,
		ResultRetention: m.Policy.ResultRetention,
		KeyRetention:    m.Policy.KeyRetention,
		Claimed:         m.Now,
		LeaseUntil:      m.Now.Add(lease),
		CreatedAt:       m.Wall,
		ClaimedAt:       m.Wall,
		FenceBase:       m.FenceBase,
		TraceID:         req.TraceID,
		Labels:          req.Labels,
	}
	if old != nil {
		rec.Attempt = old.Attempt + 1
		rec.AttemptsForgiven = old.AttemptsForgiven
		rec.CreatedAt = old.CreatedAt
		rec.Spent = old.Spent
		if old.State == Released {
			rec.ReleasedClaimID = old.ClaimID
		}
		if len(old.Fingerprint) > 0 {
			rec.Fingerprint = old.Fingerprint
		}
		if old.Operation != "" {
			rec.Operation = old.Operation
		}
	}
	rec.KeyUntil = rec.pendingUntil()
	return Answer{Verdict: First, Now: m.Now}, rec, nil
}

// pendingUntil is when a pending key is forgotten by time: the later of the
// lease's end and claim + retention, or never where nobody may take it over.
func (r *Record) pendingUntil() Instant {
	if r.TakeoverNever {
		return 0
	}
	return max(r.LeaseUntil, r.Claimed.Add(r.KeyRetention))
}

// Grant tells the holder of its claim, as of a tick that was read from etcd no
// earlier than the claim. lease is what was asked for, 0 for whatever is left.
func (r *Record) Grant(lease time.Duration, tick Instant) *Grant {
	left := r.LeaseUntil.Sub(tick)
	if lease > 0 {
		left = min(left, lease)
	}
	return &Grant{
		ID:       r.ClaimID,
		Attempt:  r.Attempt,
		Fence:    r.Fence(),
		Left:     max(left-shave, 0),
		Previous: r.Previous,
	}
}

// Renew returns the claim with its deadline set anew, if less than half of the
// lease was left when its commit read this tick: a caller must not be told of a
// claim that is about to lapse. It returns nil if there is enough.
func Renew(rec *Record, lease time.Duration, tick Instant) *Record {
	if 2*rec.LeaseUntil.Sub(tick) >= lease {
		return nil
	}
	return rec.extended(tick.Add(lease))
}

// extended returns the pending record with a later deadline.
func (r *Record) extended(until Instant) *Record {
	later := *r
	later.LeaseUntil = max(r.LeaseUntil, until)
	later.KeyUntil = later.pendingUntil()
	if later.ClaimRevision == 0 {
		later.ClaimRevision = r.Revision
	}
	later.Revision = 0
	return &later
}
