package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/dualcheck/dualcheck/internal/ingest"
	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

// textFile writes a file of the test's own and returns its path.
func textFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// summary reads the summary that a run printed.
func summary(t *testing.T, text string) ingest.Summary {
	t.Helper()
	var s ingest.Summary
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatalf("%q is not a summary: %v", text, err)
	}
	s.Seconds, s.PerSecond = 0, 0
	return s
}

const deliveries = `{"namespace":"n","key":"a","operation":"op","body":{"x":1,"y":[2]}}
{"namespace":"n","key":"b","operation":"op","body":{"x":1}}
{"operation":"op","namespace":"n","body":{"y":[2.0],"x":1},"key":"a"}
{"namespace":"n","key":"b","operation":"op","body":{"x":2}}
`

func TestIngestCountsEachLine(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	file := textFile(t, "deliveries.jsonl", deliveries)
	first := command(t, "", "ingest", file, "-o", "json", "--workers", "64")
	first.wants(t, exitOK)
	if got, want := summary(t, first.stdout), (ingest.Summary{Lines: 4, First: 2, Replay: 1, Conflict: 1}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	note := object(t, first.stderr)
	if note["line"] != 4.0 || note["key"] != "b" || note["outcome"] != "conflict" || note["message"] == "" {
		t.Errorf("it told %v", note)
	}
	again := command(t, deliveries, "ingest", "-", "--workers", "1")
	again.wants(t, exitOK, "lines 4", "first 0", "replay 3", "conflict 1", "per_second")
	if !strings.HasPrefix(again.stderr, "line 4: conflict: n b: ") || !strings.Contains(again.stderr, "give it a key of its own\n") {
		t.Errorf("it told %q", again.stderr)
	}
}

func TestIngestRefusesNumbersThatMakeNoSense(t *testing.T) {
	for flag, value := range map[string]string{"--workers": "0", "--lease": "-1s", "--retry-for": "-1s", "--wait": "31s"} {
		command(t, deliveries, "ingest", "-", flag, value).complains(t, exitUsage, flag+" is "+value)
	}
	command(t, deliveries, "ingest", "-", "--wait", "-1s").complains(t, exitUsage, "--wait is -1s, it must be between 0 and 30s")
}

func TestIngestHelpSaysWhatACommandMustNotDo(t *testing.T) {
	command(t, "", "ingest", "--help").wants(t, exitOK, "It must not leave anything running", "lines of\nother keys go on with the rest")
}

func TestIngestCanFailOnAConflict(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	conflicts := command(t, deliveries, "ingest", "-", "--addr", addr, "--fail-on-conflict")
	conflicts.wants(t, exitConflict, "conflict 1")
	if !strings.HasSuffix(conflicts.stderr, "\ndualcheck: 1 of 4 lines were not taken: their keys are known with other work\n") {
		t.Errorf("it told %q", conflicts.stderr)
	}
	nameless := command(t, `{"key":"a","body":1}`, "ingest", "-", "--addr", addr)
	nameless.wants(t, exitFailure)
	if want := "line 1: failed: a: it has no namespace\ndualcheck: 1 of 1 line failed; the lines above say why\n"; nameless.stderr != want {
		t.Errorf("it told %q, want %q", nameless.stderr, want)
	}
}

func TestIngestGoesOnAfterLinesThatItCannotJudge(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	bad := command(t, "{\n\n"+deliveries+`{"namespace":"n","key":"c","body":9007199254740993}`, "ingest", "-", "--addr", addr, "-o", "json")
	bad.wants(t, exitFailure)
	if got, want := summary(t, bad.stdout), (ingest.Summary{Lines: 6, First: 2, Replay: 1, Conflict: 1, Failed: 2}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for _, word := range []string{`"line":1,"outcome":"failed"`, `"line":7,"namespace":"n","key":"c","outcome":"failed"`, "send it as a string", "2 of 6 lines failed"} {
		if !strings.Contains(bad.stderr, word) {
			t.Errorf("it did not tell %q, but %q", word, bad.stderr)
		}
	}
}

func TestIngestWithACommandStoresWhatItPrints(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	t.Setenv(addrVariable, addr)
	file := textFile(t, "deliveries.jsonl", deliveries)
	command(t, "", "ingest", file, "--exec", `printf "$INGEST_KEY "; cat`, "--content-type", "text/plain").wants(t, exitOK, "first 2")
	if got := service.Record("n", "a").GetResult(); string(got.GetBody()) != `a {"x":1,"y":[2]}` || got.GetContentType() != "text/plain" {
		t.Errorf("the result is %v", got)
	}
	if _, err := os.Stat(file + journalSuffix); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the journal was left behind (%v)", err)
	}
	other := textFile(t, "other.jsonl", `{"namespace":"n","key":"c","body":1}`)
	failed := command(t, "", "ingest", other, "--exec", "echo no >&2; exit 9")
	failed.wants(t, exitFailure, "failed 1")
	if !strings.Contains(failed.stderr, "the key is held until its outcome is resolved): no") {
		t.Errorf("it told %q", failed.stderr)
	}
	doubt := command(t, "", "ingest", other, "--exec", "true")
	doubt.wants(t, exitUnknownOutcome, "in_doubt 1")
	if !strings.Contains(doubt.stderr, "find out, then: dualcheck resolve n c --state=succeeded|failed|released --reason=WHY\n") {
		t.Errorf("it told %q", doubt.stderr)
	}
	third := textFile(t, "third.jsonl", `{"namespace":"n","key":"d","body":1}`)
	command(t, "", "ingest", third, "--exec", "exit 9", "--exec-failure", "terminal").wants(t, exitFailure)
	command(t, "", "ingest", third, "--exec", "true").wants(t, exitFailedForGood, "replay_failure 1")
}

func TestIngestSaysWhenNoServerAnswers(t *testing.T) {
	silent := command(t, `{"namespace":"n","key":"c","body":1}`, "ingest", "-", "--addr", "127.0.0.1:1", "--retry-for", "1s", "-o", "json")
	silent.wants(t, exitUnavailable)
	if !strings.Contains(silent.stderr, `"outcome":"waiting"`) || !strings.Contains(silent.stderr, "connection refused") {
		t.Errorf("it told %q", silent.stderr)
	}
	summary(t, silent.stdout)
}

// process is a running program whose command writes to a FIFO.
type process struct {
	cmd            *exec.Cmd
	stdout, stderr bytes.Buffer
	fifo           *bufio.Reader
	file           *os.File
}

// startIngest starts a real `dualcheck ingest`; the command finds the FIFO in
// $FIFO. It returns when the command has opened it.
func startIngest(t *testing.T, addr string, args ...string) *process {
	t.Helper()
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command("dualcheck", append([]string{"ingest", "-o", "json", "--addr", addr}, args...)...)}
	p.cmd.Env = append(os.Environ(), "FIFO="+fifo)
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(fifo)
	if err != nil {
		t.Fatal(err)
	}
	p.file, p.fifo = file, bufio.NewReader(file)
	return p
}

// gone waits until neither the program nor anything it started is there.
func (p *process) gone(t *testing.T) (code int) {
	t.Helper()
	if _, err := io.Copy(io.Discard, p.fifo); err != nil {
		t.Fatal(err)
	}
	if err := p.file.Close(); err != nil {
		t.Fatal(err)
	}
	err := p.cmd.Wait()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		t.Fatal(err)
	}
	return p.cmd.ProcessState.ExitCode()
}

func (p *process) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func TestAfterAKillIngestListsWhatIsInDoubtAndRunsItWhenTold(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	t.Setenv(addrVariable, addr)
	file := textFile(t, "deliveries.jsonl", deliveries)
	killed := startIngest(t, addr, file, "--workers", "1", "--exec", "exec >$FIFO; echo begun; exec sleep 600")
	if line, err := killed.fifo.ReadString('\n'); line != "begun\n" {
		t.Fatal(line, err)
	}
	killed.signal(t, syscall.SIGKILL)
	killed.gone(t)

	command(t, "", "ingest", file).complains(t, exitRefused, journalSuffix, "in doubt", "--exec")
	listed := command(t, "", "ingest", file, "--exec", "cat", "--workers", "1")
	listed.wants(t, exitUnknownOutcome, "in_doubt 2", "first 1", "conflict 1")
	for _, word := range []string{
		"in_doubt: n a: line 1, begun 2", "run it again with --rerun-in-doubt", ": dualcheck resolve n a --state=succeeded|failed|released --reason=WHY\n",
		"line 1: in_doubt: n a: ", "line 3: in_doubt: n a: ",
		"2 of 4 lines are in doubt",
	} {
		if !strings.Contains(listed.stderr, word) {
			t.Errorf("it did not tell %q, but %q", word, listed.stderr)
		}
	}
	command(t, "", "ingest", file, "--exec", `printf "$INGEST_LAPSED"`, "--rerun-in-doubt").wants(t, exitOK, "first 1", "replay 2", "in_doubt 0")
	if record := service.Record("n", "a"); record.GetAttempt() != 1 || string(record.GetResult().GetBody()) != "1" {
		t.Errorf("the record is %v", record)
	}
	if _, err := os.Stat(file + journalSuffix); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the journal was left behind (%v)", err)
	}
}

func TestAnInterruptFinishesTheCommandThatRuns(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	var lines strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&lines, `{"namespace":"n","key":"k%d","body":1}`+"\n", i)
	}
	file := textFile(t, "deliveries.jsonl", lines.String())
	// The first command tells of itself, reads the answer, and ends.
	back := filepath.Join(t.TempDir(), "back")
	if err := syscall.Mkfifo(back, 0o600); err != nil {
		t.Fatal(err)
	}
	p := startIngest(t, addr, file, "--workers", "1", "--exec", `if [ "$INGEST_LINE" = 1 ]; then echo >$FIFO; cat `+back+`; fi`)
	p.signal(t, os.Interrupt)
	if err := os.WriteFile(back, []byte("finished"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code := p.gone(t); code != exitInterrupted {
		t.Errorf("exit status %d; %s", code, p.stderr.String())
	}
	got := summary(t, p.stdout.String())
	if !got.Interrupted || got.First < 1 || got.First != got.Lines || got.Lines > 4000 {
		t.Errorf("got %+v", got)
	}
	if body := service.Record("n", "k0").GetResult().GetBody(); string(body) != "finished" {
		t.Errorf("the command that ran stored %q", body)
	}
}

func TestASecondInterruptKillsTheCommandThatRuns(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	file := textFile(t, "deliveries.jsonl", deliveries)
	p := startIngest(t, addr, file, "--workers", "1", "--exec", "exec >$FIFO; sleep 600 & sleep 600")
	p.signal(t, os.Interrupt)
	p.signal(t, syscall.SIGTERM)
	if code := p.gone(t); code != exitInterrupted {
		t.Errorf("exit status %d; %s", code, p.stderr.String())
	}
	if got := summary(t, p.stdout.String()); got.InDoubt != 1 || !got.Interrupted {
		t.Errorf("got %+v", got)
	}
	if doubts, err := ingest.HasDoubts(file + journalSuffix); err != nil || !doubts {
		t.Errorf("the journal has nothing in doubt (%v)", err)
	}
}
