package etcdtxn

import (
	"context"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Resolve carries out an operator's word on what became of a key.
func (s *Store) Resolve(ctx context.Context, req *claim.ResolveRequest) (claim.Found, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	c, err := s.onRecord(ctx, business{kind: "resolve", namespace: req.Namespace, key: req.Key, name: layout.NameOf(req.Namespace, req.Key)},
		func(rec *claim.Record, m claim.Moment) (*claim.Record, error) {
			_, write, err := claim.Resolve(rec, req, m)
			return write, err
		})
	if err != nil {
		return claim.Found{}, err
	}
	return c.told(), nil
}
