package etcdtxn

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/layout"
)

// CountNames counts the keys of all records in etcd, those that say nothing any more too.
func (s *Store) CountNames(ctx context.Context) (int64, error) {
	resp, err := s.kv.Range(ctx, &pb.RangeRequest{Key: []byte(layout.Records), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(layout.Records)), CountOnly: true}, callOptions...)
	return resp.GetCount(), err
}

// Names returns the keys of records in etcd's order, after one of them, linearizably;
// fewer than asked for: there are no more.
func (s *Store) Names(ctx context.Context, after string, most int) ([]string, error) {
	from := layout.Records
	if after != "" {
		from = after + "\x00"
	}
	resp, err := s.kv.Range(ctx, &pb.RangeRequest{Key: []byte(from), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(layout.Records)), KeysOnly: true, Limit: int64(most)}, callOptions...)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(resp.GetKvs()))
	for i, kv := range resp.GetKvs() {
		names[i] = string(kv.Key)
	}
	return names, nil
}
