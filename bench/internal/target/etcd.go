package target

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

var etcdTxnKind = Kind{Name: "etcd-txn", About: "one etcd transaction a key: put if absent, else get", Open: openEtcdTxn}

// etcdTxn is what one would write with an etcd and no dualcheck.
type etcdTxn struct {
	clients []*clientv3.Client
	namer
	value string
}

// DialEtcd makes a client that logs nothing.
func DialEtcd(addr string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
}

// etcdConnections is what suits etcd's client best here.
const etcdConnections = 1

func openEtcdTxn(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
	at, err := r.Etcd(ctx)
	if err != nil {
		return nil, err
	}
	size, err := recordBytes(ctx, r, s)
	if err != nil {
		return nil, err
	}
	t := etcdTxn{namer: newNamer(r, s), value: string(result(size))}
	t.prefix = "/bench/" + t.prefix
	n := s.Connections
	if n == 0 {
		n = etcdConnections
	}
	for range n {
		c, err := DialEtcd(at)
		if err != nil {
			return nil, errors.Join(err, t.Close())
		}
		t.clients = append(t.clients, c)
	}
	return t, nil
}

func (t etcdTxn) Prepare(context.Context) error { return nil }

func (t etcdTxn) Do(ctx context.Context, key uint64) error {
	k := t.key(key)
	r, err := t.clients[key%uint64(len(t.clients))].Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(k), "=", 0)).
		Then(clientv3.OpPut(k, t.value)).
		Else(clientv3.OpGet(k)).Commit()
	if err != nil {
		return err
	}
	if !r.Succeeded {
		return fmt.Errorf("new key %s was there", k)
	}
	return nil
}

func (t etcdTxn) Close() error {
	var errs []error
	for _, c := range t.clients {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}
