package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// waits counts what waiting callers cost. Causes of asks are change (the key may have
// changed), lease (the claim in the way should have lapsed), second (a round found that the
// key or the guard had moved) and retry (changes are not being told, so that it is asked
// for; or the node was overloaded).
type waits struct {
	groups  prometheus.Gauge
	asks    *prometheus.CounterVec
	asked   prometheus.Counter
	checked prometheus.Counter
	reads   prometheus.Counter
	woken   prometheus.Histogram
}

func newWaits() waits {
	w := waits{
		groups:  prometheus.NewGauge(prometheus.GaugeOpts{Name: metricWaitKeys, Help: "Keys that Begins wait for now."}),
		asks:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricWaitAsks, Help: "How often a key was asked for on behalf of all the Begins that wait for it, by cause: change, lease (the claim lapsed), second (a look found a change that nobody told), retry (changes are not being told, or the node is overloaded)."}, []string{labelCause}),
		asked:   prometheus.NewCounter(prometheus.CounterOpts{Name: metricWaitAsked, Help: "Waiting Begins on whose behalf their keys were asked for (dualcheck_wait_asks_total): one that waits through five of these counts five times."}),
		reads:   prometheus.NewCounter(prometheus.CounterOpts{Name: metricWaitLooks, Help: "Reads of the revisions of keys that Begins wait for: one a second for each hundred keys."}),
		checked: prometheus.NewCounter(prometheus.CounterOpts{Name: metricWaitLooked, Help: "Keys whose revisions were read because Begins wait for them (dualcheck_wait_looks_total counts the reads)."}),
		woken: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: metricWaitWoken, Help: "How long it took from when it was known that waiting Begins have to be asked for until some of them were answered.",
			Buckets: []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
	}
	for _, cause := range []string{"change", "lease", "second", "retry"} {
		w.asks.WithLabelValues(cause).Add(0)
	}
	return w
}

func (w waits) all() []prometheus.Collector {
	return []prometheus.Collector{w.groups, w.asks, w.asked, w.checked, w.reads, w.woken}
}

// Groups counts so many keys more that are waited for, or fewer.
func (w waits) Groups(more int) { w.groups.Add(float64(more)) }

// Asked counts a question for so many who wait.
func (w waits) Asked(cause string, waiters int) {
	w.asks.WithLabelValues(cause).Inc()
	w.asked.Add(float64(waiters))
}

// Checked counts a read of so many keys' revisions.
func (w waits) Checked(keys int) {
	w.reads.Inc()
	w.checked.Add(float64(keys))
}

// Woken observes how long waiting Begins took to be answered once something had happened.
func (w waits) Woken(took time.Duration) { w.woken.Observe(took.Seconds()) }
