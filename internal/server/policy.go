package server

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// namespaceOf returns what was declared: POLICY_INVALID for what this version does
// not serve, so that nobody relies on what is not there.
func namespaceOf(m *dualcheckv1.Namespace) (policy.Namespace, error) {
	p := m.GetPolicy()
	n := policy.Namespace{Name: m.GetName(), Revision: m.GetRevision(), Policy: policy.Policy{
		Class:              policy.Class(number(p.GetRetentionClass())),
		Takeover:           policy.Takeover(number(p.GetTakeover())),
		MaxAttempts:        p.GetMaxAttempts(),
		RequireFingerprint: p.GetRequireFingerprint(),
		MaxResultBytes:     p.GetMaxResultBytes(),
		WithoutEtcd:        policy.WithoutEtcd(number(p.GetWithoutEtcd())),
	}}
	if err := validName(n.Name, "namespace.name"); err != nil {
		return n, err
	}
	for _, f := range unserved(p) {
		if f.set {
			return n, refuse(claim.PolicyInvalid, "namespace.policy."+f.name, f.name+" is not served by this version: leave it out")
		}
	}
	for _, f := range []struct {
		name string
		from *durationpb.Duration
		to   **time.Duration
	}{
		{"default_lease", p.GetDefaultLease(), &n.Policy.DefaultLease},
		{"max_lease", p.GetMaxLease(), &n.Policy.MaxLease},
		{"result_retention", p.GetResultRetention(), &n.Policy.ResultRetention},
		{"key_retention", p.GetKeyRetention(), &n.Policy.KeyRetention},
		{"cache_ttl_min", p.GetCacheTtlMin(), &n.Policy.CacheTTLMin},
		{"cache_ttl_max", p.GetCacheTtlMax(), &n.Policy.CacheTTLMax},
	} {
		if f.from == nil {
			continue
		}
		d := f.from.AsDuration()
		if !f.from.IsValid() || d <= 0 {
			return n, refuse(claim.PolicyInvalid, "namespace.policy."+f.name, fmt.Sprintf("%s is more than 0, or left out for its default", f.name))
		}
		*f.to = &d
	}
	return n, n.Validate()
}

type policyField struct {
	name string
	set  bool
}

// unserved lists the parts of a policy that this version has no code for. A rollout
// that enforces every call is what happens anyway.
func unserved(p *dualcheckv1.Policy) []policyField {
	r := p.GetRollout()
	partial := r != nil && r.Thousandths != nil && r.GetThousandths() != 1000
	return []policyField{
		{"rollout.thousandths", partial},
		{"rollout.by", r.GetBy() != ""},
		{"rollout.allow", len(r.GetAllow()) > 0},
		{"off", p.GetOff()},
		{"rate_per_second", p.GetRatePerSecond() != 0},
		{"max_records", p.GetMaxRecords() != 0},
		{"state_machine", p.GetStateMachine() != nil},
	}
}

// namespaceMessage tells what was declared, with nothing filled in.
func namespaceMessage(n policy.Namespace) *dualcheckv1.Namespace {
	return &dualcheckv1.Namespace{Name: n.Name, Policy: policyMessage(n.Policy), Revision: n.Revision}
}

func policyMessage(p policy.Policy) *dualcheckv1.Policy {
	return &dualcheckv1.Policy{
		DefaultLease:       duration(p.DefaultLease),
		MaxLease:           duration(p.MaxLease),
		RetentionClass:     dualcheckv1.RetentionClass(p.Class),
		ResultRetention:    duration(p.ResultRetention),
		KeyRetention:       duration(p.KeyRetention),
		Takeover:           dualcheckv1.Takeover(p.Takeover),
		MaxAttempts:        p.MaxAttempts,
		RequireFingerprint: p.RequireFingerprint,
		MaxResultBytes:     p.MaxResultBytes,
		CacheTtlMin:        duration(p.CacheTTLMin),
		CacheTtlMax:        duration(p.CacheTTLMax),
		WithoutEtcd:        dualcheckv1.WithoutEtcd(p.WithoutEtcd),
	}
}

func duration(d *time.Duration) *durationpb.Duration {
	if d == nil {
		return nil
	}
	return durationpb.New(*d)
}
