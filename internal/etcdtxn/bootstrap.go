package etcdtxn

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/cenkalti/backoff/v5"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Bootstrap makes the guard, the tick, the epoch and the secret, if this etcd has
// none: one create-only transaction, which any number of nodes may race and repeat.
// A read before it spares an etcd that is full from being asked to write. It tries
// until ctx ends.
func Bootstrap(ctx context.Context, client *clientv3.Client) error {
	id := claim.NewID()
	var key [32]byte
	rand.Read(key[:]) // never fails
	var ops []clientv3.Op
	for _, m := range []struct {
		key   string
		value func() (string, error)
	}{
		{layout.Guard, func() (string, error) { return layout.EncodeGuard("first start") }},
		{layout.Tick, func() (string, error) { return layout.EncodeTick(0) }},
		{layout.Epoch, func() (string, error) { return layout.EncodeEpoch(id, 0) }},
		{layout.Secret, func() (string, error) { return layout.EncodeSecret(key[:]) }},
	} {
		value, err := m.value()
		if err != nil {
			return err
		}
		ops = append(ops, clientv3.OpPut(m.key, value))
	}
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		there, err := client.Get(call, layout.Guard, clientv3.WithCountOnly())
		if err == nil && there.Count == 0 {
			_, err = client.Txn(call).If(clientv3.Compare(clientv3.CreateRevision(layout.Guard), "=", 0)).Then(ops...).Commit()
		}
		if err != nil && classOf(err) == denied {
			err = backoff.Permanent(err)
		}
		return struct{}{}, err
	}, backoff.WithMaxElapsedTime(0), backoff.WithBackOff(&backoff.ExponentialBackOff{
		InitialInterval: 50 * time.Millisecond, MaxInterval: 2 * time.Second, Multiplier: 2, RandomizationFactor: 0.5,
	}))
	if err != nil {
		return claim.Unavailable("the first start could not be made in etcd", err)
	}
	return nil
}
