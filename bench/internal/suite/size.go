package suite

import (
	"context"
	"fmt"
	"strconv"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
	"github.com/dualcheck/dualcheck/bench/internal/target"
)

const (
	bytesGoal = 0.5
	// sizeTimeout bounds a compaction and a defragmentation.
	sizeTimeout = 2 * time.Minute
)

// bytesPerRecord fills an etcd that holds nothing else with whole lives, and compares
// what its database grew by with the bytes that callers gave or were told.
func (r *Runner) bytesPerRecord(ctx context.Context) (GoalRow, error) {
	row := GoalRow{ID: bytesPerRecord, Goal: bytesGoal, Unit: "B/record", Rounds: []GoalRound{}}
	apart := r.Rig.At(rig.Site{Name: "apart", Bare: true})
	defer apart.CloseSite()
	node, err := apart.Node(ctx)
	if err != nil {
		return row, err
	}
	at, err := apart.Etcd(ctx)
	if err != nil {
		return row, err
	}
	etcd, err := target.DialEtcd(at)
	if err != nil {
		return row, err
	}
	defer etcd.Close()
	empty, err := settled(ctx, etcd, at)
	if err != nil {
		return row, err
	}
	n := r.Options.Life
	key := func(i uint64) string { return "po-" + strconv.FormatUint(4_711_000_000+i, 10) }
	if err := target.Fill(ctx, node.GRPC, key, n, target.Result(r.Options.ResultBytes)); err != nil {
		return row, err
	}
	full, err := settled(ctx, etcd, at)
	if err != nil {
		return row, err
	}
	own := target.OwnBytes(key(0), r.Options.ResultBytes)
	row.Ours, row.Rival = round(float64(full.DbSizeInUse-empty.DbSizeInUse)/float64(n)), float64(own)
	row.Ratio = round(row.Rival / row.Ours)
	row.Met = row.Rival/row.Ours >= bytesGoal
	row.Rounds = append(row.Rounds, GoalRound{row.Ours, row.Rival, row.Ratio})
	row.Note = fmt.Sprintf("%d lives with %d B of result, compacted and defragmented: in use %d B, on disk %d B; a record's own bytes are %d",
		n, r.Options.ResultBytes, full.DbSizeInUse-empty.DbSizeInUse, full.DbSize-empty.DbSize, own)
	r.Progress.Say("%s: %s", row.ID, row.Note)
	return row, nil
}

// settled compacts and defragments etcd and tells its size.
func settled(ctx context.Context, c *clientv3.Client, at string) (*clientv3.StatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, sizeTimeout)
	defer cancel()
	now, err := c.Get(ctx, "-")
	if err != nil {
		return nil, err
	}
	if _, err := c.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		return nil, fmt.Errorf("compact: %w", err)
	}
	if _, err := c.Defragment(ctx, at); err != nil {
		return nil, fmt.Errorf("defragment: %w", err)
	}
	return c.Status(ctx, at)
}
