package suite

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// ours is how many of our own operations are in flight where the goal says so.
const ours = 512

// goal is a row that compares. A ratio is always such that more is better.
type goal struct {
	id, ours, rival string // contestants
	reach           float64
	unit            string
	value           func(*contestant, load.Result) float64
	// less: a smaller value is the better one.
	less bool
	// lowerP99 is asked for besides.
	lowerP99 bool
}

func perSecond(c *contestant, r load.Result) float64 { return c.perSecond(r) }
func p50(_ *contestant, r load.Result) float64       { return r.Quantile(0.5) }

const bytesPerRecord = "bytes-per-record"

// goals are what is to be reached; bytesPerRecord besides, which has no rounds.
var goals = []goal{
	{id: "new-vs-etcd", ours: "new", rival: "etcd-txn", reach: 2.5, unit: "keys/s", value: perSecond},
	{id: "new-vs-mariadb", ours: "new", rival: "mariadb", reach: 2.2, unit: "keys/s", value: perSecond},
	{id: "new-vs-redis-aof", ours: "new", rival: "redis-setnx", reach: 0.9, unit: "keys/s", value: perSecond},
	{id: "life-vs-redis-mysql", ours: "life", rival: "redis+mysql-life", reach: 3, unit: "lives/s", value: perSecond, lowerP99: true},
	{id: "replay-vs-redis-get", ours: "replay", rival: "redis-get", reach: 1.5, unit: "keys/s", value: perSecond},
	{id: "idle-latency", ours: "new, idle", rival: "etcd-txn, idle", reach: 0.8, unit: "µs p50", value: p50, less: true},
}

// contestants of the goals. Those that no goal names are measured for comparison. The node
// is as it is unless it is told otherwise, with 64 MiB of memory: replays, lives' too, are
// answered from there before Redis is asked, and each goal's note says how many were.
func goalRows(o Options) []Row {
	named := func(id string, row Row) Row { row.ID = id; return row }
	rival := func(target string, keys load.Kind, repeats float64) Row {
		return Row{ID: target, Target: target, Keys: keys, Repeats: repeats}
	}
	rows := []Row{
		newKeys(ours), rival("etcd-txn", load.New, 0), rival("mariadb", load.New, 0), rival("redis-setnx", load.New, 0),
		rival("redis-setnx-everysec", load.New, 0), rival("postgres", load.New, 0), rival("redis+mysql", load.New, 0),
		lives(o, 0), rival("redis+mysql-life", load.Zipf, o.Repeats),
		replays(ours), rival("redis-get", load.Zipf, 1), rival("redis-get-pipelined", load.Zipf, 1),
		named("new, idle", newKeys(1)),
		{ID: "etcd-txn, idle", Target: "etcd-txn", Keys: load.New, InFlight: 1},
	}
	if len(o.Only) == 0 {
		return rows
	}
	return slices.DeleteFunc(rows, func(row Row) bool {
		return !slices.ContainsFunc(goals, func(g goal) bool {
			return slices.Contains(o.Only, g.id) && (g.ours == row.ID || g.rival == row.ID)
		})
	})
}

// GoalIDs are the names of the goals.
func GoalIDs() (ids []string) {
	for _, g := range goals {
		ids = append(ids, g.id)
	}
	return append(ids, bytesPerRecord)
}

// GoalRound is one round of a goal.
type GoalRound struct {
	Ours  float64 `json:"ours"`
	Rival float64 `json:"rival"`
	Ratio float64 `json:"ratio"`
}

// GoalRow is what came of a goal: of the rounds' ratios the median.
type GoalRow struct {
	ID            string      `json:"id"`
	Ratio         float64     `json:"ratio"`
	Goal          float64     `json:"goal"`
	Met           bool        `json:"met"`
	Ours          float64     `json:"ours"`
	Rival         float64     `json:"rival"`
	Unit          string      `json:"unit"`
	InFlight      int         `json:"in_flight"`
	RivalInFlight int         `json:"rival_in_flight"`
	P99           float64     `json:"p99_us,omitempty"`
	RivalP99      float64     `json:"rival_p99_us,omitempty"`
	Rounds        []GoalRound `json:"rounds"`
	Errors        int64       `json:"errors"` // of both
	Note          string      `json:"note"`
}

// GoalReport is what came of the goals.
type GoalReport struct {
	Rows        []GoalRow   `json:"rows"`
	Machine     rig.Machine `json:"machine"`
	NotRun      []NotRun    `json:"not_run"`
	Conditions  Conditions  `json:"conditions"`
	Contestants []Figures   `json:"contestants"`
}

// Met says whether all goals are met.
func (r *GoalReport) Met() bool {
	return !slices.ContainsFunc(r.Rows, func(row GoalRow) bool { return !row.Met })
}

// MeasureGoals runs the goals. A rival that cannot be run is told; without a node of our
// own there is nothing to measure.
func (r *Runner) MeasureGoals(ctx context.Context) (*GoalReport, error) {
	report := &GoalReport{Machine: r.Rig.Machine(ctx), NotRun: []NotRun{}, Conditions: r.Options.conditions(), Rows: []GoalRow{}, Contestants: []Figures{}}
	rows := goalRows(r.Options)
	r.Progress.Expect(r.slices(rows))
	if _, err := r.Rig.Node(ctx); err != nil {
		return nil, err
	}
	running, absent := map[string]*contestant{}, map[string]string{}
	var all []*contestant
	defer func() {
		for _, c := range all {
			_ = c.close() // it has told what it has to tell
		}
	}()
	for _, row := range rows {
		c, err := r.open(ctx, r.filled(row))
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			r.Progress.Say("%s is not run: %v", row.ID, err)
			absent[row.ID] = err.Error()
			report.NotRun = append(report.NotRun, NotRun{row.ID, err.Error()})
		default:
			running[row.ID] = c
			all = append(all, c)
		}
	}
	if err := r.compete(ctx, all); err != nil {
		return nil, err
	}
	for _, c := range all {
		report.Contestants = append(report.Contestants, c.figures())
	}
	for _, g := range goals {
		if len(r.Options.Only) == 0 || slices.Contains(r.Options.Only, g.id) {
			report.Rows = append(report.Rows, g.judge(running, absent))
		}
	}
	if len(r.Options.Only) == 0 || slices.Contains(r.Options.Only, bytesPerRecord) {
		row, err := r.bytesPerRecord(ctx)
		if err != nil {
			return nil, err
		}
		report.Rows = append(report.Rows, row)
	}
	return report, nil
}

// judge compares the rounds of two contestants.
func (g goal) judge(running map[string]*contestant, absent map[string]string) GoalRow {
	row := GoalRow{ID: g.id, Goal: g.reach, Unit: g.unit, Rounds: []GoalRound{}}
	for _, id := range []string{g.ours, g.rival} {
		if running[id] == nil {
			row.Note = fmt.Sprintf("%s was not run: %s", id, absent[id])
			return row
		}
	}
	mine, rival := running[g.ours], running[g.rival]
	var values, rivals, ratios []float64
	for i := range min(len(mine.rounds), len(rival.rounds)) {
		a, b := g.value(mine, mine.rounds[i]), g.value(rival, rival.rounds[i])
		better, worse := a, b
		if g.less {
			better, worse = b, a
		}
		ratio := 0.0
		if worse > 0 {
			ratio = better / worse
		}
		values, rivals, ratios = append(values, a), append(rivals, b), append(ratios, ratio)
		row.Rounds = append(row.Rounds, GoalRound{round(a), round(b), round(ratio)})
	}
	a, b := load.Merge(mine.rounds...), load.Merge(rival.rounds...)
	row.Ours, row.Rival, row.Ratio = round(median(values)), round(median(rivals)), round(median(ratios))
	row.InFlight, row.RivalInFlight = mine.InFlight, rival.InFlight
	row.P99, row.RivalP99 = a.Quantile(0.99), b.Quantile(0.99)
	row.Errors = a.Errors + b.Errors
	row.Met = median(ratios) >= g.reach && row.Errors == 0
	var notes []string
	if n := mine.counters; n.Replays > 0 {
		notes = append(notes, fmt.Sprintf("of the replays %.1f %% from the node's memory, %.1f %% from Redis, %.1f %% from etcd",
			100*n.Memory/n.Replays, 100*(n.Hits-n.Memory)/n.Replays, 100*(1-n.Hits/n.Replays)))
	}
	if g.lowerP99 {
		row.Met = row.Met && row.P99 < row.RivalP99
		notes = append(notes, fmt.Sprintf("p99 %.0f µs against %.0f µs", row.P99, row.RivalP99))
	}
	for _, c := range []struct {
		id string
		load.Result
	}{{g.ours, a}, {g.rival, b}} {
		if c.Errors > 0 {
			notes = append(notes, fmt.Sprintf("%s had %d errors, the first: %s", c.id, c.Errors, c.FirstError))
		}
	}
	if short := 1 - median(ratios)/g.reach; short > 0 {
		notes = append(notes, fmt.Sprintf("%.0f %% short: docs/performance.md says what a call costs and why", 100*short))
	}
	row.Note = strings.Join(notes, "; ")
	return row
}

// Table writes the goals for people.
func (r *GoalReport) Table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "goal\tours\trival\tunit\tratio\tto reach\tmet\tin flight\trival's\terrors\tnote")
	for _, row := range r.Rows {
		met := "no"
		if row.Met {
			met = "yes"
		}
		fmt.Fprintf(t, "%s\t%.5g\t%.5g\t%s\t%.2f\t%.2f\t%s\t%s\t%s\t%d\t%s\n",
			row.ID, row.Ours, row.Rival, row.Unit, row.Ratio, row.Goal, met, number(row.InFlight), number(row.RivalInFlight), row.Errors, row.Note)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "A ratio is the median of the ratios of %d rounds in which all take turns; more is better. dualcheck is called by: %s.\n\n", r.Conditions.Rounds, r.Conditions.Client)
	all := Report{Rows: r.Contestants, NotRun: r.NotRun, Machine: r.Machine}
	return all.Table(w)
}

// number is empty for none.
func number(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}
