package layout

import (
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	storagev1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/storage/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// Format is the newest format of records, policies and switches that can be read,
// and the one that is written.
const Format = 1

var deterministic = proto.MarshalOptions{Deterministic: true}

// EncodeRecord returns the bytes of a record: the same for the same record.
func EncodeRecord(r *claim.Record) ([]byte, error) {
	m := &storagev1.Record{
		Format:            Format,
		Namespace:         r.Namespace,
		Key:               r.Key,
		Operation:         r.Operation,
		State:             uint32(r.State),
		Fingerprint:       r.Fingerprint,
		Owner:             r.Owner,
		Attempt:           uint32(r.Attempt),
		ClaimId:           idBytes(r.ClaimID),
		ReleasedClaimId:   idBytes(r.ReleasedClaimID),
		Previous:          uint32(r.Previous),
		RequestId:         r.RequestID,
		Spent:             r.Spent,
		AttemptsForgiven:  uint32(r.AttemptsForgiven),
		TakeoverNever:     r.TakeoverNever,
		ResultRetentionNs: uint64(r.ResultRetention),
		KeyRetentionNs:    uint64(r.KeyRetention),
		ClaimedNs:         int64(r.Claimed),
		LeaseUntilNs:      int64(r.LeaseUntil),
		ResultUntilNs:     int64(r.ResultUntil),
		KeyUntilNs:        int64(r.KeyUntil),
		CreatedWallNs:     wallNs(r.CreatedAt),
		ClaimedWallNs:     wallNs(r.ClaimedAt),
		FinishedWallNs:    wallNs(r.FinishedAt),
		ResultOmitted:     r.ResultOmitted,
		ResultSize:        r.ResultSize,
		Digest:            r.Digest,
		ClaimRevision:     r.ClaimRevision,
		FinishRevision:    r.FinishRevision,
		FenceBase:         r.FenceBase,
		TraceId:           r.TraceID,
		Labels:            r.Labels,
	}
	if r.Result != nil {
		m.Result = &storagev1.Result{Code: r.Result.Code, ContentType: r.Result.ContentType, Body: r.Result.Body, Metadata: r.Result.Metadata}
	}
	if r.Failure != nil {
		m.Failure = &storagev1.Failure{Class: uint32(r.Failure.Class), Code: r.Failure.Code, Message: r.Failure.Message}
		for _, d := range r.Failure.Details {
			m.Failure.Details = append(m.Failure.Details, &anypb.Any{TypeUrl: d.TypeURL, Value: d.Value})
		}
	}
	if r.Forgotten != nil {
		m.Forgotten = &storagev1.Forgotten{Opened: r.Forgotten.Opened, AtOnce: r.Forgotten.AtOnce, AtWallNs: wallNs(r.Forgotten.At)}
	}
	b, err := deterministic.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	return b, nil
}

// DecodeRecord reads a record that was found where namespace and key belong; both
// empty, wherever it was found.
//
// Errors: RECORD_UNREADABLE, KEY_COLLISION.
func DecodeRecord(value []byte, revision int64, namespace, key string) (*claim.Record, error) {
	var m storagev1.Record
	if err := proto.Unmarshal(value, &m); err != nil {
		return nil, &claim.Error{Reason: claim.RecordUnreadable, Message: "the record is damaged: an operator must look at it", Err: err}
	}
	if m.GetFormat() != Format {
		return nil, claim.Errorf(claim.RecordUnreadable, "the record has format %d, this version reads %d: upgrade this node", m.GetFormat(), Format)
	}
	if (namespace != "" || key != "") && (m.GetNamespace() != namespace || m.GetKey() != key) {
		return nil, claim.Errorf(claim.KeyCollision, "another key has the same hash: use another key")
	}
	if err := sound(&m); err != nil {
		return nil, err
	}
	r := &claim.Record{
		Namespace:        m.GetNamespace(),
		Key:              m.GetKey(),
		Operation:        m.GetOperation(),
		State:            claim.State(m.GetState()),
		Fingerprint:      m.GetFingerprint(),
		Owner:            m.GetOwner(),
		Attempt:          int32(m.GetAttempt()),
		Previous:         claim.Previous(m.GetPrevious()),
		RequestID:        m.GetRequestId(),
		Spent:            m.GetSpent(),
		AttemptsForgiven: int32(m.GetAttemptsForgiven()),
		TakeoverNever:    m.GetTakeoverNever(),
		ResultRetention:  time.Duration(m.GetResultRetentionNs()),
		KeyRetention:     time.Duration(m.GetKeyRetentionNs()),
		Claimed:          claim.Instant(m.GetClaimedNs()),
		LeaseUntil:       claim.Instant(m.GetLeaseUntilNs()),
		ResultUntil:      claim.Instant(m.GetResultUntilNs()),
		KeyUntil:         claim.Instant(m.GetKeyUntilNs()),
		CreatedAt:        wall(m.GetCreatedWallNs()),
		ClaimedAt:        wall(m.GetClaimedWallNs()),
		FinishedAt:       wall(m.GetFinishedWallNs()),
		ResultOmitted:    m.GetResultOmitted(),
		ResultSize:       m.GetResultSize(),
		Digest:           m.GetDigest(),
		Revision:         revision,
		ClaimRevision:    m.GetClaimRevision(),
		FinishRevision:   m.GetFinishRevision(),
		FenceBase:        m.GetFenceBase(),
		TraceID:          m.GetTraceId(),
		Labels:           m.GetLabels(),
	}
	copy(r.ClaimID[:], m.GetClaimId())
	copy(r.ReleasedClaimID[:], m.GetReleasedClaimId())
	if res := m.GetResult(); res != nil {
		r.Result = &claim.Result{Code: res.GetCode(), ContentType: res.GetContentType(), Body: res.GetBody(), Metadata: res.GetMetadata()}
	}
	if f := m.GetFailure(); f != nil {
		r.Failure = &claim.Failure{Class: claim.FailureClass(f.GetClass()), Code: f.GetCode(), Message: f.GetMessage()}
		for _, d := range f.GetDetails() {
			r.Failure.Details = append(r.Failure.Details, claim.Detail{TypeURL: d.GetTypeUrl(), Value: d.GetValue()})
		}
	}
	if g := m.GetForgotten(); g != nil {
		r.Forgotten = &claim.Forgotten{Opened: g.GetOpened(), AtOnce: g.GetAtOnce(), At: wall(g.GetAtWallNs())}
	}
	return r, nil
}

// sound reports what a record says that this version never writes: it would be
// misread, for instance a state cut to eight bits.
func sound(m *storagev1.Record) error {
	switch {
	case m.GetState() > uint32(claim.Failed), m.GetState() < uint32(claim.Pending) && m.GetForgotten() == nil:
		return claim.Errorf(claim.RecordUnreadable, "the record is in state %d, which this version does not know: upgrade this node", m.GetState())
	case m.GetPrevious() > uint32(claim.PreviousLapsed):
		return claim.Errorf(claim.RecordUnreadable, "the claim before ended as %d, which this version does not know: upgrade this node", m.GetPrevious())
	case m.GetFailure().GetClass() > uint32(claim.UnknownOutcome):
		return claim.Errorf(claim.RecordUnreadable, "the failure is of class %d, which this version does not know: upgrade this node", m.GetFailure().GetClass())
	case !isID(m.GetClaimId()), !isID(m.GetReleasedClaimId()),
		m.GetAttempt() > math.MaxInt32, m.GetAttemptsForgiven() > math.MaxInt32,
		m.GetResultRetentionNs() > math.MaxInt64, m.GetKeyRetentionNs() > math.MaxInt64:
		return claim.Errorf(claim.RecordUnreadable, "the record is damaged: an operator must look at it")
	}
	return nil
}

func isID(b []byte) bool { return len(b) == 0 || len(b) == len(claim.ID{}) }

// EncodePolicy returns the bytes of a declared namespace.
func EncodePolicy(n policy.Namespace) ([]byte, error) {
	p := n.Policy
	b, err := deterministic.Marshal(&storagev1.Policy{
		Format:             Format,
		Namespace:          n.Name,
		DefaultLeaseNs:     optional(p.DefaultLease),
		MaxLeaseNs:         optional(p.MaxLease),
		RetentionClass:     uint32(p.Class),
		ResultRetentionNs:  optional(p.ResultRetention),
		KeyRetentionNs:     optional(p.KeyRetention),
		Takeover:           uint32(p.Takeover),
		MaxAttempts:        uint32(p.MaxAttempts),
		RequireFingerprint: p.RequireFingerprint,
		MaxResultBytes:     uint64(p.MaxResultBytes),
		CacheTtlMinNs:      optional(p.CacheTTLMin),
		CacheTtlMaxNs:      optional(p.CacheTTLMax),
		WithoutEtcd:        uint32(p.WithoutEtcd),
		Deleting:           n.Deleting,
	})
	if err != nil {
		return nil, fmt.Errorf("encode policy: %w", err)
	}
	return b, nil
}

// DecodePolicy reads a declared namespace. What this version would not have let in
// is an error: nothing may be decided by a policy that is half understood.
func DecodePolicy(value []byte, revision int64) (policy.Namespace, error) {
	var m storagev1.Policy
	if err := proto.Unmarshal(value, &m); err != nil {
		return policy.Namespace{}, fmt.Errorf("decode policy: %w", err)
	}
	if m.GetFormat() != Format {
		return policy.Namespace{}, fmt.Errorf("decode policy: format %d, this version reads %d", m.GetFormat(), Format)
	}
	n := policy.Namespace{
		Name:     m.GetNamespace(),
		Revision: revision,
		Deleting: m.GetDeleting(),
		Policy: policy.Policy{
			DefaultLease:       present(m.GetDefaultLeaseNs()),
			MaxLease:           present(m.GetMaxLeaseNs()),
			Class:              policy.Class(narrow(m.GetRetentionClass())),
			ResultRetention:    present(m.GetResultRetentionNs()),
			KeyRetention:       present(m.GetKeyRetentionNs()),
			Takeover:           policy.Takeover(narrow(m.GetTakeover())),
			MaxAttempts:        int32(m.GetMaxAttempts()),
			RequireFingerprint: m.GetRequireFingerprint(),
			MaxResultBytes:     int64(m.GetMaxResultBytes()),
			CacheTTLMin:        present(m.GetCacheTtlMinNs()),
			CacheTTLMax:        present(m.GetCacheTtlMaxNs()),
			WithoutEtcd:        policy.WithoutEtcd(narrow(m.GetWithoutEtcd())),
		},
	}
	if err := n.Validate(); err != nil {
		return policy.Namespace{}, fmt.Errorf("decode policy: %w", err)
	}
	return n, nil
}

// narrow keeps a value that eight bits cannot hold one that nobody knows.
func narrow(n uint32) uint8 { return uint8(min(n, math.MaxUint8)) }

func idBytes(id claim.ID) []byte {
	if id == (claim.ID{}) {
		return nil
	}
	return id[:]
}

func wallNs(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func wall(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

func optional(d *time.Duration) uint64 {
	if d == nil {
		return 0
	}
	return uint64(*d)
}

func present(ns uint64) *time.Duration {
	if ns == 0 {
		return nil
	}
	d := time.Duration(ns)
	return &d
}
