package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Switch is a lever that all nodes obey.
type Switch struct {
	Name string
	On   bool
	// Reason is why it was last put, and ChangedAt when, for people.
	Reason    string
	ChangedAt time.Time
}

// The names of the switches.
const (
	BypassRedis  = "bypass-redis"
	BypassMemory = "bypass-memory"
)

// switches are those that this version obeys, and what each does while it is on. The
// names are keys in etcd and words of the contract: none is ever changed. What obeys
// one finds it in claim.View.
var switches = map[string]string{
	BypassRedis:  "Redis is neither asked nor written",
	BypassMemory: "the nodes' own memory is neither asked nor filled",
}

// SwitchNames lists the switches that this version obeys.
func SwitchNames() []string { return slices.Sorted(maps.Keys(switches)) }

// HasSwitch reports whether this version obeys a switch of this name.
func HasSwitch(name string) bool { return switches[name] != "" }

// SwitchMeaning is what a switch does while it is on; "" if there is none of this
// name.
func SwitchMeaning(name string) string { return switches[name] }

// Validate reports REQUEST_INVALID for a switch that this version does not obey, and
// for one that is put without a reason.
func (s Switch) Validate() error {
	if !HasSwitch(s.Name) {
		return &claim.Error{Reason: claim.RequestInvalid, Field: "switch.name", Message: fmt.Sprintf("this version has no switch %.40q: it has %s", s.Name, strings.Join(SwitchNames(), ", "))}
	}
	return claim.ValidateReason("switch.reason", s.Reason)
}
