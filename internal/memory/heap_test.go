package memory_test

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/memory"
)

// What it says that records take is what they take of the heap, within a third: as they
// came in, and once they have been told.
func TestBytesAreTrue(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	const records = 10_000
	for _, body := range []int{0, 200, 5000} {
		w := open(func(c *memory.Config) {
			c.Bytes = 1 << 30
			c.Encode = func(rec *claim.Record) []byte { return make([]byte, len(rec.Result.Body)+350) } // about what EncodeRecord makes
		})
		before := heap()
		for i := range records {
			rec := finished(fmt.Sprint("order-", i), string(make([]byte, body)), int64(i+1))
			rec.Labels, rec.Result.Metadata = map[string]string{"supplier": "acme"}, map[string]string{"location": "/orders/1"}
			w.Keep(w.then(), rec)
		}
		w.CleanUp()
		for _, how := range []string{"whole", "encoded"} {
			if n := w.Size(); n.Entries != records || n.Evictions != 0 {
				t.Fatalf("%+v", n)
			}
			took, said := heap()-before, int64(w.Size().Bytes)
			if t.Logf("%d bytes of result, %s: %d bytes a record, said %d", body, how, took/records, said/records); took > said*4/3 || took < said*2/3 {
				t.Errorf("%d bytes of result, %s: %d bytes, said %d", body, how, took, said)
			}
			for i := range records {
				w.begin(t, fmt.Sprint("order-", i))
			}
		}
		runtime.KeepAlive(w)
	}
}
