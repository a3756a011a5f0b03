package telemetry

import "github.com/prometheus/client_golang/prometheus"

// maxCauses is how many causes of a RESYNC are counted by name: they come from another
// package, which has a handful.
const maxCauses = 20

// subscribers counts those who watch, and what they are told.
type subscribers struct {
	watching prometheus.Gauge
	told     prometheus.Counter
	resyncs  *prometheus.CounterVec
	causes   *bounded
	slow     prometheus.Counter
}

func newSubscribers() subscribers {
	return subscribers{
		watching: prometheus.NewGauge(prometheus.GaugeOpts{Name: metricSubscribers, Help: "Streams of Watch that are open now."}),
		told:     prometheus.NewCounter(prometheus.CounterOpts{Name: metricWatchEvents, Help: "Events that were sent to those who watch, those of snapshots included; one that goes to ten counts ten times."}),
		resyncs:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricResyncs, Help: "How often one who watches was told RESYNC and given what is there anew, by cause."}, []string{labelCause}),
		causes:   newBounded(maxCauses),
		slow:     prometheus.NewCounter(prometheus.CounterOpts{Name: metricWatchSlow, Help: "Streams of Watch that this node ended because their reader took nothing for a minute."}),
	}
}

func (s subscribers) all() []prometheus.Collector {
	return []prometheus.Collector{s.watching, s.told, s.resyncs, s.slow}
}

// Subscriber counts one who watches until the returned function is called.
func (s subscribers) Subscriber() (done func()) { s.watching.Inc(); return s.watching.Dec }

// Told counts events that were sent.
func (s subscribers) Told(events int) { s.told.Add(float64(events)) }

// Resync counts a RESYNC by its cause.
func (s subscribers) Resync(cause string) { s.resyncs.WithLabelValues(s.causes.name(cause)).Inc() }

// Slow counts a reader that was too slow to be kept.
func (s subscribers) Slow() { s.slow.Inc() }
