package claim

import "time"

// Policy is what a namespace's policy comes to, with every default filled in, as
// far as claims are concerned.
type Policy struct {
	DefaultLease, MaxLease        time.Duration
	ResultRetention, KeyRetention time.Duration
	TakeoverNever                 bool
	// MaxAttempts is 0 for no limit.
	MaxAttempts        int32
	RequireFingerprint bool
	MaxResultBytes     int64
	// CacheTTLMin and CacheTTLMax bound for how long a finished record is cached: within
	// them it is as long as such keys come back, see package recency.
	CacheTTLMin, CacheTTLMax time.Duration
	// ReplayWithoutEtcd: while etcd cannot decide, what was surely finished is
	// replayed from a cache, marked stale.
	ReplayWithoutEtcd bool
	// Held: the namespace is being deleted; Begins wait for the end of it.
	Held bool
}

// MinLease is the shortest lease there is.
const MinLease = time.Second

// Lease returns the lease that is given to who asks for this one; nil asks for
// the default. What is asked for is brought inside MinLease ... MaxLease.
func (p Policy) Lease(asked *time.Duration) (time.Duration, error) {
	if asked == nil {
		return min(p.DefaultLease, p.MaxLease), nil
	}
	if *asked <= 0 {
		return 0, invalid(LeaseInvalid, "lease", "a lease of %v is none: ask for 1s or more, or leave it out for the default of %v", *asked, p.DefaultLease)
	}
	return min(max(*asked, MinLease), p.MaxLease), nil
}
