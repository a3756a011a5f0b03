package server

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// domain is ErrorInfo's domain.
const domain = "dualcheck"

// table says which gRPC code each reason has. It is the only such place.
var table = map[claim.Reason]codes.Code{
	claim.NamespaceInvalid:    codes.InvalidArgument,
	claim.KeyInvalid:          codes.InvalidArgument,
	claim.OperationInvalid:    codes.InvalidArgument,
	claim.FingerprintInvalid:  codes.InvalidArgument,
	claim.FingerprintRequired: codes.InvalidArgument,
	claim.RequestIDInvalid:    codes.InvalidArgument,
	claim.LeaseInvalid:        codes.InvalidArgument,
	claim.WaitInvalid:         codes.InvalidArgument,
	claim.TokenInvalid:        codes.InvalidArgument,
	claim.FailureInvalid:      codes.InvalidArgument,
	claim.ResultInvalid:       codes.InvalidArgument,
	claim.LabelsInvalid:       codes.InvalidArgument,
	claim.PolicyInvalid:       codes.InvalidArgument,
	claim.BatchTooLarge:       codes.InvalidArgument,
	claim.RequestInvalid:      codes.InvalidArgument,

	claim.ClaimLost:   codes.Aborted,
	claim.PolicyStale: codes.Aborted,

	claim.AlreadyFinished: codes.AlreadyExists,

	claim.RequestIDSpent:    codes.FailedPrecondition,
	claim.ClaimLive:         codes.FailedPrecondition,
	claim.NamespaceNotEmpty: codes.FailedPrecondition,

	claim.RecordNotFound:    codes.NotFound,
	claim.NamespaceNotFound: codes.NotFound,

	claim.StoreUnavailable: codes.Unavailable,
	claim.Draining:         codes.Unavailable,

	claim.StoreFull:  codes.ResourceExhausted,
	claim.Overloaded: codes.ResourceExhausted,

	claim.RecordUnreadable: codes.Internal,
	claim.KeyCollision:     codes.Internal,
	claim.Internal:         codes.Internal,

	claim.Unimplemented: codes.Unimplemented,
}

// fault is an error on its way out.
type fault struct {
	code codes.Code
	*claim.Error
	// incident finds the log line of an error whose message tells nothing.
	incident string
}

// faultOf puts an error through the table. caller is the call's own context, as it
// came from the wire: an answer that was not established is UNAVAILABLE unless the
// caller itself has stopped waiting.
func faultOf(caller context.Context, err error) fault {
	e, ok := errors.AsType[*claim.Error](err)
	switch {
	case ok:
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		e = claim.Unavailable("the answer could not be established in time: send the same call again", err)
	default:
		e = &claim.Error{Reason: claim.Internal, Err: err}
	}
	code, known := table[e.Reason]
	if !known || e.Reason == claim.Internal {
		incident := rand.Text()[:12]
		return fault{codes.Internal, &claim.Error{
			Reason:   claim.Internal,
			Message:  "internal error: tell an operator this incident, under which the server's log says more",
			Metadata: map[string]string{"incident": incident},
			Err:      err,
		}, incident}
	}
	if e.Reason == claim.StoreUnavailable {
		switch caller.Err() {
		case context.DeadlineExceeded:
			code = codes.DeadlineExceeded
		case context.Canceled:
			code = codes.Canceled
		}
	}
	return fault{code: code, Error: e}
}

// status is the fault as gRPC carries it.
func (f fault) status() *status.Status {
	s := status.New(f.code, f.Message)
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: string(f.Reason), Domain: domain, Metadata: f.Metadata}}
	if f.Field != "" {
		details = append(details, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
			{Field: f.Field, Description: f.Message, Reason: string(f.Reason)},
		}})
	}
	if f.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(f.RetryAfter)})
	}
	if detailed, err := s.WithDetails(details...); err == nil {
		return detailed
	}
	return s
}

// batch is the fault as a member of a batch carries it.
func (f fault) batch() *dualcheckv1.BatchError {
	e := &dualcheckv1.BatchError{Code: int32(f.code), Reason: string(f.Reason), Message: f.Message, Metadata: f.Metadata, Field: f.Field}
	if f.RetryAfter > 0 {
		e.RetryAfter = durationpb.New(f.RetryAfter)
	}
	return e
}

// complete returns a status that has an ErrorInfo: gRPC and the gateway make
// errors of their own, which have none.
func complete(s *status.Status) *status.Status {
	for _, d := range s.Details() {
		if _, ok := d.(*errdetails.ErrorInfo); ok {
			return s
		}
	}
	reason := claim.Internal
	switch s.Code() {
	case codes.InvalidArgument, codes.OutOfRange, codes.NotFound,
		codes.ResourceExhausted: // a message over gRPC's limit
		reason = claim.RequestInvalid
	case codes.Unavailable:
		reason = claim.Draining
	case codes.DeadlineExceeded, codes.Canceled:
		reason = claim.StoreUnavailable
	case codes.Unimplemented:
		reason = claim.Unimplemented
	}
	code := table[reason]
	e := &claim.Error{Reason: reason, Message: s.Message()}
	if code == codes.Unavailable {
		e.RetryAfter = time.Second
	}
	if reason == claim.StoreUnavailable {
		code = s.Code() // the caller has stopped waiting, see faultOf
	}
	return fault{code: code, Error: e}.status()
}

func refuse(reason claim.Reason, field, message string) *claim.Error {
	return &claim.Error{Reason: reason, Field: field, Message: message}
}
