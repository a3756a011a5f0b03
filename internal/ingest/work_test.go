package ingest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

type callOption = grpc.CallOption

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// runnerFunc is a Runner.
type runnerFunc func(ctx context.Context, job Job) (Output, error)

func (f runnerFunc) Run(ctx context.Context, job Job) (Output, error) { return f(ctx, job) }

// journalAt opens a journal and closes it with the test.
func journalAt(t *testing.T, path string) *Journal {
	t.Helper()
	j, err := OpenJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func closeJournal(t *testing.T, j *Journal) {
	t.Helper()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
}

const oneLine = `{"namespace":"n","key":"a","operation":"op","body":{"x":1}}` + "\n"

func TestACommandsOutputIsTheResult(t *testing.T) {
	service := &ingesttest.Service{}
	path := filepath.Join(t.TempDir(), "journal")
	j := journalAt(t, path)
	got, err := Run(t.Context(), strings.NewReader(deliveries(5)), Options{
		Service: ingesttest.Client{Service: service},
		Runner:  Command{Shell: `printf '%s %s %s %s %s ' "$INGEST_NAMESPACE" "$INGEST_KEY" "$INGEST_OPERATION" "$INGEST_ATTEMPT" "$INGEST_LAPSED"; cat`, ContentType: "text/plain"},
		Journal: j,
	})
	closeJournal(t, j)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Summary{Lines: 15, First: 5, Replay: 5, Conflict: 5}); counts(got) != want {
		t.Errorf("got %+v, want %+v", counts(got), want)
	}
	result := service.Record("n", "k3").GetResult()
	if got := string(result.GetBody()); got != `n k3 op 1 0 {"a":1,"b":{"c":3}}` || result.GetContentType() != "text/plain" {
		t.Errorf("the result is %v", result)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a journal that has nothing open was left behind (%v)", err)
	}
}

func TestACommandThatFailsEndsItsClaimByTheClass(t *testing.T) {
	for class, want := range map[dualcheckv1.FailureClass]dualcheckv1.State{
		dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE: dualcheckv1.State_STATE_RELEASED,
		dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL:  dualcheckv1.State_STATE_FAILED,
		dualcheckv1.FailureClass_FAILURE_CLASS_UNKNOWN:   dualcheckv1.State_STATE_UNKNOWN,
	} {
		service := &ingesttest.Service{}
		j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
		var told notes
		got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
			Service: ingesttest.Client{Service: service},
			Runner:  Command{Shell: "echo some; echo no such order >&2; exit 3", FailureClass: class},
			Journal: j,
			Report:  told.add,
		})
		closeJournal(t, j)
		if err != nil {
			t.Fatal(err)
		}
		if want := (Summary{Lines: 1, Failed: 1}); counts(got) != want {
			t.Errorf("got %+v, want %+v", counts(got), want)
		}
		record := service.Record("n", "a")
		if record.GetState() != want || record.GetFailure().GetCode() != 3 || record.GetFailure().GetMessage() != "no such order" {
			t.Errorf("%v left %v", class, record)
		}
		if !strings.Contains(told.of(Failed), "no such order") {
			t.Errorf("told %q", told.of(Failed))
		}
	}
}

func TestAnOutputTooLongToKeepIsStoredAsItsDigest(t *testing.T) {
	service := &ingesttest.Service{}
	j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
	const size = maxOutput + 1000
	_, err := Run(t.Context(), strings.NewReader(oneLine), Options{
		Service: ingesttest.Client{Service: service},
		Runner:  Command{Shell: fmt.Sprintf("head -c %d /dev/zero", size), ContentType: "x/y"},
		Journal: j,
	})
	closeJournal(t, j)
	if err != nil {
		t.Fatal(err)
	}
	whole := sha256.New()
	for _, part := range [][]byte{[]byte("result"), []byte("0"), []byte("x/y"), []byte("0"), make([]byte, size)} {
		whole.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		whole.Write(part)
	}
	record := service.Record("n", "a")
	if !record.GetResultOmitted() || record.GetResultSize() != size || !bytes.Equal(record.GetDigest(), whole.Sum(nil)) {
		t.Errorf("the record is %v", record)
	}
}

func TestACommandThatCannotBeStartedLeavesTheKeyFree(t *testing.T) {
	service := &ingesttest.Service{}
	j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
	t.Setenv("PATH", "/nowhere")
	got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
		Service: ingesttest.Client{Service: service}, Runner: Command{Shell: "true"}, Journal: j,
	})
	closeJournal(t, j)
	if err != nil || got.Failed != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
	if state := service.Record("n", "a").GetState(); state != dualcheckv1.State_STATE_RELEASED {
		t.Errorf("the key is %v", state)
	}
}

func TestAClaimIsExtendedWhileItsCommandRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var extended atomic.Int64
		service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
			if _, ok := q.(*dualcheckv1.ExtendRequest); ok {
				extended.Add(1)
			}
			return nil
		}}
		j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
		defer closeJournal(t, j)
		got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
			Service: ingesttest.Client{Service: service},
			Lease:   9 * time.Second,
			Journal: j,
			Runner: runnerFunc(func(ctx context.Context, job Job) (Output, error) {
				if !sleep(ctx, 10*time.Minute) {
					return Output{}, context.Cause(ctx)
				}
				return Output{}, nil
			}),
		})
		if err != nil || got.First != 1 {
			t.Errorf("got %+v, %v", got, err)
		}
		if n := extended.Load(); n < 150 || n > 210 {
			t.Errorf("a lease of 9 s was extended %d times in 10 min", n)
		}
	})
}

func TestACommandIsGoneBeforeALeaseThatCannotBeExtendedEnds(t *testing.T) {
	for reason, answer := range map[error]error{
		errLeaseEnds: ingesttest.Error(codes.Unavailable, "STORE_UNAVAILABLE", "no quorum", nil),
		errClaimLost: ingesttest.Error(codes.Aborted, "CLAIM_LOST", "an operator ended it", nil),
	} {
		synctest.Test(t, func(t *testing.T) {
			service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
				if _, ok := q.(*dualcheckv1.ExtendRequest); ok {
					return answer
				}
				return nil
			}}
			j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
			defer closeJournal(t, j)
			var ran time.Duration
			var told notes
			got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
				Service: ingesttest.Client{Service: service},
				Lease:   9 * time.Second,
				Journal: j,
				Report:  told.add,
				Runner: runnerFunc(func(ctx context.Context, job Job) (Output, error) {
					begun := time.Now()
					<-ctx.Done()
					ran = time.Since(begun)
					return Output{}, context.Cause(ctx)
				}),
			})
			if err != nil {
				t.Fatal(err)
			}
			if want := (Summary{Lines: 1, InDoubt: 1}); counts(got) != want {
				t.Errorf("got %+v, want %+v", counts(got), want)
			}
			if ran >= 9*time.Second || (errors.Is(reason, errLeaseEnds) && ran < 8*time.Second) {
				t.Errorf("%v: the command ran for %v of a lease of 9 s", reason, ran)
			}
			if !strings.Contains(told.of(InDoubt), reason.Error()) {
				t.Errorf("told %q", told.of(InDoubt))
			}
			if state := service.Record("n", "a").GetState(); state != dualcheckv1.State_STATE_UNKNOWN {
				t.Errorf("the key is %v", state)
			}
		})
	}
}

func TestAClaimThatWasTakenOverStoresNothing(t *testing.T) {
	service := &ingesttest.Service{}
	client := ingesttest.Client{Service: service}
	j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
	defer closeJournal(t, j)
	var told notes
	got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
		Service: client,
		Journal: j,
		Report:  told.add,
		Runner: runnerFunc(func(ctx context.Context, job Job) (Output, error) {
			service.Lapse()
			_, err := client.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "n", Key: "a"})
			return Output{}, err
		}),
	})
	if err != nil || got.Failed != 1 || !strings.Contains(told.of(Failed), "CLAIM_LOST") {
		t.Errorf("got %+v, %v, told %q", got, err, told.of(Failed))
	}
	if open, _ := j.find(name{"n", "a"}); open.Token != "" {
		t.Error("a command that ended is still open in the journal")
	}
}

func TestWorkWhoseOutcomeTheServiceDidNotTakeStaysInDoubt(t *testing.T) {
	for name, c := range map[string]struct {
		answer error
		// tries is how often the finish is sent at least.
		tries int64
		ends  error
	}{
		"a stream that broke":      {status.Error(codes.Internal, "stream terminated by RST_STREAM"), 2, ErrUnavailable},
		"a caught panic":           {ingesttest.Error(codes.Internal, "INTERNAL", "internal error", nil), 1, nil},
		"a record of a newer form": {ingesttest.Error(codes.Internal, "RECORD_UNREADABLE", "a newer format", nil), 1, nil},
		"a proxy's not found":      {status.Error(codes.NotFound, "no such route"), 1, nil},
		"a namespace that is gone": {ingesttest.Error(codes.NotFound, "NAMESPACE_NOT_FOUND", "not declared", nil), 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "journal")
			var tries atomic.Int64
			service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
				if _, ok := q.(*dualcheckv1.CompleteRequest); ok {
					tries.Add(1)
					return c.answer
				}
				return nil
			}}
			synctest.Test(t, func(t *testing.T) {
				var told notes
				j := journalAt(t, path)
				got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
					Service: ingesttest.Client{Service: service}, Journal: j, Report: told.add,
					Runner: runnerFunc(func(context.Context, Job) (Output, error) { return Output{}, nil }),
				})
				closeJournal(t, j)
				if !errors.Is(err, c.ends) || got.InDoubt != 1 || got.Lines != 1 || tries.Load() < c.tries {
					t.Errorf("got %+v, %v after %d tries", got, err, tries.Load())
				}
				if text := told.of(InDoubt); !strings.Contains(text, "its outcome could not be stored") {
					t.Errorf("told %q", text)
				}
			})
			service.Before = nil
			service.Lapse()
			got, ran, _ := again(t, service, path, false)
			if got.InDoubt != 2 || len(ran) != 1 || ran[0].Key != "b" {
				t.Errorf("then got %+v, ran %+v", got, ran)
			}
		})
	}
}

func TestAFinishWhoseStreamBrokeIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var tries atomic.Int64
		service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
			if _, ok := q.(*dualcheckv1.CompleteRequest); ok && tries.Add(1) == 1 {
				return status.Error(codes.Internal, "server closed the stream without sending trailers")
			}
			return nil
		}}
		j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
		defer closeJournal(t, j)
		got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
			Service: ingesttest.Client{Service: service}, Journal: j,
			Runner: runnerFunc(func(context.Context, Job) (Output, error) { return Output{}, nil }),
		})
		if err != nil || got.First != 1 || tries.Load() != 2 {
			t.Errorf("got %+v, %v after %d tries", got, err, tries.Load())
		}
	})
}

func TestAnExtendThatIsRefusedOnceStopsNothing(t *testing.T) {
	for _, answer := range []error{
		status.Error(codes.Internal, "stream terminated by RST_STREAM"),
		ingesttest.Error(codes.Internal, "INTERNAL", "internal error", nil),
		ingesttest.Error(codes.Internal, "RECORD_UNREADABLE", "a newer format", nil),
		status.Error(codes.NotFound, "no such route"),
	} {
		synctest.Test(t, func(t *testing.T) {
			var extended atomic.Int64
			service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
				if _, ok := q.(*dualcheckv1.ExtendRequest); ok && extended.Add(1) == 1 {
					return answer
				}
				return nil
			}}
			j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
			defer closeJournal(t, j)
			got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
				Service: ingesttest.Client{Service: service},
				Lease:   9 * time.Second,
				Journal: j,
				Runner: runnerFunc(func(ctx context.Context, job Job) (Output, error) {
					if !sleep(ctx, time.Minute) {
						return Output{}, context.Cause(ctx)
					}
					return Output{}, nil
				}),
			})
			if err != nil || got.First != 1 {
				t.Errorf("%v: got %+v, %v", answer, got, err)
			}
		})
	}
}

func TestAnOutputThatCannotBeKeptLeavesTheOutcomeUnknown(t *testing.T) {
	for _, exit := range []string{"0", "3"} {
		service := &ingesttest.Service{}
		dir := t.TempDir()
		done := filepath.Join(dir, "done")
		t.Setenv("TMPDIR", filepath.Join(dir, "nowhere"))
		j := journalAt(t, filepath.Join(dir, "journal"))
		var told notes
		got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
			Service: ingesttest.Client{Service: service},
			Runner: Command{
				Shell:        fmt.Sprintf("head -c %d /dev/zero && touch '%s'; exit %s", 2*maxOutput, done, exit),
				FailureClass: dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE,
			},
			Journal: j,
			Report:  told.add,
		})
		closeJournal(t, j)
		if err != nil || got.Failed != 1 || !strings.Contains(told.of(Failed), "its output could not be kept") {
			t.Errorf("got %+v, %v, told %q", got, err, told.of(Failed))
		}
		record := service.Record("n", "a")
		if record.GetState() != dualcheckv1.State_STATE_UNKNOWN || fmt.Sprint(record.GetFailure().GetCode()) != exit {
			t.Errorf("the record is %v", record)
		}
		if _, err := os.Stat(done); err != nil {
			t.Errorf("the command did not come to its end: %v", err)
		}
		t.Setenv("TMPDIR", dir)
	}
}

func TestAClaimTooOldAfterItsWaitIsExtendedBeforeTheCommandBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var extended atomic.Int64
		service := &ingesttest.Service{Before: func(ctx context.Context, q proto.Message) error {
			switch q.(type) {
			case *dualcheckv1.BeginRequest:
				sleep(ctx, 8*time.Second)
			case *dualcheckv1.ExtendRequest:
				extended.Add(1)
			}
			return nil
		}}
		j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
		defer closeJournal(t, j)
		got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
			Service: ingesttest.Client{Service: service},
			Lease:   9 * time.Second,
			Journal: j,
			Runner: runnerFunc(func(context.Context, Job) (Output, error) {
				if extended.Load() != 1 {
					t.Errorf("the command began under a lease that was extended %d times", extended.Load())
				}
				return Output{}, nil
			}),
		})
		if err != nil || got.First != 1 {
			t.Errorf("got %+v, %v", got, err)
		}
	})
}

func TestASecondInterruptKillsCommandsAndWhatTheyStarted(t *testing.T) {
	service := &ingesttest.Service{}
	dir := t.TempDir()
	path := filepath.Join(dir, "journal")
	kill := make(chan struct{})
	ctx, interrupt := context.WithCancel(t.Context())
	output := filepath.Join(dir, "output")
	if err := syscall.Mkfifo(output, 0o600); err != nil {
		t.Fatal(err)
	}
	gone := make(chan error, 1)
	go func() {
		// The FIFO opens when the command opens it, and ends when the command
		// and what it started are gone.
		file, err := os.Open(output)
		if err == nil {
			interrupt()
			close(kill)
			_, err = io.ReadAll(file)
			err = errors.Join(err, file.Close())
		}
		gone <- err
	}()
	j := journalAt(t, path)
	got, err := Run(ctx, strings.NewReader(oneLine), Options{
		Service: ingesttest.Client{Service: service},
		Runner:  Command{Shell: "exec >" + output + "; sleep 600 & wait"},
		Journal: j,
		Kill:    kill,
	})
	if err := <-gone; err != nil {
		t.Fatal(err)
	}
	closeJournal(t, j)
	if !errors.Is(err, ErrKilled) || counts(got) != (Summary{Lines: 1, InDoubt: 1, Interrupted: true}) {
		t.Errorf("got %+v, %v", got, err)
	}
	if doubts, err := HasDoubts(path); err != nil || !doubts {
		t.Errorf("the journal has nothing open (%v)", err)
	}
}

func TestWhatACommandLeavesRunningIsKilledAndTheOutcomeUnknown(t *testing.T) {
	for name, shell := range map[string]string{
		"it holds the output":            "sleep 600 & exec sleep 0",
		"after a failure":                "(sleep 600; touch done) & exit 3",
		"it does not hold the output":    "(sleep 600; touch done) >/dev/null 2>&1 & exit 0",
		"the same, after a failure":      "(sleep 600; touch done) >/dev/null 2>&1 & exit 3",
		"a command of a command, silent": "sh -c 'sleep 600 >/dev/null 2>&1 &'",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			service := &ingesttest.Service{}
			dir := t.TempDir()
			j := journalAt(t, filepath.Join(dir, "journal"))
			defer closeJournal(t, j)
			// Whatever goes on holds the FIFO open.
			fifo := filepath.Join(dir, "fifo")
			if err := syscall.Mkfifo(fifo, 0o600); err != nil {
				t.Fatal(err)
			}
			gone := make(chan error, 1)
			go func() {
				file, err := os.Open(fifo)
				if err == nil {
					_, err = io.ReadAll(file)
					err = errors.Join(err, file.Close())
				}
				gone <- err
			}()
			got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
				Service: ingesttest.Client{Service: service},
				Runner: Command{
					Shell:        "cd " + dir + "; exec 9>fifo; " + shell,
					FailureClass: dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE,
				},
				Journal: j,
			})
			if err != nil || got.Failed != 1 {
				t.Errorf("got %+v, %v", got, err)
			}
			record := service.Record("n", "a")
			if record.GetState() != dualcheckv1.State_STATE_UNKNOWN || !strings.Contains(record.GetFailure().GetMessage(), "left something running, which was killed") {
				t.Errorf("the record is %v", record)
			}
			if err := <-gone; err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(filepath.Join(dir, "done")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("what was left running went on to its end (%v)", err)
			}
		})
	}
}

func TestWhatACommandWaitsForIsNotLeftRunning(t *testing.T) {
	service := &ingesttest.Service{}
	j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
	defer closeJournal(t, j)
	got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
		Service: ingesttest.Client{Service: service},
		Runner:  Command{Shell: "sleep 0.2 & cat | cat; wait"},
		Journal: j,
	})
	if err != nil || got.First != 1 {
		t.Errorf("got %+v, %v: %v", got, err, service.Record("n", "a"))
	}
}

func TestWhatEndsInAMomentIsNotLeftRunning(t *testing.T) {
	leader := exec.CommandContext(t.Context(), "true")
	ownGroup(leader)
	gate, err := leader.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := leader.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(gate); err != nil {
		t.Fatal(err)
	}
	// The leader has ended and is not reaped, so its group can be joined.
	member := exec.Command("true")
	member.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: leader.Process.Pid}
	if err := member.Start(); err != nil {
		t.Fatal(err)
	}
	if err := leader.Wait(); err != nil {
		t.Fatal(err)
	}
	if !groupLeft(leader) {
		t.Error("a member that is not reaped is not in its group")
	}
	reaped := make(chan error, 1)
	go func() { reaped <- member.Wait() }()
	if err := endGroup(t.Context(), leader); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("got %v", err)
	}
	if err := <-reaped; err != nil {
		t.Error(err)
	}
}
