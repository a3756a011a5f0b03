package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// The exit status of every command; exitCodes says what each means.
const (
	exitOK             = 0
	exitFailure        = 1
	exitUsage          = 2
	exitInProgress     = 3
	exitConflict       = 4
	exitUnknownOutcome = 5
	exitFailedForGood  = 6
	exitExpired        = 7
	exitNotFound       = 8
	exitRefused        = 9
	exitUnavailable    = 10
	exitDone           = 11
	exitInterrupted    = 130
)

// exitCodes is the table that `dualcheck help exit-codes` prints.
var exitCodes = []struct {
	code    int
	meaning string
}{
	{exitOK, "done; for begin: FIRST, and nothing else: do the work"},
	{exitFailure, "any other error; ingest: a line failed"},
	{exitUsage, "a mistake in the command line or in the request (INVALID_ARGUMENT)"},
	{exitInProgress, "IN_PROGRESS: another claim is live, or still was when --wait was over; ask again"},
	{exitConflict, "CONFLICT: the key is known with another fingerprint or operation; ingest --fail-on-conflict: of a line"},
	{exitUnknownOutcome, "UNKNOWN_OUTCOME: nobody knows what came of it; ingest: a line is in doubt"},
	{exitFailedForGood, "REPLAY_FAILURE: it failed for good"},
	{exitExpired, "EXPIRED: it was done, its result is no longer kept"},
	{exitNotFound, "no such record or namespace (NOT_FOUND)"},
	{exitRefused, "refused as things stand: claim lost, already finished, stale policy (ABORTED, ALREADY_EXISTS, FAILED_PRECONDITION)"},
	{exitUnavailable, "no answer could be had; the same call may be repeated (UNAVAILABLE, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED)"},
	{exitDone, "REPLAY: done already; nothing is to be done"},
	{exitInterrupted, "interrupted; watch, dev and serve end with 0 then"},
}

func exitCodesText() string {
	var b strings.Builder
	for _, e := range exitCodes {
		fmt.Fprintf(&b, "  %3d  %s\n", e.code, e.meaning)
	}
	return b.String()
}

// newExitCodesTopic is the help topic exit-codes.
func newExitCodesTopic() *cobra.Command {
	return &cobra.Command{
		Use:   "exit-codes",
		Short: "What the exit status of a command says",
		Long: "What the exit status of a command says:\n\n" + exitCodesText() + `
An interrupt (^C) is the usual end of watch, as --limit is: 0. An outage ends it
only if no server has answered yet (10); what a server refuses does at any time.

An error is one line on the standard error. With -o json it is one JSON object
there, with code and status (a gRPC code and its name), reason, message and
exit_code, and where they help advice, metadata and request_id.`,
	}
}

// exitError ends a command with a status of its choosing. Without err there is
// nothing to say that the command has not said.
type exitError struct {
	code int
	err  error
	// reason and status are shown as JSON; without them those of the code are.
	reason string
	status codes.Code
	// help: --help would have told.
	help bool
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// verdictExit is the status of begin for a verdict.
func verdictExit(v dualcheckv1.Verdict) int {
	switch v {
	case dualcheckv1.Verdict_VERDICT_FIRST:
		return exitOK
	case dualcheckv1.Verdict_VERDICT_REPLAY:
		return exitDone
	case dualcheckv1.Verdict_VERDICT_IN_PROGRESS:
		return exitInProgress
	case dualcheckv1.Verdict_VERDICT_REPLAY_FAILURE:
		return exitFailedForGood
	case dualcheckv1.Verdict_VERDICT_CONFLICT:
		return exitConflict
	case dualcheckv1.Verdict_VERDICT_EXPIRED:
		return exitExpired
	case dualcheckv1.Verdict_VERDICT_UNKNOWN_OUTCOME:
		return exitUnknownOutcome
	}
	return exitFailure
}

// codeExit is the status for an error's gRPC code.
func codeExit(c codes.Code) int {
	switch c {
	case codes.InvalidArgument, codes.OutOfRange:
		return exitUsage
	case codes.NotFound:
		return exitNotFound
	case codes.Aborted, codes.AlreadyExists, codes.FailedPrecondition:
		return exitRefused
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		return exitUnavailable
	case codes.Canceled:
		return exitInterrupted
	}
	return exitFailure
}

// problem is an error as it is shown: one sentence, or one JSON object.
type problem struct {
	// Code is the gRPC code, Status its name.
	Code     int               `json:"code"`
	Status   string            `json:"status"`
	Reason   string            `json:"reason"`
	Message  string            `json:"message"`
	Advice   string            `json:"advice,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	// RequestID repeats the very call.
	RequestID string `json:"request_id,omitempty"`
	ExitCode  int    `json:"exit_code"`

	// told: the reason is the server's own, or one that a server would have given.
	told bool
}

// standing is what an error comes to that has nothing but an exit status.
func standing(exit int) (code codes.Code, reason string) {
	switch exit {
	case exitUsage:
		return codes.InvalidArgument, "USAGE"
	case exitRefused:
		return codes.FailedPrecondition, "REFUSED"
	case exitUnavailable:
		return codes.Unavailable, "STORE_UNAVAILABLE"
	case exitInterrupted:
		return codes.Canceled, "INTERRUPTED"
	}
	return codes.Internal, "INTERNAL"
}

// problemOf says what an error comes to.
func problemOf(err error) problem {
	p := problem{Message: oneLine(err.Error()), ExitCode: exitFailure}
	var code codes.Code
	own, isOwn := errors.AsType[*exitError](err)
	s, isStatus := statusOf(err)
	switch {
	case isUsage(err):
		p.ExitCode = exitUsage
		if isOwn && own.reason != "" {
			p.Reason, p.told = own.reason, true
		}
		if !isOwn || own.help {
			p.Advice = "--help shows what is possible"
		}
	case errors.Is(err, context.Canceled):
		p.Message, p.ExitCode = "interrupted", exitInterrupted
	case isOwn:
		p.ExitCode, code, p.Reason = own.code, own.status, own.reason
	case isStatus:
		code, p.ExitCode, p.Message = s.Code(), codeExit(s.Code()), oneLine(s.Message())
		p.Reason = codeName(code)
		for _, detail := range s.Details() {
			switch detail := detail.(type) {
			case *errdetails.ErrorInfo:
				p.Reason, p.Metadata, p.told = detail.GetReason(), detail.GetMetadata(), true
			case *errdetails.RetryInfo:
				p.Advice = fmt.Sprintf("try again in %v", detail.GetRetryDelay().AsDuration())
			}
		}
	}
	usual, reason := standing(p.ExitCode)
	if code == codes.OK {
		code = usual
	}
	if p.Reason == "" {
		p.Reason = reason
	}
	p.Code, p.Status = int(code), codeName(code)
	p.advise(err)
	return p
}

// advise adds what can be done about an error of a call.
func (p *problem) advise(err error) {
	t, unanswered := errors.AsType[*trouble](err)
	if unanswered {
		p.ExitCode, p.Advice, p.told = t.exit, t.advice, false
	}
	call, called := errors.AsType[*callError](err)
	if !called {
		return
	}
	if !unanswered {
		if text := adviceFor(call, *p); text != "" {
			p.Advice = text
		}
	}
	if call.requestID != "" && mayBeRepeated(p.Code) {
		p.RequestID = call.requestID
		repeat := "repeat it with --request-id=" + shellWord(call.requestID)
		if unanswered && t.code == codes.DeadlineExceeded {
			p.Advice = "it may need more --timeout"
		}
		if p.Advice != "" {
			repeat = p.Advice + "; " + repeat
		}
		p.Advice = repeat
	}
}

// statusOf is the gRPC status that an error carries.
func statusOf(err error) (*status.Status, bool) {
	carrier, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err)
	if !ok {
		return nil, false
	}
	return carrier.GRPCStatus(), true
}

// codeName is a gRPC code by its name in the contract: INVALID_ARGUMENT.
func codeName(c codes.Code) string {
	return code.Code(c).String()
}

// reportError writes an error for people or, if asked, as JSON, and returns the
// exit status.
func reportError(w io.Writer, err error, asJSON bool) int {
	if own, ok := errors.AsType[*exitError](err); ok && own.err == nil {
		return own.code
	}
	p := problemOf(err)
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		if enc.Encode(p) == nil {
			return p.ExitCode
		}
	}
	text := "dualcheck: " + printable(p.Message)
	if p.told {
		text += " (" + printable(p.Reason) + ")"
	}
	if p.Advice != "" {
		text += "; " + p.Advice
	}
	fmt.Fprintln(w, text)
	return p.ExitCode
}

// oneLine makes one line of a message of several.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
