package claim

import (
	"encoding/base64"
	"encoding/hex"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Limits of what a request may hold, in bytes unless they say otherwise.
const (
	MaxKey            = 255
	MaxNamespace      = 63
	MaxOperation      = 128
	MaxRequestID      = 128
	MaxOwner          = 128
	MaxLabels         = 16 // labels
	MaxLabelName      = 64
	MaxLabelValue     = 256
	MaxMetadata       = 8 << 10
	MaxContentType    = 256
	MaxFailureMessage = 4 << 10
	MaxFailureDetails = 8 << 10
	MaxReason         = 1 << 10
	MaxResult         = 1 << 20
	MaxWait           = 30 * time.Second
	MaxBatch          = 1000 // members
	MaxBatchBytes     = 8 << 20
	MaxMessage        = 16 << 20
	fingerprintSize   = 32
	spentKept         = 16 // request ids
)

// BeginRequest asks for a piece of work.
type BeginRequest struct {
	Namespace, Key, Operation string
	Fingerprint               []byte
	RequestID, Owner          string
	// Lease is nil for the namespace's default.
	Lease  *time.Duration
	Wait   time.Duration
	Labels map[string]string
	// TraceID is 16 bytes, or none.
	TraceID []byte
	// Hint is from a layer in front of the Store.
	Hint Hint
}

// Hint is what a layer in front of a Store expects a Begin to find there. It changes
// what is tried first, and never the answer.
type Hint uint8

// The hints.
const (
	NoHint Hint = iota
	// LikelyNew: nothing is known of the key. LikelyRepeat: somebody has begun it.
	LikelyNew
	LikelyRepeat
)

// Validate reports the first thing that is wrong with the request, whatever the
// policy and the record.
func (r *BeginRequest) Validate() error {
	if err := ValidateName(r.Namespace, r.Key); err != nil {
		return err
	}
	if err := validateOperation(r.Operation); err != nil {
		return err
	}
	if n := len(r.Fingerprint); n != 0 && n != fingerprintSize {
		return invalid(FingerprintInvalid, "fingerprint", "a fingerprint is 32 raw bytes (SHA-256; in JSON the base64 of them), or none, not %d%s", n, looksLike(r.Fingerprint))
	}
	if err := validateText(RequestIDInvalid, "request_id", r.RequestID, MaxRequestID); err != nil {
		return err
	}
	if err := validateText(RequestInvalid, "owner", r.Owner, MaxOwner); err != nil {
		return err
	}
	if r.Lease != nil && *r.Lease <= 0 {
		return invalid(LeaseInvalid, "lease", "a lease of %v is none: ask for 1s or more, or leave it out for the namespace's default", *r.Lease)
	}
	if r.Wait < 0 || r.Wait > MaxWait {
		return invalid(WaitInvalid, "wait", "wait is 0 to %v, not %v", MaxWait, r.Wait)
	}
	return validateLabels(r.Labels)
}

// looksLike says what was probably sent in place of 32 raw bytes.
func looksLike(sent []byte) string {
	switch len(sent) {
	case hex.EncodedLen(fingerprintSize):
		if _, err := hex.DecodeString(string(sent)); err == nil {
			return ": this looks like hexadecimal sent as bytes"
		}
	case base64.StdEncoding.DecodedLen(hex.EncodedLen(fingerprintSize)):
		// 64 hexadecimal digits, read as base64: they come out of it again.
		if _, err := hex.DecodeString(base64.StdEncoding.EncodeToString(sent)); err == nil {
			return ": this looks like hexadecimal sent as base64"
		}
	}
	return ""
}

// FinishRequest ends a claim: Failure, or Omitted, or Result; none of them is an
// empty result.
type FinishRequest struct {
	Namespace, Key, Token string
	Result                *Result
	Omitted               *Omitted
	Failure               *Failure
}

// Validate reports the first thing that is wrong with the request.
func (r *FinishRequest) Validate() error {
	if err := ValidateName(r.Namespace, r.Key); err != nil {
		return err
	}
	if r.Failure != nil {
		return r.Failure.validate()
	}
	if r.Omitted != nil {
		return r.Omitted.validate()
	}
	if r.Result != nil {
		return r.Result.validate()
	}
	return nil
}

// ExtendRequest asks for more time.
type ExtendRequest struct {
	Namespace, Key, Token string
	Lease                 *time.Duration
}

// Validate reports the first thing that is wrong with the request.
func (r *ExtendRequest) Validate() error {
	if err := ValidateName(r.Namespace, r.Key); err != nil {
		return err
	}
	if r.Lease != nil && *r.Lease <= 0 {
		return invalid(LeaseInvalid, "lease", "a lease of %v is none: ask for 1s or more, or leave it out for the namespace's default", *r.Lease)
	}
	return nil
}

// GetRequest asks what became of a key.
type GetRequest struct {
	Namespace, Key string
	// Cached: an answer that was true within the last BelievedFor will do.
	Cached bool
}

// ResolveRequest is an operator's word on what became of a key.
type ResolveRequest struct {
	Namespace, Key string
	// State is Succeeded (with Result), Failed (with Failure) or Released.
	State   State
	Result  *Result
	Failure *Failure
	Reason  string
}

// Validate reports the first thing that is wrong with the request.
func (r *ResolveRequest) Validate() error {
	if err := ValidateName(r.Namespace, r.Key); err != nil {
		return err
	}
	if err := ValidateReason("reason", r.Reason); err != nil {
		return err
	}
	switch r.State {
	case Succeeded:
		if r.Failure != nil {
			return invalid(RequestInvalid, "failure", "STATE_SUCCEEDED takes a result: leave the failure out, or resolve it as STATE_FAILED")
		}
		if r.Result != nil {
			return r.Result.validate()
		}
		return nil
	case Failed:
		if r.Result != nil || r.Failure == nil {
			return invalid(FailureInvalid, "failure", "STATE_FAILED takes a failure and no result: say how it failed")
		}
		if r.Failure.Class != Terminal && r.Failure.Class != 0 {
			return invalid(FailureInvalid, "failure.class", "a resolved failure is FAILURE_CLASS_TERMINAL; to free the key resolve it as STATE_RELEASED")
		}
		f := *r.Failure
		f.Class = Terminal
		return f.validate()
	case Released:
		if r.Result != nil || r.Failure != nil {
			return invalid(RequestInvalid, "state", "STATE_RELEASED takes neither a result nor a failure: leave them out")
		}
		return nil
	}
	return invalid(RequestInvalid, "state", "say what became of it: state is STATE_SUCCEEDED, STATE_FAILED or STATE_RELEASED")
}

// ForgetRequest makes a key as if it had never been.
type ForgetRequest struct {
	Namespace, Key, Reason string
	Force                  bool
}

// Validate reports the first thing that is wrong with the request.
func (r *ForgetRequest) Validate() error {
	if err := ValidateName(r.Namespace, r.Key); err != nil {
		return err
	}
	return ValidateReason("reason", r.Reason)
}

// ValidateName checks a namespace and a key.
func ValidateName(namespace, key string) error {
	if err := ValidateNamespace(namespace); err != nil {
		return err
	}
	return validateKey(key)
}

// ValidateNamespace checks a namespace against [a-z0-9][a-z0-9._-]{0,62}.
func ValidateNamespace(s string) error {
	const rule = "a namespace is 1-63 characters of a-z, 0-9, '.', '_' and '-', and begins with a letter or digit"
	if s == "" || len(s) > MaxNamespace {
		return invalid(NamespaceInvalid, "namespace", "%s; this has %d bytes", rule, len(s))
	}
	for i := range len(s) {
		c := s[i]
		alnum := 'a' <= c && c <= 'z' || '0' <= c && c <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("._-", rune(c))) {
			return invalid(NamespaceInvalid, "namespace", "%s; byte %d is %q", rule, i, c)
		}
	}
	return nil
}

// brokenKeys are what broken clients send in place of a key.
var brokenKeys = map[string]bool{
	"null": true, "undefined": true, "None": true, "nil": true, "NaN": true,
	"00000000-0000-0000-0000-000000000000": true,
}

func validateKey(s string) error {
	bad := func(format string, args ...any) error {
		return invalid(KeyInvalid, "key", format, args...)
	}
	if s == "" {
		return bad("the key is empty: send the id that the producer gave this piece of work")
	}
	if len(s) > MaxKey {
		return bad("a key has at most %d bytes, this has %d: hash what is longer", MaxKey, len(s))
	}
	if !utf8.ValidString(s) {
		return bad("the key is not valid UTF-8: send text, or the hexadecimal or base64 of bytes")
	}
	for i, c := range s {
		if unicode.In(c, unicode.Cc, unicode.Cf) {
			return bad("a key has no control or format characters, and byte %d is %U: take it out", i, c)
		}
	}
	if strings.TrimSpace(s) != s {
		return bad("a key has no white space at its ends: trim it, the same way in every call")
	}
	if brokenKeys[s] {
		return bad("%q is what a client sends that has no key: send the id that the producer gave this piece of work", s)
	}
	return nil
}

func validateOperation(s string) error {
	if len(s) > MaxOperation {
		return invalid(OperationInvalid, "operation", "an operation has at most %d bytes, this has %d", MaxOperation, len(s))
	}
	for i := range len(s) {
		c := s[i]
		alnum := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		if !alnum && !strings.ContainsRune("._:/-", rune(c)) {
			return invalid(OperationInvalid, "operation", "an operation is made of A-Z a-z 0-9 . _ : / and -; byte %d is %q", i, c)
		}
	}
	return nil
}

func validateText(reason Reason, field, s string, limit int) error {
	if len(s) > limit {
		return invalid(reason, field, "%s has at most %d bytes, this has %d", field, limit, len(s))
	}
	if !utf8.ValidString(s) {
		return invalid(reason, field, "%s is not valid UTF-8: send text", field)
	}
	return nil
}

// ValidateReason checks an operator's reason, which came in this field.
func ValidateReason(field, s string) error {
	if s == "" {
		return invalid(RequestInvalid, field, "say why: the reason is kept in the log")
	}
	return validateText(RequestInvalid, field, s, MaxReason)
}

func validateLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return invalid(LabelsInvalid, "labels", "a key has at most %d labels, not %d: leave some out", MaxLabels, len(labels))
	}
	for name, value := range labels {
		if name == "" || len(name) > MaxLabelName || !utf8.ValidString(name) {
			return invalid(LabelsInvalid, "labels", "a label's name has 1-%d bytes of UTF-8: %.80q", MaxLabelName, name)
		}
		if len(value) > MaxLabelValue || !utf8.ValidString(value) {
			return invalid(LabelsInvalid, "labels", "a label's value has at most %d bytes of UTF-8: label %q has %d", MaxLabelValue, name, len(value))
		}
	}
	return nil
}
