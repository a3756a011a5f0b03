// Package ingesttest has a DedupService in memory for tests of its clients. It
// judges as the contract says, as far as its clients need it: one namespace policy
// (a default lease, no retention, takeover or not), no wait at the server, no
// batches.
package ingesttest

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// Name names a record.
type Name struct{ Namespace, Key string }

// Service is a DedupService in memory. The zero value works. Set its exported
// fields before its first use.
type Service struct {
	dualcheckv1.UnimplementedDedupServiceServer

	// DefaultLease is 30 s unless set.
	DefaultLease time.Duration
	// TakeoverNever: a claim that lapsed is not given to anyone else.
	TakeoverNever bool
	// MaxResultBytes is how long a body may be to be kept; 0: any.
	MaxResultBytes int
	// Before is called with each request, before it is judged; an error is the
	// answer, and nothing is judged. Calls may overlap.
	Before func(ctx context.Context, request proto.Message) error

	mu      sync.Mutex
	records map[Name]*record
	given   int64
}

type record struct {
	*dualcheckv1.Record
	token     string
	requestID string
	until     time.Time
	previous  dualcheckv1.Previous
}

// Records is a copy of every record, in no told order.
func (s *Service) Records() []*dualcheckv1.Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*dualcheckv1.Record
	for _, r := range s.records {
		all = append(all, proto.CloneOf(r.Record))
	}
	return all
}

// Record is a copy of one record; nil if there is none.
func (s *Service) Record(namespace, key string) *dualcheckv1.Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.records[Name{namespace, key}]; r != nil {
		return proto.CloneOf(r.Record)
	}
	return nil
}

// Lapse ends every live claim's lease.
func (s *Service) Lapse() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.records {
		r.until = time.Time{}
		if r.LeaseUntil != nil {
			r.LeaseUntil = timestamppb.New(time.Now().Add(-12 * time.Second))
		}
	}
}

func (s *Service) before(ctx context.Context, request proto.Message) error {
	if s.Before == nil {
		return ctx.Err()
	}
	if err := s.Before(ctx, request); err != nil {
		return err
	}
	return ctx.Err()
}

func (s *Service) lease(asked *durationpb.Duration) time.Duration {
	switch {
	case asked != nil:
		return asked.AsDuration()
	case s.DefaultLease > 0:
		return s.DefaultLease
	}
	return 30 * time.Second
}

// Begin judges as the contract does.
func (s *Service) Begin(ctx context.Context, q *dualcheckv1.BeginRequest) (*dualcheckv1.BeginResponse, error) {
	if err := s.before(ctx, q); err != nil {
		return nil, err
	}
	if q.GetNamespace() == "" || q.GetKey() == "" {
		return nil, Error(codes.InvalidArgument, "KEY_INVALID", "namespace and key must be given", nil)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	name := Name{q.GetNamespace(), q.GetKey()}
	r := s.records[name]
	if r == nil {
		r = &record{previous: dualcheckv1.Previous_PREVIOUS_NONE, Record: &dualcheckv1.Record{
			Namespace: name.Namespace, Key: name.Key, CreatedAt: timestamppb.New(now),
		}}
		if s.records == nil {
			s.records = map[Name]*record{}
		}
		s.records[name] = r
		return s.claim(r, q, now), nil
	}
	if differ(r.Fingerprint, q.GetFingerprint()) || differ([]byte(r.Operation), []byte(q.GetOperation())) {
		return &dualcheckv1.BeginResponse{
			Verdict:   dualcheckv1.Verdict_VERDICT_CONFLICT,
			KeyAction: dualcheckv1.KeyAction_KEY_ACTION_ROTATE,
			Record:    &dualcheckv1.Record{CreatedAt: r.CreatedAt},
			Enforced:  true,
		}, nil
	}
	answer := &dualcheckv1.BeginResponse{Source: dualcheckv1.Source_SOURCE_ETCD, Enforced: true, Revision: r.Revision}
	switch r.State {
	case dualcheckv1.State_STATE_SUCCEEDED:
		answer.Verdict, answer.KeyAction = dualcheckv1.Verdict_VERDICT_REPLAY, dualcheckv1.KeyAction_KEY_ACTION_STOP
		answer.Record = proto.CloneOf(r.Record)
	case dualcheckv1.State_STATE_FAILED:
		answer.Verdict, answer.KeyAction = dualcheckv1.Verdict_VERDICT_REPLAY_FAILURE, dualcheckv1.KeyAction_KEY_ACTION_ROTATE
		answer.Record = proto.CloneOf(r.Record)
	case dualcheckv1.State_STATE_RELEASED:
		r.previous = dualcheckv1.Previous_PREVIOUS_RELEASED
		return s.claim(r, q, now), nil
	case dualcheckv1.State_STATE_UNKNOWN:
		answer.Verdict, answer.KeyAction = dualcheckv1.Verdict_VERDICT_UNKNOWN_OUTCOME, dualcheckv1.KeyAction_KEY_ACTION_REUSE
		answer.RetryAfter = durationpb.New(time.Second)
	default:
		left := r.until.Sub(now)
		switch {
		case left > 0 && r.requestID != "" && r.requestID == q.GetRequestId() && r.Owner == q.GetOwner():
			answer.Verdict, answer.KeyAction = dualcheckv1.Verdict_VERDICT_FIRST, dualcheckv1.KeyAction_KEY_ACTION_PROCEED
			answer.Claim, answer.Repeat = claimOf(r, left), true
		case left > 0:
			answer.Verdict, answer.KeyAction = dualcheckv1.Verdict_VERDICT_IN_PROGRESS, dualcheckv1.KeyAction_KEY_ACTION_REUSE
			answer.RetryAfter = durationpb.New(min(left, 50*time.Millisecond))
		case s.TakeoverNever:
			answer.Verdict, answer.KeyAction = dualcheckv1.Verdict_VERDICT_UNKNOWN_OUTCOME, dualcheckv1.KeyAction_KEY_ACTION_REUSE
			answer.RetryAfter = durationpb.New(time.Second)
		default:
			r.previous = dualcheckv1.Previous_PREVIOUS_LAPSED
			return s.claim(r, q, now), nil
		}
	}
	return answer, nil
}

// claim gives a record's next claim.
func (s *Service) claim(r *record, q *dualcheckv1.BeginRequest, now time.Time) *dualcheckv1.BeginResponse {
	s.given++
	lease := s.lease(q.GetLease())
	r.State = dualcheckv1.State_STATE_PENDING
	r.Attempt++
	r.Revision = s.given
	r.token = "token-" + strconv.FormatInt(s.given, 10)
	r.requestID = q.GetRequestId()
	r.until = now.Add(lease)
	r.Owner = q.GetOwner()
	r.Labels = maps.Clone(q.GetLabels())
	r.ClaimedAt, r.LeaseUntil = timestamppb.New(now), timestamppb.New(r.until)
	if len(r.Fingerprint) == 0 {
		r.Fingerprint = slices.Clone(q.GetFingerprint())
	}
	if r.Operation == "" {
		r.Operation = q.GetOperation()
	}
	return &dualcheckv1.BeginResponse{
		Verdict:   dualcheckv1.Verdict_VERDICT_FIRST,
		KeyAction: dualcheckv1.KeyAction_KEY_ACTION_PROCEED,
		Claim:     claimOf(r, lease),
		Source:    dualcheckv1.Source_SOURCE_ETCD,
		Enforced:  true,
		Revision:  r.Revision,
	}
}

func claimOf(r *record, left time.Duration) *dualcheckv1.Claim {
	return &dualcheckv1.Claim{
		Token:     r.token,
		Attempt:   r.Attempt,
		Fence:     r.Revision,
		LeaseLeft: durationpb.New(left),
		ExpiresAt: timestamppb.New(r.until),
		Previous:  r.previous,
	}
}

func differ(a, b []byte) bool { return len(a) > 0 && len(b) > 0 && !bytes.Equal(a, b) }

// Complete stores a result.
func (s *Service) Complete(ctx context.Context, q *dualcheckv1.CompleteRequest) (*dualcheckv1.FinishResponse, error) {
	if err := s.before(ctx, q); err != nil {
		return nil, err
	}
	return s.finish(q.GetNamespace(), q.GetKey(), q.GetToken(), func(r *record) {
		r.State, r.Failure = dualcheckv1.State_STATE_SUCCEEDED, nil
		r.Result = proto.CloneOf(q.GetResult())
		r.ResultSize = int64(len(q.GetResult().GetBody()))
		if s.MaxResultBytes > 0 && r.ResultSize > int64(s.MaxResultBytes) {
			r.ResultOmitted, r.Result.Body = true, nil
		}
		if omitted := q.GetOmitted(); omitted != nil {
			r.ResultOmitted, r.ResultSize, r.Digest = true, omitted.GetSize(), omitted.GetDigest()
		}
	})
}

// Fail ends a claim by the failure's class.
func (s *Service) Fail(ctx context.Context, q *dualcheckv1.FailRequest) (*dualcheckv1.FinishResponse, error) {
	if err := s.before(ctx, q); err != nil {
		return nil, err
	}
	state := map[dualcheckv1.FailureClass]dualcheckv1.State{
		dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE: dualcheckv1.State_STATE_RELEASED,
		dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL:  dualcheckv1.State_STATE_FAILED,
		dualcheckv1.FailureClass_FAILURE_CLASS_UNKNOWN:   dualcheckv1.State_STATE_UNKNOWN,
	}[q.GetFailure().GetClass()]
	if state == dualcheckv1.State_STATE_UNSPECIFIED {
		return nil, Error(codes.InvalidArgument, "FAILURE_INVALID", "a failure needs a class", nil)
	}
	return s.finish(q.GetNamespace(), q.GetKey(), q.GetToken(), func(r *record) {
		r.State, r.Failure = state, proto.CloneOf(q.GetFailure())
	})
}

func (s *Service) finish(namespace, key, token string, end func(*record)) (*dualcheckv1.FinishResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.find(namespace, key, token)
	if err != nil {
		return nil, err
	}
	done := proto.CloneOf(r.Record)
	end(&record{Record: done})
	switch r.State {
	case dualcheckv1.State_STATE_SUCCEEDED, dualcheckv1.State_STATE_FAILED:
		if done.State != r.State || !proto.Equal(done.GetResult(), r.GetResult()) || !proto.Equal(done.GetFailure(), r.GetFailure()) {
			return nil, Error(codes.AlreadyExists, "ALREADY_FINISHED", "the key was finished otherwise",
				map[string]string{"state": r.State.String(), "attempt": fmt.Sprint(r.Attempt)})
		}
		return &dualcheckv1.FinishResponse{Record: proto.CloneOf(r.Record)}, nil
	}
	end(r)
	s.given++
	r.Revision, r.FinishRevision = s.given, s.given
	r.FinishedAt, r.LeaseUntil = timestamppb.Now(), nil
	return &dualcheckv1.FinishResponse{Record: proto.CloneOf(r.Record)}, nil
}

// find is the record whose newest claim has the token.
func (s *Service) find(namespace, key, token string) (*record, error) {
	r := s.records[Name{namespace, key}]
	switch {
	case r == nil:
		return nil, Error(codes.NotFound, "RECORD_NOT_FOUND", "nothing is known of the key", nil)
	case r.token != token:
		return nil, Error(codes.Aborted, "CLAIM_LOST", "a newer claim was given",
			map[string]string{"state": r.State.String(), "attempt": fmt.Sprint(r.Attempt)})
	}
	return r, nil
}

// Extend moves a claim's deadline.
func (s *Service) Extend(ctx context.Context, q *dualcheckv1.ExtendRequest) (*dualcheckv1.ExtendResponse, error) {
	if err := s.before(ctx, q); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.find(q.GetNamespace(), q.GetKey(), q.GetToken())
	if err != nil {
		return nil, err
	}
	if r.State != dualcheckv1.State_STATE_PENDING {
		return nil, Error(codes.Aborted, "CLAIM_LOST", "this claim is not the key's newest, or was ended",
			map[string]string{"state": r.State.String(), "attempt": fmt.Sprint(r.Attempt)})
	}
	now := time.Now()
	if until := now.Add(s.lease(q.GetLease())); until.After(r.until) {
		r.until, r.LeaseUntil = until, timestamppb.New(until)
	}
	return &dualcheckv1.ExtendResponse{Claim: claimOf(r, r.until.Sub(now))}, nil
}

// Get reads a record.
func (s *Service) Get(ctx context.Context, q *dualcheckv1.GetRequest) (*dualcheckv1.GetResponse, error) {
	if err := s.before(ctx, q); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.records[Name{q.GetNamespace(), q.GetKey()}]
	if r == nil {
		return nil, Error(codes.NotFound, "RECORD_NOT_FOUND", "nothing is known of the key", nil)
	}
	return &dualcheckv1.GetResponse{
		Record: proto.CloneOf(r.Record), Source: dualcheckv1.Source_SOURCE_ETCD, Revision: r.Revision,
	}, nil
}

// Error is an error as the server makes them.
func Error(code codes.Code, reason, message string, metadata map[string]string) error {
	s, err := status.New(code, message).WithDetails(&errdetails.ErrorInfo{
		Reason: reason, Domain: "dualcheck", Metadata: metadata,
	})
	if err != nil {
		return status.Error(code, message)
	}
	return s.Err()
}

// Client calls a Service without a network.
type Client struct{ *Service }

// Begin calls Service.Begin.
func (c Client) Begin(ctx context.Context, q *dualcheckv1.BeginRequest, _ ...grpc.CallOption) (*dualcheckv1.BeginResponse, error) {
	a, err := c.Service.Begin(ctx, q)
	return a, asStatus(err)
}

// Complete calls Service.Complete.
func (c Client) Complete(ctx context.Context, q *dualcheckv1.CompleteRequest, _ ...grpc.CallOption) (*dualcheckv1.FinishResponse, error) {
	a, err := c.Service.Complete(ctx, q)
	return a, asStatus(err)
}

// Fail calls Service.Fail.
func (c Client) Fail(ctx context.Context, q *dualcheckv1.FailRequest, _ ...grpc.CallOption) (*dualcheckv1.FinishResponse, error) {
	a, err := c.Service.Fail(ctx, q)
	return a, asStatus(err)
}

// Extend calls Service.Extend.
func (c Client) Extend(ctx context.Context, q *dualcheckv1.ExtendRequest, _ ...grpc.CallOption) (*dualcheckv1.ExtendResponse, error) {
	a, err := c.Service.Extend(ctx, q)
	return a, asStatus(err)
}

// Get calls Service.Get.
func (c Client) Get(ctx context.Context, q *dualcheckv1.GetRequest, _ ...grpc.CallOption) (*dualcheckv1.GetResponse, error) {
	a, err := c.Service.Get(ctx, q)
	return a, asStatus(err)
}

// asStatus makes a context's error the status that a network's client sees.
func asStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.FromContextError(err).Err()
}
