package ingest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

// twoDeliveries is one key's delivery and its repeat, and another key.
const twoDeliveries = `{"namespace":"n","key":"a","operation":"op","body":{"x":1}}
{"namespace":"n","key":"b","operation":"op","body":{"x":1}}
{"namespace":"n","key":"a","operation":"op","body":{"x":1.0}}
`

// killedRun is a run that is killed while the command of key a runs, as a
// SIGKILL leaves it: begun in the journal, pending at the service.
func killedRun(t *testing.T, service *ingesttest.Service, path string) {
	t.Helper()
	kill := make(chan struct{})
	j := journalAt(t, path)
	_, err := Run(t.Context(), strings.NewReader(twoDeliveries), Options{
		Service: ingesttest.Client{Service: service},
		Workers: 1,
		Journal: j,
		Kill:    kill,
		Runner: runnerFunc(func(ctx context.Context, job Job) (Output, error) {
			close(kill)
			<-ctx.Done()
			return Output{}, context.Cause(ctx)
		}),
	})
	if !errors.Is(err, ErrKilled) {
		t.Fatalf("got %v", err)
	}
	closeJournal(t, j)
}

// again is a later run with the same journal; ran gets each job that it ran.
func again(t *testing.T, service *ingesttest.Service, path string, rerun bool) (got Summary, ran []Job, told *notes) {
	t.Helper()
	told = &notes{}
	j := journalAt(t, path)
	got, err := Run(t.Context(), strings.NewReader(twoDeliveries), Options{
		Service:      ingesttest.Client{Service: service},
		Workers:      1,
		Journal:      j,
		RerunInDoubt: rerun,
		Report:       told.add,
		Runner: runnerFunc(func(_ context.Context, job Job) (Output, error) {
			ran = append(ran, job)
			return Output{}, nil
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	closeJournal(t, j)
	return counts(got), ran, told
}

func journalIsThere(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Stat(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestAfterAKillLinesInDoubtAreListedAndSkipped(t *testing.T) {
	service := &ingesttest.Service{}
	path := filepath.Join(t.TempDir(), "journal")
	killedRun(t, service, path)
	for range 2 {
		got, ran, told := again(t, service, path, false)
		if got.InDoubt != 2 || got.Lines != 3 {
			t.Errorf("got %+v", got)
		}
		for _, job := range ran {
			if job.Key == "a" {
				t.Error("work in doubt was run again")
			}
		}
		text := told.of(InDoubt)
		for _, want := range []string{"0 n a: line 1, begun ", "(attempt 1): in doubt, so skipped", "1 n a: its key is in doubt since line 1", "3 n a: its key is in doubt since line 1"} {
			if !strings.Contains(text, want) {
				t.Errorf("told %q, without %q", text, want)
			}
		}
	}
	if attempt := service.Record("n", "a").GetAttempt(); attempt != 1 {
		t.Errorf("the key in doubt was claimed again: attempt %d", attempt)
	}
	if !journalIsThere(t, path) {
		t.Error("the journal with a line in doubt was removed")
	}
}

func TestToldSoLinesInDoubtAreRunAgain(t *testing.T) {
	for name, service := range map[string]*ingesttest.Service{
		"while its claim lives":           {},
		"after its lease lapsed":          {},
		"after it lapsed, never taken up": {TakeoverNever: true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "journal")
			killedRun(t, service, path)
			if name != "while its claim lives" {
				service.Lapse()
			}
			got, ran, _ := again(t, service, path, true)
			if want := (Summary{Lines: 3, First: 2, Replay: 1}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
			if len(ran) != 2 || ran[0].Key != "a" || !ran[0].Lapsed || ran[0].Attempt != 1 || ran[0].Fence == 0 || ran[1].Lapsed {
				t.Errorf("ran %+v", ran)
			}
			if journalIsThere(t, path) {
				t.Error("the journal was left behind")
			}
		})
	}
}

func TestAClaimInDoubtThatSomebodyTookOverIsTheirs(t *testing.T) {
	service := &ingesttest.Service{}
	client := ingesttest.Client{Service: service}
	path := filepath.Join(t.TempDir(), "journal")
	killedRun(t, service, path)
	service.Lapse()
	taken, err := client.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "n", Key: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Complete(t.Context(), &dualcheckv1.CompleteRequest{Namespace: "n", Key: "a", Token: taken.GetClaim().GetToken()}); err != nil {
		t.Fatal(err)
	}
	got, ran, told := again(t, service, path, false)
	if want := (Summary{Lines: 3, First: 1, Replay: 2}); got != want || len(ran) != 1 {
		t.Errorf("got %+v, ran %v, want %+v", got, ran, want)
	}
	if told.of(InDoubt) != "" {
		t.Errorf("told %q", told.of(InDoubt))
	}
	if journalIsThere(t, path) {
		t.Error("the journal was left behind")
	}
}

func TestWorkWhoseEndReachedTheServiceIsNotInDoubt(t *testing.T) {
	service := &ingesttest.Service{}
	client := ingesttest.Client{Service: service}
	path := filepath.Join(t.TempDir(), "journal")
	killedRun(t, service, path)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, token, found := strings.Cut(string(raw), `"token":"`)
	if !found {
		t.Fatalf("the journal is %s", raw)
	}
	token, _, _ = strings.Cut(token, `"`)
	if _, err := client.Complete(t.Context(), &dualcheckv1.CompleteRequest{Namespace: "n", Key: "a", Token: token}); err != nil {
		t.Fatal(err)
	}
	got, _, _ := again(t, service, path, false)
	if want := (Summary{Lines: 3, First: 1, Replay: 2}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestARecordThatIsGoneLeavesTheLineInDoubt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	killedRun(t, &ingesttest.Service{}, path)
	forgot := &ingesttest.Service{}
	got, _, _ := again(t, forgot, path, false)
	if got.InDoubt != 2 {
		t.Errorf("got %+v", got)
	}
	got, ran, _ := again(t, forgot, path, true)
	if want := (Summary{Lines: 3, First: 1, Replay: 2}); got != want || len(ran) != 1 {
		t.Errorf("got %+v, ran %v", got, ran)
	}
	if journalIsThere(t, path) {
		t.Error("the journal was left behind")
	}
}

func TestAClaimTakenUpIsNotReleasedAsIfNothingHadHappened(t *testing.T) {
	service := &ingesttest.Service{}
	path := filepath.Join(t.TempDir(), "journal")
	killedRun(t, service, path)
	j := journalAt(t, path)
	got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
		Service: ingesttest.Client{Service: service}, Journal: j, RerunInDoubt: true,
		Runner: runnerFunc(func(context.Context, Job) (Output, error) { return Output{}, ErrNotStarted }),
	})
	closeJournal(t, j)
	if err != nil || got.InDoubt != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
	if state := service.Record("n", "a").GetState(); state != dualcheckv1.State_STATE_PENDING {
		t.Errorf("the key is %v", state)
	}
	if doubts, err := HasDoubts(path); err != nil || !doubts {
		t.Errorf("it is no longer in doubt (%v)", err)
	}
}

func TestACommandBeginsOnlyAfterTheJournalSaysSo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := journalAt(t, path)
	_, err := Run(t.Context(), strings.NewReader(twoDeliveries), Options{
		Service: ingesttest.Client{Service: &ingesttest.Service{}}, Journal: j, Workers: 1,
		Runner: runnerFunc(func(_ context.Context, job Job) (Output, error) {
			raw, err := os.ReadFile(path)
			lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
			if last := lines[len(lines)-1]; err != nil || !strings.Contains(last, `"started"`) || !strings.Contains(last, `"key":"`+job.Key+`"`) {
				t.Errorf("%s began under the journal line %s (%v)", job.Key, last, err)
			}
			return Output{}, nil
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	closeJournal(t, j)
}

func TestAJournalThatCannotBeWrittenEndsTheRunBeforeTheCommand(t *testing.T) {
	service := &ingesttest.Service{}
	j := journalAt(t, filepath.Join(t.TempDir(), "journal"))
	if err := j.file.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := Run(t.Context(), strings.NewReader(twoDeliveries), Options{
		Service: ingesttest.Client{Service: service}, Journal: j, Workers: 1,
		Runner: runnerFunc(func(context.Context, Job) (Output, error) {
			t.Error("a command began")
			return Output{}, nil
		}),
	})
	if err == nil || !strings.Contains(err.Error(), "write the journal") || got.Failed != 1 || !got.Interrupted {
		t.Errorf("got %+v, %v", got, err)
	}
	if state := service.Record("n", "a").GetState(); state != dualcheckv1.State_STATE_RELEASED {
		t.Errorf("the key is %v", state)
	}
}

func TestAJournalLineThatWasNotWrittenWholeIsDropped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	killedRun(t, &ingesttest.Service{}, path)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	torn := append(whole[:len(whole):len(whole)], []byte(`{"event":"started","namespace":"n","key":"to`)...)
	if err := os.WriteFile(path, torn, 0o600); err != nil {
		t.Fatal(err)
	}
	j := journalAt(t, path)
	if got := j.entries(); len(got) != 1 || got[0].Key != "a" {
		t.Errorf("it has %v open", got)
	}
	closeJournal(t, j)
	if now, err := os.ReadFile(path); err != nil || string(now) != string(whole) {
		t.Errorf("it became %s (%v)", now, err)
	}
}

// tornFile fails each write in its middle while full.
type tornFile struct {
	journalFile
	full, stuck bool
}

func (f *tornFile) Write(p []byte) (int, error) {
	if !f.full {
		return f.journalFile.Write(p)
	}
	n, err := f.journalFile.Write(p[:len(p)/2])
	return n, errors.Join(syscall.ENOSPC, err)
}

func (f *tornFile) Truncate(size int64) error {
	if f.stuck {
		return syscall.EIO
	}
	return f.journalFile.Truncate(size)
}

func TestAnAppendThatFailsInItsMiddleLeavesTheJournalReadable(t *testing.T) {
	for title, stuck := range map[string]bool{"it is taken back": false, "it cannot be taken back": true} {
		t.Run(title, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "journal")
			j := journalAt(t, path)
			file := &tornFile{journalFile: j.file}
			j.file = file
			begin := func(key string) error {
				return j.start(task{line: line{name: name{"n", key}}}, &held{token: "t"})
			}
			if err := begin("a"); err != nil {
				t.Fatal(err)
			}
			file.full, file.stuck = true, stuck
			if err := begin("b"); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("b: got %v", err)
			}
			if err := j.end(name{"n", "a"}); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("the end of a: got %v", err)
			}
			file.full, file.stuck = false, false
			want := []string{"a", "c"}
			if stuck {
				want = []string{"a"}
			}
			if err := begin("c"); (err != nil) != stuck {
				t.Errorf("c: got %v", err)
			}
			closeJournal(t, j)
			j = journalAt(t, path)
			defer closeJournal(t, j)
			var open []string
			for _, e := range j.entries() {
				open = append(open, e.Key)
			}
			if !slices.Equal(open, want) {
				t.Errorf("it has %v open, want %v", open, want)
			}
		})
	}
}

func TestAJournalThatIsNotOneIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"precious notes\n":                               "line 1 is damaged",
		`{"format":2}` + "\n":                            "format 2 is not known",
		`{"event":"ended"}` + "\n":                       "format 0 is not known",
		`{"format":1}` + "\n{\"event\":\n" + "{}" + "\n": "line 2 is damaged",
	} {
		path := filepath.Join(t.TempDir(), "journal")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenJournal(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
		if kept, err := os.ReadFile(path); err != nil || string(kept) != text {
			t.Errorf("%q became %q (%v)", text, kept, err)
		}
	}
}

func TestAJournalHasOneRunAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := journalAt(t, path)
	if _, err := OpenJournal(path); !errors.Is(err, ErrJournalInUse) {
		t.Errorf("got %v", err)
	}
	closeJournal(t, j)
	closeJournal(t, journalAt(t, path))
}

func TestWithoutWorkAKilledRunLeavesNothingInDoubt(t *testing.T) {
	service := &ingesttest.Service{}
	kill := make(chan struct{})
	service.Before = func(_ context.Context, q proto.Message) error {
		if _, ok := q.(*dualcheckv1.CompleteRequest); ok {
			close(kill)
			return context.Canceled
		}
		return nil
	}
	if _, err := Run(t.Context(), strings.NewReader(twoDeliveries), Options{Service: ingesttest.Client{Service: service}, Workers: 1, Kill: kill}); !errors.Is(err, ErrKilled) {
		t.Fatalf("got %v", err)
	}
	service.Before = nil
	service.Lapse()
	got, err := Run(t.Context(), strings.NewReader(twoDeliveries), Options{Service: ingesttest.Client{Service: service}, Workers: 1})
	if want := (Summary{Lines: 3, First: 2, Replay: 1}); err != nil || counts(got) != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}

func TestADoubtThatTheServiceCannotSettleStays(t *testing.T) {
	noAnswer := ingesttest.Error(codes.Unavailable, "STORE_UNAVAILABLE", "no quorum", nil)
	refused := ingesttest.Error(codes.Internal, "RECORD_UNREADABLE", "a newer format", nil)
	for name, c := range map[string]struct {
		asked   any
		answer  error
		message string
		inDoubt int64
	}{
		"what became of it: no answer":  {&dualcheckv1.GetRequest{}, noAnswer, "ask what became of line 1 (n a)", 0},
		"what became of it: unreadable": {&dualcheckv1.GetRequest{}, refused, "a newer format (RECORD_UNREADABLE)", 0},
		"the claim: no answer":          {&dualcheckv1.ExtendRequest{}, noAnswer, "no quorum (STORE_UNAVAILABLE)", 1},
		"the claim: refused":            {&dualcheckv1.ExtendRequest{}, refused, "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			service := &ingesttest.Service{}
			path := filepath.Join(t.TempDir(), "journal")
			killedRun(t, service, path)
			service.Before = func(_ context.Context, q proto.Message) error {
				if reflect.TypeOf(q) == reflect.TypeOf(c.asked) {
					return c.answer
				}
				return nil
			}
			synctest.Test(t, func(t *testing.T) {
				j := journalAt(t, path)
				got, err := Run(t.Context(), strings.NewReader(oneLine), Options{
					Service: ingesttest.Client{Service: service}, Journal: j, RerunInDoubt: true,
					Runner: runnerFunc(func(context.Context, Job) (Output, error) {
						t.Error("work in doubt was run without its claim")
						return Output{}, nil
					}),
				})
				closeJournal(t, j)
				if got.InDoubt != c.inDoubt {
					t.Errorf("got %+v", got)
				}
				if (c.message == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.message) {
					t.Errorf("got %v, want %q", err, c.message)
				}
			})
			if doubts, err := HasDoubts(path); err != nil || !doubts {
				t.Errorf("it is no longer in doubt (%v)", err)
			}
		})
	}
}

func TestNoJournalHasNoDoubts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	if doubts, err := HasDoubts(path); err != nil || doubts || journalIsThere(t, path) {
		t.Errorf("got %v, %v", doubts, err)
	}
}
