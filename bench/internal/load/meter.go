package load

import (
	"sync/atomic"
	"time"
)

// Meter collects latencies of what is not an operation that Run sends. Many may use it at
// once.
type Meter struct {
	recorder
	failed atomic.Int64
	first  atomic.Pointer[string]
}

// NewMeter is a Meter that has seen nothing.
func NewMeter() *Meter { return &Meter{recorder: recorder{hist: newHistogram()}} }

// Record notes a latency; what is less than a microsecond, or less than nothing, is one.
func (m *Meter) Record(latency time.Duration) { m.record(latency, true) }

// Fail notes that something did not come about.
func (m *Meter) Fail(why string) {
	m.failed.Add(1)
	m.first.CompareAndSwap(nil, &why)
}

// Result is what was noted, as of so long.
func (m *Meter) Result(d time.Duration) Result {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := Result{Ops: m.ops, Errors: m.failed.Load(), Duration: d, hist: newHistogram()}
	r.hist.Merge(m.hist)
	if text := m.first.Load(); text != nil {
		r.FirstError = *text
	}
	return r
}
