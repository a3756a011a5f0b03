package policy_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
)

func TestSwitchesAreValidated(t *testing.T) {
	for _, c := range []struct {
		sw    policy.Switch
		field string
	}{
		{policy.Switch{Name: policy.BypassRedis, Reason: "r"}, ""},
		{policy.Switch{Name: policy.BypassRedis, On: true, Reason: strings.Repeat("x", claim.MaxReason)}, ""},
		{policy.Switch{Name: policy.BypassMemory, Reason: "r"}, ""},
		{policy.Switch{Reason: "r"}, "switch.name"},
		{policy.Switch{Name: "read-only", Reason: "r"}, "switch.name"},
		{policy.Switch{Name: "Bypass-Redis", Reason: "r"}, "switch.name"},
		{policy.Switch{Name: policy.BypassRedis}, "switch.reason"},
		{policy.Switch{Name: policy.BypassRedis, Reason: "\xff"}, "switch.reason"},
	} {
		err := c.sw.Validate()
		if c.field == "" && err == nil {
			continue
		}
		if e, ok := errors.AsType[*claim.Error](err); !ok || e.Reason != claim.RequestInvalid || e.Field != c.field {
			t.Errorf("%+v: %v, want %q to be blamed", c.sw, err, c.field)
		}
	}
}

// Every switch says what it does, by a name that may stand in a key of etcd.
func TestSwitchesAreDescribed(t *testing.T) {
	for _, name := range policy.SwitchNames() {
		if policy.SwitchMeaning(name) == "" || !policy.HasSwitch(name) || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz-") != "" {
			t.Errorf("switch %q: %q", name, policy.SwitchMeaning(name))
		}
	}
}
