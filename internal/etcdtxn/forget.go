package etcdtxn

import (
	"context"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Forget puts a held mark in the record's place, together with a new epoch of its
// slot; waits, on its own clock from the commit's answer, until no node believes
// an older cache; then opens the mark. It goes on though its caller hangs up.
func (s *Store) Forget(ctx context.Context, req *claim.ForgetRequest) (int64, error) {
	return detach(ctx, s, finishWithin, func(ctx context.Context) (int64, error) {
		opened := false
		c, err := s.onRecord(ctx, business{kind: "forget", namespace: req.Namespace, key: req.Key, name: layout.NameOf(req.Namespace, req.Key), takesBack: true},
			func(rec *claim.Record, m claim.Moment) (write *claim.Record, err error) {
				write, opened, err = claim.Forget(rec, req, m)
				return write, err
			})
		if err != nil {
			return 0, err
		}
		// A mark that is open already may be younger than the hold: a forced delete of the
		// namespace opens all at once and holds for them together.
		if err := s.hold(ctx, "the key is marked but not yet free: forget it again, or wait until a Begin has freed it"); err != nil {
			return 0, err
		}
		if opened {
			return c.record.Revision, nil
		}
		return c.record.Revision, s.open(ctx, req.Namespace, req.Key, c.record.Revision)
	})
}

// hold waits, from the answer to a commit on, until no node acts by what was before.
func (s *Store) hold(ctx context.Context, interrupted string) error {
	select {
	case <-time.After(claim.BelievedFor):
		return nil
	case <-ctx.Done():
		return claim.Unavailable(interrupted, ctx.Err())
	}
}

// open opens the held mark of this revision by compare. Whatever else is there is left
// alone, another forget's mark too: it has to be held for its own time.
func (s *Store) open(ctx context.Context, namespace, key string, mark int64) error {
	_, err := s.onRecord(ctx, business{kind: "forget", namespace: namespace, key: key, name: layout.NameOf(namespace, key)},
		func(rec *claim.Record, m claim.Moment) (*claim.Record, error) {
			if rec == nil || rec.Revision != mark || rec.Forgotten == nil || rec.Forgotten.Opened {
				return nil, nil
			}
			return claim.Open(rec), nil
		})
	return err
}
