package sdktest

import (
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dualcheck/dualcheck"
	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// The contract's words as claim's. Deadlines are told by the wall clock of who
// answers, so that here an Instant is the wall clock's nanoseconds: what is left until
// a deadline is right, and nothing else of it.

func instant(m *timestamppb.Timestamp) claim.Instant {
	if m == nil {
		return 0
	}
	return claim.Instant(m.AsTime().UnixNano())
}

func now() claim.Instant { return claim.Instant(time.Now().UnixNano()) }

func wall(m *timestamppb.Timestamp) time.Time {
	if m == nil {
		return time.Time{}
	}
	return m.AsTime()
}

func recordOf(m *dualcheckv1.Record) (*claim.Record, error) {
	if m == nil {
		return nil, nil
	}
	r := &claim.Record{
		Namespace: m.GetNamespace(), Key: m.GetKey(), Operation: m.GetOperation(),
		State: claim.State(m.GetState()), Fingerprint: m.GetFingerprint(), Owner: m.GetOwner(), Attempt: m.GetAttempt(),
		CreatedAt: wall(m.GetCreatedAt()), ClaimedAt: wall(m.GetClaimedAt()), FinishedAt: wall(m.GetFinishedAt()),
		LeaseUntil: instant(m.GetLeaseUntil()), ResultUntil: instant(m.GetResultUntil()), KeyUntil: instant(m.GetKeyUntil()),
		ResultOmitted: m.GetResultOmitted(), ResultSize: m.GetResultSize(),
		Digest: m.GetDigest(), Revision: m.GetRevision(), FinishRevision: m.GetFinishRevision(), Labels: m.GetLabels(),
	}
	if id := m.GetTraceId(); id != "" {
		var err error
		if r.TraceID, err = hex.DecodeString(id); err != nil {
			return nil, fmt.Errorf("a record's trace id: %w", err)
		}
	}
	if res := m.GetResult(); res != nil {
		r.Result = &claim.Result{Code: res.GetCode(), ContentType: res.GetContentType(), Body: res.GetBody(), Metadata: res.GetMetadata()}
	}
	if f := m.GetFailure(); f != nil {
		r.Failure = &claim.Failure{Class: claim.FailureClass(f.GetClass()), Code: f.GetCode(), Message: f.GetMessage()}
		for _, d := range f.GetDetails() {
			r.Failure.Details = append(r.Failure.Details, claim.Detail{TypeURL: d.GetTypeUrl(), Value: d.GetValue()})
		}
	}
	return r, nil
}

func foundOf(m *dualcheckv1.Record) (claim.Found, error) {
	r, err := recordOf(m)
	if err == nil && r == nil {
		err = errors.New("an answer without its record")
	}
	return claim.Found{Record: r, Now: now()}, err
}

// answerOf is an answer of the contract.
func answerOf(m *dualcheckv1.BeginResponse) (claim.Answer, error) {
	a := claim.Answer{
		Verdict: claim.Verdict(m.GetVerdict()), RetryAfter: m.GetRetryAfter().AsDuration(), Repeat: m.GetRepeat(), Now: now(),
		Revision: m.GetRevision(), Source: claim.Source(m.GetSource()), Stale: m.GetStale(), Detail: m.GetDetail(),
	}
	if c := m.GetClaim(); c != nil {
		a.Claim = &claim.Grant{Token: c.GetToken(), Attempt: c.GetAttempt(), Fence: c.GetFence(), Left: c.GetLeaseLeft().AsDuration(), Previous: claim.Previous(c.GetPrevious())}
	}
	var err error
	if a.Record, err = recordOf(m.GetRecord()); err != nil {
		return a, err
	}
	return a, agrees(&a, claim.KeyAction(m.GetKeyAction()), m.GetEnforced())
}

// outcomeOf is an answer of the SDK.
func outcomeOf(o *dualcheck.Outcome) (claim.Answer, error) {
	a := claim.Answer{
		Verdict: claim.Verdict(o.Verdict), RetryAfter: o.RetryAfter, Repeat: o.Repeat, Now: now(),
		Revision: o.Revision, Source: claim.Source(o.Source), Stale: o.Stale, Detail: o.Detail,
	}
	if o.Claim != nil {
		a.Claim = grantOf(o.Claim)
	}
	if o.Encoded() != nil {
		m, err := o.Record()
		if err != nil {
			return a, err
		}
		if a.Record, err = recordOf(m); err != nil {
			return a, err
		}
	}
	return a, agrees(&a, claim.KeyAction(o.KeyAction), o.Enforced)
}

// agrees reports an answer whose parts do not go together.
func agrees(a *claim.Answer, action claim.KeyAction, enforced bool) error {
	if a.KeyAction() != action || !enforced {
		return fmt.Errorf("verdict %d comes with key action %d, enforced %v", a.Verdict, action, enforced)
	}
	return nil
}

func grantOf(c *dualcheck.Claim) *claim.Grant {
	return &claim.Grant{Token: c.Token, Attempt: c.Attempt, Fence: c.Fence, Left: c.LeaseLeft(), Previous: claim.Previous(c.Previous)}
}

// errorOf is an error of the SDK, which stays what it wraps. What the SDK alone says
// is all the same to a Store's caller: there is no answer.
func errorOf(err error) error {
	e, ok := errors.AsType[*dualcheck.Error](err)
	if !ok {
		return err
	}
	told := &claim.Error{Reason: claim.Reason(e.Reason), Message: e.Message, Field: e.Field, Metadata: e.Metadata, RetryAfter: e.RetryAfter, Err: e}
	switch e.Reason {
	case dualcheck.ErrConnectionLost, dualcheck.ErrUnreachable, dualcheck.ErrCanceled, dualcheck.ErrDeadline:
		told.Reason, told.Message = claim.StoreUnavailable, e.Error()
	}
	return told
}

// statusOf is an error of the generated clients.
func statusOf(err error) error {
	s := status.Convert(err)
	told := &claim.Error{Message: s.Message(), Err: err}
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			told.Reason, told.Metadata = claim.Reason(d.GetReason()), d.GetMetadata()
		case *errdetails.BadRequest:
			told.Field = d.GetFieldViolations()[0].GetField()
		case *errdetails.RetryInfo:
			told.RetryAfter = d.GetRetryDelay().AsDuration()
		}
	}
	if told.Reason == "" {
		switch s.Code() {
		case codes.Unavailable, codes.Canceled, codes.DeadlineExceeded:
			told.Reason = claim.StoreUnavailable
		default:
			told.Reason = claim.Internal
		}
	}
	return told
}

// memberOf is the error of one member of a batch.
func memberOf(e *dualcheckv1.BatchError) error {
	return &claim.Error{Reason: claim.Reason(e.GetReason()), Message: e.GetMessage(), Field: e.GetField(), Metadata: e.GetMetadata(), RetryAfter: e.GetRetryAfter().AsDuration()}
}

func resultMessage(r *claim.Result) *dualcheckv1.Result {
	if r == nil {
		r = &claim.Result{}
	}
	return &dualcheckv1.Result{Code: r.Code, ContentType: r.ContentType, Body: r.Body, Metadata: r.Metadata}
}

func failureMessage(f *claim.Failure) *dualcheckv1.Failure {
	return &dualcheckv1.Failure{Class: dualcheckv1.FailureClass(f.Class), Code: f.Code, Message: f.Message, Details: detailMessages(f.Details)}
}

func detailMessages(details []claim.Detail) (all []*anypb.Any) {
	for _, d := range details {
		all = append(all, &anypb.Any{TypeUrl: d.TypeURL, Value: d.Value})
	}
	return all
}
