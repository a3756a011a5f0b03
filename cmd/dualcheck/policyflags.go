package main

import (
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// policyFlags sets the fields of a policy for which a flag was given.
type policyFlags struct {
	set map[string]func(*dualcheckv1.Policy)
}

// addPolicyFlags gives a command a flag for each field of a policy; a state
// machine comes from a file alone.
func addPolicyFlags(cmd *cobra.Command) *policyFlags {
	p := &policyFlags{set: map[string]func(*dualcheckv1.Policy){}}
	f := cmd.Flags()

	duration := func(name, usage string, field func(*dualcheckv1.Policy) **durationpb.Duration) {
		value := f.Duration(name, 0, usage)
		p.set[name] = func(to *dualcheckv1.Policy) { *field(to) = durationpb.New(*value) }
	}
	duration("default-lease", "how long a claim is held unless it asks otherwise", func(to *dualcheckv1.Policy) **durationpb.Duration { return &to.DefaultLease })
	duration("max-lease", "how long a claim may ask to be held", func(to *dualcheckv1.Policy) **durationpb.Duration { return &to.MaxLease })
	duration("result-retention", "how long results are kept, from the finish", func(to *dualcheckv1.Policy) **durationpb.Duration { return &to.ResultRetention })
	duration("key-retention", "how long keys are known, from the finish", func(to *dualcheckv1.Policy) **durationpb.Duration { return &to.KeyRetention })
	duration("cache-ttl-min", "how long caches keep what is finished, at least", func(to *dualcheckv1.Policy) **durationpb.Duration { return &to.CacheTtlMin })
	duration("cache-ttl-max", "how long they keep it at most; in between, as long as such keys come back", func(to *dualcheckv1.Policy) **durationpb.Duration { return &to.CacheTtlMax })

	retention := choiceFlag(cmd, "retention-class", "a usual pair of retentions", "retry", "queue", "ledger")
	p.set["retention-class"] = func(to *dualcheckv1.Policy) {
		to.RetentionClass = dualcheckv1.RetentionClass(enumValue(dualcheckv1.RetentionClass_value, "RETENTION_", retention.value))
	}
	takeover := choiceFlag(cmd, "takeover", "who may have a claim that lapsed: the next begin, or nobody", "auto", "never")
	p.set["takeover"] = func(to *dualcheckv1.Policy) {
		to.Takeover = dualcheckv1.Takeover(enumValue(dualcheckv1.Takeover_value, "TAKEOVER_", takeover.value))
	}
	without := choiceFlag(cmd, "without-etcd", "what is answered while etcd cannot decide: replay-only replays what Redis holds, marked stale", "fail-closed", "replay-only")
	p.set["without-etcd"] = func(to *dualcheckv1.Policy) {
		to.WithoutEtcd = dualcheckv1.WithoutEtcd(enumValue(dualcheckv1.WithoutEtcd_value, "WITHOUT_ETCD_", without.value))
	}

	attempts := f.Int32("max-attempts", 0, "how many claims a key may be given before somebody must look; 0: no limit")
	p.set["max-attempts"] = func(to *dualcheckv1.Policy) { to.MaxAttempts = *attempts }
	require := f.Bool("require-fingerprint", false, "refuse a begin without a fingerprint")
	p.set["require-fingerprint"] = func(to *dualcheckv1.Policy) { to.RequireFingerprint = *require }
	bytes := f.Int64("max-result-bytes", 0, "how many bytes a result's body may have to be kept (default 256 KiB, 1 MiB at most)")
	p.set["max-result-bytes"] = func(to *dualcheckv1.Policy) { to.MaxResultBytes = *bytes }
	off := f.Bool("off", false, "observe all calls, write nothing (not served yet)")
	p.set["off"] = func(to *dualcheckv1.Policy) { to.Off = *off }
	rate := f.Int64("rate-per-second", 0, "how many calls a second, about; 0: no limit (not served yet)")
	p.set["rate-per-second"] = func(to *dualcheckv1.Policy) { to.RatePerSecond = *rate }
	records := f.Int64("max-records", 0, "how many records, about; 0: no limit (not served yet)")
	p.set["max-records"] = func(to *dualcheckv1.Policy) { to.MaxRecords = *records }

	thousandths := f.Int32("rollout-thousandths", 0, "how many of a thousand keys are enforced; the rest are observed (not served yet)")
	p.set["rollout-thousandths"] = func(to *dualcheckv1.Policy) { rolloutOf(to).Thousandths = proto.Int32(*thousandths) }
	by := f.String("rollout-by", "", "the label whose hash decides (default the key's) (not served yet)")
	p.set["rollout-by"] = func(to *dualcheckv1.Policy) { rolloutOf(to).By = *by }
	allow := f.StringArray("rollout-allow", nil, "a key, or a value of that label, that is always enforced (may be repeated) (not served yet)")
	p.set["rollout-allow"] = func(to *dualcheckv1.Policy) { rolloutOf(to).Allow = *allow }
	return p
}

func rolloutOf(p *dualcheckv1.Policy) *dualcheckv1.Rollout {
	if p.Rollout == nil {
		p.Rollout = &dualcheckv1.Rollout{}
	}
	return p.Rollout
}

// apply sets in a policy what the command line gives.
func (p *policyFlags) apply(cmd *cobra.Command, to *dualcheckv1.Policy) {
	for name, set := range p.set {
		if cmd.Flags().Changed(name) {
			set(to)
		}
	}
}
