package telemetry

import (
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Build says what is running.
type Build struct {
	Version, Commit, Node string
}

// Metrics counts what a node does. Its methods may be called from anywhere. It is
// an etcdtxn.Observer, and Redis a rediscache.Observer.
type Metrics struct {
	registry   *prometheus.Registry
	namespaces *bounded
	batches
	subscribers
	waits

	verdicts      *prometheus.CounterVec
	finishes      *prometheus.CounterVec
	requests      *prometheus.HistogramVec
	inFlight      prometheus.Gauge
	waiting       prometheus.Gauge
	sessions      prometheus.Gauge
	retries       *prometheus.CounterVec
	errors        *prometheus.CounterVec
	panics        prometheus.Counter
	etcdCalls     *prometheus.HistogramVec
	settled       *prometheus.CounterVec
	guardRefusals *prometheus.CounterVec
	undated       prometheus.Counter
}

const helpEtcdCalls = "How long reads, lists and writes of etcd took, the wait for their transaction included, by kind (read, list, revisions, or the operation that writes) and outcome: " +
	"ok; " +
	"lost (the compare failed because something else was there: it is decided anew); " +
	"refused (by the guard or the tick window, because this node's view was old: it is decided anew); " +
	"ambiguous (applied or not: the very same is sent again until that is known); " +
	"full (etcd's database is); " +
	"busy (not applied, etcd asks for a pause); " +
	"denied (not applied, and no use in sending it again: an operator must look at the log)."

// NewMetrics makes the metrics and a registry for them.
func NewMetrics(build Build) *Metrics {
	// From a quarter of a millisecond to a minute; a native histogram besides, for
	// servers that scrape those.
	buckets := []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	histogram := func(name, help string, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: buckets,
			NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100, NativeHistogramMinResetDuration: time.Hour,
		}, labels)
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &Metrics{
		registry:      prometheus.NewRegistry(),
		namespaces:    newBounded(maxNamespaces),
		batches:       newBatches(),
		subscribers:   newSubscribers(),
		waits:         newWaits(),
		verdicts:      counters(metricVerdicts, "Answers to Begin, members of batches included; namespace is \"other\" for those after the first 200.", labelNamespace, labelVerdict, labelSource),
		finishes:      counters(metricFinishes, "Completes and fails by kind (complete, retryable, terminal, unknown) and reason (OK, or why it was refused).", labelKind, labelReason),
		requests:      histogram(metricRequests, "How long calls took, from the decoded request to the answer. Those of sessions have methods of their own; a session as a whole is not among them.", labelMethod, labelCode),
		inFlight:      gauge(metricInFlight, "Calls being answered now."),
		waiting:       gauge(metricWaiting, "Begins waiting now for a key that is in progress."),
		sessions:      gauge(metricSessions, "Sessions that are open now."),
		retries:       counters(metricRetries, "Calls that say that they were sent before, by method.", labelMethod),
		errors:        counters(metricErrors, "Calls and members of batches that ended with an error, by its reason.", labelReason),
		panics:        counter(metricPanics, "Panics that were caught; each is a bug."),
		etcdCalls:     histogram(metricEtcdCalls, helpEtcdCalls, labelKind, labelOutcome),
		settled:       counters(metricSettled, "Writes whose outcome was ambiguous and then settled: it is known that they were applied, or that they never will be. By kind.", labelKind),
		guardRefusals: counters(metricGuardRefusals, "Writes that etcd refused because this node's view was old, by cause: guard (a policy, the epoch or the secret has changed) or tick (the clock has moved on). Each is decided anew.", labelCause),
		undated:       counter(metricUndated, "Records met without a deadline where one is due; each is held until somebody resolves it."),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: metricBuildInfo, Help: "1, with what is running.",
		ConstLabels: prometheus.Labels{labelVersion: build.Version, labelCommit: build.Commit, labelGo: runtime.Version(), labelNode: build.Node},
	})
	info.Set(1)
	m.registry.MustRegister(info, m.verdicts, m.finishes, m.requests, m.inFlight, m.waiting, m.sessions, m.retries, m.errors, m.panics,
		m.etcdCalls, m.settled, m.guardRefusals, m.undated)
	m.registry.MustRegister(m.batches.all()...)
	m.registry.MustRegister(m.subscribers.all()...)
	m.registry.MustRegister(m.waits.all()...)
	return m
}

// Following is how far a node follows etcd.
type Following struct {
	// TickAge is how long ago the node saw the clock move, Applied the revision up to
	// which it follows, Restored how often it saw that etcd had gone back.
	TickAge  time.Duration
	Applied  int64
	Restored uint64
	// Believed: what is cached may be told. BypassRedis and BypassMemory: switches keep Redis
	// and memory out.
	Believed, BypassRedis, BypassMemory bool
}

// Watch adds what is asked of the node at each scrape. Call it once.
func (m *Metrics) Watch(ready func() error, following func() Following) {
	gauge := func(name, help string, value func() float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	gauge(metricReady, "1 if this node can serve.", func() float64 {
		if ready() == nil {
			return 1
		}
		return 0
	})
	gauge(metricTickAge, "How long ago this node saw the cluster's clock move.", func() float64 { return following().TickAge.Seconds() })
	gauge(metricBelieved, "1 if this node knows of the last seconds' changes of epochs, so that what is cached may be told; 0: etcd is asked for everything.", func() float64 {
		if following().Believed {
			return 1
		}
		return 0
	})
	gauge(metricBypassed, "1 while the switch bypass-redis is on.", func() float64 {
		if following().BypassRedis {
			return 1
		}
		return 0
	})
	gauge(metricMemoryBypassed, "1 while the switch bypass-memory is on.", func() float64 {
		if following().BypassMemory {
			return 1
		}
		return 0
	})
	gauge(metricApplied, "The etcd revision up to which this node follows.", func() float64 { return float64(following().Applied) })
	m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: metricRestored, Help: "How often this node saw that etcd had gone back: it was restored from a snapshot."},
		func() float64 { return float64(following().Restored) }))
}

// Gatherer gathers the private registry and the default one, which etcd's embedded
// server and Go itself use.
func (m *Metrics) Gatherer() prometheus.Gatherer {
	return prometheus.Gatherers{m.registry, prometheus.DefaultGatherer}
}

// Handler serves /metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.Gatherer(), promhttp.HandlerOpts{EnableOpenMetrics: true, ErrorHandling: promhttp.ContinueOnError})
}

// Begin counts an answer to Begin.
func (m *Metrics) Begin(namespace, verdict, source string) {
	m.verdicts.WithLabelValues(m.namespaces.name(namespace), verdict, source).Inc()
}

// Finish counts a finish; reason is OK or why it was refused.
func (m *Metrics) Finish(kind, reason string) { m.finishes.WithLabelValues(kind, reason).Inc() }

// Request counts a call that was answered.
func (m *Metrics) Request(method, code string, d time.Duration) {
	m.requests.WithLabelValues(method, code).Observe(d.Seconds())
}

// Requests is Request for calls of one method and code, of which there are many.
func (m *Metrics) Requests(method, code string) func(time.Duration) {
	one := m.requests.WithLabelValues(method, code)
	return func(d time.Duration) { one.Observe(d.Seconds()) }
}

// Retried counts a call that was sent before.
func (m *Metrics) Retried(method string) { m.retries.WithLabelValues(method).Inc() }

// Session counts a session until the returned function is called.
func (m *Metrics) Session() (done func()) { m.sessions.Inc(); return m.sessions.Dec }

// AddInFlight counts so many calls more, or fewer.
func (m *Metrics) AddInFlight(calls int) { m.inFlight.Add(float64(calls)) }

// InFlight counts a call until the returned function is called.
func (m *Metrics) InFlight() (done func()) { m.inFlight.Inc(); return m.inFlight.Dec }

// Waiting counts a waiting Begin until the returned function is called.
func (m *Metrics) Waiting() (done func()) { m.waiting.Inc(); return m.waiting.Dec }

// Error counts an error by its reason.
func (m *Metrics) Error(reason string) { m.errors.WithLabelValues(reason).Inc() }

// Panic counts a panic that was caught.
func (m *Metrics) Panic() { m.panics.Inc() }

// Call counts a call to etcd.
func (m *Metrics) Call(kind, outcome string, d time.Duration) {
	m.etcdCalls.WithLabelValues(kind, outcome).Observe(d.Seconds())
}

// Settled counts a transaction whose outcome was lost and then settled.
func (m *Metrics) Settled(kind string) { m.settled.WithLabelValues(kind).Inc() }

// Refused counts a write that etcd refused because this node's view was old.
func (m *Metrics) Refused(cause string) { m.guardRefusals.WithLabelValues(cause).Inc() }

// Undated counts a record without a deadline where one is due.
func (m *Metrics) Undated() { m.undated.Inc() }

// maxNamespaces is how many namespaces are counted by name.
const maxNamespaces = 200

// other stands for the names that came too late.
const other = "other"

// bounded lets the first names through and replaces all later ones.
type bounded struct {
	most  int
	mu    sync.RWMutex
	names map[string]struct{}
}

func newBounded(most int) *bounded { return &bounded{most: most, names: make(map[string]struct{})} }

func (b *bounded) name(s string) string {
	b.mu.RLock()
	_, known := b.names[s]
	full := len(b.names) >= b.most
	b.mu.RUnlock()
	if known {
		return s
	}
	if full {
		return other
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known = b.names[s]; !known {
		if len(b.names) >= b.most {
			return other
		}
		b.names[s] = struct{}{}
	}
	return s
}
