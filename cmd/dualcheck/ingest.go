package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/grpc/codes"

	"github.com/dualcheck/dualcheck/internal/ingest"
)

// quickLease is the lease of a run without commands: nothing happens under its
// claims, so a run that was killed need not hold them long.
const quickLease = 5 * time.Second

// journalSuffix is what the default journal's name has after the input's.
const journalSuffix = ".dualcheck-journal"

// ingestFlags are the flags of ingest.
type ingestFlags struct {
	workers     int
	owner       string
	lease, wait time.Duration
	retryFor    time.Duration
	exclude     []string
	exec        string
	contentType string
	journal     string
	rerun       bool
	// failOnConflict: a conflict is not as good as done.
	failOnConflict bool
}

func newIngestCommand() *cobra.Command {
	var flags ingestFlags
	cmd := &cobra.Command{
		Use:   "ingest FILE|-",
		Short: "Run a file of deliveries through begin and complete, each once",
		Long: `Run a file of deliveries, each a line of JSON
{"namespace": …, "key": …, "operation": …, "body": …}, through begin and complete
with the fingerprint of the body's canonical JSON (RFC 8785). Members with other
names are left alone. The lines of one key are taken in their order, those of
different keys by --workers at once. - is the standard input.

Each line counts as one of:
  first           its work was done by this run
  replay          it had succeeded before
  replay_failure  it had failed for good before
  conflict        its key is known with another body or operation; it was not taken
  expired         it was done before, and its result is no longer kept
  failed          it could not be read, judged or done; told with its reason
  in_doubt        nobody knows whether its work happened

A key that is in progress is waited for. That takes one of --workers; lines of
other keys go on with the rest. Up to 64 MiB of lines are read ahead; when as much
waits for such a key, all wait. A service that cannot answer is asked again for
--retry-for, then the run ends.

Without --exec the work is nothing, and the result is empty. With --exec each
FIRST runs a shell command: the body on its standard input, its standard output
as the result, the line in INGEST_LINE, INGEST_NAMESPACE, INGEST_KEY,
INGEST_OPERATION, INGEST_ATTEMPT, INGEST_FENCE and INGEST_LAPSED. Its claim is
extended while it runs; it is killed, with all it started, before a lease ends
that could not be extended. It must not leave anything running: what it started
and did not wait for is killed when it ends, and the outcome is unknown, whatever
its exit status. Else, if its exit status is not 0, --exec-failure says what that
means. The default is unknown, because a command that failed in the middle may
have done part of its work; choose retryable only for a command that does nothing
unless it succeeds.

With --exec a journal beside the input (FILE` + journalSuffix + `, or --journal)
records on disk what is about to run, about 400 bytes each. If the run is killed
in the middle, the next one lists those lines as in doubt and leaves them, and
all lines of their keys, alone. Look whether the work happened and say so with
dualcheck resolve, or have it run again with --rerun-in-doubt. The journal is
removed when nothing is in doubt. Without --exec there is nothing to be in doubt,
and a killed run is simply run again; where the namespace says TAKEOVER_NEVER, the
claims that it left are held until dualcheck resolve all the same.

An interrupt finishes what runs and prints the summary; a second one kills it.

Exit status: 0, conflicts or not; 130 if interrupted; 10 if the service did not
answer; else 1 if a line failed, 5 if one is in doubt, with --fail-on-conflict 4 if
one was a conflict, 6 if one had failed for good before.`,
		Example: `  dualcheck ingest deliveries.jsonl
  dualcheck ingest deliveries.jsonl --workers 64 -o json
  dualcheck ingest orders.jsonl --exec 'curl -sf --data-binary @- https://erp.example/orders'`,
		Args: arguments("FILE"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveDefault
		},
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	f := cmd.Flags()
	f.IntVar(&flags.workers, "workers", 16, "how many lines are under way at most")
	f.StringVar(&flags.owner, "owner", "", "who asks (default user@host)")
	f.DurationVar(&flags.lease, "lease", 0, "how long each claim is held (default 5s; with --exec the namespace's)")
	f.DurationVar(&flags.wait, "wait", 5*time.Second, "how long one begin waits at the server for a key in progress, up to 30s")
	f.DurationVar(&flags.retryFor, "retry-for", 2*time.Minute, "how long a call without an answer is sent again before the run ends")
	f.StringArrayVar(&flags.exclude, "fingerprint-exclude", nil, "leave what this JSON Pointer leads to in each body out of its fingerprint (may be repeated)")
	f.StringVar(&flags.exec, "exec", "", "run this shell command for each FIRST")
	class := choiceFlag(cmd, "exec-failure", "what an exit status other than 0 means (default unknown)", "retryable", "terminal", "unknown")
	f.StringVar(&flags.contentType, "content-type", "", "the media type of what the command prints")
	f.StringVar(&flags.journal, "journal", "", "the journal's file (default FILE"+journalSuffix+"; needed with --exec for the standard input)")
	f.BoolVar(&flags.rerun, "rerun-in-doubt", false, "run lines again that an earlier run began and did not see end")
	f.BoolVar(&flags.failOnConflict, "fail-on-conflict", false, "end with exit status 4 if any line was a conflict")
	fileFlag(cmd, "journal")

	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if flags.exec == "" {
			for _, name := range []string{"exec-failure", "content-type", "journal", "rerun-in-doubt"} {
				if cmd.Flags().Changed(name) {
					return usageErrorf("--%s goes with --exec", name)
				}
			}
		}
		if flags.workers < 1 {
			return usageErrorf("--workers is %d, it must be 1 or more", flags.workers)
		}
		if flags.wait < 0 || flags.wait > 30*time.Second {
			return usageErrorf("--wait is %v, it must be between 0 and 30s", flags.wait)
		}
		for name, value := range map[string]time.Duration{"lease": flags.lease, "retry-for": flags.retryFor} {
			if value < 0 {
				return usageErrorf("--%s is %v, it must not be negative", name, value)
			}
		}
		failure := class.value
		if failure == "" {
			failure = "unknown"
		}
		return runIngest(cmd, server, &flags, args[0], ingest.Command{
			Shell:        flags.exec,
			FailureClass: failureClass(failure),
			ContentType:  flags.contentType,
		})
	}
	return cmd
}

// runIngest runs the input at path and prints the summary.
func runIngest(cmd *cobra.Command, server *clientFlags, flags *ingestFlags, path string, command ingest.Command) (err error) {
	exclude, err := parsePointers("fingerprint-exclude", flags.exclude)
	if err != nil {
		return err
	}
	input, length, closeInput, err := openInput(cmd, path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeInput()) }()
	to, err := server.connect(cmd)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.conn.Close()) }()

	kill, stopWatching := secondInterrupt(cmd.Context())
	defer stopWatching()
	talk := newTalk(cmd, length)
	options := ingest.Options{
		Service:      to.dedup,
		Workers:      flags.workers,
		Owner:        flags.owner,
		Lease:        flags.lease,
		Wait:         flags.wait,
		CallTimeout:  server.timeout,
		RetryFor:     flags.retryFor,
		Exclude:      exclude,
		RerunInDoubt: flags.rerun,
		Kill:         kill,
		Report:       talk.note,
		Progress:     talk.progress,
		Hopeless:     isMistake,
		Resolve: func(namespace, key string) string {
			return commandLine("resolve", []string{namespace, key}, server.given(cmd), resolveChoices...)
		},
	}
	if options.Owner == "" {
		options.Owner = defaultOwner()
	}
	if command.Shell == "" {
		if err := refuseDoubts(path); err != nil {
			return err
		}
		if options.Lease == 0 {
			options.Lease = quickLease
		}
	} else {
		options.Runner = command
		if options.Journal, err = openJournal(path, flags.journal); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, options.Journal.Close()) }()
	}
	summary, err := ingest.Run(cmd.Context(), input, options)
	talk.end()
	if printErr := printValue(cmd, summary, func(p *page) { printSummary(p, summary) }); printErr != nil {
		return errors.Join(err, printErr)
	}
	return ingestExit(summary, err, flags.failOnConflict)
}

// openInput opens the file at path; length is its size in bytes, -1 if it is not
// known.
func openInput(cmd *cobra.Command, path string) (input io.Reader, length int64, closeInput func() error, err error) {
	if path == "-" {
		return cmd.InOrStdin(), -1, func() error { return nil }, nil
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, 0, nil, inputErrorf("open the input: %w", err)
	}
	length = -1
	if info, err := file.Stat(); err == nil && info.Mode().IsRegular() {
		length = info.Size()
	}
	return file, length, file.Close, nil
}

// openJournal opens the journal that the flag names, or the one beside the input.
func openJournal(input, path string) (*ingest.Journal, error) {
	if path == "" {
		if input == "-" {
			return nil, usageErrorf("--exec on the standard input needs --journal FILE, which must be the same file the next time")
		}
		path = input + journalSuffix
	}
	journal, err := ingest.OpenJournal(path)
	if errors.Is(err, ingest.ErrJournalInUse) {
		return nil, &exitError{code: exitRefused, reason: "JOURNAL_IN_USE", err: fmt.Errorf("%w; wait for it to end", err)}
	}
	return journal, err
}

// refuseDoubts refuses to complete lines without a command that an earlier run's
// command may have done.
func refuseDoubts(input string) error {
	if input == "-" {
		return nil
	}
	path := input + journalSuffix
	doubts, err := ingest.HasDoubts(path)
	if err == nil && doubts {
		err = errors.New("commands of an earlier run with --exec are in doubt")
	}
	if err != nil {
		return &exitError{code: exitRefused, reason: "LINES_IN_DOUBT", err: fmt.Errorf("%s: %w; run with --exec again, or remove that file if they do not matter", path, err)}
	}
	return nil
}

// secondInterrupt is a channel that is closed at the second interrupt: the first
// has ended ctx. stop must be called, and waits for what it has started.
func secondInterrupt(ctx context.Context) (kill <-chan struct{}, stop func()) {
	signals := make(chan os.Signal, 2)
	killed := make(chan struct{})
	done := make(chan struct{})
	var watcher sync.WaitGroup
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	watcher.Go(func() {
		for count := 0; count < 2; count++ {
			select {
			case <-signals:
			case <-done:
				return
			}
		}
		close(killed)
	})
	return killed, func() {
		signal.Stop(signals)
		close(done)
		watcher.Wait()
	}
}

// talk writes to the standard error while lines are dealt with.
type talk struct {
	to     io.Writer
	asJSON bool

	mu  sync.Mutex
	bar *progressbar.ProgressBar
}

// newTalk shows a bar of length bytes (-1: not known) if the standard error is a
// terminal that wants one.
func newTalk(cmd *cobra.Command, length int64) *talk {
	t := &talk{to: cmd.ErrOrStderr(), asJSON: wantsJSON(cmd)}
	file, ok := t.to.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) || os.Getenv("TERM") == "dumb" {
		return t
	}
	t.bar = progressbar.NewOptions64(length,
		progressbar.OptionSetWriter(t.to),
		progressbar.OptionShowBytes(true),
		progressbar.OptionUseIECUnits(true),
		progressbar.OptionEnableColorCodes(false),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionSetDescription("ingest"),
	)
	return t
}

// note tells of one line.
func (t *talk) note(n ingest.Note) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.bar != nil {
		// A terminal that cannot be written to is no reason to stop.
		_ = t.bar.Clear()
	}
	if t.asJSON {
		enc := json.NewEncoder(t.to)
		enc.SetEscapeHTML(false)
		_ = enc.Encode(n)
		return
	}
	text := string(n.Outcome) + ": "
	if n.Line > 0 {
		text = fmt.Sprintf("line %d: %s", n.Line, text)
	}
	if name := strings.TrimSpace(n.Namespace + " " + n.Key); name != "" {
		text += printable(name) + ": "
	}
	fmt.Fprintln(t.to, text+printable(oneLine(n.Text)))
}

// progress moves the bar.
func (t *talk) progress(bytes int) {
	if t.bar == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.bar.Add(bytes)
}

// end takes the bar away.
func (t *talk) end() {
	if t.bar == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.bar.Finish()
}

func printSummary(p *page, s ingest.Summary) {
	for _, row := range []struct {
		name  string
		count int64
	}{
		{"lines", s.Lines},
		{"first", s.First},
		{"replay", s.Replay},
		{"replay_failure", s.ReplayFailure},
		{"conflict", s.Conflict},
		{"expired", s.Expired},
		{"failed", s.Failed},
		{"in_doubt", s.InDoubt},
	} {
		p.line(row.name, fmt.Sprint(row.count))
	}
	p.line("seconds", fmt.Sprintf("%.2f", s.Seconds))
	p.line("per_second", fmt.Sprintf("%.0f", s.PerSecond))
	if s.Interrupted {
		p.line("interrupted", "yes: run it again for the rest")
	}
}

// ingestExit is the error, and so the exit status, of a run.
func ingestExit(s ingest.Summary, err error, failOnConflict bool) error {
	lines := func(code int, status codes.Code, reason, text string, n int64) error {
		return &exitError{code: code, status: status, reason: reason, err: fmt.Errorf("%d of %s %s", n, counted(s.Lines, "line"), text)}
	}
	switch {
	case errors.Is(err, ingest.ErrInterrupted), errors.Is(err, ingest.ErrKilled):
		return &exitError{code: exitInterrupted, err: fmt.Errorf("%w after %s; run it again for the rest", err, counted(s.Lines, "line"))}
	case errors.Is(err, ingest.ErrUnavailable):
		return &exitError{code: exitUnavailable, err: fmt.Errorf("%w; run it again for the rest", err)}
	case err != nil:
		return err
	case s.Failed > 0:
		return lines(exitFailure, codes.FailedPrecondition, "LINES_FAILED", "failed; the lines above say why", s.Failed)
	case s.InDoubt > 0:
		return lines(exitUnknownOutcome, codes.Unknown, "LINES_IN_DOUBT", "are in doubt; the lines above say what to do", s.InDoubt)
	case s.Conflict > 0 && failOnConflict:
		return lines(exitConflict, codes.AlreadyExists, "LINES_IN_CONFLICT", "were not taken: their keys are known with other work", s.Conflict)
	case s.ReplayFailure > 0:
		return lines(exitFailedForGood, codes.FailedPrecondition, "LINES_FAILED_BEFORE", "had failed for good before", s.ReplayFailure)
	}
	return nil
}
