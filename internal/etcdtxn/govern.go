package etcdtxn

import (
	"context"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// guardPause is how long after it saw the guard move a node waits before it moves
// it: each move has every write in flight decided again.
const guardPause = 100 * time.Millisecond

// govern settles an operation on a key that all nodes obey, moving the guard with it,
// so that no node writes by what was there before. decide returns what to put over
// what is there, that key first.
func (s *Store) govern(ctx context.Context, kind, key, cause string, decide func(there found, v *claim.View) ([]put, error)) (outcome, error) {
	guard, err := layout.EncodeGuard(cause)
	if err != nil {
		return outcome{}, err
	}
	end, err := s.settle(ctx, &operation{
		kind: kind, key: key, before: s.awaitGuard,
		decide: func(there found, v *claim.View, _ claim.Instant) ([]put, error) {
			puts, err := decide(there, v)
			if err != nil {
				return nil, err
			}
			return append(puts, put{key: layout.Guard, value: []byte(guard)}), nil
		},
	})
	if err != nil {
		return end, err
	}
	// The next call on this node sees it.
	return end, s.cfg.View.CatchUp(ctx, *end.view, claim.Seen{Guard: end.revision, Tick: end.view.Tick})
}

// awaitGuard waits until this node has not seen the guard move for a while.
func (s *Store) awaitGuard(ctx context.Context) error {
	for {
		v, err := s.cfg.View.View()
		if err != nil {
			return err
		}
		left := guardPause - v.GuardAge
		if left <= 0 {
			return nil
		}
		select {
		case <-time.After(left):
		case <-ctx.Done():
			return claim.Unavailable("policies and switches change faster than this node may change them: send the same call again", ctx.Err())
		}
	}
}
