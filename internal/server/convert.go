package server

import (
	"encoding/hex"
	"math"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// Requests, from the wire.

func beginRequest(m *dualcheckv1.BeginRequest, traceID []byte) (*claim.BeginRequest, error) {
	lease, err := leaseOf(m.GetLease())
	if err != nil {
		return nil, err
	}
	if m.GetWait() != nil && !m.GetWait().IsValid() {
		return nil, refuse(claim.WaitInvalid, "wait", "wait is no duration: its seconds and nanos have the same sign, and nanos are less than a second")
	}
	req := &claim.BeginRequest{
		Namespace:   m.GetNamespace(),
		Key:         m.GetKey(),
		Operation:   m.GetOperation(),
		Fingerprint: m.GetFingerprint(),
		RequestID:   m.GetRequestId(),
		Owner:       m.GetOwner(),
		Lease:       lease,
		Wait:        m.GetWait().AsDuration(),
		Labels:      m.GetLabels(),
		TraceID:     traceID,
	}
	return req, req.Validate()
}

func completeRequest(m *dualcheckv1.CompleteRequest) (*claim.FinishRequest, error) {
	req := &claim.FinishRequest{Namespace: m.GetNamespace(), Key: m.GetKey(), Token: m.GetToken()}
	switch m.GetOutcome().(type) {
	case *dualcheckv1.CompleteRequest_Result:
		req.Result = resultOf(m.GetResult())
	case *dualcheckv1.CompleteRequest_Omitted:
		req.Omitted = &claim.Omitted{Digest: m.GetOmitted().GetDigest(), Size: m.GetOmitted().GetSize()}
	}
	return req, req.Validate()
}

func failRequest(m *dualcheckv1.FailRequest) (*claim.FinishRequest, error) {
	req := &claim.FinishRequest{Namespace: m.GetNamespace(), Key: m.GetKey(), Token: m.GetToken(), Failure: failureOf(m.GetFailure())}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	return req, showable(m.GetFailure().GetDetails())
}

func extendRequest(m *dualcheckv1.ExtendRequest) (*claim.ExtendRequest, error) {
	lease, err := leaseOf(m.GetLease())
	if err != nil {
		return nil, err
	}
	req := &claim.ExtendRequest{Namespace: m.GetNamespace(), Key: m.GetKey(), Token: m.GetToken(), Lease: lease}
	return req, req.Validate()
}

func resolveRequest(m *dualcheckv1.ResolveRecordRequest) (*claim.ResolveRequest, error) {
	req := &claim.ResolveRequest{Namespace: m.GetNamespace(), Key: m.GetKey(), State: claim.State(number(m.GetState())), Reason: m.GetReason()}
	switch m.GetOutcome().(type) {
	case *dualcheckv1.ResolveRecordRequest_Result:
		req.Result = resultOf(m.GetResult())
	case *dualcheckv1.ResolveRecordRequest_Failure:
		req.Failure = failureOf(m.GetFailure())
	}
	if err := req.Validate(); err != nil {
		return req, err
	}
	return req, showable(m.GetFailure().GetDetails())
}

// leaseOf returns nil for a lease that was left out.
func leaseOf(d *durationpb.Duration) (*time.Duration, error) {
	if d == nil {
		return nil, nil
	}
	if !d.IsValid() {
		return nil, refuse(claim.LeaseInvalid, "lease", "lease is no duration: its seconds and nanos have the same sign, and nanos are less than a second")
	}
	lease := d.AsDuration()
	return &lease, nil
}

// resultOf never returns nil: a result without fields is an empty result.
func resultOf(m *dualcheckv1.Result) *claim.Result {
	return &claim.Result{Code: m.GetCode(), ContentType: m.GetContentType(), Body: m.GetBody(), Metadata: m.GetMetadata()}
}

// failureOf never returns a nil failure: one that was left out has no class, and is
// refused for that.
func failureOf(m *dualcheckv1.Failure) *claim.Failure {
	f := &claim.Failure{Class: claim.FailureClass(number(m.GetClass())), Code: m.GetCode(), Message: m.GetMessage()}
	for _, d := range m.GetDetails() {
		f.Details = append(f.Details, claim.Detail{TypeURL: d.GetTypeUrl(), Value: d.GetValue()})
	}
	return f
}

// number returns an enum's number as the core keeps it; what cannot be one of the
// core's becomes 255, which nothing accepts.
func number[E ~int32](e E) uint8 {
	if e < 0 || e > math.MaxUint8 {
		return math.MaxUint8
	}
	return uint8(e)
}

// Answers, to the wire. wall is this node's wall clock at the answer: deadlines are
// told as wall + what is left, for people.

func beginResponse(a *claim.Answer, wall time.Time) *dualcheckv1.BeginResponse {
	m := &dualcheckv1.BeginResponse{
		Verdict:   dualcheckv1.Verdict(a.Verdict),
		KeyAction: dualcheckv1.KeyAction(a.KeyAction()),
		Claim:     grantMessage(a.Claim, wall),
		Repeat:    a.Repeat,
		Record:    recordMessage(a.Record, a.Now, wall),
		Source:    dualcheckv1.Source(a.Source),
		Revision:  a.Revision,
		Stale:     a.Stale,
		Enforced:  true,
		Detail:    a.Detail,
	}
	if a.Verdict == claim.First {
		m.Record = nil
	}
	if a.RetryAfter > 0 {
		m.RetryAfter = durationpb.New(a.RetryAfter)
	}
	return m
}

func grantMessage(g *claim.Grant, wall time.Time) *dualcheckv1.Claim {
	if g == nil {
		return nil
	}
	return &dualcheckv1.Claim{
		Token:     g.Token,
		Attempt:   g.Attempt,
		Fence:     g.Fence,
		LeaseLeft: durationpb.New(g.Left),
		ExpiresAt: timestamppb.New(wall.Add(g.Left)),
		Previous:  dualcheckv1.Previous(g.Previous),
	}
}

// EncodeRecord returns what is sent of a record wherever it is told, all but its deadlines,
// which depend on when that is: what claim.Record.Encoded is. It returns nil for a record
// that cannot be sent.
func EncodeRecord(r *claim.Record) []byte {
	bare := *r
	bare.LeaseUntil, bare.ResultUntil, bare.KeyUntil = 0, 0, 0
	b, err := proto.Marshal(recordMessage(&bare, 0, time.Time{}))
	if err != nil {
		return nil
	}
	return b
}

// recordMessage tells a record, or the part of one that a verdict shows. Nobody here looks
// into a message that tells an encoded one: who decodes its bytes finds all the fields.
func recordMessage(r *claim.Record, now claim.Instant, wall time.Time) *dualcheckv1.Record {
	if r == nil {
		return nil
	}
	deadline := func(until claim.Instant) *timestamppb.Timestamp { return wallDeadline(until, now, wall) }
	if r.Encoded != nil {
		// What is known to nobody here is sent as it is: the rest of the message.
		m := &dualcheckv1.Record{LeaseUntil: deadline(r.LeaseUntil), ResultUntil: deadline(r.ResultUntil), KeyUntil: deadline(r.KeyUntil)}
		m.ProtoReflect().SetUnknown(r.Encoded)
		return m
	}
	m := &dualcheckv1.Record{
		Namespace:      r.Namespace,
		Key:            r.Key,
		Operation:      r.Operation,
		State:          dualcheckv1.State(r.State),
		Fingerprint:    r.Fingerprint,
		Owner:          r.Owner,
		Attempt:        r.Attempt,
		CreatedAt:      timestamp(r.CreatedAt),
		ClaimedAt:      timestamp(r.ClaimedAt),
		LeaseUntil:     deadline(r.LeaseUntil),
		FinishedAt:     timestamp(r.FinishedAt),
		ResultUntil:    deadline(r.ResultUntil),
		KeyUntil:       deadline(r.KeyUntil),
		ResultOmitted:  r.ResultOmitted,
		ResultSize:     r.ResultSize,
		Failure:        failureMessage(r.Failure),
		Digest:         r.Digest,
		Revision:       r.Revision,
		FinishRevision: r.FinishRevision,
		TraceId:        hex.EncodeToString(r.TraceID),
		Labels:         r.Labels,
	}
	if r.Result != nil {
		m.Result = &dualcheckv1.Result{Code: r.Result.Code, ContentType: r.Result.ContentType, Body: r.Result.Body, Metadata: r.Result.Metadata}
	}
	return m
}

// wallDeadline tells a deadline by the wall clock; nil if there is none.
func wallDeadline(until, now claim.Instant, wall time.Time) *timestamppb.Timestamp {
	if until == 0 || until == claim.Never {
		return nil
	}
	return timestamppb.New(wall.Add(until.Sub(now)))
}

// foundMessage tells a record as a caller may see it now.
func foundMessage(f claim.Found, wall time.Time) *dualcheckv1.Record {
	if f.Record == nil {
		return nil
	}
	return recordMessage(f.Record.At(f.Now), f.Now, wall)
}

func failureMessage(f *claim.Failure) *dualcheckv1.Failure {
	if f == nil {
		return nil
	}
	m := &dualcheckv1.Failure{Class: dualcheckv1.FailureClass(f.Class), Code: f.Code, Message: f.Message}
	for _, d := range f.Details {
		m.Details = append(m.Details, &anypb.Any{TypeUrl: d.TypeURL, Value: d.Value})
	}
	return m
}

func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
