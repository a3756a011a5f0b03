package target

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// What the machine itself allows: no system that is built of these is faster.
var (
	emptyCallKind   = Kind{Name: "grpc-call", About: "an empty gRPC call", Open: openEmptyCall}
	emptyStreamKind = Kind{Name: "grpc-frame", About: "an empty frame of a gRPC stream, and one back", Open: openEmptyStream}
	etcdNestedKind  = Kind{Name: "etcd-nested", About: "one etcd transaction of 100 nested ones, each put if absent", Keys: hundred, Open: openEtcdNested}
	etcdReadKind    = Kind{Name: "etcd-read", About: "one flat etcd transaction that reads 100 keys", Keys: hundred, Open: openEtcdRead}
	redisPingKind   = Kind{Name: "redis-ping", About: "a round trip to Redis", Open: openRedisPing}
)

const perTxn = 100

func hundred(Spec) int { return perTxn }

type emptyCall struct{ *grpc.ClientConn }

func openEmptyCall(ctx context.Context, r *rig.Rig, _ Spec) (Target, error) {
	addr, err := r.Empty(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := dial(addr)
	return emptyCall{conn}, err
}

func (t emptyCall) Prepare(context.Context) error { return nil }
func (t emptyCall) Do(ctx context.Context, _ uint64) error {
	return t.Invoke(ctx, rig.EmptyCall, &emptypb.Empty{}, &emptypb.Empty{})
}

// emptyStream is a stream for each operation in flight.
type emptyStream struct {
	*grpc.ClientConn
	mu   sync.Mutex
	free []grpc.ClientStream
}

func openEmptyStream(ctx context.Context, r *rig.Rig, _ Spec) (Target, error) {
	addr, err := r.Empty(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := dial(addr)
	return &emptyStream{ClientConn: conn}, err
}

func (t *emptyStream) Prepare(context.Context) error { return nil }

func (t *emptyStream) Do(ctx context.Context, _ uint64) error {
	s, err := t.take(ctx)
	if err != nil {
		return err
	}
	var frame emptypb.Empty
	// A stream that failed is not used again.
	if err := s.SendMsg(&frame); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := s.RecvMsg(&frame); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free = append(t.free, s)
	return nil
}

func (t *emptyStream) take(ctx context.Context) (grpc.ClientStream, error) {
	t.mu.Lock()
	if n := len(t.free); n > 0 {
		s := t.free[n-1]
		t.free = t.free[:n-1]
		t.mu.Unlock()
		return s, nil
	}
	t.mu.Unlock()
	// It outlives the slice that opened it; closing the connection ends it.
	return t.NewStream(context.WithoutCancel(ctx), &rig.EmptyStreams, rig.EmptyStream)
}

type etcdMany struct {
	*clientv3.Client
	namer
	value string
	read  bool
}

func openEtcdNested(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
	return openEtcdMany(ctx, r, s, false)
}

func openEtcdRead(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
	return openEtcdMany(ctx, r, s, true)
}

func openEtcdMany(ctx context.Context, r *rig.Rig, s Spec, read bool) (Target, error) {
	at, err := r.Etcd(ctx)
	if err != nil {
		return nil, err
	}
	size, err := recordBytes(ctx, r, s)
	if err != nil {
		return nil, err
	}
	c, err := DialEtcd(at)
	return etcdMany{c, namer{"/bench/" + newNamer(r, s).prefix}, string(result(size)), read}, err
}

func (t etcdMany) Prepare(ctx context.Context) error {
	if !t.read {
		return nil
	}
	for i := range uint64(perTxn) {
		if _, err := t.Put(ctx, t.key(i), t.value); err != nil {
			return err
		}
	}
	return nil
}

func (t etcdMany) Do(ctx context.Context, key uint64) error {
	ops := make([]clientv3.Op, perTxn)
	for i := range ops {
		if t.read {
			ops[i] = clientv3.OpGet(t.key(uint64(i)))
			continue
		}
		k := t.key(key*perTxn + uint64(i))
		ops[i] = clientv3.OpTxn([]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(k), "=", 0)},
			[]clientv3.Op{clientv3.OpPut(k, t.value)}, []clientv3.Op{clientv3.OpGet(k)})
	}
	r, err := t.Txn(ctx).Then(ops...).Commit()
	if err != nil {
		return err
	}
	if len(r.Responses) != perTxn {
		return fmt.Errorf("%d answers to %d", len(r.Responses), perTxn)
	}
	return nil
}

type redisPing struct{ *redis.Client }

func openRedisPing(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
	addr, err := r.Plain(ctx)
	if err != nil {
		return nil, err
	}
	return redisPing{openRedis(addr, s)}, nil
}

func (t redisPing) Prepare(context.Context) error          { return nil }
func (t redisPing) Do(ctx context.Context, _ uint64) error { return t.Ping(ctx).Err() }
