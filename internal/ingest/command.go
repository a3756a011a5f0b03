package ingest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// Command is a Runner that runs a shell command for each line: the body on its
// standard input, its standard output as the result. The environment says which
// line it is: INGEST_LINE, INGEST_NAMESPACE, INGEST_KEY, INGEST_OPERATION,
// INGEST_ATTEMPT, INGEST_FENCE, and INGEST_LAPSED, 1 if an earlier attempt may
// have happened, else 0.
//
// The command and what it starts are one process group, which is killed when the
// context ends; on Linux the command is killed too when this process is. A command
// must wait for what it starts: what of its group is left when it ends is killed,
// and its outcome is unknown, whatever its exit status.
type Command struct {
	// Shell is what `sh -c` is given.
	Shell string
	// FailureClass is what an exit status other than 0 means.
	FailureClass dualcheckv1.FailureClass
	// ContentType is the result's.
	ContentType string
}

// maxContentType is how long the contract lets a content type be, in bytes.
const maxContentType = 256

// check says what of c the service would refuse after the command ran.
func (c Command) check() error {
	switch n := len(c.ContentType); {
	case n > maxContentType:
		return fmt.Errorf("ingest: the content type has %d bytes, it may have %d", n, maxContentType)
	case !utf8.ValidString(c.ContentType):
		return errors.New("ingest: the content type is not valid UTF-8")
	}
	return nil
}

// Bounds of what is kept of a command's output, in bytes.
const (
	// maxOutput: a namespace keeps 1 MiB at most; of more, the result has size
	// and digest alone.
	maxOutput = 1 << 20
	// maxFailure is kept of the end of the standard error, as the message.
	maxFailure = 2 << 10
)

// straggler is how long a command's output stays open after its end before what
// holds it open is killed.
const straggler = 2 * time.Second

// moment is how long what is left of a command's group may take to be gone. What
// has ended is there until it is reaped, which is not done here.
const moment = 500 * time.Millisecond

// Run runs the command once.
func (c Command) Run(ctx context.Context, job Job) (Output, error) {
	// The kill that follows this process's death follows its thread's too.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	output := spill{limit: maxOutput}
	defer output.close()
	complaint := tail{limit: maxFailure}
	cmd := exec.CommandContext(ctx, "sh", "-c", c.Shell)
	cmd.Env = append(os.Environ(),
		"INGEST_LINE="+strconv.Itoa(job.Line),
		"INGEST_NAMESPACE="+job.Namespace,
		"INGEST_KEY="+job.Key,
		"INGEST_OPERATION="+job.Operation,
		"INGEST_ATTEMPT="+strconv.Itoa(int(job.Attempt)),
		"INGEST_FENCE="+strconv.FormatInt(job.Fence, 10),
		"INGEST_LAPSED="+map[bool]string{true: "1", false: "0"}[job.Lapsed],
	)
	cmd.Stdin = bytes.NewReader(job.Body)
	cmd.Stdout = &output
	cmd.Stderr = &complaint
	cmd.WaitDelay = straggler
	ownGroup(cmd)
	if err := cmd.Start(); err != nil {
		return Output{}, fmt.Errorf("%w: %w", ErrNotStarted, err)
	}
	err := cmd.Wait()
	// Whatever it ended with, something of its group may go on.
	left := endGroup(ctx, cmd)
	if ctx.Err() != nil {
		return Output{}, context.Cause(ctx)
	}
	switch exit, ok := errors.AsType[*exec.ExitError](err); {
	case left == nil:
		return unknown(cmd, "the command ended and left something running, which was killed"), nil
	case !errors.Is(left, os.ErrProcessDone):
		return unknown(cmd, "the command ended and left something running, which could not be killed: "+left.Error()), nil
	case output.err != nil:
		return unknown(cmd, "the command ended and its output could not be kept: "+output.err.Error()), nil
	case ok:
		message := complaint.text()
		if message == "" {
			message = exit.Error()
		}
		return c.failed(exit.ExitCode(), message), nil
	case err != nil:
		return unknown(cmd, err.Error()), nil
	}
	return output.result(c.ContentType)
}

// endGroup kills what is left of the group of a command that ended, if it is not
// gone in a moment; os.ErrProcessDone: nothing is left.
func endGroup(ctx context.Context, cmd *exec.Cmd) error {
	for until := time.Now().Add(moment); groupLeft(cmd) && time.Now().Before(until); {
		if !sleep(ctx, moment/100) {
			break
		}
	}
	return killGroup(cmd)
}

// unknown is the output of a command that ended and whose work may have happened.
func unknown(cmd *exec.Cmd, message string) Output {
	return Output{Failure: &dualcheckv1.Failure{
		Class:   dualcheckv1.FailureClass_FAILURE_CLASS_UNKNOWN,
		Code:    int32(cmd.ProcessState.ExitCode()),
		Message: strings.ToValidUTF8(message, "\uFFFD"),
	}}
}

func (c Command) failed(code int, message string) Output {
	return Output{Failure: &dualcheckv1.Failure{
		Class:   c.FailureClass,
		Code:    int32(code),
		Message: message,
	}}
}

// tail keeps the end of what is written to it.
type tail struct {
	limit int
	kept  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.limit; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

func (t *tail) text() string {
	return strings.TrimSpace(strings.ToValidUTF8(string(t.kept), "\uFFFD"))
}
