package etcdtxn

import (
	"context"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Get reads a record, linearizably and under the guard.
func (s *Store) Get(ctx context.Context, namespace, key string) (claim.Found, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	c, err := s.onRecord(ctx, business{kind: "get", namespace: namespace, key: key, name: layout.NameOf(namespace, key)},
		func(rec *claim.Record, m claim.Moment) (*claim.Record, error) {
			return nil, claim.Known(rec, namespace, m)
		})
	if err != nil {
		return claim.Found{}, err
	}
	return c.told(), nil
}
