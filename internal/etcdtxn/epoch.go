package etcdtxn

import (
	"context"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// fenceStep is what each epoch adds to fences: more revisions than one epoch can
// have, so that fences grow even where etcd's revisions are used again.
const fenceStep = 1 << 40

// RaiseEpoch makes a new epoch, which voids everything cached everywhere, and waits,
// on its own clock from the commit's answer, until no node acts by the old one. It
// goes on though its caller hangs up. Called again, it raises again.
func (s *Store) RaiseEpoch(ctx context.Context, reason string) (claim.ID, error) {
	return detach(ctx, s, finishWithin, func(ctx context.Context) (claim.ID, error) {
		end, err := s.govern(ctx, "epoch", layout.Epoch, "epoch raised: "+reason, func(there found, _ *claim.View) ([]put, error) {
			_, fenceBase, err := layout.DecodeEpoch(there.value)
			if err != nil {
				return nil, &claim.Error{Reason: claim.RecordUnreadable, Message: "the epoch cannot be read by this version: upgrade this node", Err: err}
			}
			next, err := nextEpoch(fenceBase)
			return []put{next}, err
		})
		if err != nil {
			return claim.ID{}, err
		}
		id, _, err := layout.DecodeEpoch(end.there.value)
		if err != nil {
			return claim.ID{}, err
		}
		return id, s.hold(ctx, "the epoch is raised, and for 3s a node may still act by the old one: wait so long, or raise it again")
	})
}

// nextEpoch is the epoch after one with this fence base. Its id is a new one each time
// that it is decided: with one that was in force already, what was cached then would
// come back.
func nextEpoch(fenceBase int64) (put, error) {
	value, err := layout.EncodeEpoch(claim.NewID(), fenceBase+fenceStep)
	return put{key: layout.Epoch, value: []byte(value)}, err
}
