package claim

import (
	"bytes"
	"slices"
)

// Finish judges a Complete or a Fail by the holder of the claim id. It returns
// the record to answer with and, if that is not what is stored, the same as the
// record to write.
func Finish(rec *Record, id ID, req *FinishRequest, m Moment) (answer, write *Record, err error) {
	if rec.Gone(m.Now) || rec.held() {
		return nil, nil, notFound(req.Namespace)
	}
	release := req.Failure != nil && req.Failure.Class == Retryable
	switch {
	case id == (ID{}): // names no claim, nor does a record without one
		return nil, nil, rec.lost(m.Now)
	case release && id == rec.ReleasedClaimID:
		return rec.At(m.Now), nil, nil // any release repeats a release
	case id != rec.ClaimID:
		return nil, nil, rec.lost(m.Now)
	}
	unknown := req.Failure != nil && req.Failure.Class == UnknownOutcome
	switch {
	case rec.State == Released && (release || unknown):
		return rec.At(m.Now), nil, nil // nothing happened: that stands
	case rec.State == Unknown && unknown:
		return rec.At(m.Now), nil, nil
	case rec.State.Finished() && (release || unknown):
		return nil, nil, rec.finished(m.Now)
	case release:
		write = rec.released(m)
		return write.At(m.Now), write, nil
	case unknown:
		write = rec.ended(m)
		write.RequestID = rec.RequestID // spent if it comes to a release
		write.State = Unknown
		write.Failure = req.Failure
		write.KeyUntil = 0
		return write.At(m.Now), write, nil
	}
	var out outcome
	if req.Failure != nil {
		out = failed(req.Failure)
	} else {
		out = succeeded(req.Result, req.Omitted, m.Policy.MaxResultBytes)
	}
	if rec.State.Finished() {
		if rec.State == out.state && bytes.Equal(rec.Digest, out.digest) {
			return rec.At(m.Now), nil, nil
		}
		return nil, nil, rec.finished(m.Now)
	}
	write = rec.settled(out, m)
	return write.At(m.Now), write, nil
}

// Extend judges an Extend by the holder of the claim id. It returns the record to
// write; nil if the deadline is not moved by it.
func Extend(rec *Record, id ID, req *ExtendRequest, m Moment) (answer, write *Record, err error) {
	lease, err := m.Policy.Lease(req.Lease)
	if err != nil {
		return nil, nil, err
	}
	if rec.Gone(m.Now) || rec.held() {
		return nil, nil, notFound(req.Namespace)
	}
	if id != rec.ClaimID || rec.State != Pending {
		return nil, nil, rec.lost(m.Now)
	}
	until := m.Now.Add(lease)
	if until <= rec.LeaseUntil {
		return rec, nil, nil
	}
	write = rec.extended(until)
	return write, write, nil
}

// Resolve judges an operator's word on what became of a key.
func Resolve(rec *Record, req *ResolveRequest, m Moment) (answer, write *Record, err error) {
	if rec.Gone(m.Now) || rec.held() {
		return nil, nil, notFound(req.Namespace)
	}
	usedUp := rec.usedUp(m.Policy)
	switch {
	case rec.State.Finished():
		return nil, nil, rec.finished(m.Now)
	case rec.live(m.Now):
		return nil, nil, &Error{Reason: ClaimLive, Message: "a claim is live: wait until it is finished or its lease has lapsed", Metadata: rec.standing(m.Now), RetryAfter: max(rec.LeaseUntil.Add(Grace).Sub(m.Now), retryLeast)}
	case rec.State == Released && !usedUp:
		return rec.At(m.Now), nil, nil
	}
	switch req.State {
	case Succeeded:
		write = rec.settled(succeeded(req.Result, nil, m.Policy.MaxResultBytes), m)
	case Failed:
		write = rec.settled(failed(req.Failure), m)
	default:
		write = rec.released(m)
		if rec.State != Released {
			write.ClaimID = ID{} // taken back: a late finish of it is refused
		}
		if usedUp {
			write.AttemptsForgiven = rec.Attempt
		}
	}
	return write.At(m.Now), write, nil
}

// Forget judges an operator's forget: it returns the held mark to write, or none
// if the mark is there already. opened tells that the key has been forgotten
// before and is new again.
func Forget(rec *Record, req *ForgetRequest, m Moment) (write *Record, opened bool, err error) {
	switch {
	case rec != nil && rec.Forgotten != nil:
		return nil, rec.Forgotten.Opened, nil
	case rec.Gone(m.Now):
		return nil, false, notFound(req.Namespace)
	case !req.Force && (rec.live(m.Now) || rec.StateAt(m.Now) == Unknown):
		return nil, false, &Error{Reason: ClaimLive, Message: "a claim is live or its outcome is not known, and forgetting it lets the work run again: set force if that is meant, or resolve it", Metadata: rec.standing(m.Now)}
	}
	return Mark(rec, false, m), false, nil
}

// Mark returns the mark that forgets a record; opened, the key is new at once.
func Mark(rec *Record, opened bool, m Moment) *Record {
	return &Record{
		Namespace: rec.Namespace,
		Key:       rec.Key,
		KeyUntil:  m.Now,
		Forgotten: &Forgotten{Opened: opened, AtOnce: opened && rec.Forgotten == nil, At: m.Wall},
	}
}

// Open returns the opened mark of a held one.
func Open(mark *Record) *Record {
	open := *mark
	open.Forgotten = &Forgotten{Opened: true, At: mark.Forgotten.At}
	open.Revision = 0
	return &open
}

// ended returns the record without what only matters while a claim runs.
func (r *Record) ended(m Moment) *Record {
	end := *r
	end.RequestID = ""
	end.Claimed, end.LeaseUntil = 0, 0
	end.Result, end.Failure = nil, nil
	end.FinishedAt = m.Wall
	end.Revision, end.ClaimRevision, end.FenceBase = 0, 0, 0
	return &end
}

// released returns the record with its key free.
func (r *Record) released(m Moment) *Record {
	free := r.ended(m)
	free.State = Released
	free.KeyUntil = m.Now.Add(r.KeyRetention)
	if r.RequestID != "" {
		spent := append(slices.Clone(r.Spent), spentHash(r.Owner, r.RequestID))
		free.Spent = spent[max(0, len(spent)-spentKept):]
	}
	return free
}

// settled returns the record finished for good.
func (r *Record) settled(out outcome, m Moment) *Record {
	end := r.ended(m)
	if r.State == Released && r.ClaimID != (ID{}) { // one taken back left no id: the release before it stays known
		end.ReleasedClaimID = r.ClaimID
	}
	end.State = out.state
	end.Result, end.ResultOmitted, end.ResultSize = out.result, out.omitted, out.size
	end.Failure = out.failure
	end.Digest = out.digest
	end.ResultUntil = m.Now.Add(r.ResultRetention)
	end.KeyUntil = m.Now.Add(r.KeyRetention)
	end.Spent = nil // no claim will be given that an old request id could ask for
	return end
}

func notFound(namespace string) *Error {
	return Errorf(RecordNotFound, "namespace %q knows no such key: look whether both are spelt as they were for Begin; if so, the key was forgotten or its time is over, and only a new Begin makes it known", namespace)
}

func (r *Record) lost(now Instant) *Error {
	return &Error{Reason: ClaimLost, Message: "this claim is not the key's newest, or was ended: stop this work, whose effect must not count twice, and ask Get what became of the key", Metadata: r.standing(now)}
}

func (r *Record) finished(now Instant) *Error {
	return &Error{Reason: AlreadyFinished, Message: "the key was finished otherwise before, and the first finish stands: Get tells what is stored", Metadata: r.standing(now)}
}

// Known reports RECORD_NOT_FOUND unless there is a record to tell of.
func Known(rec *Record, namespace string, m Moment) error {
	if rec.Gone(m.Now) || rec.held() {
		return notFound(namespace)
	}
	return nil
}
