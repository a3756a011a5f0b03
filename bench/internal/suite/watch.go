package suite

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
	"github.com/dualcheck/dualcheck/bench/internal/target"
)

// Watch is the name of the suite about what a node tells of changes, to whom, and what it
// keeps in its memory.
const Watch = "watch"

// The parts of the suite watch.
const (
	partWrites  = "writes"
	partReaders = "readers"
	partWaiting = "waiting"
	partMemory  = "memory"
)

// WatchParts are their names.
func WatchParts() []string { return []string{partWrites, partReaders, partWaiting, partMemory} }

// The states of a node's watch of records.
const (
	watchOff  = "off"
	watchLive = "live"
)

func watching(o Options) []Row {
	rows := slices.Concat(writesWatched(o), readersTold(o), callersWaiting(o), memoryAsked(o))
	if len(o.Only) == 0 {
		return rows
	}
	return slices.DeleteFunc(rows, func(row Row) bool { return !slices.Contains(o.Only, row.Part) })
}

// many are so many subscribers, a tenth of whom never read.
func many(n int) Readers { return Readers{Reading: n - n/10, Silent: n / 10} }

// writesWatched are writes with the watch of records off, and on for more and more. A node
// keeps its watch on for two minutes after the last subscriber is gone, and follows all that
// is written to its etcd, whoever wrote it. So each degree has a site of its own, and the
// rows of the watch that is off have one that never has a subscriber: while it has its turn
// the others' etcds are quiet, and it is looked whether its watch was off before and after.
func writesWatched(o Options) (rows []Row) {
	crowd := many(o.Subscribers)
	some := max(1, o.Subscribers/10)
	degrees := []struct {
		id, site string
		readers  *Readers
	}{
		{", watch off", "writes-off", nil},
		{" beside a subscriber elsewhere", "writes-elsewhere", &Readers{Reading: 1, Elsewhere: true}},
		{" beside 1 subscriber", "writes-one", &Readers{Reading: 1}},
		{fmt.Sprintf(" beside %d subscribers", some), "writes-some", &Readers{Reading: some}},
		{fmt.Sprintf(" beside %d subscribers, %d never read", o.Subscribers, crowd.Silent), "writes-many", &crowd},
	}
	life := lives(o, ours)
	life.Keys, life.Repeats = load.New, 0 // whole ones, so that all of it is writes
	for _, of := range []Row{newKeys(ours), life} {
		for _, d := range degrees {
			row := of
			row.ID, row.Site, row.Readers, row.Part = of.ID+d.id, rig.Site{Name: d.site}, d.readers, partWrites
			row.Watch, row.Against = watchLive, []string{of.ID + degrees[0].id}
			if d.readers == nil {
				row.Watch, row.Against = watchOff, nil
			} else if d.readers.Reading > some {
				row.Files = filesOf(o.Subscribers)
			}
			rows = append(rows, row)
		}
	}
	return rows
}

// filesOf is how many open files so many subscribers and the rest need.
func filesOf(subscribers int) int { return 2000 + subscribers }

// readersTold are new keys at a rate, and what became of their events: one each.
func readersTold(o Options) (rows []Row) {
	crowd := many(o.Subscribers)
	some := max(1, o.Subscribers/10)
	base := fmt.Sprintf("events to %d readers", crowd.Reading)
	for _, d := range []struct {
		id      string
		readers Readers
		against []string
	}{
		{fmt.Sprintf("events to %d readers", some), Readers{Reading: some}, nil},
		{base, Readers{Reading: crowd.Reading}, nil},
		{fmt.Sprintf("%s beside %d that never read", base, crowd.Silent), crowd, []string{base}},
	} {
		row := newKeys(512)
		row.ID, row.Rate, row.Readers, row.Against = d.id, float64(o.Events), &d.readers, d.against
		row.Part, row.Site, row.Watch, row.Files = partReaders, rig.Site{Name: "readers"}, watchLive, filesOf(o.Subscribers)
		rows = append(rows, row)
	}
	return rows
}

func callersWaiting(o Options) []Row {
	site := rig.Site{Name: "waiting"} // whoever waits has the watch switched on
	return []Row{
		{ID: "waiting for one key", Target: "dualcheck-waiting", Keys: load.New, InFlight: o.Waiters, Part: partWaiting, Site: site},
		{ID: "waiting for a key each", Target: "dualcheck-waiting-each", Keys: load.New, InFlight: o.Waiters, Part: partWaiting, Site: site},
	}
}

// memoryAsked are replays and lives of a node that has memory, as every node does unless it
// is told otherwise, of one that has none, and what Redis itself does.
func memoryAsked(o Options) []Row {
	const get, memory, redis = "redis-get", " from memory", " from Redis"
	var rows []Row
	for _, of := range []struct {
		row     Row
		against []string
	}{
		{replays(ours), []string{get}},
		{lives(o, ours), nil},
		{Row{ID: "replay, idle", Target: "dualcheck-replay", Keys: load.Zipf, Repeats: 1, InFlight: 1}, nil},
	} {
		with, without := of.row, of.row
		with.ID, without.ID = of.row.ID+memory, of.row.ID+redis
		with.Site, without.Site = rig.Site{Name: "memory"}, rig.Site{Name: "no-memory", Args: []string{"--memory-bytes=0"}}
		with.Against, without.Against = append([]string{without.ID}, of.against...), of.against
		rows = append(rows, with, without)
	}
	rows = append(rows, Row{ID: get, Target: get, Keys: load.Zipf, Repeats: 1})
	for i := range rows {
		rows[i].Part = partMemory
	}
	return rows
}

// settleTimeout is how long a node may take until its watch is as a row needs it, or those
// who watched are gone.
const settleTimeout = 15 * time.Second

// watch looks whether the node's watch of records is off where it has to be.
func (c *contestant) watch(ctx context.Context) error {
	if c.Watch != watchOff || c.node == nil {
		return nil
	}
	s, err := c.node.State(ctx)
	if err == nil && s.Records != watchOff {
		err = fmt.Errorf("the node's watch of records is %q, and is to be %s", s.Records, watchOff)
	}
	return err
}

// subscribe opens those who watch during a slice; nil if nobody does.
func (c *contestant) subscribe(ctx context.Context, plan load.Plan) (*target.Readers, error) {
	if c.Readers == nil {
		return nil, nil
	}
	spec := target.ReadersSpec{Reading: c.Readers.Reading, Silent: c.Readers.Silent, Elsewhere: c.Readers.Elsewhere, Keys: c.prefix, First: c.fresh.Load()}
	if c.Rate > 0 {
		spec.Most = int(c.Rate*(plan.WarmUp+plan.Duration).Seconds()) + 2
	}
	readers, err := target.OpenReaders(ctx, *c.node, spec)
	if err != nil {
		return nil, err
	}
	if c.Watch == watchLive {
		if err := c.node.Await(ctx, settleTimeout, func(s rig.State) bool { return s.Records == watchLive }, "does not follow its records"); err != nil {
			_, _ = readers.Finish(ctx) // there is nothing to be told
			return nil, err
		}
	}
	return readers, nil
}

// unsubscribe has those who watched tell what they were told, and waits until the node
// knows that they are gone.
func (c *contestant) unsubscribe(ctx context.Context, readers *target.Readers) error {
	if readers == nil {
		return nil
	}
	s, stateless := c.node.State(ctx)
	told, err := readers.Finish(ctx)
	if err := errors.Join(stateless, err); err != nil {
		return err
	}
	if s.Records != watchLive {
		c.behind++
	}
	c.told = append(c.told, told)
	return c.node.Await(ctx, settleTimeout, func(s rig.State) bool { return s.Subscribers == 0 }, "still has subscribers")
}

// Told is what those who watched were told.
type Told struct {
	Reading   int     `json:"reading"`
	Silent    int     `json:"silent"` // they never read
	PerSecond float64 `json:"events_per_second"`
	// Where there is a rate: from a write's answer to its event at a reader, and from its
	// question.
	Answer      *Quantiles `json:"from_answer,omitempty"`
	Question    *Quantiles `json:"from_question,omitempty"`
	Undelivered int64      `json:"undelivered"` // had not come soon after the end, of those looked for
	Resyncs     int64      `json:"resyncs"`     // how often one was told to begin anew
	Ended       int64      `json:"ended"`       // streams that the node ended
	Why         string     `json:"why,omitempty"`
	Behind      int        `json:"watch_behind"` // slices at whose end the node's watch of records was not live
}

// Quantiles are latencies in microseconds.
type Quantiles struct {
	P50  float64 `json:"p50_us"`
	P90  float64 `json:"p90_us"`
	P99  float64 `json:"p99_us"`
	P999 float64 `json:"p999_us"`
	Max  float64 `json:"max_us"`
}

// quantiles of what was measured; nil if nothing was.
func quantiles(all []load.Result) *Quantiles {
	r := load.Merge(all...)
	if r.Ops == 0 {
		return nil
	}
	return &Quantiles{r.Quantile(0.5), r.Quantile(0.9), r.Quantile(0.99), r.Quantile(0.999), r.Quantile(1)}
}

func (c *contestant) toldOf() *Told {
	if len(c.told) == 0 {
		return nil
	}
	t := &Told{Reading: c.Readers.Reading, Silent: c.Readers.Silent, Behind: c.behind}
	var rates []float64
	var all, whole []load.Result
	for _, told := range c.told {
		rates = append(rates, float64(told.Events)/told.Latency.Duration.Seconds())
		all, whole = append(all, told.Latency), append(whole, told.Whole)
		t.Undelivered += told.Latency.Errors
		t.Resyncs += told.Resyncs
		t.Ended += told.Ended
		if t.Why == "" {
			t.Why = told.Why
		}
	}
	t.PerSecond, t.Answer, t.Question = round(median(rates)), quantiles(all), quantiles(whole)
	return t
}

// Waited is what callers cost while they waited, a second.
type Waited struct {
	Callers    int     `json:"callers"`
	Keys       int     `json:"keys"`
	EtcdReads  float64 `json:"etcd_reads_per_second"`
	Looks      float64 `json:"looks_per_second"`       // of these, at revisions
	LookedKeys float64 `json:"looked_keys_per_second"` // in these
	Last       float64 `json:"last_us"`                // from the last finish to the last answer; the median of the rounds
}

func (c *contestant) waitedOf() *Waited {
	if len(c.waits) == 0 {
		return nil
	}
	w := &Waited{Callers: c.waits[0].Callers, Keys: c.waits[0].Keys}
	var cost rig.Counters
	quiet := 0.0
	var last []float64
	for _, waited := range c.waits {
		cost = cost.Plus(waited.Cost)
		quiet += waited.Quiet.Seconds()
		last = append(last, float64(waited.Last.Microseconds()))
	}
	w.EtcdReads, w.Looks, w.LookedKeys = round(cost.Reads/quiet), round(cost.Looks/quiet), round(cost.Looked/quiet)
	w.Last = median(last)
	return w
}

// Against is how a row compares with another of its part: of its figures, divided by the
// other's of the same round, the median. Of rates more is better, of latencies less.
type Against struct {
	ID     string    `json:"id"`
	Rate   float64   `json:"rate"`
	P50    float64   `json:"p50"`
	P99    float64   `json:"p99"`
	Rounds []float64 `json:"rounds"` // of the rates
	// Of the processor time that the node, and its etcd, had for one operation; 0: one of
	// them has no node.
	NodeTime float64 `json:"node_time,omitempty"`
	EtcdTime float64 `json:"etcd_time,omitempty"`
	// Of the events, where both have readers and a rate.
	Events *AgainstEvents `json:"events,omitempty"`
}

// AgainstEvents compares what readers were told: how much, and how long after the question.
type AgainstEvents struct {
	Rate float64 `json:"rate"`
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
}

// against compares a contestant with those that its row names, as far as they ran.
func (c *contestant) against(ran map[string]*contestant) (all []Against) {
	for _, id := range c.Against {
		base := ran[id]
		if base == nil {
			continue
		}
		a := Against{ID: id, Rounds: []float64{}}
		n := min(len(c.rounds), len(base.rounds))
		rates := ratios(n, func(i int) (float64, float64) { return c.perSecond(c.rounds[i]), base.perSecond(base.rounds[i]) })
		for _, ratio := range rates {
			a.Rounds = append(a.Rounds, round(ratio))
		}
		a.Rate = round(median(rates))
		if len(c.busy) == len(c.rounds) && len(base.busy) == len(base.rounds) {
			times := func(of func(cores) float64) float64 {
				each := func(x *contestant, i int) float64 { return of(x.busy[i]) / max(x.perSecond(x.rounds[i]), 1e-9) }
				return round(median(ratios(n, func(i int) (float64, float64) { return each(c, i), each(base, i) })))
			}
			a.NodeTime, a.EtcdTime = times(func(b cores) float64 { return b.node }), times(func(b cores) float64 { return b.etcd })
		}
		quantile := func(q float64, of, than func(int) load.Result) float64 {
			return round(median(ratios(n, func(i int) (float64, float64) { return of(i).Quantile(q), than(i).Quantile(q) })))
		}
		mine, theirs := func(i int) load.Result { return c.rounds[i] }, func(i int) load.Result { return base.rounds[i] }
		a.P50, a.P99 = quantile(0.5, mine, theirs), quantile(0.99, mine, theirs)
		if c.Rate > 0 && len(c.told) == len(c.rounds) && len(base.told) == len(base.rounds) {
			mine, theirs = func(i int) load.Result { return c.told[i].Whole }, func(i int) load.Result { return base.told[i].Whole }
			a.Events = &AgainstEvents{P50: quantile(0.5, mine, theirs), P99: quantile(0.99, mine, theirs),
				Rate: round(median(ratios(n, func(i int) (float64, float64) {
					return float64(c.told[i].Events), float64(base.told[i].Events)
				})))}
		}
		all = append(all, a)
	}
	return all
}

// ratios are those of n rounds; 0 where there is nothing to divide by.
func ratios(n int, of func(round int) (value, base float64)) []float64 {
	all := make([]float64, n)
	for i := range all {
		if value, base := of(i); base > 0 {
			all[i] = value / base
		}
	}
	return all
}
