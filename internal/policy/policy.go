// Package policy holds what a namespace declares of itself: how long claims and
// answers last, what happens to a lapsed claim, what is required; and the switches of
// the whole cluster.
//
// A declared policy keeps only what was said; defaults are filled in when it is
// used, so that a better default reaches those who never chose. A policy that
// contradicts itself is refused when it is put, with a sentence that says how.
package policy

import (
	"fmt"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Class is a usual pair of retentions. The numbers are stored.
type Class uint8

// The classes; 0 is Queue.
const (
	Retry Class = iota + 1
	Queue
	Ledger
)

// Takeover says what happens to a lapsed claim. The numbers are stored.
type Takeover uint8

// The takeovers; 0 is Auto, or Never under Ledger.
const (
	Auto Takeover = iota + 1
	NeverTakeOver
)

// WithoutEtcd says what is answered while etcd cannot decide. The numbers are
// stored.
type WithoutEtcd uint8

// The answers without etcd; 0 is FailClosed.
const (
	FailClosed WithoutEtcd = iota + 1
	ReplayOnly
)

// Policy is what was declared. A nil duration was not set, nor was a zero.
type Policy struct {
	DefaultLease, MaxLease        *time.Duration
	Class                         Class
	ResultRetention, KeyRetention *time.Duration
	Takeover                      Takeover
	MaxAttempts                   int32
	RequireFingerprint            bool
	// MaxResultBytes is 0 for the default.
	MaxResultBytes           int64
	CacheTTLMin, CacheTTLMax *time.Duration
	WithoutEtcd              WithoutEtcd
}

// Namespace is a declared namespace.
type Namespace struct {
	Name   string
	Policy Policy
	// Revision is etcd's ModRevision of the declaration.
	Revision int64
	// Deleting: a forced delete is under way, Begins are held.
	Deleting bool
}

const day = 24 * time.Hour

// retentions of the classes: results, keys.
var retentions = map[Class][2]time.Duration{
	Retry:  {15 * time.Minute, 15 * time.Minute},
	Queue:  {day, 3 * day},
	Ledger: {30 * day, 30 * day},
}

// WithDefaults returns the policy with everything filled in.
func (p Policy) WithDefaults() Policy {
	maxLease := or(p.MaxLease, time.Hour)
	defaultLease := min(or(p.DefaultLease, 30*time.Second), maxLease)
	if p.Class == 0 {
		p.Class = Queue
	}
	if p.Takeover == 0 {
		p.Takeover = Auto
		if p.Class == Ledger {
			p.Takeover = NeverTakeOver
		}
	}
	usual := retentions[p.Class]
	result, key := or(p.ResultRetention, usual[0]), or(p.KeyRetention, usual[1])
	if p.KeyRetention == nil {
		key = max(key, result)
	}
	if p.ResultRetention == nil {
		result = min(result, key)
	}
	if p.MaxResultBytes == 0 {
		p.MaxResultBytes = 256 << 10
	}
	ttlMin, ttlMax := or(p.CacheTTLMin, 5*time.Minute), or(p.CacheTTLMax, 2*time.Hour)
	if p.CacheTTLMin == nil {
		ttlMin = min(ttlMin, ttlMax)
	}
	if p.CacheTTLMax == nil {
		ttlMax = max(ttlMax, ttlMin)
	}
	if p.WithoutEtcd == 0 {
		p.WithoutEtcd = FailClosed
	}
	p.MaxLease, p.DefaultLease = &maxLease, &defaultLease
	p.ResultRetention, p.KeyRetention = &result, &key
	p.CacheTTLMin, p.CacheTTLMax = &ttlMin, &ttlMax
	return p
}

// Claim returns what the policy comes to for claims.
func (n Namespace) Claim() claim.Policy {
	p := n.Policy.WithDefaults()
	return claim.Policy{
		DefaultLease:       *p.DefaultLease,
		MaxLease:           *p.MaxLease,
		ResultRetention:    *p.ResultRetention,
		KeyRetention:       *p.KeyRetention,
		TakeoverNever:      p.Takeover == NeverTakeOver,
		MaxAttempts:        p.MaxAttempts,
		RequireFingerprint: p.RequireFingerprint,
		MaxResultBytes:     p.MaxResultBytes,
		CacheTTLMin:        *p.CacheTTLMin,
		CacheTTLMax:        *p.CacheTTLMax,
		ReplayWithoutEtcd:  p.WithoutEtcd == ReplayOnly,
		Held:               n.Deleting,
	}
}

// Validate reports the first contradiction in what was declared: POLICY_INVALID
// or NAMESPACE_INVALID.
func (n Namespace) Validate() error {
	if err := claim.ValidateNamespace(n.Name); err != nil {
		return err
	}
	p := n.Policy
	for _, d := range []struct {
		field     string
		value     *time.Duration
		low, high time.Duration
	}{
		{"default_lease", p.DefaultLease, claim.MinLease, day},
		{"max_lease", p.MaxLease, claim.MinLease, day},
		{"result_retention", p.ResultRetention, time.Second, 0},
		{"key_retention", p.KeyRetention, time.Second, 0},
		{"cache_ttl_min", p.CacheTTLMin, time.Second, 0},
		{"cache_ttl_max", p.CacheTTLMax, time.Second, 0},
	} {
		switch {
		case d.value == nil:
		case *d.value < d.low:
			return bad(d.field, "%s is %v at least, not %v", d.field, d.low, *d.value)
		case d.high > 0 && *d.value > d.high:
			return bad(d.field, "%s is %v at most, not %v", d.field, d.high, *d.value)
		}
	}
	if p.ResultRetention != nil && p.KeyRetention != nil && *p.KeyRetention < *p.ResultRetention {
		return bad("key_retention", "keys must be known for at least as long as results are kept: key_retention %v is less than result_retention %v", *p.KeyRetention, *p.ResultRetention)
	}
	if p.CacheTTLMin != nil && p.CacheTTLMax != nil && *p.CacheTTLMax < *p.CacheTTLMin {
		return bad("cache_ttl_max", "cache_ttl_max %v is less than cache_ttl_min %v", *p.CacheTTLMax, *p.CacheTTLMin)
	}
	if p.MaxAttempts < 0 {
		return bad("max_attempts", "max_attempts is 0 (no limit) or more, not %d", p.MaxAttempts)
	}
	if p.MaxResultBytes < 0 || p.MaxResultBytes > claim.MaxResult {
		return bad("max_result_bytes", "max_result_bytes is 1 to %d, or 0 for the default, not %d", claim.MaxResult, p.MaxResultBytes)
	}
	if p.Class > Ledger {
		return bad("retention_class", "retention_class %d is not known", p.Class)
	}
	if p.Takeover > NeverTakeOver {
		return bad("takeover", "takeover %d is not known", p.Takeover)
	}
	if p.WithoutEtcd > ReplayOnly {
		return bad("without_etcd", "without_etcd %d is not known", p.WithoutEtcd)
	}
	return nil
}

func or(d *time.Duration, otherwise time.Duration) time.Duration {
	if d == nil {
		return otherwise
	}
	return *d
}

func bad(field, format string, args ...any) error {
	return &claim.Error{Reason: claim.PolicyInvalid, Field: "namespace.policy." + field, Message: fmt.Sprintf(format, args...)}
}
