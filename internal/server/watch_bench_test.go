package server

import (
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// encodedAway is a stream whose messages are encoded and go nowhere.
type encodedAway struct {
	grpc.ServerStreamingServer[dualcheckv1.WatchResponse]
	codec encoding.CodecV2
}

func (s encodedAway) Send(m *dualcheckv1.WatchResponse) error {
	b, err := s.codec.Marshal(m)
	b.Free()
	return err
}

// What an event costs each subscriber who is told it, apart from the network.
func BenchmarkWatchEvents(b *testing.B) {
	var events []feed.Event
	for i := range 100 {
		events = append(events, finished(fmt.Sprintf("order-%032d", i), int64(i+1), 200))
	}
	for _, values := range []bool{false, true} {
		b.Run(fmt.Sprintf("values=%v", values), func(b *testing.B) {
			limits := defaultWatchLimits()
			t := &teller{
				limits: &limits, metrics: telemetry.NewMetrics(telemetry.Build{}), values: values,
				stream: encodedAway{codec: lenientCodec{encoding.GetCodecV2(proto.Name)}}, wait: func() {}, sent: func() {},
			}
			b.ReportAllocs()
			for range b.N {
				if err := t.batch(&feed.Batch{Token: "t", Events: events}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(events)), "ns/event")
		})
	}
}
