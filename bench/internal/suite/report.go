package suite

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// Conditions are what the figures depend on and a reader cannot see in them.
type Conditions struct {
	Client      string  `json:"client"`
	Slice       string  `json:"slice"`
	WarmUp      string  `json:"warm_up"`
	Rounds      int     `json:"rounds"`
	Known       int     `json:"known"`
	ResultBytes int     `json:"result_bytes"`
	Repeats     float64 `json:"repeats"`
}

func (o Options) conditions() Conditions {
	return Conditions{o.Client, o.Slice.String(), o.WarmUp.String(), o.Rounds, o.Known, o.ResultBytes, o.Repeats}
}

// Figures are what came of a row.
type Figures struct {
	ID          string    `json:"id"`
	Target      string    `json:"target"`
	Client      string    `json:"client,omitempty"`
	InFlight    int       `json:"in_flight"`
	Rate        float64   `json:"rate,omitempty"` // asked for, in an open loop
	Connections int       `json:"connections,omitempty"`
	PerSecond   float64   `json:"per_second"` // keys; the median of the rounds
	Rounds      []float64 `json:"rounds"`
	P50         float64   `json:"p50_us"` // of operations, over all rounds
	P90         float64   `json:"p90_us"`
	P99         float64   `json:"p99_us"`
	P999        float64   `json:"p999_us"`
	Max         float64   `json:"max_us"`
	Errors      int64     `json:"errors"`
	Missed      int64     `json:"missed,omitempty"`
	FirstError  string    `json:"first_error,omitempty"`
	// Of rows with replays: the share that was answered without etcd.
	HitRate *float64 `json:"hit_rate,omitempty"`
	// Of these the share that was answered from the node's memory, and how many records
	// had to leave that meanwhile.
	MemoryRate *float64 `json:"memory_rate,omitempty"`
	Evictions  float64  `json:"memory_evictions,omitempty"`
	// How many cores the node and its etcd kept busy; the median of the rounds.
	NodeCores *float64 `json:"node_cores,omitempty"`
	EtcdCores *float64 `json:"etcd_cores,omitempty"`
	// Reads that the node asked etcd for, a second.
	EtcdReads *float64 `json:"etcd_reads_per_second,omitempty"`
	// What ran beside it.
	Beside *Figures `json:"beside,omitempty"`
	// What those who watched were told, and what those who waited cost.
	Told   *Told   `json:"told,omitempty"`
	Waited *Waited `json:"waited,omitempty"`
	// How it compares with other rows.
	Against []Against `json:"against,omitempty"`
}

// Report is what came of a suite.
type Report struct {
	Suite      string      `json:"suite"`
	Rows       []Figures   `json:"rows"`
	NotRun     []NotRun    `json:"not_run"`
	Conditions Conditions  `json:"conditions"`
	Machine    rig.Machine `json:"machine"`
}

func (c *contestant) figures() Figures {
	f := c.figuresOf(c.rounds)
	f.Told, f.Waited = c.toldOf(), c.waitedOf()
	if c.node != nil && c.node.HTTP != "" && c.measured > 0 {
		if c.counters.Replays > 0 {
			share := round(c.counters.Hits / c.counters.Replays)
			memory := round(c.counters.Memory / c.counters.Replays)
			f.HitRate, f.MemoryRate = &share, &memory
		}
		f.Evictions = c.counters.Evicted
		f.NodeCores, f.EtcdCores = c.busyOf(func(b cores) float64 { return b.node }), c.busyOf(func(b cores) float64 { return b.etcd })
		reads := round(c.counters.Reads / c.measured.Seconds())
		if f.EtcdReads = &reads; f.Waited != nil {
			f.EtcdReads = nil // of the whole slice, gathering and finishes and all
		}
	}
	if c.beside != nil {
		beside := c.beside.figuresOf(c.aside)
		f.Beside = &beside
	}
	return f
}

// busyOf is the median of the rounds; nil where the system does not tell.
func (c *contestant) busyOf(of func(cores) float64) *float64 {
	var all []float64
	for _, b := range c.busy {
		all = append(all, of(b))
	}
	if m := round(median(all)); m > 0 {
		return &m
	}
	return nil
}

func (c *contestant) figuresOf(rounds []load.Result) Figures {
	all := load.Merge(rounds...)
	f := Figures{
		ID: c.ID, Target: c.Target, InFlight: c.InFlight, Rate: c.Rate, Connections: c.Connections,
		P50: all.Quantile(0.5), P90: all.Quantile(0.9), P99: all.Quantile(0.99), P999: all.Quantile(0.999), Max: all.Quantile(1),
		Errors: all.Errors, Missed: all.Missed, FirstError: all.FirstError, Rounds: []float64{},
	}
	if c.node != nil {
		f.Client = c.Client
	}
	for _, r := range rounds {
		f.Rounds = append(f.Rounds, round(c.perSecond(r)))
	}
	f.PerSecond = round(median(f.Rounds))
	return f
}

// median is that of the middle; of an even number, of the two in the middle.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}
	return (sorted[half-1] + sorted[half]) / 2
}

// round keeps what a reader may believe.
func round(v float64) float64 {
	if v >= 100 {
		return math.Round(v)
	}
	return math.Round(v*1000) / 1000
}

// JSON writes anything indented.
func JSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// Table writes a report for people.
func (r *Report) Table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "row\tin flight\tper second\tp50 µs\tp90 µs\tp99 µs\tp99.9 µs\tmax µs\terrors\thits\tmemory\tnode cores\tetcd cores\tetcd reads/s")
	for _, f := range r.Rows {
		f.line(t, f.ID)
		if f.Beside != nil {
			f.Beside.line(t, "  (the hot load itself)")
		}
		if f.Told != nil {
			f.Told.line(t)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, f := range r.Rows {
		if f.FirstError != "" {
			fmt.Fprintf(w, "%s: %d errors, the first: %s\n", f.ID, f.Errors, f.FirstError)
		}
		if f.Missed > 0 {
			fmt.Fprintf(w, "%s: %d operations were due and never sent\n", f.ID, f.Missed)
		}
		if f.Evictions > 0 {
			fmt.Fprintf(w, "%s: %.0f records had to leave the node's memory for others\n", f.ID, f.Evictions)
		}
		f.Told.note(w, f.ID)
		f.Waited.note(w, f.ID)
	}
	if err := ratioTable(w, r.Rows); err != nil {
		return err
	}
	return foot(w, r.NotRun, r.Machine)
}

func (f Figures) line(w io.Writer, name string) {
	optional := func(v *float64) string {
		if v == nil {
			return ""
		}
		return fmt.Sprintf("%.4g", *v)
	}
	inFlight := fmt.Sprint(f.InFlight)
	if f.Rate > 0 {
		inFlight = fmt.Sprintf("%.0f/s", f.Rate)
	}
	fmt.Fprintf(w, "%s\t%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%d\t%s\t%s\t%s\t%s\t%s\n",
		name, inFlight, f.PerSecond, f.P50, f.P90, f.P99, f.P999, f.Max, f.Errors, optional(f.HitRate), optional(f.MemoryRate), optional(f.NodeCores), optional(f.EtcdCores), optional(f.EtcdReads))
}

// line is what readers were told, below the row of what was written.
func (t *Told) line(w io.Writer) {
	line := func(name, readers, rate string, q *Quantiles, missing string) {
		latencies := "\t\t\t\t"
		if q != nil {
			latencies = fmt.Sprintf("%.0f\t%.0f\t%.0f\t%.0f\t%.0f", q.P50, q.P90, q.P99, q.P999, q.Max)
		}
		fmt.Fprintf(w, "  (%s)\t%s\t%s\t%s\t%s\t\t\t\t\t\n", name, readers, rate, latencies, missing)
	}
	readers, rate := fmt.Sprintf("%d readers", t.Reading), fmt.Sprintf("%.0f", t.PerSecond)
	if t.Answer == nil {
		line("events at who reads", readers, rate, nil, "")
		return
	}
	line("events, from the answer", readers, rate, t.Answer, fmt.Sprint(t.Undelivered))
	line("events, from the question", "", "", t.Question, "")
}

func (t *Told) note(w io.Writer, id string) {
	if t == nil {
		return
	}
	if t.Undelivered > 0 {
		fmt.Fprintf(w, "%s: of every tenth reader's events %d had not come soon after the end\n", id, t.Undelivered)
	}
	if t.Resyncs > 0 {
		fmt.Fprintf(w, "%s: a reader was told to begin anew %d times\n", id, t.Resyncs)
	}
	if t.Behind > 0 {
		fmt.Fprintf(w, "%s: at the end of %d slices the node's watch of records was not live\n", id, t.Behind)
	}
	if t.Ended > 0 {
		fmt.Fprintf(w, "%s: the node ended %d streams, the first: %s\n", id, t.Ended, t.Why)
	}
}

func (v *Waited) note(w io.Writer, id string) {
	if v == nil {
		return
	}
	fmt.Fprintf(w, "%s: while %d callers waited for %d keys the node read etcd %.4g times a second (%.4g looks, at %.4g keys); the last was answered %.0f µs after the last finish\n",
		id, v.Callers, v.Keys, v.EtcdReads, v.Looks, v.LookedKeys, v.Last)
}

// ratioTable is how rows compare, if any do.
func ratioTable(w io.Writer, rows []Figures) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	any := false
	for _, f := range rows {
		for _, a := range f.Against {
			if !any {
				fmt.Fprintln(t, "\nof each round, divided, the median\tby\trate\tp50\tp99\tnode's time\tetcd's\tevents: rate\tp50\tp99")
				any = true
			}
			events := "\t\t"
			if e := a.Events; e != nil {
				events = fmt.Sprintf("%.3f\t%.3f\t%.3f", e.Rate, e.P50, e.P99)
			}
			times := "\t"
			if a.NodeTime > 0 {
				times = fmt.Sprintf("%.3f\t%.3f", a.NodeTime, a.EtcdTime)
			}
			fmt.Fprintf(t, "%s\t%s\t%.3f\t%.3f\t%.3f\t%s\t%s\n", f.ID, a.ID, a.Rate, a.P50, a.P99, times, events)
		}
	}
	return t.Flush()
}

func foot(w io.Writer, notRun []NotRun, m rig.Machine) error {
	for _, n := range notRun {
		fmt.Fprintf(w, "not run: %s: %s\n", n.Target, n.Why)
	}
	_, err := fmt.Fprintf(w, "\n%d cores of %s, %.1f GiB, %s %s, %s, a sync takes %.0f µs\n", m.Cores, m.CPU, float64(m.Memory)/(1<<30), m.OS, m.Kernel, m.Go, m.Sync)
	return err
}
