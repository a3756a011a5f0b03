package ingest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// held is a claim that this run was given. While its command runs it belongs to
// keep.
type held struct {
	token   string
	attempt int32
	fence   int64
	// lapsed: an earlier claim's work may have happened.
	lapsed bool
	// taken: it is an earlier run's claim, taken up again.
	taken bool
	// granted is before the server counted the lease, lease is what was left
	// then: the claim is surely ours until granted + lease.
	granted time.Time
	lease   time.Duration
}

func newHeld(claim *dualcheckv1.Claim, sent time.Time) *held {
	return &held{
		token:   claim.GetToken(),
		attempt: claim.GetAttempt(),
		fence:   claim.GetFence(),
		lapsed:  claim.GetPrevious() == dualcheckv1.Previous_PREVIOUS_LAPSED,
		granted: sent,
		lease:   claim.GetLeaseLeft().AsDuration(),
	}
}

// extendAt is when the claim is next to be extended.
func (h *held) extendAt() time.Time { return h.granted.Add(h.lease / 3) }

// stopAt is when a command must be gone: a tenth of the lease before its end,
// but at most 2 s.
func (h *held) stopAt() time.Time {
	return h.granted.Add(h.lease - min(h.lease/10, 2*time.Second))
}

// Why a command was stopped.
var (
	errLeaseEnds = errors.New("its lease could not be extended in time")
	errClaimLost = errors.New("its claim was lost")
)

// extend asks once for more time, until stopAt at the latest.
func (r *run) extend(ctx context.Context, t task, h *held) error {
	ctx, cancel := context.WithDeadline(ctx, h.stopAt())
	defer cancel()
	ctx, cancelCall := context.WithTimeout(ctx, r.CallTimeout)
	defer cancelCall()
	sent := time.Now()
	answer, err := r.Service.Extend(ctx, &dualcheckv1.ExtendRequest{
		Namespace: t.name.namespace, Key: t.name.key, Token: h.token, Lease: r.lease(),
	})
	if err != nil {
		return err
	}
	h.granted, h.lease = sent, answer.GetClaim().GetLeaseLeft().AsDuration()
	return nil
}

// secure extends a claim of which too much has passed to begin a command under
// it, as after a Begin that waited. It says whether the command may begin.
func (r *run) secure(t task, h *held) bool {
	if time.Now().Before(h.extendAt()) {
		return true
	}
	return r.extend(r.hard, t, h) == nil && time.Now().Before(h.stopAt())
}

// hold runs the line's work and extends its claim meanwhile. Errors: the
// runner's, or why the work was stopped.
func (r *run) hold(t task, h *held) (Output, error) {
	ctx, stop := context.WithCancelCause(r.hard)
	defer stop(nil)
	job := Job{
		Line:      t.number,
		Namespace: t.name.namespace,
		Key:       t.name.key,
		Operation: t.operation,
		Body:      t.body,
		Attempt:   h.attempt,
		Fence:     h.fence,
		Lapsed:    h.lapsed,
	}
	var keeper sync.WaitGroup
	keeper.Go(func() { r.keep(ctx, t, h, stop) })
	output, err := r.Runner.Run(ctx, job)
	cause := context.Cause(ctx)
	stop(nil)
	keeper.Wait()
	if err != nil && cause != nil && !errors.Is(err, ErrNotStarted) {
		return output, cause
	}
	return output, err
}

// keep extends a claim until ctx is done. It stops the work when the claim is
// gone, or when its lease ends and no call had extended it: whatever else a call
// is answered, the next one may be answered better.
func (r *run) keep(ctx context.Context, t task, h *held, stop context.CancelCauseFunc) {
	next := h.extendAt()
	for sleep(ctx, time.Until(next)) {
		err := r.extend(ctx, t, h)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			next = h.extendAt()
		case claimIsGone(err):
			stop(fmt.Errorf("%w: %s", errClaimLost, describe(err)))
			return
		case !time.Now().Before(h.stopAt()):
			stop(fmt.Errorf("%w: %s", errLeaseEnds, describe(err)))
			return
		default:
			next = time.Now().Add(h.lease / 12)
			if next.After(h.stopAt()) {
				next = h.stopAt()
			}
		}
	}
}
