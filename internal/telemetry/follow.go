package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Followed is how far one watch of etcd is.
type Followed struct {
	// State is off, resyncing, catching-up or live.
	State string
	// Behind is by how many revisions it is behind what a read of etcd saw, and BehindFor
	// since when.
	Behind    int64
	BehindFor time.Duration
	// Lists counts beginnings anew, Cuts watches that ended.
	Lists, Cuts uint64
}

// The states of a watch, see internal/watch.
var watchStates = []string{"off", "resyncing", "catching-up", "live"}

// Follows adds how far a watch is, asked at each scrape. Call it once a watch.
func (m *Metrics) Follows(watch string, how func() Followed) {
	of := prometheus.Labels{labelWatch: watch}
	for _, state := range watchStates {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: metricWatchState, ConstLabels: prometheus.Labels{labelWatch: watch, labelState: state},
			Help: "1 for the state that this node's watch of etcd is in (watch: governing, which brings policies, the clock and epochs; records, which brings what subscribers and waiting callers are told): off (nobody wants it), resyncing (what it brought is void, it begins anew), catching-up (it is behind), live.",
		}, func() float64 {
			if how().State == state {
				return 1
			}
			return 0
		}))
	}
	gauge := func(name, help string, value func(Followed) float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: of}, func() float64 { return value(how()) }))
	}
	counter := func(name, help string, value func(Followed) float64) {
		m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: of}, func() float64 { return value(how()) }))
	}
	gauge(metricWatchBehind, "By how many revisions this node's watch of etcd is behind what a read of etcd saw.", func(f Followed) float64 { return float64(f.Behind) })
	gauge(metricWatchBehindFor, "For how long this node's watch of etcd has been behind what a read of etcd saw.", func(f Followed) float64 { return f.BehindFor.Seconds() })
	counter(metricWatchLists, "How often this node's watch of etcd began anew, all that it had brought being void; not that of a subscriber, see dualcheck_watch_resyncs_total.", func(f Followed) float64 { return float64(f.Lists) })
	counter(metricWatchCuts, "How often this node's watch of etcd was cut off and made again; not the stream of a subscriber.", func(f Followed) float64 { return float64(f.Cuts) })
}

// Feeding is what the feed of records' changes keeps and has done.
type Feeding struct {
	RingBytes                         int64
	RingChanges                       int
	Changes, Scans, Pieces, FilterLen uint64
}

// Feeds adds what the feed keeps and has done, asked at each scrape. Call it once.
func (m *Metrics) Feeds(how func() Feeding) {
	gauge := func(name, help string, value func(Feeding) float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return value(how()) }))
	}
	counter := func(name, help string, value func(Feeding) float64) {
		m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return value(how()) }))
	}
	gauge(metricFeedBytes, "Bytes of the changes of records that are kept for subscribers who are behind or come back.", func(f Feeding) float64 { return float64(f.RingBytes) })
	gauge(metricFeedKept, "Changes of records that are kept for subscribers who are behind or come back.", func(f Feeding) float64 { return float64(f.RingChanges) })
	gauge(metricFeedNames, "Names in the filter by which cached Gets are told that there is no such key; 0: there is no filter.", func(f Feeding) float64 { return float64(f.FilterLen) })
	counter(metricFeedChanges, "Changes of records that this node's watch of etcd has brought.", func(f Feeding) float64 { return float64(f.Changes) })
	counter(metricFeedScans, "Readings of all that a namespace has, for subscribers who begin with a snapshot or a RESYNC; those who begin together may share one.", func(f Feeding) float64 { return float64(f.Scans) })
	counter(metricFeedPieces, "Reads of etcd that the snapshots for subscribers took (dualcheck_feed_scans_total).", func(f Feeding) float64 { return float64(f.Pieces) })
}
