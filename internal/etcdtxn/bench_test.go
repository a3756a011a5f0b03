package etcdtxn_test

import (
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
)

// BenchmarkBegin gives claims on new keys with so many callers at once, on a durable etcd
// in the same process, and finishes them.
func BenchmarkBegin(b *testing.B) {
	c := etcdtest.Start(b, 1, func(e *embed.Config) { e.UnsafeNoFsync = false })
	n := startNode(b, c.Client(), options{keeps: true})
	for _, callers := range []int{1, 16, 64, 512} {
		b.Run(strconv.Itoa(callers), func(b *testing.B) {
			b.ReportAllocs()
			ctx := within(b, 10*time.Minute)
			var next atomic.Int64
			var running sync.WaitGroup
			run := time.Now().UnixNano()
			for range callers {
				running.Go(func() {
					for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
						req := claim.BeginRequest{Namespace: "bench", Key: strconv.FormatInt(run+i, 36), Operation: "bench.begin", RequestID: "r", Owner: "o"}
						if a, err := n.Begin(ctx, &req); err != nil || a.Verdict != claim.First {
							b.Errorf("%v %v", a.Verdict, err)
							return
						}
					}
				})
			}
			running.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
		})
	}
}
