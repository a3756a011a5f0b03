package server

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/feed"
)

// dial opens a connection whose streams take so many bytes ahead of their readers.
func (w *world) dial(t *testing.T, window int32) dualcheckv1.WatchServiceClient {
	t.Helper()
	conn, err := grpc.NewClient(w.grpcAddr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(1<<20))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return dualcheckv1.NewWatchServiceClient(conn)
}

// held is how much memory is in use.
func held() int64 {
	for range 3 { // what is pooled goes with the second
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Of a thousand subscribers a hundred never read: the others are told everything and soon,
// what the hundred hold is bounded, and they are ended.
func TestWatchSlowReadersAmongMany(t *testing.T) {
	const (
		readers, idlers, perConn = 900, 100, 100
		batches                  = 10
		limit                    = 12 * time.Second
	)
	w := start(t, func(c *Config) {
		c.watches = defaultWatchLimits()
		c.watches.slow = limit
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	req := &dualcheckv1.WatchRequest{Namespace: "a", IncludeValues: true}
	open := func(client dualcheckv1.WatchServiceClient) grpc.ServerStreamingClient[dualcheckv1.WatchResponse] {
		stream, err := client.Watch(ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		return stream
	}
	idle := w.dial(t, 64<<10)
	var silent []grpc.ServerStreamingClient[dualcheckv1.WatchResponse]
	for range idlers {
		silent = append(silent, open(idle))
	}
	var reading sync.WaitGroup
	var whole atomic.Int64
	var clients []dualcheckv1.WatchServiceClient
	for range readers / perConn {
		clients = append(clients, w.dial(t, 64<<10))
	}
	for i := range readers {
		stream := open(clients[i/perConn])
		reading.Go(func() {
			for got := 0; ; {
				m, err := stream.Recv()
				if err != nil {
					return
				}
				for _, e := range m.GetEvents() {
					if got++; e.GetRevision() != int64(got) {
						t.Errorf("event %d has revision %d", got, e.GetRevision())
					}
				}
				if len(m.GetEvents()) > 0 && got%batches == 0 {
					whole.Add(1)
				}
			}
		})
	}
	eventually(t, "all are subscribed", func() bool { return w.feed.subscribers() == readers+idlers })
	began := time.Now()
	flood := func(n int) { // 240 KiB for each
		whole.Store(0)
		for i := range batches {
			w.feed.tell(feed.Batch{Events: []feed.Event{finished(strings.Repeat("k", 200), int64(n*batches+i+1), 24<<10)}})
		}
		told := time.Now()
		for deadline := time.After(time.Minute); whole.Load() != readers; {
			select {
			case <-deadline:
				t.Fatalf("%d of %d readers were told everything", whole.Load(), readers)
			case <-time.After(5 * time.Millisecond):
			}
		}
		t.Logf("%d readers were told %d events in %v", readers, batches, time.Since(told))
	}
	flood(0)
	// Whoever does not read has as much as gRPC takes ahead of him, and gets no more.
	before := held()
	flood(1)
	grown := held() - before
	t.Logf("then %d who do not read came to hold %d KiB each", idlers, grown/idlers>>10)
	if most := int64(idlers * 60 << 10); grown > most {
		t.Errorf("%d bytes more are held, over %d", grown, most)
	}
	w.metric(t, "dualcheck_watch_slow_total 100")
	if slow := time.Since(began); slow < limit {
		t.Errorf("after %v", slow)
	}
	eventually(t, "who does not read was ended", func() bool { return w.feed.subscribers() == readers })
	w.metric(t, "dualcheck_watch_subscribers 900")
	// Once it reads it learns what it was too late for.
	r := &reader{t: t, stream: silent[0]}
	s := want(t, r.end(), claim.Overloaded, codes.ResourceExhausted)
	if !strings.Contains(s.Message(), "too slowly") || !strings.Contains(s.Message(), "resume token") {
		t.Errorf("%v", s)
	}
	stopped := w.stopping(t, 30*time.Second)
	if took, err := stopped(); err != nil || took > flushMost+10*time.Second {
		t.Errorf("the stop took %v, %v", took, err)
	}
	reading.Wait()
}

// A reader that takes its time between messages, and no more than it has, is kept.
func TestWatchAReaderWithPausesIsKept(t *testing.T) {
	w := start(t, func(c *Config) {
		c.watches = defaultWatchLimits()
		c.watches.slow = time.Second
	})
	client := w.dial(t, 64<<10)
	stream, err := client.Watch(t.Context(), &dualcheckv1.WatchRequest{Namespace: "a", IncludeValues: true})
	if err != nil {
		t.Fatal(err)
	}
	r := &reader{t: t, stream: stream}
	r.next()
	w.feed.tell(feed.Batch{Events: slices.Repeat([]feed.Event{finished("k", 1, 200<<10)}, 12)})
	pause := time.NewTicker(300 * time.Millisecond)
	defer pause.Stop()
	for range 12 { // longer than the limit in all
		<-pause.C
		r.next()
	}
}
