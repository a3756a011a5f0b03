package dualcheck

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// Key names a piece of work. Whoever makes the work makes the key, once, and sends the
// same in every retry.
type Key struct {
	// Namespace is the unit of isolation, policy and permission.
	Namespace string
	// Key names one piece of work within the namespace.
	Key string
	// Operation is what is done to it; kept and compared. May be empty.
	Operation string
	// Fingerprint is the SHA-256 of the canonical request, or nil; kept and compared.
	Fingerprint []byte
}

func (k Key) String() string { return k.Namespace + "/" + k.Key }

// Verdict is the answer to Begin.
type Verdict int32

// What Begin answers.
const (
	First          Verdict = 1 // do the work: Claim is set
	InProgress     Verdict = 2 // another claim is live: come back after RetryAfter
	Replay         Verdict = 3 // it succeeded: Result has what came of it
	ReplayFailure  Verdict = 4 // it failed for good: Failure has how
	Conflict       Verdict = 5 // the key was used for another request or operation
	Expired        Verdict = 6 // it was done; what came of it is no longer kept
	UnknownOutcome Verdict = 7 // nobody may run it until its outcome is resolved
)

var verdicts = [...]string{"UNSPECIFIED", "FIRST", "IN_PROGRESS", "REPLAY", "REPLAY_FAILURE", "CONFLICT", "EXPIRED", "UNKNOWN_OUTCOME"}

func (v Verdict) String() string { return name(verdicts[:], int32(v)) }

// KeyAction is what to do with the key.
type KeyAction int32

// What to do with a key.
const (
	Proceed KeyAction = 1 // do the work under it
	Reuse   KeyAction = 2 // come back with it
	Stop    KeyAction = 3 // do nothing: it is done
	Rotate  KeyAction = 4 // make a new one if the work is still wanted
)

func (a KeyAction) String() string {
	return name([]string{"UNSPECIFIED", "PROCEED", "REUSE", "STOP", "ROTATE"}, int32(a))
}

// Source is who answered.
type Source int32

// Who answers.
const (
	FromEtcd   Source = 1
	FromRedis  Source = 2
	FromMemory Source = 3
)

func (s Source) String() string {
	return name([]string{"UNSPECIFIED", "ETCD", "REDIS", "MEMORY"}, int32(s))
}

// Previous is what became of the claim before.
type Previous int32

// What became of the claim before.
const (
	PreviousNone     Previous = 1 // there was none that counts
	PreviousReleased Previous = 2 // nothing happened under it
	PreviousLapsed   Previous = 3 // whether its work happened is not known
)

func (p Previous) String() string {
	return name([]string{"UNSPECIFIED", "NONE", "RELEASED", "LAPSED"}, int32(p))
}

// Class is what a failure means for its key.
type Class int32

// What a failure means.
const (
	ClassRetryable Class = 1 // nothing happened: the next Begin is First
	ClassTerminal  Class = 2 // it failed for good: stored and replayed
	ClassUnknown   Class = 3 // it may have happened: the key is held until resolved
)

func (c Class) String() string {
	return name([]string{"UNSPECIFIED", "RETRYABLE", "TERMINAL", "UNKNOWN"}, int32(c))
}

func name(names []string, i int32) string {
	if i < 0 || int(i) >= len(names) {
		return fmt.Sprintf("(%d)", i)
	}
	return names[i]
}

// Claim is the right to do the work, given to one caller at a time. One that is made of
// a Key and a Token that were kept can be finished and extended as well.
type Claim struct {
	Key Key
	// Token proves the claim. Keep it secret.
	Token string
	// Attempt is how many claims of this key have been given, this one included.
	Attempt int32
	// Fence grows with each claim of a key: for the caller's own database.
	Fence int64
	// Previous is what became of the claim before.
	Previous Previous
	// ExpiresAt is for people: by the server's wall clock, when the claim was given.
	ExpiresAt time.Time

	given time.Duration // what the answer to Begin said was left
	mu    sync.Mutex
	until time.Time
}

// Until is until when the claim surely holds: counted by this process's monotonic clock
// from when the request that gave or extended it was sent. A Begin that waited long may
// leave little of it: Extend then, as Do does. Zero if it is not known.
func (c *Claim) Until() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.until
}

// LeaseLeft is for how much longer the claim surely holds; 0 or less: it may not.
func (c *Claim) LeaseLeft() time.Duration {
	if until := c.Until(); !until.IsZero() {
		return time.Until(until)
	}
	return 0
}

// extended moves the end, never back.
func (c *Claim) extended(until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if until.After(c.until) {
		c.until = until
	}
}

// Result is what the work produced. It is stored and replayed byte for byte.
type Result struct {
	// Code is the caller's own, for instance an HTTP status.
	Code        int32
	ContentType string
	Body        []byte
	// Metadata are headers worth keeping. Names come back in lower case, and credentials
	// not at all.
	Metadata map[string]string

	// Replayed: this came of an earlier run. Not sent.
	Replayed bool
	// Omitted: Body was not kept, Size is how long it was, and Digest the SHA-256 of the
	// result as the contract defines it. Complete sets it by itself for a result that
	// would not fit a message.
	Omitted bool
	Size    int64
	Digest  []byte
}

// Failure is how the work failed.
type Failure struct {
	Class Class
	// Code is the caller's own, for instance a gRPC code.
	Code int32
	// Message is for people, at most 4 KiB.
	Message string
	// Details are machine-readable, at most 8 KiB in all.
	Details []*anypb.Any
}

// FailureError is a failure that was stored, replayed as it was given. As a gRPC status
// it has the same code, message and details, if its code is one of gRPC's.
type FailureError struct {
	Failure
	KeyAction KeyAction
	Outcome   *Outcome
}

func (e *FailureError) Error() string { return "dualcheck: it failed before: " + e.Message }

// GRPCStatus is the failure as gRPC carries it.
func (e *FailureError) GRPCStatus() *grpcstatus.Status {
	code := e.Code
	if code <= int32(codes.OK) || code > int32(codes.Unauthenticated) {
		code = int32(codes.Unknown)
	}
	return grpcstatus.FromProto(&status.Status{Code: code, Message: e.Message, Details: e.Details})
}

// encoded is a record as it came. It is decoded when it is asked for, each time anew:
// what the caller gets is the caller's own.
type encoded []byte

// errNoRecord: the answer carries no record.
var errNoRecord = errors.New("dualcheck: the answer carries no record")

// Encoded is the record as bytes of dualcheck.v1.Record, nil if there is none. They are
// shared, and not to be changed.
func (r encoded) Encoded() []byte { return r }

// Record decodes the record.
func (r encoded) Record() (*dualcheckv1.Record, error) {
	if len(r) == 0 {
		return nil, errNoRecord
	}
	m := new(dualcheckv1.Record)
	if err := proto.Unmarshal(r, m); err != nil {
		return nil, fmt.Errorf("dualcheck: decoding a record: %w", err)
	}
	return m, nil
}

// Result decodes the result alone. A record without one has an empty result.
func (r encoded) Result() (Result, error) {
	res := Result{Replayed: true}
	if len(r) == 0 {
		return res, errNoRecord
	}
	c := walk(r)
	for c.next() {
		switch c.num {
		case 14:
			in := walk(c.data)
			for in.next() {
				switch in.num {
				case 1:
					res.Code = int32(in.v)
				case 2:
					res.ContentType = string(in.data)
				case 3:
					res.Body = append([]byte(nil), in.data...)
				case 4:
					if res.Metadata == nil {
						res.Metadata = make(map[string]string)
					}
					k, v := entry(in.data)
					res.Metadata[k] = v
				}
			}
			c.bad = c.bad || in.bad
		case 15:
			res.Omitted = c.v != 0
		case 16:
			res.Size = int64(c.v)
		case 18:
			res.Digest = append([]byte(nil), c.data...)
		}
	}
	if c.bad {
		return res, unreadable("a result")
	}
	return res, nil
}

// Failure decodes the failure alone.
func (r encoded) Failure() (*Failure, error) {
	record, err := r.Record()
	if err != nil {
		return nil, err
	}
	f := record.GetFailure()
	return &Failure{Class: Class(f.GetClass()), Code: f.GetCode(), Message: f.GetMessage(), Details: f.GetDetails()}, nil
}

// Outcome is what Begin answered.
type Outcome struct {
	Verdict   Verdict
	KeyAction KeyAction
	// Claim is set with First.
	Claim *Claim
	// Repeat: this is the answer to a call that had been answered before.
	Repeat bool
	// RetryAfter is when to come back.
	RetryAfter time.Duration
	Source     Source
	// Revision is the record's in etcd, where there is one.
	Revision int64
	// Stale: etcd could not be asked, and the namespace allows such answers.
	Stale bool
	// Enforced is false outside the namespace's rollout: the caller is not held back, and
	// Observed is the verdict that it would have had.
	Enforced bool
	Observed Verdict
	// Detail is a sentence for people, where the verdict alone leaves a question.
	Detail string

	encoded
}

// Err is the outcome as Do returns it: nil for First and Replay.
func (o *Outcome) Err() error {
	switch o.Verdict {
	case First, Replay:
		return nil
	case ReplayFailure:
		f, err := o.Failure()
		if err != nil {
			return err
		}
		return &FailureError{Failure: *f, KeyAction: o.KeyAction, Outcome: o}
	}
	return &VerdictError{Verdict: o.Verdict, KeyAction: o.KeyAction, RetryAfter: o.RetryAfter, Detail: o.Detail, Outcome: o}
}

// Stored is what is known of a key, after Get, Complete or Fail.
type Stored struct {
	// Source, Revision and Stale are those of Get.
	Source   Source
	Revision int64
	Stale    bool

	encoded
}

// begun is an outcome and its claim in one piece of memory.
type begun struct {
	Outcome
	claim Claim
}

// decodeBegin reads a BeginResponse to a request that was sent at sent.
func decodeBegin(b []byte, key *Key, sent time.Time) (*Outcome, *Error) {
	o := new(begun)
	c := walk(b)
	for c.next() {
		switch c.num {
		case 1:
			o.Verdict = Verdict(c.v)
		case 2:
			o.KeyAction = KeyAction(c.v)
		case 3:
			o.RetryAfter = duration(c.data)
		case 4:
			o.claim.Key = *key
			if !o.claim.decode(c.data, sent) {
				return nil, unreadable("a claim")
			}
			o.Claim = &o.claim
		case 5:
			o.Repeat = c.v != 0
		case 6:
			o.encoded = c.data
		case 7:
			o.Source = Source(c.v)
		case 8:
			o.Revision = int64(c.v)
		case 9:
			o.Stale = c.v != 0
		case 10:
			o.Observed = Verdict(c.v)
		case 11:
			o.Enforced = c.v != 0
		case 12:
			o.Detail = string(c.data)
		}
	}
	if c.bad || o.Verdict == 0 || o.Verdict == First && o.Claim == nil {
		return nil, unreadable("the answer")
	}
	return &o.Outcome, nil
}

// decode reads a Claim of the contract.
func (c *Claim) decode(b []byte, sent time.Time) bool {
	f := walk(b)
	for f.next() {
		switch f.num {
		case 1:
			c.Token = string(f.data)
		case 2:
			c.Attempt = int32(f.v)
		case 3:
			c.Fence = int64(f.v)
		case 4:
			c.given = duration(f.data)
			c.until = sent.Add(c.given)
		case 5:
			c.ExpiresAt = timestamp(f.data)
		case 6:
			c.Previous = Previous(f.v)
		}
	}
	return !f.bad
}

// decodeExtend reads an ExtendResponse: what is left of the lease.
func decodeExtend(b []byte) (left time.Duration, e *Error) {
	c := walk(b)
	for c.next() {
		if c.num != 1 {
			continue
		}
		in := walk(c.data)
		for in.next() {
			if in.num == 4 {
				left = duration(in.data)
			}
		}
		c.bad = c.bad || in.bad
	}
	if c.bad || left <= 0 {
		return 0, unreadable("the answer")
	}
	return left, nil
}

// decodeStored reads a FinishResponse or a GetResponse.
func decodeStored(b []byte) (*Stored, *Error) {
	s := new(Stored)
	c := walk(b)
	for c.next() {
		switch c.num {
		case 1:
			s.encoded = c.data
		case 2:
			s.Source = Source(c.v)
		case 3:
			s.Revision = int64(c.v)
		case 4:
			s.Stale = c.v != 0
		}
	}
	if c.bad {
		return nil, unreadable("the answer")
	}
	return s, nil
}
