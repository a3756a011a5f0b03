// Package suite is what is measured: rows of parameters, run in slices that take turns,
// and what comes of them as a table or as JSON.
//
// What always holds: what is compared was measured in the same run, in slices that
// alternate, so that a noisy machine hurts all alike; and what went wrong is told beside
// the figure that it belongs to.
package suite

import (
	"fmt"
	"time"

	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// Row is a target under one load.
type Row struct {
	ID     string
	Target string
	Client string // "": the one that was asked for
	// InFlight is how many operations are under way; 0: whatever suits the target best.
	InFlight int
	Rate     float64 // in an open loop
	Keys     load.Kind
	Repeats  float64
	// Connections 0: the target's own choice.
	Connections int
	// ResultBytes 0: as many as were asked for; none: no bytes.
	ResultBytes int
	Batch       int
	Records     int
	// Beside is another load that runs at the same time and is not what is measured.
	Beside *Row
	// Readers watch during each slice; nil: nobody does.
	Readers *Readers
	// Watch is what the node's watch of records is to be before and after each slice, or
	// the slice is not measured; "": whatever it is.
	Watch string
	// Site has an etcd, a Redis and a node of its own; the rows that name it share them.
	Site rig.Site
	// Part is a part of the suite. Its rows take turns with each other alone, and when they
	// are done their sites are closed.
	Part string
	// Against are the rows of the same part with which this one is compared.
	Against []string
	// Files is how many open files a row needs, for those that need many.
	Files int
}

// Readers are subscribers, see target.ReadersSpec.
type Readers struct {
	Reading, Silent int
	Elsewhere       bool
}

const none = -1

// Options are what one run can choose.
type Options struct {
	Client      string
	Slice       time.Duration
	WarmUp      time.Duration
	Rounds      int
	Known       int
	ResultBytes int // 0: none
	Repeats     float64
	Connections int
	Records     []int // for the suite of that name
	Life        int   // how many lives bytes-per-record has
	Only        []string
	Subscribers int // of the suite watch: the most that there are
	Events      int // of the suite watch: writes a second whose events are measured
	Waiters     int // of the suite watch: callers that wait
}

// Suite is a list of rows.
type Suite struct {
	Name, About string
	rows        func(Options) []Row
	// alone: each row has all its rounds before the next is begun, because it changes
	// what others would meet, or takes too much to be kept.
	alone bool
}

// Goals is the name of the suite that compares; all others only measure.
const Goals = "goals"

// All is every suite but the goals.
func All() []Suite {
	return []Suite{
		{Name: "in-flight", About: "new keys and replays with 1 to 1,024 in flight", rows: inFlight},
		{Name: "connections", About: "512 to 30,000 connections, a stream or unary calls on each", rows: connections, alone: true},
		{Name: "result-size", About: "lives and replays with results of nothing to 256 KiB", rows: resultSize},
		{Name: "records", About: "new keys and replays with up to a million records in etcd", rows: records, alone: true},
		{Name: "batch", About: "BatchBegin of 1 to 1,000 keys", rows: batches},
		{Name: "json", About: "JSON, one gRPC call a question, a stream, the SDK", rows: clients},
		{Name: "hot-key", About: "other keys while 10,000 Begins a second ask for one that is held", rows: hotKey},
		{Name: Watch, About: "what the watch of records costs and brings, what waiting callers and the node's memory do", rows: watching},
		{Name: "limits", About: "what the machine allows anybody", rows: limits},
	}
}

// Find finds a suite by its name.
func Find(name string) (Suite, error) {
	names := []string{Goals}
	for _, s := range All() {
		if s.Name == name {
			return s, nil
		}
		names = append(names, s.Name)
	}
	return Suite{}, fmt.Errorf("no suite %q; there are %v", name, names)
}

// parts are the rows of a suite in groups that take turns among themselves.
func (s Suite) parts(o Options) (parts [][]Row) {
	for _, row := range s.rows(o) {
		if n := len(parts); n > 0 && !s.alone && parts[n-1][0].Part == row.Part {
			parts[n-1] = append(parts[n-1], row)
			continue
		}
		parts = append(parts, []Row{row})
	}
	return parts
}

// Of is a suite of rows that were put together by hand.
func Of(rows ...Row) Suite {
	return Suite{Name: "load", rows: func(Options) []Row { return rows }}
}

// newKeys, replays and lives are the three loads that most suites vary.
func newKeys(inFlight int) Row {
	return Row{ID: "new", Target: "dualcheck", Keys: load.New, InFlight: inFlight}
}

func replays(inFlight int) Row {
	return Row{ID: "replay", Target: "dualcheck-replay", Keys: load.Zipf, Repeats: 1, InFlight: inFlight}
}

func lives(o Options, inFlight int) Row {
	return Row{ID: "life", Target: "dualcheck-life", Keys: load.Zipf, Repeats: o.Repeats, InFlight: inFlight}
}

// vary makes rows of loads for each value, and says which in their names.
func vary[T any](values []T, loads func(T) []Row, name func(T) string) (rows []Row) {
	for _, v := range values {
		for _, row := range loads(v) {
			row.ID += " " + name(v)
			rows = append(rows, row)
		}
	}
	return rows
}

func inFlight(Options) []Row {
	return vary([]int{1, 4, 16, 64, 256, 512, 1024},
		func(n int) []Row { return []Row{newKeys(n), replays(n)} },
		func(n int) string { return fmt.Sprintf("%d in flight", n) })
}

func connections(o Options) []Row {
	return vary([]int{512, 5000, 15_000, 30_000}, func(n int) []Row {
		var rows []Row
		for _, client := range []string{"stream", "unary"} {
			row := lives(o, n)
			row.ID, row.Client, row.Connections = client, client, n
			row.Files = n + 2000 // of this process, and of the node at the other ends
			rows = append(rows, row)
		}
		return rows
	}, func(n int) string { return fmt.Sprintf("× %d", n) })
}

func resultSize(o Options) []Row {
	return vary([]int{0, 256, 4 << 10, 64 << 10, 256 << 10}, func(n int) []Row {
		life, replay := lives(o, 64), replays(64)
		life.ResultBytes, replay.ResultBytes = n, n
		if n == 0 {
			life.ResultBytes, replay.ResultBytes = none, none
		}
		return []Row{life, replay}
	}, func(n int) string { return fmt.Sprintf("of %d B", n) })
}

func records(o Options) []Row {
	return vary(o.Records, func(n int) []Row {
		fresh, replay := newKeys(256), replays(256)
		fresh.Records, replay.Records = n, n
		return []Row{fresh, replay}
	}, func(n int) string { return fmt.Sprintf("beside %d records", n) })
}

func batches(Options) []Row {
	return vary([]int{1, 10, 100, 1000}, func(n int) []Row {
		return []Row{{ID: "BatchBegin", Target: "dualcheck-batch", Keys: load.New, Batch: n, InFlight: max(1, 512/n)}}
	}, func(n int) string { return fmt.Sprintf("of %d", n) })
}

func clients(Options) []Row {
	return vary([]string{"json", "unary", "stream", "sdk"}, func(client string) []Row {
		fresh, replay := newKeys(256), replays(256)
		fresh.Client, replay.Client = client, client
		return []Row{fresh, replay}
	}, func(client string) string { return "by " + client })
}

// hotRate and quietRate are operations a second: of the load on one key, and of the load
// whose latency is looked at.
const hotRate, quietRate = 10_000, 500

func hotKey(o Options) []Row {
	quiet := func(row Row) Row { row.Rate, row.InFlight = quietRate, 256; return row }
	rows := []Row{quiet(newKeys(0)), quiet(replays(0)), quiet(lives(o, 0))}
	for _, row := range rows[:3:3] {
		row.ID += " beside a hot key"
		row.Beside = &Row{ID: "hot", Target: "dualcheck-hot", Keys: load.New, Rate: hotRate, InFlight: 2048}
		rows = append(rows, row)
	}
	return rows
}

func limits(Options) []Row {
	return vary([]int{1, 16, 64, 512}, func(n int) (rows []Row) {
		for _, target := range []string{"grpc-call", "grpc-frame", "redis-ping", "etcd-txn"} {
			rows = append(rows, Row{ID: target, Target: target, Keys: load.New, InFlight: n})
		}
		for _, target := range []string{"etcd-nested", "etcd-read"} {
			if n <= 16 { // of a hundred keys each
				rows = append(rows, Row{ID: target, Target: target, Keys: load.New, InFlight: n})
			}
		}
		return rows
	}, func(n int) string { return fmt.Sprintf("%d in flight", n) })
}
