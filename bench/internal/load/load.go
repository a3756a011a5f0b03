// Package load makes calls and measures them.
//
// What always holds: in an open loop a call's latency counts from the moment at which it
// was to be sent, not from when it was, so that a system that stalls cannot hide the calls
// that it kept from being sent. In a closed loop a stalled system is asked less: its
// latencies are those of the calls that were made.
package load

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Op is one operation on the key with a number.
type Op func(ctx context.Context, key uint64) error

const (
	// grace is how long operations may take that were under way at the end.
	grace = 30 * time.Second
	// shards bounds the histograms: workers beyond that share them.
	shards = 64
	// Latencies from a microsecond to two minutes, to three digits.
	lowest, highest, digits = 1, 120_000_000, 3
)

// Plan is how a system is loaded.
type Plan struct {
	// InFlight is how many operations are under way at once; in an open loop, at most.
	InFlight int
	// Rate is how many operations are sent a second; 0: as fast as they are answered.
	Rate float64
	// WarmUp goes before Duration and is not counted.
	WarmUp, Duration time.Duration
	Keys             Keys

	nap func(time.Duration) // nil: that of the system
}

// Result is what came of it.
type Result struct {
	// Ops were answered without an error within Duration; in an open loop, those that
	// were to be sent in it.
	Ops    int64
	Errors int64
	// Missed were due in an open loop and not sent even so long after its end.
	Missed     int64
	FirstError string
	Duration   time.Duration
	hist       *hdrhistogram.Histogram // microseconds
}

// PerSecond is the rate at which operations were answered.
func (r Result) PerSecond() float64 {
	if r.Duration <= 0 {
		return 0
	}
	return float64(r.Ops) / r.Duration.Seconds()
}

// Quantile is a latency in microseconds, such as that of 0.99; 0 if nothing was answered.
func (r Result) Quantile(q float64) float64 {
	if r.hist == nil || r.hist.TotalCount() == 0 {
		return 0
	}
	return float64(r.hist.ValueAtQuantile(q * 100))
}

// Merge is the result of several slices as one.
func Merge(all ...Result) Result {
	sum := Result{hist: newHistogram()}
	for _, r := range all {
		sum.Ops += r.Ops
		sum.Errors += r.Errors
		sum.Missed += r.Missed
		sum.Duration += r.Duration
		if sum.FirstError == "" {
			sum.FirstError = r.FirstError
		}
		if r.hist != nil {
			sum.hist.Merge(r.hist)
		}
	}
	return sum
}

// Run loads a system by the plan. It returns once no operation is under way.
func Run(ctx context.Context, p Plan, op Op) Result {
	ctx, cancel := context.WithTimeout(ctx, p.WarmUp+p.Duration+grace)
	defer cancel()
	began := time.Now()
	r := &run{Plan: p, op: op, counted: began.Add(p.WarmUp), end: began.Add(p.WarmUp + p.Duration)}
	r.recorders = make([]recorder, min(p.InFlight, shards))
	for i := range r.recorders {
		r.recorders[i].hist = newHistogram()
	}
	if p.Rate > 0 {
		r.open(ctx, began)
	} else {
		r.closed(ctx)
	}
	return r.sum()
}

type run struct {
	Plan
	op           Op
	counted, end time.Time // what counts is in between
	recorders    []recorder
	missed       atomic.Int64
	failed       atomic.Int64
	first        atomic.Pointer[string]
}

// recorder is a histogram that a few workers share.
type recorder struct {
	mu   sync.Mutex
	hist *hdrhistogram.Histogram
	ops  int64
	_    [64]byte // a cache line of its own
}

func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(lowest, highest, digits) }

func (r *recorder) record(latency time.Duration, counts bool) {
	us := min(max(latency.Microseconds(), lowest), highest)
	r.mu.Lock()
	_ = r.hist.RecordValue(us) // it is within bounds
	if counts {
		r.ops++
	}
	r.mu.Unlock()
}

// closed keeps InFlight operations under way: a new one as soon as one is answered.
func (r *run) closed(ctx context.Context) {
	var group sync.WaitGroup
	for w := range r.InFlight {
		group.Go(func() {
			keys, into := r.Keys.source(w), &r.recorders[w%len(r.recorders)]
			for {
				key := keys.next()
				sent := time.Now()
				err := r.op(ctx, key)
				now := time.Now()
				if now.After(r.counted) {
					if err != nil {
						r.fail(err)
					} else {
						into.record(now.Sub(sent), !now.After(r.end))
					}
				}
				if now.After(r.end) || ctx.Err() != nil {
					return
				}
			}
		})
	}
	group.Wait()
}

// open sends operations at their moments, whatever became of those before. When all
// InFlight are under way the next is late, and its latency says so.
func (r *run) open(ctx context.Context, began time.Time) {
	nap := r.nap
	if nap == nil {
		nap = systemNap
	}
	every := float64(time.Second) / r.Rate
	due := make(chan time.Time, 4*r.InFlight)
	var group sync.WaitGroup
	for w := range r.InFlight {
		group.Go(func() {
			keys, into := r.Keys.source(w), &r.recorders[w%len(r.recorders)]
			for at := range due {
				counts := at.After(r.counted)
				if ctx.Err() != nil {
					r.missed.Add(1)
					continue
				}
				err := r.op(ctx, keys.next())
				switch {
				case !counts:
				case err != nil:
					r.fail(err)
				default:
					into.record(time.Since(at), true)
				}
			}
		})
	}
	for i := 0; ; i++ {
		at := began.Add(time.Duration(float64(i) * every))
		if at.After(r.end) {
			break
		}
		if ctx.Err() != nil {
			r.missed.Add(int64(float64(r.end.Sub(at))/every) + 1)
			break
		}
		for wait := time.Until(at); wait > 0; wait = time.Until(at) {
			nap(wait)
		}
		due <- at
	}
	close(due)
	group.Wait()
}

func (r *run) fail(err error) {
	r.failed.Add(1)
	if r.first.Load() == nil {
		text := err.Error()
		if errors.Is(err, context.DeadlineExceeded) {
			text = fmt.Sprintf("not answered within %v after the end: %v", grace, err)
		}
		r.first.CompareAndSwap(nil, &text)
	}
}

func (r *run) sum() Result {
	sum := Result{Errors: r.failed.Load(), Missed: r.missed.Load(), Duration: r.Duration, hist: newHistogram()}
	for i := range r.recorders {
		sum.Ops += r.recorders[i].ops
		sum.hist.Merge(r.recorders[i].hist)
	}
	if text := r.first.Load(); text != nil {
		sum.FirstError = *text
	}
	return sum
}
