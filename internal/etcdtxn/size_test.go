package etcdtxn_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// What a finished record costs etcd, compacted and defragmented: at most twice the
// sum of its own bytes. Prints the figures that the README gives (-v).
func TestBytesPerRecord(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		result int
	}{{"a result of 200 B", 200}, {"no result", 0}, {"a result of 900 B", 900}} {
		t.Run(c.name, func(t *testing.T) {
			own, cost := bytesPerRecord(t, c.result)
			const eightGiB = 8 << 30
			t.Logf("%s: the record's own bytes %d, its key and value %d, in etcd %d; 8 GiB hold %.1f million", c.name, own.fields, own.stored, cost, eightGiB/float64(cost)/1e6)
			if cost > 2*int64(own.fields) {
				t.Errorf("a record of %d bytes of its own costs %d", own.fields, cost)
			}
		})
	}
}

type recordBytes struct{ fields, stored int }

func bytesPerRecord(t *testing.T, result int) (recordBytes, int64) {
	t.Helper()
	const records = 10_000
	c := etcdtest.Start(t, 1)
	client := c.Client()
	ctx := within(t, 2*time.Minute)
	empty := sizeOf(t, c, client)
	var own recordBytes
	var g errgroup.Group
	g.SetLimit(64)
	for i := range records {
		rec := &claim.Record{
			Namespace: "supplier-orders", Key: fmt.Sprintf("0190b3a0-7c4e-7d2a-9f3e-%012x", i), Operation: "order.accept",
			State: claim.Succeeded, Fingerprint: make([]byte, 32), Owner: "orders-worker-17", Attempt: 1, ClaimID: claim.NewID(),
			Previous: claim.PreviousNone, ResultRetention: 24 * time.Hour, KeyRetention: 72 * time.Hour,
			ResultUntil: 1 << 50, KeyUntil: 1 << 51, CreatedAt: time.Now(), ClaimedAt: time.Now(), FinishedAt: time.Now(),
			Result: &claim.Result{Code: 200, ContentType: "application/json", Body: make([]byte, result)}, ResultSize: int64(result),
			Digest: make([]byte, 32), TraceID: make([]byte, 16),
		}
		value, err := layout.EncodeRecord(rec)
		if err != nil {
			t.Fatal(err)
		}
		name := layout.NameOf(rec.Namespace, rec.Key)
		own.stored = len(name.Key) + len(value)
		// What the record says, each field at its plain size: 8 bytes a time or number.
		own.fields = len(rec.Namespace) + len(rec.Key) + len(rec.Operation) + len(rec.Owner) + 32 + 16 + 32 + 16 + 7*8 + 3*8 + len("application/json") + result
		g.Go(func() error {
			_, err := client.Put(ctx, name.Key, string(value))
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	return own, (sizeOf(t, c, client) - empty) / records
}

// sizeOf is the size of etcd's database, compacted and defragmented.
func sizeOf(t *testing.T, c *etcdtest.Cluster, client *clientv3.Client) int64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	now, err := client.Get(ctx, "x")
	if err != nil {
		t.Fatal(err)
	}
	if now.Header.Revision > 1 {
		if _, err := client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.Defragment(ctx, c.Endpoint(0)); err != nil {
		t.Fatal(err)
	}
	status, err := client.Status(ctx, c.Endpoint(0))
	if err != nil {
		t.Fatal(err)
	}
	return status.DbSize
}
