package dualcheck

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Work is what Do runs. Its context ends before the claim's lease does; its claim has a
// fence for the caller's own database.
type Work func(ctx context.Context, claim *Claim) (Result, error)

const (
	// longestAsk is how long one Begin waits at the server at most.
	longestAsk = 30 * time.Second
	// tooLate is how much time is not worth another Begin: a server that waits answers
	// 100 ms before the deadline.
	tooLate = 150 * time.Millisecond
	// answerTime is what the last Begin of all is given.
	answerTime = 30 * time.Millisecond
	// finishGrace is for how long a finish goes on though its caller's context ended.
	finishGrace = 10 * time.Second
	// lastWords is how long a panic is held up to report it.
	lastWords = 5 * time.Second
)

// Do runs the work unless it was done, and returns what came of it: now or earlier
// (Result.Replayed says which). While somebody else has the claim it waits, up to Wait.
//
// While the work runs its claim is extended. If that fails, the work's context ends
// with ErrLeaseLost as its cause, before the lease does; what runs on after that may run
// twice.
//
// An error of the work ends the claim by its class: Retryable, Terminal and Unknown say
// it. For any other WithClassifier is asked, and without one it is ClassUnknown, which
// holds the key until somebody resolves it: only the work can say that nothing happened,
// and a wrong guess runs it twice. A context that ended, a panic and a Goexit are
// ClassUnknown too. The error itself is returned as it is.
//
// Errors besides: *FailureError for a failure of an earlier run, *VerdictError where
// nobody may run it, *StoreError if the result could not be stored, *Error.
func (c *Client) Do(ctx context.Context, key Key, work Work, opts ...CallOption) (Result, error) {
	if work == nil {
		return Result{}, invalid(ErrRequestInvalid, "work", "there is no work to do")
	}
	o := gather(opts)
	out, e := c.claim(ctx, &key, o)
	if e != nil {
		return Result{}, e
	}
	switch out.Verdict {
	case First:
		return c.run(ctx, out, &o, work)
	case Replay:
		return out.Result()
	}
	err := out.Err()
	if v, ok := errors.AsType[*VerdictError](err); ok && v.Verdict == InProgress {
		v.cause = ctx.Err()
		if deadline, ok := ctx.Deadline(); ok && v.cause == nil && time.Until(deadline) <= answerTime {
			v.cause = context.DeadlineExceeded // there is no time to ask again
		}
	}
	return Result{}, err
}

// claim begins until the key is not in progress, or as long as there is time.
func (c *Client) claim(ctx context.Context, key *Key, o callOptions) (*Outcome, *Error) {
	var end time.Time // zero: only the context ends it
	if o.waits {
		end = time.Now().Add(o.wait)
	}
	if deadline, ok := ctx.Deadline(); ok && (end.IsZero() || deadline.Before(end)) {
		end = deadline
	}
	for last := false; ; {
		o.waits, o.wait = true, longestAsk
		if !end.IsZero() {
			o.wait = min(max(time.Until(end), 0), longestAsk)
		}
		if last {
			o.wait = 0
		}
		out, e := c.ask(ctx, key, &o)
		if e != nil || out.Verdict != InProgress {
			return out, e
		}
		wait := min(max(out.RetryAfter, time.Millisecond), time.Second)
		if !end.IsZero() {
			left := time.Until(end)
			if last {
				return out, nil
			}
			// A server that waits answers early; what is finished meanwhile is asked for
			// once more, as late as there is time for an answer.
			if last = left <= tooLate; last {
				left = max(left-answerTime, 0)
			}
			wait = min(wait, left)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return out, nil
		case <-c.closed:
			timer.Stop()
			return nil, closedError()
		}
	}
}

// run does the work under a claim.
func (c *Client) run(ctx context.Context, out *Outcome, o *callOptions, work Work) (Result, error) {
	claim := out.Claim
	if e := c.finish(); e != nil {
		e.MaybeAccepted = true // the claim, which lapses
		return Result{}, e
	}
	defer c.finished()
	if err := c.renew(ctx, out, o.lease); err != nil {
		return Result{}, err
	}
	working, cancel := context.WithCancelCause(ctx)
	k := &keeper{client: c, claim: claim, lease: o.lease, enforced: out.Enforced, ctx: working, cancel: cancel}
	k.start()
	returned := false
	defer func() {
		if returned {
			return
		}
		// It panicked, or ended its goroutine; both go on after this.
		k.stop()
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWords)
		defer cancel()
		_, _ = c.Fail(last, claim, Failure{Class: ClassUnknown, Code: int32(codes.Unknown), Message: "the work panicked"})
	}()
	result, err := work(working, claim)
	returned = true
	cause := context.Cause(working)
	k.stop()
	finishing, done := outlive(ctx)
	defer done()
	if err == nil {
		if _, err := c.Complete(finishing, claim, result); err != nil {
			return result, &StoreError{Claim: claim, Result: &result, Err: err}
		}
		return result, nil
	}
	failure := c.failure(err, cause != nil)
	if errors.Is(cause, ErrLeaseLost) && !errors.Is(err, ErrLeaseLost) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	if _, failed := c.Fail(finishing, claim, failure); failed != nil {
		return Result{}, &StoreError{Claim: claim, Failure: &failure, Work: err, Err: failed}
	}
	return Result{}, err
}

// renew extends a claim whose answer took long, as one that was waited for did: its
// lease counts from when it was asked for, and the work should have the most of it. If
// it cannot, the claim is given back.
func (c *Client) renew(ctx context.Context, out *Outcome, lease time.Duration) error {
	claim := out.Claim
	if claim.LeaseLeft() >= claim.given/2 || !out.Enforced {
		return nil
	}
	err := c.Extend(ctx, claim, lease)
	if err == nil {
		return nil
	}
	finishing, done := outlive(ctx)
	defer done()
	if _, failed := c.Fail(finishing, claim, Failure{Class: ClassRetryable, Message: "nothing was begun"}); failed != nil {
		return fmt.Errorf("%w (and the claim could not be given back: %w)", err, failed)
	}
	return err
}

// outlive is a context that ends finishGrace after ctx.
func outlive(ctx context.Context) (context.Context, func()) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(finishGrace, cancel)
		context.AfterFunc(longer, func() { timer.Stop() })
	})
	return longer, func() { stop(); cancel() }
}

// keeper extends a claim while its work runs, and ends the work before its lease ends.
// Short work costs it two timers and no goroutine.
type keeper struct {
	client   *Client
	claim    *Claim
	lease    time.Duration // 0: the namespace's default
	enforced bool
	ctx      context.Context // the work's
	cancel   context.CancelCauseFunc

	mu             sync.Mutex
	over           bool
	extends, loses *time.Timer
	extending      sync.WaitGroup
}

// margin is how long before the end of a lease its work must have stopped.
func margin(left time.Duration) time.Duration {
	return min(max(left/10, 50*time.Millisecond), 2*time.Second)
}

func (k *keeper) start() {
	left := k.claim.LeaseLeft()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.extends = time.AfterFunc(left/3, k.extend)
	if k.enforced {
		k.loses = time.AfterFunc(left-margin(left), func() { k.lost(nil) })
	}
}

// extend moves the lease's end, and both timers.
func (k *keeper) extend() {
	k.mu.Lock()
	if k.over {
		k.mu.Unlock()
		return
	}
	k.extending.Add(1)
	k.mu.Unlock()
	defer k.extending.Done()
	ctx, cancel := context.WithDeadline(k.ctx, k.claim.Until())
	err := k.client.extend(ctx, k.claim, k.lease, untilDeadline)
	cancel()
	if errors.Is(err, ErrClaimLost) || errors.Is(err, ErrRecordNotFound) {
		if k.enforced {
			k.lost(err)
		}
		return // an observed claim may name nothing, and holds nobody back
	}
	left := k.claim.LeaseLeft()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over {
		return
	}
	if k.loses != nil && err == nil {
		k.loses.Reset(left - margin(left))
	}
	if left > 0 {
		k.extends.Reset(max(left/3, 10*time.Millisecond))
	}
}

// lost ends the work.
func (k *keeper) lost(err error) {
	e := &Error{Reason: ErrLeaseLost, Code: codes.Aborted, Message: "the claim of " + k.claim.Key.String() + " could not be extended in time", cause: err}
	if err != nil {
		e.Message = "the claim of " + k.claim.Key.String() + " was taken away: " + err.Error()
	}
	k.cancel(e)
}

// stop ends the keeper; nothing of it runs after that.
func (k *keeper) stop() {
	k.mu.Lock()
	k.over = true
	k.extends.Stop()
	if k.loses != nil {
		k.loses.Stop()
	}
	k.mu.Unlock()
	k.cancel(nil)
	k.extending.Wait()
}

// classified is an error whose class was said.
type classified struct {
	class Class
	error
}

func (e *classified) Unwrap() error { return e.error }

// Retryable says that nothing happened: the key is free, and the next Begin is First.
func Retryable(err error) error { return classify(ClassRetryable, err) }

// Terminal says that the work failed for good: the failure is stored and replayed. If
// the error is a gRPC status or a *FailureError, its code and details are kept.
func Terminal(err error) error { return classify(ClassTerminal, err) }

// Unknown says that it may have happened: the key is held until it is resolved.
func Unknown(err error) error { return classify(ClassUnknown, err) }

func classify(class Class, err error) error {
	if err == nil {
		return nil
	}
	return &classified{class, err}
}

// failure makes of a work's error what is stored.
func (c *Client) failure(err error, ended bool) Failure {
	said, ok := errors.AsType[*classified](err)
	inner := err
	if ok {
		inner = said.error
	}
	f := Failure{Code: int32(codes.Unknown), Message: inner.Error()}
	if replayed, ok := errors.AsType[*FailureError](inner); ok {
		f.Code, f.Message, f.Details = replayed.Code, replayed.Message, replayed.Details
	} else if s, ok := status.FromError(inner); ok {
		f.Code, f.Message, f.Details = int32(s.Code()), s.Message(), s.Proto().GetDetails()
	}
	switch {
	case ok:
		f.Class = said.class
	case ended, errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		f.Class = ClassUnknown
	default:
		f.Class = c.classify(err)
	}
	if f.Class < ClassRetryable || f.Class > ClassUnknown {
		f.Class = ClassUnknown
	}
	return f
}

// DoJSON is Do for work whose result is a value that is kept as JSON.
func DoJSON[T any](ctx context.Context, c *Client, key Key, work func(context.Context, *Claim) (T, error), opts ...CallOption) (T, error) {
	var value T
	ran := false
	result, err := c.Do(ctx, key, func(ctx context.Context, claim *Claim) (Result, error) {
		v, err := work(ctx, claim)
		if err != nil {
			return Result{}, err
		}
		body, err := json.Marshal(v)
		if err != nil {
			return Result{}, Unknown(fmt.Errorf("dualcheck: the work is done and its result is no JSON: %w", err))
		}
		value, ran = v, true
		return Result{ContentType: "application/json", Body: body}, nil
	}, opts...)
	switch {
	case err != nil || ran:
		return value, err
	case result.Omitted:
		return value, fmt.Errorf("dualcheck: %s was done; its result of %d bytes was too large to keep", key, result.Size)
	}
	if err := json.Unmarshal(result.Body, &value); err != nil {
		return value, fmt.Errorf("dualcheck: the result of %s is no JSON of its type: %w", key, err)
	}
	return value, nil
}
