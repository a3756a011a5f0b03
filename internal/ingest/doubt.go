package ingest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// settleDoubts asks the service about everything that an earlier run began and
// did not end, drops what the service knows the end of, and tells of the rest.
func (r *run) settleDoubts() error {
	for _, e := range r.Journal.entries() {
		n := name{e.Namespace, e.Key}
		answer, err := retry(r, r.soft, func(ctx context.Context) (*dualcheckv1.GetResponse, error) {
			return r.Service.Get(ctx, &dualcheckv1.GetRequest{Namespace: e.Namespace, Key: e.Key})
		})
		switch {
		case errors.Is(err, errStopped):
			r.interrupted()
			return nil
		case err != nil && status.Code(err) != codes.NotFound:
			if definite(err) {
				err = errors.New(describe(err))
			}
			return fmt.Errorf("ask what became of line %d (%s %s), which an earlier run began: %w", e.Line, e.Namespace, e.Key, err)
		case err == nil && ended(e, answer.GetRecord()):
			if err := r.Journal.end(n); err != nil {
				return err
			}
			continue
		}
		what := "in doubt, so skipped: run it again with --rerun-in-doubt, or look whether it happened and say so: " + r.Resolve(e.Namespace, e.Key)
		if r.RerunInDoubt {
			what = "in doubt, and to be run again"
		}
		r.mu.Lock()
		r.Report(Note{Namespace: e.Namespace, Key: e.Key, Outcome: InDoubt, Text: fmt.Sprintf(
			"line %d, begun %s by a run that did not see it end (attempt %d): %s",
			e.Line, e.At.Format(time.RFC3339), e.Attempt, what)})
		r.mu.Unlock()
	}
	return nil
}

// ended says whether a record tells what became of a claim: it finished, it was
// released, or a newer claim decides.
func ended(e entry, record *dualcheckv1.Record) bool {
	switch record.GetState() {
	case dualcheckv1.State_STATE_SUCCEEDED, dualcheckv1.State_STATE_FAILED, dualcheckv1.State_STATE_RELEASED:
		return true
	}
	return record.GetAttempt() > e.Attempt
}

// takeUp deals with a line whose name the journal has in doubt. It returns the
// earlier run's claim to run it again under, or an outcome, or neither: then the
// line is to be begun as any other.
//
// All lines of such a name are in doubt with it, so that none overtakes it.
func (r *run) takeUp(t task) (*held, Outcome, string) {
	e, open := r.Journal.find(t.name)
	switch {
	case !open:
		return nil, "", ""
	case !r.RerunInDoubt:
		return nil, InDoubt, fmt.Sprintf("its key is in doubt since line %d (attempt %d)", e.Line, e.Attempt)
	case !bytes.Equal(e.Fingerprint, t.fingerprint[:]) || e.Operation != t.operation:
		return nil, "", ""
	}
	// The token still holds the claim, though its lease ran out, unless somebody
	// else took it over; Extend says which.
	var sent time.Time
	answer, err := retry(r, r.soft, func(ctx context.Context) (*dualcheckv1.ExtendResponse, error) {
		sent = time.Now()
		return r.Service.Extend(ctx, &dualcheckv1.ExtendRequest{
			Namespace: t.name.namespace, Key: t.name.key, Token: e.Token, Lease: r.lease(),
		})
	})
	switch {
	case err == nil:
		return &held{
			token:   e.Token,
			attempt: e.Attempt,
			fence:   e.Fence,
			lapsed:  true,
			taken:   true,
			granted: sent,
			lease:   answer.GetClaim().GetLeaseLeft().AsDuration(),
		}, "", ""
	case claimIsGone(err):
		return nil, "", ""
	}
	outcome, text := r.unanswered("extend", err)
	if outcome == Failed {
		outcome = InDoubt
	}
	return nil, outcome, text
}
