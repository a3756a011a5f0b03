package claim

import (
	"errors"
	"fmt"
	"time"
)

// Reason says what went wrong in a word a program can act on. The server maps
// each to a gRPC code in one table.
type Reason string

// The reasons, as they stand in ErrorInfo.
const (
	NamespaceInvalid    Reason = "NAMESPACE_INVALID"
	KeyInvalid          Reason = "KEY_INVALID"
	OperationInvalid    Reason = "OPERATION_INVALID"
	FingerprintInvalid  Reason = "FINGERPRINT_INVALID"
	FingerprintRequired Reason = "FINGERPRINT_REQUIRED"
	RequestIDInvalid    Reason = "REQUEST_ID_INVALID"
	LeaseInvalid        Reason = "LEASE_INVALID"
	WaitInvalid         Reason = "WAIT_INVALID"
	TokenInvalid        Reason = "TOKEN_INVALID"
	FailureInvalid      Reason = "FAILURE_INVALID"
	ResultInvalid       Reason = "RESULT_INVALID"
	LabelsInvalid       Reason = "LABELS_INVALID"
	PolicyInvalid       Reason = "POLICY_INVALID"
	BatchTooLarge       Reason = "BATCH_TOO_LARGE"
	RequestInvalid      Reason = "REQUEST_INVALID"
	ClaimLost           Reason = "CLAIM_LOST"
	PolicyStale         Reason = "POLICY_STALE"
	AlreadyFinished     Reason = "ALREADY_FINISHED"
	RequestIDSpent      Reason = "REQUEST_ID_SPENT"
	ClaimLive           Reason = "CLAIM_LIVE"
	NamespaceNotEmpty   Reason = "NAMESPACE_NOT_EMPTY"
	RecordNotFound      Reason = "RECORD_NOT_FOUND"
	NamespaceNotFound   Reason = "NAMESPACE_NOT_FOUND"
	StoreUnavailable    Reason = "STORE_UNAVAILABLE"
	Draining            Reason = "DRAINING"
	StoreFull           Reason = "STORE_FULL"
	Overloaded          Reason = "OVERLOADED"
	RecordUnreadable    Reason = "RECORD_UNREADABLE"
	KeyCollision        Reason = "KEY_COLLISION"
	Internal            Reason = "INTERNAL"
	Unimplemented       Reason = "UNIMPLEMENTED"
)

// Error is every error that a caller is meant to see.
type Error struct {
	Reason  Reason
	Message string
	// Field is the request's field to blame, if there is one.
	Field string
	// Metadata goes into ErrorInfo.
	Metadata map[string]string
	// RetryAfter is when coming back may help; 0: it does not.
	RetryAfter time.Duration
	// Err is what is behind it; logged, never sent.
	Err error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Reason, e.Message, e.Err)
	}
	return fmt.Sprintf("%s: %s", e.Reason, e.Message)
}

// Unwrap returns what is behind it.
func (e *Error) Unwrap() error { return e.Err }

// Errorf makes an Error without a field to blame.
func Errorf(reason Reason, format string, args ...any) *Error {
	return &Error{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Unavailable makes the Error of an answer that could not be established.
func Unavailable(message string, cause error) *Error {
	return &Error{Reason: StoreUnavailable, Message: message, RetryAfter: time.Second, Err: cause}
}

func invalid(reason Reason, field, format string, args ...any) *Error {
	return &Error{Reason: reason, Field: field, Message: fmt.Sprintf(format, args...)}
}

// ReasonOf returns the reason of err, Internal if it has none, "" if it is nil.
func ReasonOf(err error) Reason {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Reason
	}
	return Internal
}
