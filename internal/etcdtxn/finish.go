package etcdtxn

import (
	"context"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Finish carries out a Complete or a Fail. On the node that gave the claim it is
// one conditional put; elsewhere the record is read first. Once it has been
// accepted it goes on for 30 s though its caller hangs up.
func (s *Store) Finish(ctx context.Context, req *claim.FinishRequest) (claim.Found, error) {
	name, id, err := s.holder(req.Namespace, req.Key, req.Token)
	if err != nil {
		return claim.Found{}, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	return detach(call, s, finishWithin, func(ctx context.Context) (claim.Found, error) {
		var began claim.Instant
		c, err := s.onRecord(ctx, business{kind: "finish", urgent: true, namespace: req.Namespace, key: req.Key, name: name, id: id, guess: s.recall(name, id)},
			func(rec *claim.Record, m claim.Moment) (*claim.Record, error) {
				if rec != nil {
					began = rec.Claimed
				}
				_, write, err := claim.Finish(rec, id, req, m)
				return write, err
			})
		if err != nil {
			return claim.Found{}, err
		}
		s.claims.remove(name.Key)
		if c.written && c.record.State.Finished() && began != 0 {
			s.took(req.Namespace, c.now.Sub(began))
		}
		return c.told(), nil
	})
}

// Extend moves the claim's deadline.
func (s *Store) Extend(ctx context.Context, req *claim.ExtendRequest) (*claim.Grant, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	name, id, err := s.holder(req.Namespace, req.Key, req.Token)
	if err != nil {
		return nil, err
	}
	var lease time.Duration
	c, err := s.onRecord(ctx, business{kind: "extend", urgent: true, namespace: req.Namespace, key: req.Key, name: name, id: id, guess: s.recall(name, id)},
		func(rec *claim.Record, m claim.Moment) (write *claim.Record, err error) {
			if lease, err = m.Policy.Lease(req.Lease); err != nil {
				return nil, err
			}
			_, write, err = claim.Extend(rec, id, req, m)
			return write, err
		})
	if err != nil {
		return nil, err
	}
	if c.written {
		s.remember(name, c)
	} else {
		lease = 0 // the deadline is later than was asked for: tell what is left
	}
	grant := c.record.Grant(lease, s.elapsed(c.outcome))
	grant.Token = req.Token
	return grant, nil
}

// holder reads a token.
func (s *Store) holder(namespace, key, token string) (layout.Name, claim.ID, error) {
	v, err := s.cfg.View.View()
	if err != nil {
		return layout.Name{}, claim.ID{}, err
	}
	id, err := v.Sealer.Open(namespace, key, token)
	return layout.NameOf(namespace, key), id, err
}

// told is the record as its caller may see it.
func (c concluded) told() claim.Found {
	return claim.Found{Record: c.record.At(c.now), Now: c.now, Revision: c.revision, Source: claim.SourceEtcd}
}
