package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/cenkalti/backoff/v5"
	"github.com/spf13/cobra"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

const (
	// quietMost is how long a stream may say nothing, once it has begun: a server says
	// something every few seconds. The SDK waits as long.
	quietMost = 15 * time.Second
	// againAfter and againMost bound the pauses before a stream is opened again.
	againAfter, againMost = 100 * time.Millisecond, 5 * time.Second
	// watchedBody is how much of a body is shown in a line, in bytes.
	watchedBody = 200
)

func newWatchCommand() *cobra.Command {
	w := &watching{request: &dualcheckv1.WatchRequest{Kinds: []dualcheckv1.EventKind{dualcheckv1.EventKind_EVENT_KIND_RECORD}}}
	cmd := &cobra.Command{
		Use:   "watch NAMESPACE",
		Short: "Show changes of a namespace's keys as they happen",
		Long: `Show changes of a namespace's keys as they happen, a line each, until it is
interrupted (exit status 0): when it was heard of, PUT or DELETE (forgotten),
the state, the revision, the key. Each key's changes come in order, and none is
missed unless RESYNC says so. A connection that breaks is made again, and goes
on from where it was, or with a RESYNC.

RESYNC says that changes may have been missed, or that --snapshot asked for it:
until it ends come the keys that are there. -o json prints each message of the
stream as one line; the last resume token is in it, and in text it is told at
the end. A token that was told amid a RESYNC begins it anew.`,
		Example: `  dualcheck watch payments --prefix order-
  dualcheck watch payments --snapshot --values -o json | jq -c '.events[]?'`,
		Args: arguments("NAMESPACE"),
	}
	w.server = addClientFlags(cmd)
	addOutputFlag(cmd)
	f := cmd.Flags()
	f.Lookup("timeout").Usage = "how long a server may take to answer; one that has answered may say nothing for " + shortDuration(quietMost) + ", or for this if it is more"
	f.StringVar(&w.request.KeyPrefix, "prefix", "", "only keys that begin so")
	f.BoolVar(&w.request.Snapshot, "snapshot", false, "begin with the keys that are there")
	f.BoolVar(&w.request.IncludeValues, "values", false, "with what was stored: results and failures")
	f.StringVar(&w.request.ResumeToken, "resume", "", "go on after this token, from an earlier watch")
	f.IntVar(&w.limit, "limit", 0, "end after so many events (0: never)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if w.limit < 0 {
			return usageErrorf("--limit is %d, it must not be below zero", w.limit)
		}
		if w.request.GetSnapshot() && w.request.GetResumeToken() != "" {
			return usageErrorf("--snapshot begins with the keys that are there, --resume goes on after what an earlier watch has shown: give one of them")
		}
		if err := checkPrefix(w.request.GetKeyPrefix()); err != nil {
			return err
		}
		w.cmd, w.request.Namespace = cmd, args[0]
		return w.server.connected(cmd, w.run)
	}
	return cmd
}

// watching is one run of the command.
type watching struct {
	cmd     *cobra.Command
	server  *clientFlags
	request *dualcheckv1.WatchRequest
	limit   int
	shown   int
	// begun: a server has answered.
	begun bool
	// amid: the last token is from amid a RESYNC, which it begins anew.
	amid bool
}

// checkPrefix refuses what no key begins with, which a server would, or could not even be
// sent.
func checkPrefix(s string) error {
	bad := func(format string, args ...any) error {
		return &exitError{code: exitUsage, status: codes.InvalidArgument, reason: string(claim.KeyInvalid), err: fmt.Errorf("--prefix "+format, args...)}
	}
	if len(s) > claim.MaxKey {
		return bad("has %d bytes, and a key has at most %d", len(s), claim.MaxKey)
	}
	if !utf8.ValidString(s) {
		return bad("is not valid UTF-8, and every key is: it must end with a whole character")
	}
	for i, c := range s {
		if unicode.In(c, unicode.Cc, unicode.Cf) {
			return bad("has %U at byte %d, and no key has control or format characters: take it out", c, i)
		}
	}
	return nil
}

// errEnough ends the command: it has shown as much as it was asked for.
var errEnough = errors.New("enough")

// run watches until it is interrupted, has shown enough, or is refused. A stream that ends
// is opened again; if no server ever answered, that is an error like any other command's.
func (w *watching) run(to *client) error {
	pauses := backoff.NewExponentialBackOff()
	pauses.InitialInterval, pauses.MaxInterval, pauses.Multiplier = againAfter, againMost, 2
	for {
		came, err := w.stream(to)
		switch {
		case w.cmd.Context().Err() != nil, errors.Is(err, errEnough):
			w.tellToken()
			return nil //nolint:nilerr // these are its usual ends
		case !w.begun, !passes(err):
			return &callError{err: err, command: w.cmd.Name(), names: w.cmd.Flags().Args(), given: w.server.given(w.cmd)}
		}
		if came {
			pauses.Reset()
		}
		wait := max(pauses.NextBackOff(), retryDelay(err))
		warn(w.cmd, "the stream ended (%s); it is opened again in %s, and goes on from where it was, or with a RESYNC", oneLine(cmp.Or(status.Convert(err).Message(), err.Error())), shortDuration(wait))
		if !pause(w.cmd.Context(), wait) {
			w.tellToken()
			return nil
		}
		to.conn.ResetConnectBackoff() // its own pauses grow to minutes
	}
}

// passes reports whether a stream that ended so may be opened again.
func passes(err error) bool {
	switch s, ok := statusOf(err); {
	case !ok:
		return false // of the standard output
	case isMistake(err):
		return false
	default:
		return s.Code() == codes.Unavailable || s.Code() == codes.DeadlineExceeded || s.Code() == codes.ResourceExhausted
	}
}

// retryDelay is when the server asked to be asked again; 0 if it did not.
func retryDelay(err error) time.Duration {
	s, ok := statusOf(err)
	if !ok {
		return 0
	}
	for _, detail := range s.Details() {
		if retry, ok := detail.(*errdetails.RetryInfo); ok {
			return retry.GetRetryDelay().AsDuration()
		}
	}
	return 0
}

// stream shows what one stream tells, and returns how it ended; came: it told something.
func (w *watching) stream(to *client) (came bool, err error) {
	ctx, cancel := context.WithCancel(w.cmd.Context())
	defer cancel()
	limit := to.timeout
	silent := time.AfterFunc(limit, cancel)
	defer silent.Stop()
	stream, err := to.watch.Watch(ctx, w.request)
	for err == nil {
		var m *dualcheckv1.WatchResponse
		if m, err = stream.Recv(); err != nil {
			break
		}
		if !came {
			w.tellConnected(to)
		}
		came, w.begun = true, true
		limit = max(to.timeout, quietMost)
		silent.Reset(limit)
		whole, err := w.show(m)
		if err != nil {
			return came, err
		}
		if whole {
			w.take(m)
		}
		if w.limit > 0 && w.shown >= w.limit {
			return came, errEnough
		}
	}
	if errors.Is(err, io.EOF) { // what no dualcheck server does
		err = status.Error(codes.Unavailable, "the stream was ended without a reason")
	}
	return came, to.explain.explain(w.cmd.Context(), err, limit)
}

// take notes that a message was handled, and where to go on.
func (w *watching) take(m *dualcheckv1.WatchResponse) {
	w.request.ResumeToken = m.GetResumeToken()
	switch r := m.GetResync(); {
	case r.GetEnd():
		w.amid = false
	case r.GetBegin():
		w.amid = true
	}
}

// show prints a message. With --limit the last may be shown in part, and is then not to be
// taken.
func (w *watching) show(m *dualcheckv1.WatchResponse) (whole bool, err error) {
	whole = true
	if left := w.limit - w.shown; w.limit > 0 && len(m.GetEvents()) > left {
		whole = false
		m.Events, m.ResumeToken = m.GetEvents()[:left], w.request.GetResumeToken()
	}
	w.shown += len(m.GetEvents())
	return whole, printMessage(w.cmd, m, func(p *page) {
		if r := m.GetResync(); r.GetBegin() {
			p.line("RESYNC: what is there follows; what was shown before may be out of date (" + printable(r.GetCause()) + ")")
		}
		for _, e := range m.GetEvents() {
			p.line(eventLine(e, time.Now()))
		}
		if whole && m.GetResync().GetEnd() {
			p.line("RESYNC ends: what was not named since it began is not there")
		}
	})
}

// eventLine is a change as a line. Cells have a width of their own, for a line does not
// know the next.
func eventLine(e *dualcheckv1.Event, heard time.Time) string {
	state := "-"
	if e.GetState() != dualcheckv1.State_STATE_UNSPECIFIED {
		state = trimEnum(e.GetState().String(), "STATE_")
	}
	line := fmt.Sprintf("%s  %-6s  %-9s  %8d  %s", heard.Local().Format(time.RFC3339), trimEnum(e.GetType().String(), "EVENT_TYPE_"), state, e.GetRevision(), printable(e.GetKey()))
	if value := valueCell(e.GetRecord()); value != "" {
		line += "  " + value
	}
	return line
}

// valueCell is what a record holds, in a word or a few.
func valueCell(r *dualcheckv1.Record) string {
	var cells []string
	if failure := r.GetFailure(); failure != nil {
		cells = append(cells, fmt.Sprintf("failure=%s code=%d %s", trimEnum(failure.GetClass().String(), "FAILURE_CLASS_"), failure.GetCode(), failure.GetMessage()))
	}
	if result := r.GetResult(); result != nil {
		cells = append(cells, fmt.Sprintf("code=%d", result.GetCode()))
	}
	switch body := r.GetResult().GetBody(); {
	case r.GetResultOmitted():
		cells = append(cells, fmt.Sprintf("body=%d bytes, not kept", r.GetResultSize()))
	case len(body) > watchedBody || !utf8.Valid(body):
		cells = append(cells, fmt.Sprintf("body=%d bytes", len(body)))
	case len(body) > 0:
		cells = append(cells, "body="+string(body))
	}
	return printable(strings.Join(cells, " "))
}

// tellConnected says that a server has answered, for a namespace in which nothing happens
// has nothing else to show.
func (w *watching) tellConnected(to *client) {
	if wantsJSON(w.cmd) {
		return
	}
	again := ""
	if w.begun {
		again = " again"
	}
	fmt.Fprintf(w.cmd.ErrOrStderr(), "watching %s at %s%s\n", printable(w.request.GetNamespace()), to.explain.at.target, again)
}

// tellToken says where another watch goes on; JSON has told it.
func (w *watching) tellToken() {
	token := w.request.GetResumeToken()
	if token == "" || wantsJSON(w.cmd) {
		return
	}
	does := "goes on from here"
	if w.amid {
		does = "begins the RESYNC anew, which has not ended"
	}
	fmt.Fprintf(w.cmd.ErrOrStderr(), "--resume=%s %s\n", token, does)
}
