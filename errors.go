package dualcheck

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Reason is why a call was not answered, in a word that a program can act on. It is
// what errors.Is compares:
//
//	if errors.Is(err, dualcheck.ErrClaimLost) { … }
//
// A reason that this version does not know compares as well: Reason("NEW_ONE").
type Reason string

func (r Reason) Error() string { return "dualcheck: " + string(r) }

// Reasons of the server. The contract says which call may meet which.
const (
	ErrNamespaceInvalid    Reason = "NAMESPACE_INVALID"
	ErrKeyInvalid          Reason = "KEY_INVALID"
	ErrOperationInvalid    Reason = "OPERATION_INVALID"
	ErrFingerprintInvalid  Reason = "FINGERPRINT_INVALID"
	ErrFingerprintRequired Reason = "FINGERPRINT_REQUIRED"
	ErrRequestIDInvalid    Reason = "REQUEST_ID_INVALID"
	ErrLeaseInvalid        Reason = "LEASE_INVALID"
	ErrWaitInvalid         Reason = "WAIT_INVALID"
	ErrTokenInvalid        Reason = "TOKEN_INVALID"
	ErrFailureInvalid      Reason = "FAILURE_INVALID"
	ErrResultInvalid       Reason = "RESULT_INVALID"
	ErrLabelsInvalid       Reason = "LABELS_INVALID"
	ErrBatchTooLarge       Reason = "BATCH_TOO_LARGE"
	ErrRequestInvalid      Reason = "REQUEST_INVALID"
	ErrClaimLost           Reason = "CLAIM_LOST"
	ErrAlreadyFinished     Reason = "ALREADY_FINISHED"
	ErrRequestIDSpent      Reason = "REQUEST_ID_SPENT"
	ErrReadOnly            Reason = "READ_ONLY"
	ErrRecordNotFound      Reason = "RECORD_NOT_FOUND"
	ErrNamespaceNotFound   Reason = "NAMESPACE_NOT_FOUND"
	ErrStoreUnavailable    Reason = "STORE_UNAVAILABLE"
	ErrStoreRestored       Reason = "STORE_RESTORED"
	ErrDraining            Reason = "DRAINING"
	ErrStoreFull           Reason = "STORE_FULL"
	ErrQuotaExceeded       Reason = "QUOTA_EXCEEDED"
	ErrRateLimited         Reason = "RATE_LIMITED"
	ErrOverloaded          Reason = "OVERLOADED"
	ErrUnauthenticated     Reason = "UNAUTHENTICATED"
	ErrNamespaceDenied     Reason = "NAMESPACE_DENIED"
	ErrRoleDenied          Reason = "ROLE_DENIED"
	ErrRecordUnreadable    Reason = "RECORD_UNREADABLE"
	ErrKeyCollision        Reason = "KEY_COLLISION"
	ErrInternal            Reason = "INTERNAL"
	ErrUnimplemented       Reason = "UNIMPLEMENTED"
)

// Reasons of this package.
const (
	// ErrConnectionLost: the connection or the stream ended before the answer came.
	ErrConnectionLost Reason = "CONNECTION_LOST"
	// ErrUnreachable: no server can be reached; nothing was sent.
	ErrUnreachable Reason = "UNREACHABLE"
	// ErrCanceled, ErrDeadline: the caller's context ended first. The error unwraps to
	// the context's own.
	ErrCanceled Reason = "CANCELED"
	ErrDeadline Reason = "DEADLINE_EXCEEDED"
	// ErrClosed: the Client was closed.
	ErrClosed Reason = "CLOSED"
	// ErrAnswerInvalid: what came cannot be read.
	ErrAnswerInvalid Reason = "ANSWER_INVALID"
	// ErrLeaseLost is the cause with which Do ends the work's context before a lease
	// that could not be extended ends.
	ErrLeaseLost Reason = "LEASE_LOST"
)

// Error is a call that was not answered. Verdicts are no errors: see Outcome.
type Error struct {
	Reason  Reason
	Code    codes.Code
	Message string
	// Field is the request's field that is to blame, if one is.
	Field string
	// Metadata is what the server tells besides: for ErrClaimLost and
	// ErrAlreadyFinished state, digest, finished_at and attempt.
	Metadata map[string]string
	// RetryAfter is when coming back helps; 0 if it is not known to.
	RetryAfter time.Duration
	// MaybeAccepted: the call may have been carried out though its answer did not
	// come. The same call, with the same request id or token, tells.
	MaybeAccepted bool
	// Tries is how often the call was sent or tried to be.
	Tries int

	cause error
	// local says what became of a try of the session; never told to callers.
	local local
}

// local is what this package knows of a failed try beyond its reason.
type local uint8

const (
	// notSent: the call never left; it can go elsewhere at once.
	notSent local = iota + 1
	// refusedTogether: the stream was refused for a reason that may be another call's.
	refusedTogether
)

func (e *Error) Error() string {
	if e.Message == "" {
		return "dualcheck: " + string(e.Reason)
	}
	return "dualcheck: " + string(e.Reason) + ": " + e.Message
}

// Is compares the reason.
func (e *Error) Is(target error) bool {
	r, ok := target.(Reason)
	return ok && r == e.Reason
}

// Unwrap is the context's error, or that of gRPC, where there is one.
func (e *Error) Unwrap() error { return e.cause }

// domain is ErrorInfo's domain.
const domain = "dualcheck"

// GRPCStatus is the error as gRPC carries it, with its details.
func (e *Error) GRPCStatus() *status.Status {
	s := status.New(e.Code, e.Message)
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: string(e.Reason), Domain: domain, Metadata: e.Metadata}}
	if e.Field != "" {
		details = append(details, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: e.Field, Description: e.Message}}})
	}
	if e.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryAfter)})
	}
	if detailed, err := s.WithDetails(details...); err == nil {
		return detailed
	}
	return s
}

// errorOf reads the error of a unary call or of a whole stream. What has no reason of
// the server's is the connection's.
func errorOf(err error) *Error {
	s := status.Convert(err)
	e := &Error{Code: s.Code(), Message: s.Message(), cause: err}
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == domain {
				e.Reason, e.Metadata = Reason(d.GetReason()), d.GetMetadata()
			}
		case *errdetails.BadRequest:
			if v := d.GetFieldViolations(); len(v) > 0 {
				e.Field = v[0].GetField()
			}
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay().AsDuration()
		}
	}
	if e.Reason == "" {
		switch e.Code {
		case codes.Unavailable:
			e.Reason = ErrConnectionLost
		case codes.Unauthenticated:
			e.Reason = ErrUnauthenticated
		case codes.Unimplemented:
			e.Reason = ErrUnimplemented
		case codes.InvalidArgument, codes.OutOfRange:
			e.Reason = ErrRequestInvalid
		case codes.Canceled:
			e.Reason = ErrCanceled
		case codes.DeadlineExceeded:
			e.Reason = ErrDeadline
		default:
			e.Reason = ErrInternal
		}
	}
	return e
}

// contextError is the error of a call whose caller stopped waiting.
func contextError(ctx context.Context, last *Error) *Error {
	err := ctx.Err()
	e := &Error{Reason: ErrCanceled, Code: codes.Canceled, cause: err}
	if errors.Is(err, context.DeadlineExceeded) {
		e.Reason, e.Code = ErrDeadline, codes.DeadlineExceeded
	}
	e.Message = err.Error()
	if last != nil {
		e.Message += ", after " + last.Error()
		e.cause = fmt.Errorf("%w, after %w", err, last)
	}
	return e
}

// invalid refuses a request that must not be sent.
func invalid(reason Reason, field, format string, args ...any) *Error {
	return &Error{Reason: reason, Code: codes.InvalidArgument, Field: field, Message: fmt.Sprintf(format, args...)}
}

func closedError() *Error {
	return &Error{Reason: ErrClosed, Code: codes.Canceled, Message: "the client was closed"}
}

func unreadable(what string) *Error {
	return &Error{Reason: ErrAnswerInvalid, Code: codes.Internal, Message: what + " cannot be read", MaybeAccepted: true}
}

// What Do returns where nothing may be run. Each comes as a *VerdictError.
var (
	ErrInProgress     = errors.New("dualcheck: another claim of the key is live")
	ErrConflict       = errors.New("dualcheck: the key was used for another request or operation")
	ErrExpired        = errors.New("dualcheck: it was done, and what came of it is no longer kept")
	ErrUnknownOutcome = errors.New("dualcheck: it may have happened, or its attempts are used up: nobody may run it until its outcome is resolved")
)

// VerdictError is a verdict under which Do neither runs the work nor has its result.
// It is ErrInProgress, ErrConflict, ErrExpired or ErrUnknownOutcome.
type VerdictError struct {
	Verdict    Verdict
	KeyAction  KeyAction
	RetryAfter time.Duration
	Detail     string
	Outcome    *Outcome

	cause error // why Do waits no longer, if its context ended
}

func (e *VerdictError) Error() string {
	text := "dualcheck: " + e.Verdict.String()
	if err := e.sentinel(); err != nil {
		text = err.Error()
	}
	if e.Detail != "" {
		text += ": " + e.Detail
	}
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return text
}

// Unwrap is the sentinel of the verdict and, if the context ended meanwhile, its error.
func (e *VerdictError) Unwrap() (all []error) {
	for _, err := range []error{e.sentinel(), e.cause} {
		if err != nil {
			all = append(all, err)
		}
	}
	return all
}

func (e *VerdictError) sentinel() error {
	switch e.Verdict {
	case InProgress:
		return ErrInProgress
	case Conflict:
		return ErrConflict
	case Expired:
		return ErrExpired
	case UnknownOutcome:
		return ErrUnknownOutcome
	}
	return nil
}

// StoreError is work that was done, or failed, and could not be reported. Its claim
// may still hold (see LeaseLeft): repeat Complete or Fail with it.
// With ErrClaimLost or ErrAlreadyFinished what was done must not count.
type StoreError struct {
	Claim *Claim
	// Result is what was to be stored, nil if the work failed.
	Result *Result
	// Failure is what was to be stored, nil if the work succeeded.
	Failure *Failure
	// Work is the work's own error, nil if it succeeded.
	Work error
	// Err is why it was not stored.
	Err error
}

func (e *StoreError) Error() string {
	if e.Work != nil {
		return fmt.Sprintf("%v (and this could not be reported: %v)", e.Work, e.Err)
	}
	return fmt.Sprintf("the work is done and its result could not be stored: %v", e.Err)
}

// Unwrap is both errors.
func (e *StoreError) Unwrap() []error {
	if e.Work != nil {
		return []error{e.Work, e.Err}
	}
	return []error{e.Err}
}
