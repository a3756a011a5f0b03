package etcdtxn

import (
	"context"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// PutSwitch stores a switch, whatever it was, and waits until no node acts by what
// was before. It does not go on without its caller: the opposite that the caller puts
// next must stand.
//
// Error: REQUEST_INVALID.
func (s *Store) PutSwitch(ctx context.Context, sw policy.Switch) (policy.Switch, error) {
	if err := sw.Validate(); err != nil {
		return policy.Switch{}, err
	}
	sw.ChangedAt = s.cfg.Wall().UTC()
	value, err := layout.EncodeSwitch(sw)
	if err != nil {
		return policy.Switch{}, err
	}
	key := layout.SwitchOf(sw.Name)
	within, cancel := bounded(ctx)
	defer cancel()
	if _, err := s.govern(within, "switch", key, "switch "+sw.Name, func(found, *claim.View) ([]put, error) {
		return []put{{key: key, value: []byte(value)}}, nil
	}); err != nil {
		return policy.Switch{}, err
	}
	return sw, s.hold(ctx, "the switch is stored, and for 3s a node may still act by what was before: wait so long, or put it again")
}
