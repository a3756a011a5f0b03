package telemetry

import "github.com/prometheus/client_golang/prometheus"

// MemoryMetrics counts what a node answers from its memory. It is a memory.Observer.
type MemoryMetrics struct {
	looks    *prometheus.CounterVec
	absences *prometheus.CounterVec
	// hit is the finding that must cost next to nothing to count.
	hit prometheus.Counter
}

// MemorySize is what a node's memory of records holds.
type MemorySize struct {
	Bytes, Entries uint64
	// Evictions counts what had to go because there was no room.
	Evictions uint64
}

const findingHit = "hit"

const helpMemoryLooks = "Looks into the node's memory for an answer, by what was found: hit (it answered; for all others Redis or etcd was asked); " +
	"absent; expired (too near to a deadline, or kept for as long as the policy says); undecided (no answer to this question); epoch (it was taken back); " +
	"bypassed (by a switch), disbelieved (this node has not heard from etcd lately), undeclared (the namespace)."

// Memory adds the metrics of the node's memory; size is asked at each scrape. Call it once.
func (m *Metrics) Memory(size func() MemorySize) *MemoryMetrics {
	r := &MemoryMetrics{
		looks:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricMemoryLooks, Help: helpMemoryLooks}, []string{labelFinding}),
		absences: prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricMemoryAbsences, Help: "Cached Gets that were told from memory that there is no such key, by what said so: read (one of the last 3 s found none), filter."}, []string{labelKind}),
	}
	r.hit = r.looks.WithLabelValues(findingHit)
	gauge := func(name, help string, value func(MemorySize) uint64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return float64(value(size())) })
	}
	m.registry.MustRegister(r.looks, r.absences,
		gauge(metricMemoryBytes, "What the records in the node's memory take, about.", func(s MemorySize) uint64 { return s.Bytes }),
		gauge(metricMemoryEntries, "How many records are in the node's memory.", func(s MemorySize) uint64 { return s.Entries }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: metricMemoryEvictions, Help: "Records that had to leave the node's memory for others: more than a few a second, and repeats that find nothing there, say that memory-bytes is too small."},
			func() float64 { return float64(size().Evictions) }),
	)
	return r
}

// Remembered counts a look for an answer.
func (r *MemoryMetrics) Remembered(finding string) {
	if finding == findingHit {
		r.hit.Inc()
		return
	}
	r.looks.WithLabelValues(finding).Inc()
}

// Absent counts a cached Get that was told that there is no such key.
func (r *MemoryMetrics) Absent(by string) { r.absences.WithLabelValues(by).Inc() }
