package server

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// cheapStore gives every Begin a claim and costs next to nothing, so that a benchmark
// measures what is before it. Each Begin has a deadline of its own, as a real one has.
type cheapStore struct{ claim.Store }

func (cheapStore) Begin(ctx context.Context, _ *claim.BeginRequest) (claim.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, 7*time.Second)
	defer cancel()
	return claim.Answer{Verdict: claim.First, Source: claim.SourceEtcd, Revision: 7, Claim: &claim.Grant{Token: "0123456789012345678901234567890123456789012", Attempt: 1, Fence: 7, Left: 3e10, Previous: 1}}, ctx.Err()
}

// quietly is a node as it runs: nothing is logged of calls that go well.
func quietly(c *Config) {
	c.Log = slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelInfo}))
	c.MaxInFlight = 10_000
	c.Store = cheapStore{c.Store}
}

func newKey(i int64) *dualcheckv1.BeginRequest {
	id := fmt.Sprintf("supplier-%012d", i)
	return &dualcheckv1.BeginRequest{Namespace: "a", Key: id, Operation: "payment.capture", Fingerprint: fingerprint("f"), RequestId: id, Owner: "bench"}
}

// BenchmarkBegin is the way through gRPC, the interceptors and the conversions, one call
// of gRPC a key.
func BenchmarkBegin(b *testing.B) {
	for _, flight := range []int{1, 64, 512} {
		b.Run(fmt.Sprintf("%d", flight), func(b *testing.B) {
			w := start(b, quietly)
			defer processor(b)()
			var next atomic.Int64
			b.ReportAllocs()
			b.ResetTimer()
			inFlight(b, flight, func() {
				if _, err := w.Begin(b.Context(), newKey(next.Add(1))); err != nil {
					b.Error(err)
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
		})
	}
}

// processor has the processor's time told that a call took, client and all, which
// tells more than the clock where others are at work.
func processor(b *testing.B) func() {
	used := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	return func() { b.ReportMetric(float64((used()-before).Nanoseconds())/float64(b.N), "cpu-ns/op") }
}

// inFlight calls f b.N times, so many at once.
func inFlight(b *testing.B, flight int, f func()) {
	var left atomic.Int64
	left.Store(int64(b.N))
	done := make(chan struct{})
	for range flight {
		go func() {
			defer func() { done <- struct{}{} }()
			for left.Add(-1) >= 0 {
				f()
			}
		}()
	}
	for range flight {
		<-done
	}
}

// BenchmarkSession is the same over a session: so many calls are kept under way, and
// those whose answers came in one frame are sent in one. The frames are made before, and
// of the answers the bytes are looked at and no more, so that the client costs little.
func BenchmarkSession(b *testing.B) {
	for _, flight := range []int{1, 64, 512} {
		b.Run(fmt.Sprintf("%d", flight), func(b *testing.B) {
			w := start(b, quietly)
			stream, err := w.conn.NewStream(b.Context(), &dualcheckv1.DedupService_ServiceDesc.Streams[0], dualcheckv1.DedupService_Session_FullMethodName, grpc.ForceCodec(rawCodec{}))
			if err != nil {
				b.Fatal(err)
			}
			defer processor(b)()
			b.ReportAllocs()
			b.ResetTimer()
			sent, answered, frames := 0, 0, 0
			send := func(n int) {
				n = min(n, b.N-sent)
				if n == 0 {
					return
				}
				frame := rawMessage{}
				for range n {
					sent++
					frame = appendCall(frame, uint64(sent), newKeyBytes(sent))
				}
				if err := stream.SendMsg(frame); err != nil {
					b.Fatal(err)
				}
			}
			send(flight)
			for answered < b.N {
				var frame rawMessage
				if err := stream.RecvMsg(&frame); err != nil {
					b.Fatal(err)
				}
				n := countAnswers(b, frame)
				answered += n
				frames++
				send(n)
			}
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
			b.ReportMetric(float64(b.N)/float64(frames), "calls/frame")
			if err := stream.CloseSend(); err != nil {
				b.Fatal(err)
			}
			if err := stream.RecvMsg(new(rawMessage)); err != io.EOF {
				b.Fatal(err)
			}
		})
	}
}
