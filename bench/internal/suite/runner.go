package suite

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
	"github.com/dualcheck/dualcheck/bench/internal/target"
)

// Progress is told what goes on.
type Progress interface {
	// Expect says how many slices there will be.
	Expect(slices int)
	// Slice says what came of one.
	Slice(text string)
	// Say is for what a reader of the figures must know.
	Say(format string, args ...any)
}

// Runner runs suites on a rig.
type Runner struct {
	Rig      *rig.Rig
	Options  Options
	Progress Progress
}

// NotRun is what could not be measured, and why.
type NotRun struct {
	Target string `json:"target"`
	Why    string `json:"why"`
}

// contestant is a row that is run.
type contestant struct {
	Row
	keys     int // of an operation
	target   target.Target
	known    uint64
	fresh    atomic.Uint64
	node     *rig.Node // of those that are ours
	beside   *contestant
	rounds   []load.Result
	aside    []load.Result
	counters rig.Counters
	measured time.Duration // for how long it was counted, warm-ups and all
	at       *rig.Rig      // its site
	busy     []cores       // in each round
	prefix   string        // of its keys
	told     []target.Told // to those who watch
	behind   int           // slices at whose end the node's watch was not live
	waits    []target.Waited
	lost     error // why it has no more slices
}

// cores is how many of the machine's the node and its etcd kept busy.
type cores struct{ node, etcd float64 }

// resizer is a target with a connection for each operation in flight: those that are idle
// from now on are a burden to it.
type resizer interface{ Resize(inFlight int) }

// calibrations are the numbers in flight of which the best is chosen.
var calibrations = []int{16, 64, 256, 512}

// open opens a row's target, and what is to run beside it.
func (r *Runner) open(ctx context.Context, row Row) (c *contestant, err error) {
	if row.Files > 0 {
		if err := rig.RaiseFiles(uint64(row.Files)); err != nil {
			return nil, err
		}
	}
	kind, err := target.Find(row.Target)
	if err != nil {
		return nil, err
	}
	at := r.Rig.At(row.Site)
	c = &contestant{Row: row, keys: 1, at: at, prefix: target.Prefix(at, name(row.ID))}
	if row.Keys != load.New {
		c.known = uint64(r.Options.Known)
	}
	spec := target.Spec{
		Name: name(row.ID), Client: row.Client, Connections: row.Connections, InFlight: row.InFlight,
		Known: c.known, ResultBytes: row.ResultBytes, Batch: row.Batch, Records: row.Records,
	}
	if row.InFlight == 0 {
		spec.InFlight = slices.Max(calibrations)
	}
	if kind.Keys != nil {
		c.keys = kind.Keys(spec)
	}
	c.fresh.Store(c.known)
	if kind.Ours {
		n, err := at.Node(ctx)
		if err != nil {
			return nil, err
		}
		c.node = &n
	}
	if c.target, err = kind.Open(ctx, at, spec); err != nil {
		return nil, err
	}
	if err := c.target.Prepare(ctx); err != nil {
		return nil, errors.Join(err, c.target.Close())
	}
	if row.Beside != nil {
		beside := *row.Beside
		beside.ID = row.ID + " hot"
		if c.beside, err = r.open(ctx, r.filled(beside)); err != nil {
			return nil, errors.Join(err, c.target.Close())
		}
	}
	return c, nil
}

// filled is a row with what the options say where it says nothing.
func (r *Runner) filled(row Row) Row {
	if row.Client == "" {
		row.Client = r.Options.Client
	}
	if row.Connections == 0 && r.Options.Connections > 0 {
		row.Connections = r.Options.Connections
	}
	switch row.ResultBytes {
	case 0:
		row.ResultBytes = r.Options.ResultBytes
	case none:
		row.ResultBytes = 0
	}
	return row
}

func (c *contestant) close() error {
	err := c.target.Close()
	if c.beside != nil {
		err = errors.Join(err, c.beside.close())
	}
	return err
}

func (c *contestant) plan(inFlight int, warmUp, slice time.Duration) load.Plan {
	return load.Plan{InFlight: inFlight, Rate: c.Rate, WarmUp: warmUp, Duration: slice,
		Keys: load.Keys{Kind: c.Keys, Repeats: c.Repeats, Known: c.known, Fresh: &c.fresh}}
}

// slice runs one slice of a contestant.
func (r *Runner) slice(ctx context.Context, c *contestant) (err error) {
	plan := c.plan(c.InFlight, r.Options.WarmUp, r.Options.Slice)
	if err := c.watch(ctx); err != nil {
		return err
	}
	readers, err := c.subscribe(ctx, plan)
	if err != nil {
		return err
	}
	before, err := c.count(ctx)
	if err != nil {
		return errors.Join(err, c.unsubscribe(ctx, readers))
	}
	var group sync.WaitGroup
	if b := c.beside; b != nil {
		group.Go(func() {
			c.aside = append(c.aside, load.Run(ctx, b.plan(b.InFlight, plan.WarmUp, plan.Duration), b.target.Do))
		})
	}
	nodeBefore, etcdBefore := c.at.Busy()
	began := time.Now()
	result, err := c.run(ctx, plan, readers)
	took := time.Since(began)
	nodeAfter, etcdAfter := c.at.Busy()
	after, uncounted := c.count(ctx)
	group.Wait() // what runs beside it may be late
	if err := errors.Join(ctx.Err(), err, uncounted, c.watch(ctx), c.unsubscribe(ctx, readers)); err != nil {
		return err
	}
	spent := after.Minus(before)
	c.counters, c.measured = c.counters.Plus(spent), c.measured+took
	c.busy = append(c.busy, cores{(nodeAfter - nodeBefore).Seconds() / took.Seconds(), (etcdAfter - etcdBefore).Seconds() / took.Seconds()})
	c.rounds = append(c.rounds, result)
	r.Progress.Slice(fmt.Sprintf("round %d, %s: %.0f/s, p50 %.0f µs, p99 %.0f µs, %d errors",
		len(c.rounds), c.ID, c.perSecond(result), result.Quantile(0.5), result.Quantile(0.99), result.Errors))
	return nil
}

// run loads a contestant's target by a plan.
func (c *contestant) run(ctx context.Context, plan load.Plan, readers *target.Readers) (load.Result, error) {
	if whole, ok := c.target.(target.Whole); ok {
		result, waited, err := whole.Load(ctx, plan)
		if err == nil {
			c.waits = append(c.waits, waited)
		}
		return result, err
	}
	do := c.target.Do
	if readers != nil {
		began := time.Now()
		readers.Count(began.Add(plan.WarmUp), began.Add(plan.WarmUp+plan.Duration))
		do = func(ctx context.Context, key uint64) error {
			readers.Asked(key)
			err := c.target.Do(ctx, key)
			if err == nil {
				readers.Answered(key)
			}
			return err
		}
	}
	return load.Run(ctx, plan, do), nil
}

func (c *contestant) count(ctx context.Context) (rig.Counters, error) {
	if c.node == nil {
		return rig.Counters{}, nil
	}
	return c.node.Counters(ctx)
}

// perSecond is a rate in keys.
func (c *contestant) perSecond(r load.Result) float64 { return r.PerSecond() * float64(c.keys) }

// calibrate chooses the number in flight that suits a contestant best, where its row
// does not say one.
func (r *Runner) calibrate(ctx context.Context, c *contestant) error {
	if c.InFlight > 0 {
		return nil
	}
	// As long as a slice at most; a second tells them apart.
	slice := min(r.Options.Slice, time.Second)
	best := 0.0
	var rates []string
	for _, n := range calibrations {
		got, err := c.run(ctx, c.plan(n, r.Options.WarmUp, slice), nil)
		if err := errors.Join(ctx.Err(), err); err != nil {
			return err
		}
		rate := fmt.Sprintf("%d: %.0f/s", n, c.perSecond(got))
		if got.Errors > 0 {
			rate += fmt.Sprintf(" with %d errors, the first: %s", got.Errors, got.FirstError)
		}
		rates = append(rates, rate)
		if c.InFlight == 0 || got.PerSecond() > best && got.Errors == 0 {
			best, c.InFlight = got.PerSecond(), n
		}
		r.Progress.Slice("calibrate " + c.ID + ", " + rate)
	}
	if t, ok := c.target.(resizer); ok {
		t.Resize(c.InFlight)
	}
	r.Progress.Say("%s runs with %d in flight (%s)", c.ID, c.InFlight, strings.Join(rates, ", "))
	return nil
}

// order is who comes when in a round: it is turned round each time, so that nobody always
// follows the same one.
func order(n, round int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	if round%2 == 1 {
		slices.Reverse(all)
	}
	return all
}

// compete runs all rounds of contestants that take turns.
func (r *Runner) compete(ctx context.Context, all []*contestant) error {
	for _, c := range all {
		if err := r.calibrate(ctx, c); err != nil {
			return err
		}
	}
	for round := range r.Options.Rounds {
		for _, i := range order(len(all), round) {
			c := all[i]
			if c.lost != nil {
				continue
			}
			err := r.slice(ctx, c)
			_, whole := c.target.(target.Whole)
			if err != nil && ctx.Err() == nil && (whole || c.Watch != "") {
				c.lost, err = err, nil // the others go on
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// slices is how many slices these rows take.
func (r *Runner) slices(rows []Row) int {
	n := len(rows) * r.Options.Rounds
	for _, row := range rows {
		if row.InFlight == 0 {
			n += len(calibrations)
		}
	}
	return n
}

// Measure runs a suite and returns its figures.
func (r *Runner) Measure(ctx context.Context, s Suite) (*Report, error) {
	report := &Report{Suite: s.Name, Rows: []Figures{}, NotRun: []NotRun{}, Machine: r.Rig.Machine(ctx), Conditions: r.Options.conditions()}
	r.Progress.Expect(r.slices(s.rows(r.Options)))
	for _, rows := range s.parts(r.Options) {
		if err := r.part(ctx, rows, report); err != nil {
			return nil, err
		}
	}
	return report, nil
}

// part runs rows that take turns.
func (r *Runner) part(ctx context.Context, rows []Row, report *Report) error {
	var all []*contestant
	defer func() {
		for _, c := range all {
			_ = c.close() // it has told what it has to tell
		}
		for _, row := range rows {
			r.Rig.At(row.Site).CloseSite()
		}
	}()
	skip := func(id string, err error) {
		r.Progress.Say("%s is not run: %v", id, err)
		report.NotRun = append(report.NotRun, NotRun{id, err.Error()})
	}
	for _, row := range rows {
		c, err := r.open(ctx, r.filled(row))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			skip(row.ID, err)
			continue
		}
		all = append(all, c)
	}
	if err := r.compete(ctx, all); err != nil {
		return err
	}
	ran := map[string]*contestant{}
	for _, c := range all {
		if c.lost != nil {
			skip(c.ID, c.lost)
			continue
		}
		ran[c.ID] = c
	}
	for _, c := range all {
		if ran[c.ID] != nil {
			f := c.figures()
			f.Against = c.against(ran)
			report.Rows = append(report.Rows, f)
		}
	}
	return nil
}

// name makes an ID a part of keys and tables.
func name(id string) string {
	b := make([]byte, 0, len(id))
	for i := range len(id) {
		switch c := id[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
			b = append(b, c)
		case c >= 'A' && c <= 'Z':
			b = append(b, c+'a'-'A')
		case len(b) > 0 && b[len(b)-1] != '-':
			b = append(b, '-')
		}
	}
	return string(b)
}
