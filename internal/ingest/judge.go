package ingest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/fingerprint"
)

// task is a line with its fingerprint.
type task struct {
	line
	fingerprint [fingerprint.Size]byte
}

// judge deals with one line and says what became of it; text, if not empty, is
// for people.
func (r *run) judge(ln line) (Outcome, string) {
	digest, err := fingerprint.OfJSON(ln.body, r.Exclude...)
	if err != nil {
		return Failed, "the body has no fingerprint: " + err.Error()
	}
	t := task{line: ln, fingerprint: digest}
	if r.Runner == nil {
		return r.settleWithoutWork(t)
	}
	held, outcome, text := r.takeUp(t)
	if held == nil && outcome == "" {
		held, outcome, text = r.begin(t)
	}
	if held != nil {
		return r.perform(t, held)
	}
	switch outcome {
	case Replay, ReplayFailure, Expired:
		r.forget(t.name)
	}
	return outcome, text
}

// settleWithoutWork completes the line with an empty result as soon as it has
// the claim. Nothing happens under such a claim, so one that is lost, as after a
// long pause, is simply judged again.
func (r *run) settleWithoutWork(t task) (Outcome, string) {
	for tries := 1; ; tries++ {
		held, outcome, text := r.begin(t)
		if held == nil {
			return outcome, text
		}
		_, err := retry(r, r.hard, func(ctx context.Context) (*dualcheckv1.FinishResponse, error) {
			return r.Service.Complete(ctx, &dualcheckv1.CompleteRequest{
				Namespace: t.name.namespace, Key: t.name.key, Token: held.token,
			})
		})
		if err == nil {
			return First, ""
		}
		if !claimIsGone(err) || tries == 3 {
			return r.unanswered("complete", err)
		}
	}
}

// begin asks for the line's claim until it has it, or an answer that settles
// the line. While another claim is live it waits.
func (r *run) begin(t task) (*held, Outcome, string) {
	for told := false; ; told = true {
		request := &dualcheckv1.BeginRequest{
			Namespace:   t.name.namespace,
			Key:         t.name.key,
			Operation:   t.operation,
			Fingerprint: t.fingerprint[:],
			RequestId:   uuid.NewString(),
			Owner:       r.Owner,
			Lease:       r.lease(),
			Wait:        durationpb.New(r.Wait),
		}
		var sent time.Time
		answer, err := retry(r, r.soft, func(ctx context.Context) (*dualcheckv1.BeginResponse, error) {
			sent = time.Now()
			return r.Service.Begin(ctx, request)
		})
		if err != nil {
			outcome, text := r.unanswered("begin", err)
			return nil, outcome, text
		}
		switch answer.GetVerdict() {
		case dualcheckv1.Verdict_VERDICT_FIRST:
			return newHeld(answer.GetClaim(), sent), "", ""
		case dualcheckv1.Verdict_VERDICT_REPLAY:
			return nil, Replay, ""
		case dualcheckv1.Verdict_VERDICT_REPLAY_FAILURE:
			failure := answer.GetRecord().GetFailure()
			return nil, ReplayFailure, fmt.Sprintf("it had failed for good before (code %d): %s", failure.GetCode(), failure.GetMessage())
		case dualcheckv1.Verdict_VERDICT_CONFLICT:
			return nil, Conflict, "the key is known with another body or operation; this line was not taken: give it a key of its own"
		case dualcheckv1.Verdict_VERDICT_EXPIRED:
			return nil, Expired, ""
		case dualcheckv1.Verdict_VERDICT_UNKNOWN_OUTCOME:
			return nil, InDoubt, r.unknownOutcome(t, answer)
		case dualcheckv1.Verdict_VERDICT_IN_PROGRESS:
			if !told {
				r.note(t.line, "another claim is live; waiting for it to end")
			}
			if !sleep(r.soft, answer.GetRetryAfter().AsDuration()) {
				return nil, notBegun, ""
			}
		default:
			return nil, Failed, fmt.Sprintf("begin was answered with %v, which this version does not know", answer.GetVerdict())
		}
	}
}

func (r *run) unknownOutcome(t task, answer *dualcheckv1.BeginResponse) string {
	text := "nobody knows whether its work happened"
	if detail := answer.GetDetail(); detail != "" {
		text = detail
	}
	return fmt.Sprintf("%s; find out, then: %s", text, r.Resolve(t.name.namespace, t.name.key))
}

// perform runs the line's work under its claim and reports what came of it.
func (r *run) perform(t task, h *held) (Outcome, string) {
	if !r.secure(t, h) {
		return r.release(t, h, "the claim's lease could not be extended before the command began")
	}
	if r.soft.Err() != nil {
		return r.release(t, h, "")
	}
	if err := r.Journal.start(t, h); err != nil {
		r.giveUp(err)
		return r.release(t, h, err.Error())
	}
	output, err := r.hold(t, h)
	if errors.Is(err, ErrNotStarted) {
		return r.release(t, h, err.Error())
	}
	if r.hard.Err() != nil {
		return InDoubt, "the command was killed; the next run lists the line in doubt"
	}
	stopped, ran := err, "the command ran"
	if stopped != nil {
		ran = "the command was stopped: " + stopped.Error()
		output = Output{Failure: &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_UNKNOWN, Message: ran}}
	}
	err = r.finish(t, h, output)
	switch {
	case err == nil:
		r.forget(t.name)
	case claimIsGone(err):
		// Somebody else's claim decides now; this command has ended.
		r.forget(t.name)
		return Failed, ran + "; its outcome was not stored: " + describe(err)
	default:
		r.unanswered("finish", err)
		return InDoubt, ran + "; its outcome could not be stored: " + describe(err)
	}
	switch {
	case stopped != nil:
		return InDoubt, ran
	case output.Failure != nil:
		return Failed, fmt.Sprintf("the command failed (%s): %s", className(output.Failure.GetClass()), output.Failure.GetMessage())
	}
	return First, ""
}

// finish reports an output. Its error is as retry's.
func (r *run) finish(t task, h *held, output Output) error {
	_, err := retry(r, r.hard, func(ctx context.Context) (*dualcheckv1.FinishResponse, error) {
		if output.Failure != nil {
			return r.Service.Fail(ctx, &dualcheckv1.FailRequest{
				Namespace: t.name.namespace, Key: t.name.key, Token: h.token, Failure: output.Failure,
			})
		}
		request := &dualcheckv1.CompleteRequest{Namespace: t.name.namespace, Key: t.name.key, Token: h.token}
		if output.Omitted != nil {
			request.Outcome = &dualcheckv1.CompleteRequest_Omitted{Omitted: output.Omitted}
		} else if output.Result != nil {
			request.Outcome = &dualcheckv1.CompleteRequest_Result{Result: output.Result}
		}
		return r.Service.Complete(ctx, request)
	})
	return err
}

// release gives a claim back under which this run began nothing. A claim under
// which an earlier one may have done something is not given back as if nothing
// had happened: it is left to lapse. why is for people; without one the line
// simply was not begun.
func (r *run) release(t task, h *held, why string) (Outcome, string) {
	if !h.taken {
		r.forget(t.name)
	}
	if !h.lapsed {
		err := r.finish(t, h, Output{Failure: &dualcheckv1.Failure{
			Class:   dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE,
			Message: "nothing was begun",
		}})
		if err != nil {
			r.unanswered("release", err)
		}
	}
	switch {
	case why == "":
		return notBegun, ""
	case h.taken:
		return InDoubt, why
	}
	return Failed, why
}

// forget records in the journal that nothing of a name is under way any more.
func (r *run) forget(n name) {
	if err := r.Journal.end(n); err != nil {
		r.giveUp(err)
	}
}

// unanswered says what becomes of a line whose call had no good answer. If the
// service could not be reached, the run ends.
func (r *run) unanswered(call string, err error) (Outcome, string) {
	switch {
	case errors.Is(err, errStopped):
		return notBegun, ""
	case errors.Is(err, ErrUnavailable):
		r.giveUp(err)
	}
	return Failed, call + ": " + describe(err)
}

// lease is what Begin and Extend ask for.
func (r *run) lease() *durationpb.Duration {
	if r.Lease == 0 {
		return nil
	}
	return durationpb.New(r.Lease)
}

func className(c dualcheckv1.FailureClass) string {
	switch c {
	case dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE:
		return "retryable: the key is free again"
	case dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL:
		return "terminal: stored for good"
	default:
		return "unknown: the key is held until its outcome is resolved"
	}
}
