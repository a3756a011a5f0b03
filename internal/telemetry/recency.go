package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// RecencyMetrics counts the TTLs that caches' entries were given. It is a
// recency.Observer.
type RecencyMetrics struct{ ttls *prometheus.HistogramVec }

// Recency adds the metrics of how keys come back; habits, how many are known of, is
// asked at each scrape. Call it once.
func (m *Metrics) Recency(habits func() int) *RecencyMetrics {
	r := &RecencyMetrics{ttls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: metricCacheTTL,
		Help: "For how long caches keep what is finished, within the policy's range, by whose keys' coming back that was chosen: supplier (the label), namespace, " +
			"nothing (not enough is known yet: the longest).",
		Buckets: []float64{1, 10, 60, 300, 600, 1200, 1800, 3600, 5400, 7200, 14400, 86400},
	}, []string{labelBy})}
	m.registry.MustRegister(r.ttls, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: metricHabits, Help: "Of how many namespaces, and suppliers in them, this node knows how their keys come back; 4,096 at most.",
	}, func() float64 { return float64(habits()) }))
	return r
}

// TTL observes one that was chosen.
func (r *RecencyMetrics) TTL(by string, ttl time.Duration) {
	r.ttls.WithLabelValues(by).Observe(ttl.Seconds())
}
