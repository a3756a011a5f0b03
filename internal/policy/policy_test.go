package policy_test

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
)

const day = 24 * time.Hour

// The defaults, as the table of the design has them.
func TestDefaults(t *testing.T) {
	want := policy.Policy{
		DefaultLease: new(30 * time.Second), MaxLease: new(time.Hour),
		Class: policy.Queue, ResultRetention: new(day), KeyRetention: new(3 * day),
		Takeover:       policy.Auto,
		MaxResultBytes: 256 << 10,
		CacheTTLMin:    new(5 * time.Minute), CacheTTLMax: new(2 * time.Hour),
		WithoutEtcd: policy.FailClosed,
	}
	got := policy.Policy{}.WithDefaults()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if again := got.WithDefaults(); !reflect.DeepEqual(again, got) {
		t.Errorf("filled in twice: %+v", again)
	}
	if err := (policy.Namespace{Name: "pay", Policy: got}).Validate(); err != nil {
		t.Errorf("the defaults contradict themselves: %v", err)
	}
}

// What the policy comes to for claims, default by default and as declared.
func TestClaimPolicy(t *testing.T) {
	for _, c := range []struct {
		what string
		n    policy.Namespace
		want claim.Policy
	}{
		{"nothing declared", policy.Namespace{}, claim.Policy{
			DefaultLease: 30 * time.Second, MaxLease: time.Hour, ResultRetention: day, KeyRetention: 3 * day, MaxResultBytes: 256 << 10,
		}},
		{"all declared", policy.Namespace{Deleting: true, Policy: policy.Policy{
			DefaultLease: new(2 * time.Second), MaxLease: new(4 * time.Second), ResultRetention: new(5 * time.Second), KeyRetention: new(6 * time.Second),
			Takeover: policy.NeverTakeOver, MaxAttempts: 7, RequireFingerprint: true, MaxResultBytes: 8,
		}}, claim.Policy{
			DefaultLease: 2 * time.Second, MaxLease: 4 * time.Second, ResultRetention: 5 * time.Second, KeyRetention: 6 * time.Second,
			TakeoverNever: true, MaxAttempts: 7, RequireFingerprint: true, MaxResultBytes: 8, Held: true,
		}},
		{"a default above max_lease counts as max_lease", policy.Namespace{Policy: policy.Policy{DefaultLease: new(time.Minute), MaxLease: new(10 * time.Second)}}, claim.Policy{
			DefaultLease: 10 * time.Second, MaxLease: 10 * time.Second, ResultRetention: day, KeyRetention: 3 * day, MaxResultBytes: 256 << 10,
		}},
		{"also if only max_lease is set", policy.Namespace{Policy: policy.Policy{MaxLease: new(10 * time.Second)}}, claim.Policy{
			DefaultLease: 10 * time.Second, MaxLease: 10 * time.Second, ResultRetention: day, KeyRetention: 3 * day, MaxResultBytes: 256 << 10,
		}},
	} {
		c.want.CacheTTLMin, c.want.CacheTTLMax = 5*time.Minute, 2*time.Hour
		if got := c.n.Claim(); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.what, got, c.want)
		}
	}
}

// The classes, and which retention follows which: explicit ones win; if one is
// set, keys are raised to results and results cut to keys.
func TestRetentions(t *testing.T) {
	for _, c := range []struct {
		class       policy.Class
		result, key *time.Duration
		wantResult  time.Duration
		wantKey     time.Duration
		never       bool
	}{
		{0, nil, nil, day, 3 * day, false},
		{policy.Queue, nil, nil, day, 3 * day, false},
		{policy.Retry, nil, nil, 15 * time.Minute, 15 * time.Minute, false},
		{policy.Ledger, nil, nil, 30 * day, 30 * day, true},

		{policy.Queue, new(time.Hour), nil, time.Hour, 3 * day, false},
		{policy.Queue, new(3 * day), nil, 3 * day, 3 * day, false},
		{policy.Queue, new(4 * day), nil, 4 * day, 4 * day, false},
		{policy.Queue, nil, new(5 * day), day, 5 * day, false},
		{policy.Queue, nil, new(day), day, day, false},
		{policy.Queue, nil, new(2 * time.Second), 2 * time.Second, 2 * time.Second, false},
		{policy.Retry, new(time.Hour), nil, time.Hour, time.Hour, false},
		{policy.Retry, nil, new(time.Hour), 15 * time.Minute, time.Hour, false},
		{policy.Ledger, new(time.Hour), nil, time.Hour, 30 * day, true},
		{policy.Ledger, nil, new(time.Hour), time.Hour, time.Hour, true},

		{policy.Queue, new(time.Second), new(time.Second), time.Second, time.Second, false},
		{policy.Ledger, new(time.Second), new(9 * 365 * day), time.Second, 9 * 365 * day, true},
	} {
		n := policy.Namespace{Name: "pay", Policy: policy.Policy{Class: c.class, ResultRetention: c.result, KeyRetention: c.key}}
		if err := n.Validate(); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
		got := n.Claim()
		if got.ResultRetention != c.wantResult || got.KeyRetention != c.wantKey || got.TakeoverNever != c.never {
			t.Errorf("class %d, %v, %v: results %v, keys %v, never %v; want %v, %v, %v", c.class, c.result, c.key, got.ResultRetention, got.KeyRetention, got.TakeoverNever, c.wantResult, c.wantKey, c.never)
		}
	}
}

// LEDGER is TAKEOVER_NEVER unless set.
func TestTakeoverOfLedgerUnlessSet(t *testing.T) {
	for _, c := range []struct {
		class    policy.Class
		takeover policy.Takeover
		never    bool
	}{
		{policy.Ledger, 0, true}, {policy.Ledger, policy.Auto, false}, {policy.Ledger, policy.NeverTakeOver, true},
		{policy.Queue, 0, false}, {policy.Queue, policy.Auto, false}, {policy.Queue, policy.NeverTakeOver, true},
		{policy.Retry, 0, false}, {0, 0, false},
	} {
		n := policy.Namespace{Policy: policy.Policy{Class: c.class, Takeover: c.takeover}}
		if got := n.Claim().TakeoverNever; got != c.never {
			t.Errorf("class %d, takeover %d: never %v", c.class, c.takeover, got)
		}
	}
}

// cache_ttl: one that is set pulls the other's default along.
func TestCacheTTLs(t *testing.T) {
	for _, c := range []struct {
		min, max         *time.Duration
		wantMin, wantMax time.Duration
	}{
		{nil, nil, 5 * time.Minute, 2 * time.Hour},
		{new(3 * time.Hour), nil, 3 * time.Hour, 3 * time.Hour},
		{nil, new(time.Minute), time.Minute, time.Minute},
		{new(time.Second), new(time.Second), time.Second, time.Second},
	} {
		p := policy.Policy{CacheTTLMin: c.min, CacheTTLMax: c.max}.WithDefaults()
		if *p.CacheTTLMin != c.wantMin || *p.CacheTTLMax != c.wantMax {
			t.Errorf("%v, %v: %v ... %v, want %v ... %v", c.min, c.max, *p.CacheTTLMin, *p.CacheTTLMax, c.wantMin, c.wantMax)
		}
	}
}

// Each bound, reached and passed; what is passed is refused with a sentence that
// names the field.
func TestBounds(t *testing.T) {
	type p = policy.Policy
	for _, c := range []struct {
		field    string
		at, over policy.Policy
	}{
		{"default_lease", p{DefaultLease: new(time.Second)}, p{DefaultLease: new(time.Second - 1)}},
		{"default_lease", p{DefaultLease: new(day)}, p{DefaultLease: new(day + 1)}},
		{"default_lease", p{}, p{DefaultLease: new(time.Duration(0))}},
		{"default_lease", p{}, p{DefaultLease: new(-time.Second)}},
		{"max_lease", p{MaxLease: new(time.Second)}, p{MaxLease: new(time.Second - 1)}},
		{"max_lease", p{MaxLease: new(day)}, p{MaxLease: new(day + 1)}},
		{"result_retention", p{ResultRetention: new(time.Second)}, p{ResultRetention: new(time.Second - 1)}},
		{"result_retention", p{ResultRetention: new(100 * 365 * day)}, p{ResultRetention: new(-time.Second)}},
		{"key_retention", p{KeyRetention: new(time.Second)}, p{KeyRetention: new(time.Second - 1)}},
		{"key_retention", p{KeyRetention: new(100 * 365 * day)}, p{KeyRetention: new(time.Duration(0))}},
		{"key_retention", p{KeyRetention: new(time.Hour), ResultRetention: new(time.Hour)}, p{KeyRetention: new(time.Hour - 1), ResultRetention: new(time.Hour)}},
		{"max_attempts", p{MaxAttempts: 1<<31 - 1}, p{MaxAttempts: -1}},
		{"max_result_bytes", p{MaxResultBytes: 1 << 20}, p{MaxResultBytes: 1<<20 + 1}},
		{"max_result_bytes", p{MaxResultBytes: 1}, p{MaxResultBytes: -1}},
		{"cache_ttl_min", p{CacheTTLMin: new(time.Second)}, p{CacheTTLMin: new(time.Second - 1)}},
		{"cache_ttl_max", p{CacheTTLMax: new(time.Second)}, p{CacheTTLMax: new(time.Second - 1)}},
		{"cache_ttl_max", p{CacheTTLMax: new(time.Minute), CacheTTLMin: new(time.Minute)}, p{CacheTTLMax: new(time.Minute - 1), CacheTTLMin: new(time.Minute)}},
		{"retention_class", p{Class: policy.Ledger}, p{Class: policy.Ledger + 1}},
		{"takeover", p{Takeover: policy.NeverTakeOver}, p{Takeover: policy.NeverTakeOver + 1}},
		{"without_etcd", p{WithoutEtcd: policy.ReplayOnly}, p{WithoutEtcd: policy.ReplayOnly + 1}},
	} {
		if err := (policy.Namespace{Name: "pay", Policy: c.at}).Validate(); err != nil {
			t.Errorf("%s, reached: %v", c.field, err)
		}
		err := policy.Namespace{Name: "pay", Policy: c.over}.Validate()
		e, ok := err.(*claim.Error)
		if !ok || e.Reason != claim.PolicyInvalid || e.Field != "namespace.policy."+c.field {
			t.Errorf("%s, passed: %v", c.field, err)
			continue
		}
		if !strings.Contains(e.Message, c.field) || len(strings.Fields(e.Message)) < 5 {
			t.Errorf("%s, passed: %q is no sentence about it", c.field, e.Message)
		}
	}
}

// The contradictions are told with both values.
func TestContradictionsAreTold(t *testing.T) {
	for _, c := range []struct {
		p    policy.Policy
		want string
	}{
		{policy.Policy{ResultRetention: new(2 * time.Hour), KeyRetention: new(time.Hour)}, "keys must be known for at least as long as results are kept: key_retention 1h0m0s is less than result_retention 2h0m0s"},
		{policy.Policy{CacheTTLMin: new(2 * time.Hour), CacheTTLMax: new(time.Hour)}, "cache_ttl_max 1h0m0s is less than cache_ttl_min 2h0m0s"},
		{policy.Policy{MaxLease: new(25 * time.Hour)}, "max_lease is 24h0m0s at most, not 25h0m0s"},
		{policy.Policy{DefaultLease: new(time.Millisecond)}, "default_lease is 1s at least, not 1ms"},
	} {
		err := policy.Namespace{Name: "pay", Policy: c.p}.Validate()
		if e, ok := err.(*claim.Error); !ok || e.Message != c.want {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

func TestNamesOfNamespaces(t *testing.T) {
	for name, want := range map[string]claim.Reason{"pay": "", "": claim.NamespaceInvalid, "Pay": claim.NamespaceInvalid, strings.Repeat("x", 64): claim.NamespaceInvalid} {
		if err := (policy.Namespace{Name: name}).Validate(); claim.ReasonOf(err) != want {
			t.Errorf("%q: %v", name, err)
		}
	}
}
