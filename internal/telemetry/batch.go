package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// batches counts what goes to etcd together. Kinds are write (a transaction of
// conditional writes) and read (a flat one of reads).
type batches struct {
	members  *prometheus.HistogramVec
	waited   *prometheus.HistogramVec
	inFlight *prometheus.GaugeVec
	behind   prometheus.Counter
	crowded  *prometheus.CounterVec
}

func newBatches() batches {
	b := batches{
		members: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: metricBatchMembers, Help: "How many keys one transaction of etcd settled or read, by kind (write, read).",
			Buckets: prometheus.ExponentialBuckets(1, 2, 11),
		}, []string{labelKind}),
		waited: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: metricBatchWait, Help: "How long the first of a transaction waited for those before it, by kind.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1},
		}, []string{labelKind}),
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: metricBatchInFlight, Help: "Transactions on their way to etcd, by kind."}, []string{labelKind}),
		behind:   prometheus.NewCounter(prometheus.CounterOpts{Name: metricBatchBehind, Help: "Writes that waited for another of the same key, as those of a hot key do."}),
		crowded:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricBatchCrowded, Help: "Begins and reads that were OVERLOADED because too many waited for etcd, by kind. Finishes and extensions never are."}, []string{labelKind}),
	}
	for _, kind := range []string{"write", "read"} {
		b.inFlight.WithLabelValues(kind).Set(0)
		b.crowded.WithLabelValues(kind).Add(0)
	}
	return b
}

func (b batches) all() []prometheus.Collector {
	return []prometheus.Collector{b.members, b.waited, b.inFlight, b.behind, b.crowded}
}

// Sent counts a transaction of so many members; the first of them has waited that long.
func (b batches) Sent(kind string, members int, waited time.Duration) {
	b.members.WithLabelValues(kind).Observe(float64(members))
	b.waited.WithLabelValues(kind).Observe(waited.Seconds())
	b.inFlight.WithLabelValues(kind).Inc()
}

// Landed counts a transaction out that was answered, or never will be.
func (b batches) Landed(kind string) { b.inFlight.WithLabelValues(kind).Dec() }

// Crowded counts what was refused because too much waits for etcd.
func (b batches) Crowded(kind string) { b.crowded.WithLabelValues(kind).Inc() }

// Behind counts a write that waited for another of the same key.
func (b batches) Behind() { b.behind.Inc() }
