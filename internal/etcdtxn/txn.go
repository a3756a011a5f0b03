package etcdtxn

import (
	"context"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// callTimeout bounds one call to etcd. A leader that died does not tell: the next
// try goes to another member.
const callTimeout = 2 * time.Second

// found is a key as etcd holds it; revision 0: it does not.
type found struct {
	value    []byte
	revision int64
}

// put is one key and what to store there, or that it is to be removed.
type put struct {
	key    string
	value  []byte
	remove bool
}

func get(key []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key}}}
}

// member is one conditional write within a batch: if the key is still at this
// revision (0: absent), all puts happen; else the key is read.
type member struct {
	key      string
	revision int64
	puts     []put
}

// settled is what became of a member: it was written, or there is something else.
type settled struct {
	written bool
	there   found
}

// seeing is what a transaction saw of the guard and the tick, and whether it was
// let through.
type seeing struct {
	admitted bool
	saw      claim.Seen
	revision int64         // etcd's, at the transaction
	sent     time.Duration // when it was sent, by this process's own clock
}

// terms are what every write compares: the guard that this node has applied, and a
// tick not behind the newest that any of its members was decided by, and fewer than ten
// ahead of the oldest.
type terms struct {
	guard          int64
	newest, oldest int64 // versions of the tick
}

func termsOf(batch []*proposal) terms {
	t := terms{guard: batch[0].view.Guard, newest: batch[0].view.Tick.Version, oldest: batch[0].view.Tick.Version}
	for _, p := range batch {
		t.newest, t.oldest = max(t.newest, p.view.Tick.Version), min(t.oldest, p.view.Tick.Version)
	}
	return t
}

func (t terms) compares() []*pb.Compare {
	return []*pb.Compare{
		{Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, Key: []byte(layout.Guard), TargetUnion: &pb.Compare_ModRevision{ModRevision: t.guard}},
		{Target: pb.Compare_VERSION, Result: pb.Compare_GREATER, Key: []byte(layout.Tick), TargetUnion: &pb.Compare_Version{Version: t.newest - 1}},
		{Target: pb.Compare_VERSION, Result: pb.Compare_LESS, Key: []byte(layout.Tick), TargetUnion: &pb.Compare_Version{Version: t.oldest + claim.TickWindow}},
	}
}

// size is what the member takes of a request, in bytes, at most.
func (m member) size() int {
	n := memberBytes + 2*len(m.key)
	for _, p := range m.puts {
		n += len(p.key) + len(p.value)
	}
	return n
}

// depth is how many operations etcd counts in a transaction of these members: as many as
// it has outside, the read of the tick with them, and the most that one has inside.
// Source: checkTxnRequest in etcd's server/etcdserver/api/v3rpc/key.go.
func depth(members []member) int {
	width := 1
	for _, m := range members {
		width = max(width, len(m.puts))
	}
	return len(members) + 1 + width
}

// write sends members as one transaction under the guard. Members must not write
// the same key. On an error nothing is known of any member: see classOf.
func (s *Store) write(ctx context.Context, t terms, members []member) ([]settled, seeing, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	tick := get([]byte(layout.Tick))
	sent := s.cfg.Monotonic()
	answer, err := s.sendBatch(ctx, &pb.TxnRequest{Compare: t.compares(), Failure: []*pb.RequestOp{get([]byte(layout.Guard)), tick}}, members, tick)
	if err != nil {
		s.commits.refused(depth(members), err)
		return nil, seeing{}, err
	}
	see := seeing{admitted: answer.succeeded, revision: answer.revision, sent: sent}
	seen, reads := claim.Seen{}, answer.responses
	if answer.succeeded {
		if len(reads) != len(members)+1 {
			return nil, see, errAnswer
		}
		seen, reads = claim.Seen{Guard: t.guard}, reads[len(members):]
	}
	ops, err := responseOps(reads)
	if err != nil {
		return nil, see, err
	}
	if see.saw, err = sawIn(seen, ops); err != nil || !see.admitted {
		return nil, see, err
	}
	out := make([]settled, len(members))
	for i := range members {
		if nestedSucceeded(answer.responses[i]) {
			out[i].written = true
			continue
		}
		nested, err := responseOps(answer.responses[i : i+1])
		if err != nil {
			return nil, see, err
		}
		lost := nested[0].GetResponseTxn().GetResponses()
		if len(lost) == 0 {
			return nil, see, errAnswer
		}
		out[i].there = firstOf(lost[0].GetResponseRange().GetKvs())
	}
	return out, see, nil
}

// read reads keys flat and linearizably, with the guard and the tick beside them;
// what it returns may be told only under a view that these match.
func (s *Store) read(ctx context.Context, keys []string) ([]found, seeing, error) {
	ops := make([]*pb.RequestOp, 0, len(keys)+2)
	for _, key := range keys {
		ops = append(ops, get([]byte(key)))
	}
	resp, see, err := s.flat(ctx, ops)
	if err != nil {
		return nil, see, err
	}
	out := make([]found, len(keys))
	for i := range keys {
		out[i] = firstOf(resp[i].GetResponseRange().GetKvs())
	}
	return out, see, nil
}

// flat carries out reads with the guard and the tick beside them.
func (s *Store) flat(ctx context.Context, ops []*pb.RequestOp) ([]*pb.ResponseOp, seeing, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	n, sent := len(ops), s.cfg.Monotonic()
	resp, err := s.kv.Txn(ctx, &pb.TxnRequest{Success: append(ops, get([]byte(layout.Guard)), get([]byte(layout.Tick)))}, callOptions...)
	if err != nil {
		s.commits.refused(n+2, err)
		return nil, seeing{}, err
	}
	see := seeing{revision: resp.GetHeader().GetRevision(), sent: sent}
	if see.saw, err = sawIn(claim.Seen{}, resp.GetResponses()[n:]); err != nil {
		return nil, see, err
	}
	return resp.GetResponses()[:n], see, nil
}

func sawIn(seen claim.Seen, responses []*pb.ResponseOp) (claim.Seen, error) {
	for _, r := range responses {
		var err error
		if seen, err = layout.See(seen, r.GetResponseRange().GetKvs()); err != nil {
			return seen, fmt.Errorf("read the tick: %w", err)
		}
	}
	return seen, nil
}

func firstOf(kvs []*mvccpb.KeyValue) found {
	if len(kvs) == 0 {
		return found{}
	}
	return found{value: kvs[0].Value, revision: kvs[0].ModRevision}
}
