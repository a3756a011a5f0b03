package ingest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// errStopped: the run ended while a call waited to be sent again.
var errStopped = errors.New("the run ended")

// retry makes a call until it has a definite answer. A call whose answer is not
// definite is sent again, the same each time, for RetryFor at most. Errors: the
// definite one; ErrUnavailable; errStopped, if waits was done between two tries,
// the run was killed in one, or an error was hopeless, with which the run ends.
func retry[T any](r *run, waits context.Context, call func(context.Context) (T, error)) (T, error) {
	var last error
	answer, err := backoff.Retry(waits, func() (T, error) {
		ctx, cancel := context.WithTimeout(r.hard, r.CallTimeout+r.Wait)
		defer cancel()
		answer, err := call(ctx)
		last = err
		switch {
		case err == nil:
			return answer, nil
		case r.Hopeless(err):
			r.giveUp(err)
			return answer, backoff.Permanent(errStopped)
		case definite(err) || r.hard.Err() != nil:
			return answer, backoff.Permanent(err)
		}
		r.tellSilence(err)
		if after := retryAfter(err); after > 0 {
			err = &backoff.RetryAfterError{Duration: after}
		}
		return answer, err
	}, backoff.WithBackOff(patience()), backoff.WithMaxElapsedTime(r.RetryFor))
	switch {
	case err == nil:
		return answer, nil
	case errors.Is(err, errStopped):
		return answer, errStopped
	case definite(last):
		return answer, last
	case waits.Err() != nil || r.hard.Err() != nil:
		return answer, errStopped
	}
	return answer, fmt.Errorf("%w for %v: %s", ErrUnavailable, r.RetryFor, describe(last))
}

// patience waits 0.1 s, then longer each time, up to 5 s.
func patience() backoff.BackOff {
	return &backoff.ExponentialBackOff{
		InitialInterval:     100 * time.Millisecond,
		RandomizationFactor: 0.5,
		Multiplier:          2,
		MaxInterval:         5 * time.Second,
	}
}

// definite says whether an error settles its call: sending the same call again
// would be answered the same. That says nothing of the claim, see claimIsGone.
func definite(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Canceled, codes.Unknown:
		return false
	case codes.Internal:
		// Without a reason it is the transport's: a stream that broke.
		return reasonOf(err) != ""
	}
	return true
}

// claimIsGone says whether a call was refused because its claim is not the one
// that decides, and never will be again. Only the service's own word counts: a
// proxy has these codes too.
func claimIsGone(err error) bool {
	switch code, reason := status.Code(err), reasonOf(err); code {
	case codes.Aborted:
		return reason == "CLAIM_LOST"
	case codes.AlreadyExists:
		return reason == "ALREADY_FINISHED"
	case codes.NotFound:
		return reason == "RECORD_NOT_FOUND"
	}
	return false
}

// reasonOf is what ErrorInfo says; "" if there is none.
func reasonOf(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

// retryAfter is what RetryInfo says; 0 if there is none.
func retryAfter(err error) time.Duration {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration()
		}
	}
	return 0
}

// describe is an answer's message and reason, for people: the server's own
// words, without what gRPC put around them.
func describe(err error) string {
	carrier, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err)
	if !ok {
		return err.Error()
	}
	s := carrier.GRPCStatus()
	if reason := reasonOf(err); reason != "" {
		return fmt.Sprintf("%s (%s)", s.Message(), reason)
	}
	return fmt.Sprintf("%s (%v)", s.Message(), s.Code())
}

// sleep waits; false if ctx was done first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
