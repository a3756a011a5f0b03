package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// RedisMetrics counts what a node has to do with Redis. It is a rediscache.Observer.
type RedisMetrics struct {
	looks     *prometheus.CounterVec
	writes    *prometheus.CounterVec
	pipelines *prometheus.HistogramVec
	commands  *prometheus.HistogramVec
	breaker   *prometheus.GaugeVec
	opened    prometheus.Counter
}

// Pool is what the connections to Redis are at, and what has been since the start.
type Pool struct {
	Total, Idle            uint32
	Waits, Timeouts, Stale uint32
}

const helpRedisLooks = "Looks into Redis for an answer, by what was found: hit (it answered; all others had etcd asked); " +
	"absent, marked (somebody asked a moment ago), staged (a finish is on its way), expired (too near to a deadline), undecided (no answer to this question); " +
	"epoch (it was taken back meanwhile); unreadable (written by a newer version); " +
	"digest, hmac, revision, garbage (it is not what was written there: it is not believed, and removed); " +
	"slow, crowded (the queue is full), failed, open (the breaker); bypassed (by a switch), disbelieved (this node has not heard from etcd lately), undeclared (the namespace)."

const helpRedisWrites = "Writes to Redis by kind (stage, confirm, fill, discard, suspect: too large perhaps) and outcome: ok; " +
	"kept (what is there stays: it is as new, or not what was to be removed); lost (the stage is gone, or another's); open (the breaker); dropped (the queue is full); failed."

// Redis adds the metrics of Redis; pool is asked at each scrape. Call it once.
func (m *Metrics) Redis(pool func() Pool) *RedisMetrics {
	r := &RedisMetrics{
		looks:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricRedisLooks, Help: helpRedisLooks}, []string{labelFinding}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricRedisWrites, Help: helpRedisWrites}, []string{labelKind, labelOutcome}),
		pipelines: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: metricRedisPipelines, Help: "How long round trips to Redis took, by lane (ask: callers wait; write: nobody does) and outcome (ok, failed).",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25},
		}, []string{labelLane, labelOutcome}),
		commands: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: metricRedisCommands, Help: "How many commands of concurrent calls shared a round trip, by lane.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 8),
		}, []string{labelLane}),
		breaker: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: metricRedisBreaker, Help: "The parts of Redis (of a Cluster 16, else 1) by the state of their breakers: closed (it is used), half-open (it is tried), open (etcd answers instead)."}, []string{labelState}),
		opened:  prometheus.NewCounter(prometheus.CounterOpts{Name: metricRedisOpened, Help: "How often a breaker of Redis opened."}),
	}
	for _, state := range []string{"closed", "half-open", "open"} { // those of sony/gobreaker
		r.breaker.WithLabelValues(state).Set(0)
	}
	gauge := func(state string, value func(Pool) uint32) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: metricRedisConns, Help: "Connections to Redis, by state.", ConstLabels: prometheus.Labels{labelState: state},
		}, func() float64 { return float64(value(pool())) })
	}
	counter := func(name, help string, value func(Pool) uint32) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(value(pool())) })
	}
	m.registry.MustRegister(r.looks, r.writes, r.pipelines, r.commands, r.breaker, r.opened,
		gauge("idle", func(p Pool) uint32 { return p.Idle }),
		gauge("used", func(p Pool) uint32 { return p.Total - min(p.Idle, p.Total) }),
		counter(metricRedisWaits, "How often a connection to Redis had to be waited for.", func(p Pool) uint32 { return p.Waits }),
		counter(metricRedisTimeouts, "How often no connection to Redis could be had in time.", func(p Pool) uint32 { return p.Timeouts }),
		counter(metricRedisStale, "Connections to Redis that were given up.", func(p Pool) uint32 { return p.Stale }),
	)
	return r
}

// Looked counts a look for an answer.
func (r *RedisMetrics) Looked(finding string) { r.looks.WithLabelValues(finding).Inc() }

// Wrote counts a write.
func (r *RedisMetrics) Wrote(kind, outcome string) { r.writes.WithLabelValues(kind, outcome).Inc() }

// Pipeline observes a round trip.
func (r *RedisMetrics) Pipeline(lane string, commands int, took time.Duration, ok bool) {
	outcome := "ok"
	if !ok {
		outcome = "failed"
	}
	r.pipelines.WithLabelValues(lane, outcome).Observe(took.Seconds())
	r.commands.WithLabelValues(lane).Observe(float64(commands))
}

// Breaker tells where a breaker went; at the start it comes from "".
func (r *RedisMetrics) Breaker(from, to string) {
	if from != "" {
		r.breaker.WithLabelValues(from).Dec()
	}
	r.breaker.WithLabelValues(to).Inc()
	if from == "closed" {
		r.opened.Inc()
	}
}
