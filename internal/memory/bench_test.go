package memory_test

import (
	"fmt"
	"testing"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/memory"
	"github.com/dualcheck/dualcheck/internal/server"
)

// fixed is a Viewer whose view stands still.
type fixed claim.View

func (f *fixed) View() (claim.View, error) { return claim.View(*f), nil }

// filled is a memory that knows 10,000 keys, with a view that costs nothing.
func filled(b *testing.B) (*memory.Cache, []claim.BeginRequest) {
	w := open(nil)
	view := fixed(*w.then())
	c := memory.New(memory.Config{Bytes: 64 << 20, View: &view, Encode: server.EncodeRecord})
	reqs := make([]claim.BeginRequest, 10_000)
	for i := range reqs {
		reqs[i] = claim.BeginRequest{Namespace: "ns", Key: fmt.Sprint("order-", i), Fingerprint: finished("", "", 0).Fingerprint}
		c.Keep(w.then(), finished(reqs[i].Key, "a result of some length, as they are", 5))
	}
	b.ReportAllocs()
	b.ResetTimer()
	return c, reqs
}

// What a REPLAY from memory costs, all but the call itself.
func BenchmarkHit(b *testing.B) {
	c, reqs := filled(b)
	s := c.Front(&behind{})
	ctx := b.Context()
	for i := range b.N {
		a, err := s.Begin(ctx, &reqs[i%len(reqs)])
		if err != nil || a.Source != claim.SourceMemory {
			b.Fatal(a, err)
		}
	}
}

// The same from all cores, of one key.
func BenchmarkHitOfOneKey(b *testing.B) {
	c, reqs := filled(b)
	s := c.Front(&behind{})
	ctx := b.Context()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if a, err := s.Begin(ctx, &reqs[0]); err != nil || a.Source != claim.SourceMemory {
				b.Error(a, err)
			}
		}
	})
}

// What a Begin of an unknown key costs more.
func BenchmarkMiss(b *testing.B) {
	c, _ := filled(b)
	s := c.Front(&behind{})
	ctx := b.Context()
	req := claim.BeginRequest{Namespace: "ns", Key: "unknown"}
	for b.Loop() {
		if _, err := s.Begin(ctx, &req); err != nil {
			b.Fatal(err)
		}
	}
}

// What a finish costs more: to be shown a record, and that it was committed.
func BenchmarkFinish(b *testing.B) {
	w := open(nil)
	c, _ := filled(b)
	v := w.then()
	for i := range b.N {
		c.Stage(v, finished(fmt.Sprint("k", i), "a result of some length, as they are", 0), nil)(int64(i + 1))
	}
}

// What BenchmarkFinish does besides.
func BenchmarkFinishWithout(b *testing.B) {
	b.ReportAllocs()
	for i := range b.N {
		sink = finished(fmt.Sprint("k", i), "a result of some length, as they are", 0)
	}
}

// What it would cost to encode each at once, and to find its slot.
func BenchmarkEncode(b *testing.B) {
	rec := finished("k", "a result of some length, as they are", 5)
	b.ReportAllocs()
	for b.Loop() {
		server.EncodeRecord(rec)
	}
}

func BenchmarkSlot(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		layout.NameOf("ns", "order-12345")
	}
}

var sink *claim.Record
