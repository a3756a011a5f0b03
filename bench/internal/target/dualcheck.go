package target

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

var (
	beginKind  = ours("dualcheck", "Begin of new keys", own.first)
	lifeKind   = ours("dualcheck-life", "Begin, and Complete where it is FIRST", own.life)
	replayKind = ours("dualcheck-replay", "Begin of finished keys, each answered with its result", own.replay)
	hotKind    = ours("dualcheck-hot", "Begin of one key that somebody else holds", own.held)
	batchKind  = Kind{Name: "dualcheck-batch", About: "BatchBegin of new keys", Ours: true, Keys: func(s Spec) int { return s.Batch },
		Open: func(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
			n, err := r.Node(ctx)
			if err != nil {
				return nil, err
			}
			conns, err := dialAll(n.GRPC, s.Connections)
			return batch{conns, newNamer(r, s), s.Batch}, err
		}}
)

// own is a node as its callers use it.
type own struct {
	caller
	namer
	node   rig.Node
	spec   Spec
	result []byte
	do     func(own, context.Context, uint64) error
	fill   func(context.Context) error // other records that are to be there
}

func ours(name, about string, do func(own, context.Context, uint64) error) Kind {
	return Kind{Name: name, About: about, Ours: true, Open: func(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
		n, err := r.Node(ctx)
		if err != nil {
			return nil, err
		}
		c, err := newCaller(n, s)
		if err != nil {
			return nil, err
		}
		fill := func(ctx context.Context) error {
			from, to := r.Records(s.Records)
			others := func(i uint64) string { return fmt.Sprintf("other-%s-%d", r.Run(), uint64(from)+i) }
			return Fill(ctx, n.GRPC, others, to-from, result(s.ResultBytes))
		}
		return own{c, newNamer(r, s), n, s, result(s.ResultBytes), do, fill}, nil
	}}
}

func (d own) Prepare(ctx context.Context) error {
	if err := d.fill(ctx); err != nil {
		return err
	}
	if err := d.hold(ctx); err != nil {
		return err
	}
	return Fill(ctx, d.node.GRPC, d.key, int(d.spec.Known), d.result)
}

func (d own) Do(ctx context.Context, key uint64) error { return d.do(d, ctx, key) }

// first begins a key that nobody has begun.
func (d own) first(ctx context.Context, key uint64) error {
	a, err := d.begin(ctx, d.key(key))
	if err != nil {
		return err
	}
	return a.want(dualcheckv1.Verdict_VERDICT_FIRST)
}

// replay begins a key that is finished.
func (d own) replay(ctx context.Context, key uint64) error {
	a, err := d.begin(ctx, d.key(key))
	if err != nil {
		return err
	}
	return d.whole(a)
}

// life does the work if it is to be done.
func (d own) life(ctx context.Context, key uint64) error {
	name := d.key(key)
	a, err := d.begin(ctx, name)
	if err != nil {
		return err
	}
	if key < d.spec.Known {
		return d.whole(a)
	}
	if err := a.want(dualcheckv1.Verdict_VERDICT_FIRST); err != nil {
		return err
	}
	return d.complete(ctx, name, a.token, d.result)
}

// held begins the one key that is held for as long as anything is measured.
func (d own) held(ctx context.Context, _ uint64) error {
	a, err := d.begin(ctx, d.prefix+"held")
	if err != nil {
		return err
	}
	return a.want(dualcheckv1.Verdict_VERDICT_IN_PROGRESS)
}

// hold takes that key.
func (d own) hold(ctx context.Context) error {
	conn, err := dial(d.node.GRPC)
	if err != nil {
		return err
	}
	defer conn.Close()
	req := beginRequest(d.prefix + "held")
	req.RequestId, req.Lease = "hold", durationpb.New(time.Hour) // another call than those that ask
	a, err := dualcheckv1.NewDedupServiceClient(conn).Begin(ctx, req)
	if err != nil {
		return err
	}
	return answerOf(a).want(dualcheckv1.Verdict_VERDICT_FIRST)
}

func (a answer) want(v dualcheckv1.Verdict) error {
	if a.verdict != v {
		return fmt.Errorf("answered %v instead of %v", a.verdict, v)
	}
	return nil
}

// whole looks whether an answer is a replay with all of the result.
func (d own) whole(a answer) error {
	if err := a.want(dualcheckv1.Verdict_VERDICT_REPLAY); err != nil {
		return err
	}
	if a.size != len(d.result) {
		return fmt.Errorf("a replay of %d bytes instead of %d", a.size, len(d.result))
	}
	return nil
}

// batch begins many new keys with one call.
type batch struct {
	conns connections
	namer
	size int
}

func (b batch) Prepare(context.Context) error { return nil }
func (b batch) Close() error                  { return b.conns.Close() }

func (b batch) Do(ctx context.Context, key uint64) error {
	req := &dualcheckv1.BatchBeginRequest{Requests: make([]*dualcheckv1.BeginRequest, b.size)}
	for i := range req.Requests {
		req.Requests[i] = beginRequest(b.key(key*uint64(b.size) + uint64(i)))
	}
	r, err := dualcheckv1.NewDedupServiceClient(b.conns.of(req.Requests[0].Key)).BatchBegin(ctx, req)
	if err != nil {
		return err
	}
	if len(r.GetResponses()) != b.size {
		return fmt.Errorf("%d answers to %d", len(r.GetResponses()), b.size)
	}
	for _, m := range r.GetResponses() {
		if e := m.GetError(); e != nil {
			return errors.New(e.GetMessage())
		}
		if err := answerOf(m.GetBegin()).want(dualcheckv1.Verdict_VERDICT_FIRST); err != nil {
			return err
		}
	}
	return nil
}

// recordBytes is how many etcd holds for a claim of dualcheck: so many have the rivals
// that keep one.
func recordBytes(ctx context.Context, r *rig.Rig, s Spec) (int, error) {
	n, err := r.Node(ctx)
	if err != nil {
		return 0, err
	}
	s.Name += "-sample"
	c, err := newUnary(n, Spec{})
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if _, err := c.begin(ctx, newNamer(r, s).key(0)); err != nil {
		return 0, err
	}
	at, err := r.Etcd(ctx)
	if err != nil {
		return 0, err
	}
	etcd, err := DialEtcd(at)
	if err != nil {
		return 0, err
	}
	defer etcd.Close()
	newest, err := etcd.Get(ctx, "/dualcheck/v1/r/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortDescend), clientv3.WithLimit(1))
	if err != nil {
		return 0, err
	}
	if len(newest.Kvs) == 0 {
		return 0, errors.New("dualcheck holds no record in the rig's etcd")
	}
	return len(newest.Kvs[0].Value), nil
}
