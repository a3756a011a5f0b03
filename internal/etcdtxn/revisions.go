package etcdtxn

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// Revisions returns the ModRevision of each key, 0 for one that is absent, without what it
// holds. Each is linearizable, and all are as of one moment if there are no more than etcd
// allows a transaction. It waits in no line and is behind nobody's claims: who asks paces himself.
func (s *Store) Revisions(ctx context.Context, keys []string) ([]int64, error) {
	revisions := make([]int64, 0, len(keys))
	for len(keys) > 0 {
		n := min(len(keys), max(s.commits.allowed(), 1))
		read, err := s.revisions(ctx, keys[:n])
		if err != nil {
			return nil, err
		}
		revisions, keys = append(revisions, read...), keys[n:]
	}
	return revisions, nil
}

// revisions reads as many as one transaction takes.
func (s *Store) revisions(ctx context.Context, keys []string) ([]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	req := &pb.TxnRequest{Success: make([]*pb.RequestOp, len(keys))}
	for i, key := range keys {
		req.Success[i] = get([]byte(key))
		req.Success[i].GetRequestRange().KeysOnly = true
	}
	began := time.Now()
	resp, err := s.kv.Txn(ctx, req, callOptions...)
	if err != nil {
		s.commits.refused(len(keys), err)
		s.observe("revisions", string(classOf(err)), began)
		return nil, err
	}
	s.observe("revisions", "ok", began)
	if len(resp.GetResponses()) != len(keys) {
		return nil, errAnswer
	}
	revisions := make([]int64, len(keys))
	for i, r := range resp.GetResponses() {
		revisions[i] = firstOf(r.GetResponseRange().GetKvs()).revision
	}
	return revisions, nil
}
