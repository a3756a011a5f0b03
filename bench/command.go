package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
	"github.com/dualcheck/dualcheck/bench/internal/suite"
	"github.com/dualcheck/dualcheck/bench/internal/target"
)

var errUnmet = errors.New("not all goals are met")

// flags are what the command line says.
type flags struct {
	suite     string
	targets   []string
	options   suite.Options
	inFlight  int
	rate      float64
	keys      string
	duration  time.Duration
	addr      string
	dualcheck string
	dir       string
	nodeArgs  []string
	output    string
	verbose   bool
	strict    bool
	list      bool
}

// withTarget are the flags of a load that is put together by hand; a suite has its own.
var withTarget = []string{"in-flight", "rate", "connections", "keys", "duration", "addr"}

// withSuite are those of a suite.
var withSuite = []string{"slice", "rounds", "only", "records", "lives", "strict", "subscribers", "events", "waiters"}

func newCommand(ran *bool) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "dualcheck-bench",
		Short: "Measure dualcheck beside what would be used instead of it",
		Long: `Runs everything that it measures on this machine, in a temporary directory and on
free ports: etcd, Redis and a node of dualcheck, and the rivals that are
installed. What cannot be run is told on the standard error, with the reason.

A suite runs its own rows; --suite goals compares. Without --suite the targets of
--target are loaded, one after another in each round.`,
		Example: `  dualcheck bench --suite goals
  dualcheck bench --suite in-flight -o json
  dualcheck bench --target dualcheck-life --keys zipf --repeats 0.9 --in-flight 256
  dualcheck bench --target dualcheck,etcd-txn --rate 2000 --duration 30s`,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "dualcheck bench"},
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("it takes no arguments; %q were given", args)
			}
			return nil
		},
		PreRunE: func(cmd *cobra.Command, _ []string) error { return f.check(cmd.Flags()) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			*ran = true
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.CompletionOptions.DisableDefaultCmd = true
	f.define(cmd.Flags())
	return cmd
}

func (f *flags) define(s *pflag.FlagSet) {
	o := &f.options
	s.StringVar(&f.suite, "suite", "", "the suite to run; --list shows them")
	s.StringSliceVar(&f.targets, "target", []string{"dualcheck"}, "the targets to load; --list shows them")
	s.StringVar(&o.Client, "client", "sdk", "how dualcheck is called: "+strings.Join(target.Clients(), ", "))
	s.IntVar(&f.inFlight, "in-flight", 0, "operations under way at once (with --rate: at most); 0: whatever suits each target best, with --rate 1024")
	s.Float64Var(&f.rate, "rate", 0, "operations sent a second, whatever became of those before; 0: a new one when one is answered")
	s.IntVar(&o.Connections, "connections", 0, "connections to dualcheck or etcd; 0: the target's own choice")
	s.StringVar(&f.keys, "keys", "new", "new: each once; zipf: a share of repeats of known keys; hot: a share of repeats of one known key")
	s.Float64Var(&o.Repeats, "repeats", 0.9, "the share of repeats")
	s.IntVar(&o.Known, "known", 10_000, "how many keys are finished before, for repeats to ask for")
	s.IntVar(&o.ResultBytes, "result-bytes", 200, "bytes of a result")
	s.DurationVar(&o.WarmUp, "warm-up", 500*time.Millisecond, "goes before each slice and is not counted")
	s.DurationVar(&f.duration, "duration", 10*time.Second, "how long a target of --target is measured")
	s.DurationVar(&o.Slice, "slice", 3*time.Second, "how long a slice of a suite is")
	s.IntVar(&o.Rounds, "rounds", 5, "how many slices each row of a suite has")
	s.StringSliceVar(&o.Only, "only", nil, "of --suite goals only these: "+strings.Join(suite.GoalIDs(), ", ")+"; of --suite watch: "+strings.Join(suite.WatchParts(), ", "))
	s.IntSliceVar(&o.Records, "records", []int{1000, 100_000, 1_000_000}, "how many records there are in etcd, for --suite records")
	s.IntVar(&o.Subscribers, "subscribers", 1000, "the most subscribers that --suite watch has")
	s.IntVar(&o.Events, "events", 1000, "writes a second whose events --suite watch measures")
	s.IntVar(&o.Waiters, "waiters", 10_000, "callers that wait at once in --suite watch")
	s.IntVar(&o.Life, "lives", 20_000, "how many lives bytes-per-record has")
	s.StringVar(&f.addr, "addr", "", "the gRPC address of a dualcheck that runs already, for targets that need nothing else")
	s.StringVar(&f.dualcheck, "dualcheck", "", "the dualcheck that serves (default: the one beside this program, or in PATH)")
	s.StringVar(&f.dir, "dir", "", "where the temporary directory is made: the disk that is measured (default: the system's)")
	s.StringArrayVar(&f.nodeArgs, "node-arg", nil, "a further argument of dualcheck serve, such as --node-arg=--max-in-flight=65536")
	s.StringVarP(&f.output, "output", "o", "table", "table or json")
	s.BoolVarP(&f.verbose, "verbose", "v", false, "say what came of each slice")
	s.BoolVar(&f.strict, "strict", false, "end with status 1 unless all goals are met")
	s.BoolVar(&f.list, "list", false, "list suites and targets, and do nothing else")
}

// check refuses what cannot be meant, a sentence a mistake.
func (f *flags) check(s *pflag.FlagSet) error {
	o := &f.options
	for _, c := range []struct {
		wrong bool
		text  string
	}{
		{f.output != "table" && f.output != "json", fmt.Sprintf("--output is table or json, not %q", f.output)},
		{!slices.Contains(target.Clients(), o.Client), fmt.Sprintf("--client is one of %s, not %q", strings.Join(target.Clients(), ", "), o.Client)},
		{f.inFlight < 0, "--in-flight is 0 or more"},
		{f.rate < 0, "--rate is 0 or more"},
		{o.Connections < 0, "--connections is 0 or more"},
		{o.Repeats < 0 || o.Repeats > 1, "--repeats is a share from 0 to 1"},
		{o.Known < 1, "--known is 1 or more"},
		{o.ResultBytes < 0 || o.ResultBytes > 256<<10, "--result-bytes is from 0 to 262144, the most that a namespace keeps unless it says so"},
		{o.WarmUp < 0, "--warm-up is 0 or more"},
		{o.Slice <= 0, "--slice is more than 0"},
		{f.duration <= 0, "--duration is more than 0"},
		{o.Rounds < 1, "--rounds is 1 or more"},
		{o.Life < 1, "--lives is 1 or more"},
		{o.Subscribers < 20, "--subscribers is 20 or more: there are rows of a tenth of them"},
		{o.Events < 1, "--events is 1 or more"},
		{o.Waiters < 1 || o.Waiters > 16_000, "--waiters is from 1 to 16000: whoever waits for a key of its own is answered within 30 s"},
		{len(o.Records) == 0 || slices.Min(o.Records) < 1 || !slices.IsSorted(o.Records), "--records are 1 or more, the smallest first: none is ever removed"},
		{f.suite != "" && s.Changed("target"), "--suite has its own targets: leave --target out, or --suite"},
		{f.strict && f.suite != suite.Goals, "--strict goes with --suite goals"},
		{len(o.Only) > 0 && f.only() == nil, "--only goes with --suite goals or watch"},
		{f.dualcheck != "" && f.addr != "", "--dualcheck is a program to be run, --addr a node that runs already: say one of them"},
	} {
		if c.wrong {
			return errors.New(c.text)
		}
	}
	if _, err := load.ParseKind(f.keys); err != nil {
		return fmt.Errorf("--keys: %w", err)
	}
	for _, only := range o.Only {
		if !slices.Contains(f.only(), only) {
			return fmt.Errorf("--only: no goal or part %q; there are %s", only, strings.Join(f.only(), ", "))
		}
	}
	apart, with := withSuite, "--suite"
	if f.suite != "" {
		apart, with = withTarget, "--target"
		if _, err := suite.Find(f.suite); err != nil && f.suite != suite.Goals {
			return fmt.Errorf("--suite: %w", err)
		}
	}
	for _, name := range apart {
		if s.Changed(name) {
			return fmt.Errorf("--%s goes with %s", name, with)
		}
	}
	for _, name := range f.targets {
		kind, err := target.Find(name)
		if err != nil {
			return fmt.Errorf("--target: %w", err)
		}
		if f.addr != "" && !kind.Ours {
			return fmt.Errorf("--addr goes with targets of dualcheck's own, not %s: what is compared runs on one machine", name)
		}
	}
	return nil
}

// only is what --only may choose from; nil: it has nothing to choose.
func (f *flags) only() []string {
	switch f.suite {
	case suite.Goals:
		return suite.GoalIDs()
	case suite.Watch:
		return suite.WatchParts()
	}
	return nil
}

func (f *flags) run(ctx context.Context, out, talk io.Writer) (err error) {
	if f.list {
		return list(out)
	}
	log := slog.New(slog.NewTextHandler(talk, &slog.HandlerOptions{Level: slog.LevelWarn}))
	self, err := os.Executable()
	if err != nil {
		return err
	}
	bin := f.dualcheck
	if bin == "" {
		bin = rig.Beside("dualcheck")
	}
	servers, err := rig.New(rig.Config{Dir: f.dir, Self: append([]string{self}, reexec...), Dualcheck: bin, Addr: f.addr, NodeArgs: f.nodeArgs, Log: log})
	if err != nil {
		return err
	}
	defer servers.Close()
	seen := newProgress(talk, f.verbose)
	defer seen.done()
	r := &suite.Runner{Rig: servers, Options: f.options, Progress: seen}
	if f.suite == suite.Goals {
		report, err := r.MeasureGoals(ctx)
		if err != nil {
			return err
		}
		seen.done()
		if err := f.show(out, report, report.Table); err != nil {
			return err
		}
		if f.strict && !report.Met() {
			return errUnmet
		}
		return nil
	}
	what := f.byHand()
	if f.suite != "" {
		if what, err = suite.Find(f.suite); err != nil {
			return err
		}
	} else {
		r.Options.Slice, r.Options.Rounds = f.duration, 1
	}
	report, err := r.Measure(ctx, what)
	if err != nil {
		return err
	}
	seen.done()
	if err := f.show(out, report, report.Table); err != nil {
		return err
	}
	if len(report.Rows) == 0 {
		return errNothing
	}
	return nil
}

var errNothing = errors.New("nothing could be measured")

// reexec are the arguments before those that make this program one of its own servers; a
// test has its own.
var reexec []string

// byHand is the load that the flags describe, on each target.
func (f *flags) byHand() suite.Suite {
	var rows []suite.Row
	for _, name := range f.targets {
		row := suite.Row{ID: name, Target: name, InFlight: f.inFlight, Rate: f.rate, Keys: load.Kind(f.keys), Repeats: f.options.Repeats, Connections: f.options.Connections}
		if row.Rate > 0 && row.InFlight == 0 {
			row.InFlight = 1024
		}
		rows = append(rows, row)
	}
	return suite.Of(rows...)
}

func (f *flags) show(out io.Writer, report any, table func(io.Writer) error) error {
	if f.output == "json" {
		return suite.JSON(out, report)
	}
	return table(out)
}

func list(out io.Writer) error {
	fmt.Fprintf(out, "suites:\n  %-22s %s\n", suite.Goals, "what dualcheck is to reach, beside its rivals")
	for _, s := range suite.All() {
		fmt.Fprintf(out, "  %-22s %s\n", s.Name, s.About)
	}
	fmt.Fprintln(out, "targets:")
	for _, k := range target.All() {
		fmt.Fprintf(out, "  %-22s %s\n", k.Name, k.About)
	}
	return nil
}
