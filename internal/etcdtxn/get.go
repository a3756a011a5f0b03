package etcdtxn

import (
	"context"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Get reads a record, linearizably and under the guard.
func (s *Store) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	c, err := s.onRecord(ctx, business{kind: "get", namespace: req.Namespace, key: req.Key, name: layout.NameOf(req.Namespace, req.Key)},
		func(rec *claim.Record, m claim.Moment) (*claim.Record, error) {
			return nil, claim.Known(rec, req.Namespace, m)
		})
	if err != nil {
		return claim.Found{}, err
	}
	return c.told(), nil
}
