// Package ingest runs a file of JSON lines through Begin and Complete: each
// line is one delivery, and its work is done once however often it is there.
//
// What always holds:
//
//   - The lines of one (namespace, key) are taken in their order: a line is begun
//     when the one before is settled. A name that waits holds up one worker; the
//     others go on with other names.
//   - What has been read and is not settled is bounded in bytes, whatever the
//     number of workers.
//   - A line's work begins only after Begin gave its claim to this run, and, if
//     it is a command, after the journal says so on disk.
//   - Work that may have begun and is not known to have ended is in doubt. It is
//     never begun again unless Options.RerunInDoubt says so.
//   - A command is gone before its claim's lease ends, or its lease is extended.
//   - Run returns when everything that it started has ended.
package ingest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/fingerprint"
)

// Service is the part of the contract that an ingest uses; the generated
// dualcheckv1.DedupServiceClient has it.
type Service interface {
	Begin(context.Context, *dualcheckv1.BeginRequest, ...grpc.CallOption) (*dualcheckv1.BeginResponse, error)
	Complete(context.Context, *dualcheckv1.CompleteRequest, ...grpc.CallOption) (*dualcheckv1.FinishResponse, error)
	Fail(context.Context, *dualcheckv1.FailRequest, ...grpc.CallOption) (*dualcheckv1.FinishResponse, error)
	Extend(context.Context, *dualcheckv1.ExtendRequest, ...grpc.CallOption) (*dualcheckv1.ExtendResponse, error)
	Get(context.Context, *dualcheckv1.GetRequest, ...grpc.CallOption) (*dualcheckv1.GetResponse, error)
}

// Runner does the work of a line. Run returns when the work has ended, or soon
// after ctx is done, when nothing of it runs any more. Its errors:
// ErrNotStarted, nothing of the work happened; any other, it was stopped in the
// middle. Work that ended badly is an Output with a Failure, not an error.
type Runner interface {
	Run(ctx context.Context, job Job) (Output, error)
}

// Job is what a Runner is told of a line.
type Job struct {
	// Line is its number in the input, from 1.
	Line      int
	Namespace string
	Key       string
	Operation string
	// Body is the line's body, the bytes of its JSON as they are there.
	Body []byte
	// Attempt and Fence are the claim's.
	Attempt int32
	Fence   int64
	// Lapsed: an earlier claim's lease ran out, and nobody knows whether its
	// work happened.
	Lapsed bool
}

// Output is what came of the work: one of the three.
type Output struct {
	Result  *dualcheckv1.Result
	Omitted *dualcheckv1.Omitted
	Failure *dualcheckv1.Failure
}

// What ends a run before its input does, and a runner's error; for errors.Is.
var (
	// ErrInterrupted: the context was cancelled; what ran was finished, and
	// the lines after it were not begun.
	ErrInterrupted = errors.New("interrupted")
	// ErrKilled: Options.Kill was closed; what ran was stopped in the middle.
	ErrKilled = errors.New("killed")
	// ErrUnavailable: the service did not answer for Options.RetryFor.
	ErrUnavailable = errors.New("the service did not answer")
	// ErrNotStarted is a Runner's: nothing of the work happened.
	ErrNotStarted = errors.New("the work could not be started")
)

// Options say how to run. Only Service is needed.
type Options struct {
	Service Service
	// Workers is how many lines are under way at most; 16 unless set.
	Workers int
	// Owner is sent with each Begin.
	Owner string
	// Lease is asked for with each Begin and Extend; 0: the namespace's default.
	Lease time.Duration
	// Wait is how long one Begin waits at the server for a key that is in
	// progress, 0 to 30 s. Such a key is asked for again until it is settled.
	Wait time.Duration
	// CallTimeout bounds one call, Wait not counted; 10 s unless set.
	CallTimeout time.Duration
	// RetryFor is how long a call that got no definite answer is sent again
	// before the run gives up; 2 min unless set.
	RetryFor time.Duration
	// Exclude leaves members of each body out of its fingerprint.
	Exclude []fingerprint.Pointer
	// Runner does the work; nil: there is none, and the result is empty.
	Runner Runner
	// Journal records what the Runner begins; needed with one, unused without.
	Journal *Journal
	// RerunInDoubt begins work again that the journal has in doubt.
	RerunInDoubt bool
	// Kill, when closed, stops everything at once, commands in their middle.
	Kill <-chan struct{}
	// Report is told of lines that people should know of; one call at a time.
	Report func(Note)
	// Hopeless says of a call's error that no call will ever be answered: the run
	// ends with it at once. Unset, no error is.
	Hopeless func(error) bool
	// Resolve is the command line, for people, that says what became of a key.
	Resolve func(namespace, key string) string
	// Progress is told how many bytes of input have been dealt with; calls may
	// overlap.
	Progress func(bytes int)
}

// Outcome is what became of a line.
type Outcome string

// Each line that is dealt with counts as one of these.
const (
	// First: its work was done by this run and its result is stored.
	First Outcome = "first"
	// Replay: it had succeeded before.
	Replay Outcome = "replay"
	// ReplayFailure: it had failed for good before.
	ReplayFailure Outcome = "replay_failure"
	// Conflict: its key is known with another body or operation.
	Conflict Outcome = "conflict"
	// Expired: it was done before; its result is no longer kept.
	Expired Outcome = "expired"
	// Failed: it could not be read, judged or done.
	Failed Outcome = "failed"
	// InDoubt: nobody knows whether its work happened.
	InDoubt Outcome = "in_doubt"
	// waiting and notBegun are not counted.
	waiting  Outcome = "waiting"
	notBegun Outcome = "not_begun"
)

// Note is what people should know of one line.
type Note struct {
	// Line is 0 if it is about the journal.
	Line      int     `json:"line,omitempty"`
	Namespace string  `json:"namespace,omitempty"`
	Key       string  `json:"key,omitempty"`
	Outcome   Outcome `json:"outcome"`
	Text      string  `json:"message"`
}

// Summary counts the lines that were dealt with.
type Summary struct {
	Lines         int64 `json:"lines"`
	First         int64 `json:"first"`
	Replay        int64 `json:"replay"`
	ReplayFailure int64 `json:"replay_failure"`
	Conflict      int64 `json:"conflict"`
	Expired       int64 `json:"expired"`
	Failed        int64 `json:"failed"`
	InDoubt       int64 `json:"in_doubt"`
	// Seconds is how long it took, PerSecond is Lines over it.
	Seconds   float64 `json:"seconds"`
	PerSecond float64 `json:"per_second"`
	// Interrupted: the input was not read to its end.
	Interrupted bool `json:"interrupted"`
}

func (s *Summary) count(o Outcome) {
	switch o {
	case First:
		s.First++
	case Replay:
		s.Replay++
	case ReplayFailure:
		s.ReplayFailure++
	case Conflict:
		s.Conflict++
	case Expired:
		s.Expired++
	case Failed:
		s.Failed++
	case InDoubt:
		s.InDoubt++
	default:
		return
	}
	s.Lines++
}

// withDefaults fills in what was left out, or says what is wrong.
func (o Options) withDefaults() (Options, error) {
	if o.Workers == 0 {
		o.Workers = 16
	}
	if o.CallTimeout == 0 {
		o.CallTimeout = 10 * time.Second
	}
	if o.RetryFor == 0 {
		o.RetryFor = 2 * time.Minute
	}
	if o.Report == nil {
		o.Report = func(Note) {}
	}
	if o.Hopeless == nil {
		o.Hopeless = func(error) bool { return false }
	}
	if o.Resolve == nil {
		o.Resolve = func(namespace, key string) string {
			return fmt.Sprintf("dualcheck resolve %s %s --state=succeeded|failed|released --reason=WHY", namespace, key)
		}
	}
	if o.Progress == nil {
		o.Progress = func(int) {}
	}
	switch {
	case o.Service == nil:
		return o, errors.New("ingest: no service")
	case o.Workers < 1:
		return o, fmt.Errorf("ingest: %d workers, at least 1 is needed", o.Workers)
	case o.Lease < 0, o.CallTimeout < 0, o.RetryFor < 0:
		return o, errors.New("ingest: a duration is negative")
	case o.Wait < 0 || o.Wait > 30*time.Second:
		return o, fmt.Errorf("ingest: wait is %v, it must be between 0 and 30s", o.Wait)
	case !utf8.ValidString(o.Owner):
		// No call with it could be encoded, which looks like a broken transport.
		return o, errors.New("ingest: the owner is not valid UTF-8")
	case o.Runner != nil && o.Journal == nil:
		return o, errors.New("ingest: commands need a journal")
	}
	if runner, ok := o.Runner.(interface{ check() error }); ok {
		return o, runner.check()
	}
	return o, nil
}

// run is one Run.
type run struct {
	Options
	// soft ends when no further line is to be begun, hard when everything is to
	// stop at once. The cause of soft is the error that Run returns.
	soft, hard context.Context
	giveUp     context.CancelCauseFunc

	mu      sync.Mutex
	summary Summary
	// silence is when people were last told that the service does not answer.
	silence time.Time
}

// Run deals with every line of input. When ctx is done it begins no further
// line, finishes what runs, waits included, and returns ErrInterrupted. The
// summary is of what was done, whatever the error. A reader that blocks is left
// behind when the run ends early; it ends when its Read returns.
func Run(ctx context.Context, input io.Reader, options Options) (Summary, error) {
	options, err := options.withDefaults()
	if err != nil {
		return Summary{}, err
	}
	started := time.Now()
	soft, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	hard, kill := context.WithCancelCause(context.WithoutCancel(ctx))
	r := &run{Options: options, soft: soft, hard: hard, giveUp: giveUp}

	var killer sync.WaitGroup
	killer.Go(func() {
		select {
		case <-options.Kill:
			giveUp(ErrKilled)
			kill(ErrKilled)
		case <-hard.Done():
		}
	})
	err = r.all(input)
	switch cause := context.Cause(soft); {
	case hard.Err() != nil:
		err = ErrKilled
		r.summary.Interrupted = true
	case cause != nil && (ctx.Err() == nil || !errors.Is(cause, context.Cause(ctx))):
		err = cause
	case r.summary.Interrupted:
		err = ErrInterrupted
	}
	kill(nil)
	killer.Wait()
	r.summary.Seconds = time.Since(started).Seconds()
	if r.summary.Seconds > 0 {
		r.summary.PerSecond = float64(r.summary.Lines) / r.summary.Seconds
	}
	return r.summary, err
}

// all settles what the journal has in doubt, then reads the input and has the
// workers deal with it. It returns when all workers have ended.
func (r *run) all(input io.Reader) error {
	if r.Runner != nil {
		if err := r.settleDoubts(); err != nil {
			return err
		}
	}
	lines := make(chan line)
	read := make(chan error, 1)
	go func() { read <- readLines(r.soft, input, lines) }()

	var workers sync.WaitGroup
	pending := newQueue()
	for range r.Workers {
		workers.Go(func() {
			for ln, more := pending.next(); more; ln, more = pending.next() {
				r.take(ln)
				pending.done(ln)
			}
		})
	}
	defer workers.Wait()
	defer pending.close()

	for {
		var ln line
		select {
		case <-r.soft.Done():
			r.interrupted()
			return nil
		case err := <-read:
			if r.soft.Err() != nil {
				r.interrupted()
			}
			return err
		case ln = <-lines:
		}
		if ln.err != nil {
			r.settled(ln, Failed, ln.err.Error())
			continue
		}
		if !pending.push(r.soft, ln) {
			r.interrupted()
			return nil
		}
	}
}

// interrupted notes that a line was not dealt with, or may not have been read.
func (r *run) interrupted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.summary.Interrupted = true
}

// take deals with one line, unless the run is ending.
func (r *run) take(ln line) {
	outcome, text := notBegun, ""
	if r.soft.Err() == nil {
		outcome, text = r.judge(ln)
	}
	r.settled(ln, outcome, text)
}

// settled counts a line and tells of it.
func (r *run) settled(ln line, outcome Outcome, text string) {
	if outcome == notBegun {
		r.interrupted()
		return
	}
	r.mu.Lock()
	r.summary.count(outcome)
	if text != "" {
		r.Report(Note{Line: ln.number, Namespace: ln.name.namespace, Key: ln.name.key, Outcome: outcome, Text: text})
	}
	r.mu.Unlock()
	r.Progress(ln.size)
}

// note tells of a line that is not settled.
func (r *run) note(ln line, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Report(Note{Line: ln.number, Namespace: ln.name.namespace, Key: ln.name.key, Outcome: waiting, Text: text})
}

// tellSilence tells, now and then, that the service does not answer.
func (r *run) tellSilence(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); r.silence.IsZero() || now.Sub(r.silence) >= 10*time.Second {
		r.silence = now
		r.Report(Note{Outcome: waiting, Text: "no answer, asking again: " + describe(err)})
	}
}
