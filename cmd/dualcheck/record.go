package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// shownBody is how much of a body is shown to people, in bytes.
const shownBody = 4 << 10

func newGetCommand() *cobra.Command {
	var request dualcheckv1.GetRequest
	cmd := &cobra.Command{
		Use:   "get NAMESPACE KEY",
		Short: "Show what is known of a key",
		Args:  arguments("NAMESPACE", "KEY"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	cmd.Flags().BoolVar(&request.Cached, "cached", false, "that there is no such key may be up to 3s old; whatever is told of a key is as true as without")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Namespace, request.Key = args[0], args[1]
		return server.with(cmd, 0, func(ctx context.Context, to *client) error {
			answer, err := to.dedup.Get(ctx, &request)
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				printState(p, answer.GetRecord(), server.given(cmd))
				p.field("source", fmt.Sprintf("%s, at revision %d", trimEnum(answer.GetSource().String(), "SOURCE_"), answer.GetRevision()))
			})
		})
	}
	return cmd
}

func newForgetCommand() *cobra.Command {
	var request dualcheckv1.ForgetRecordRequest
	cmd := &cobra.Command{
		Use:   "forget NAMESPACE KEY --reason WHY",
		Short: "Make a key as if it had never been",
		Long: `Make a key as if it had never been. It takes 3 seconds: afterwards no cache can
replay the old answer, and begin is FIRST.`,
		Args: arguments("NAMESPACE", "KEY"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	cmd.Flags().StringVar(&request.Reason, "reason", "", "why; kept in the log (required)")
	cmd.Flags().BoolVar(&request.Force, "force", false, "also if a claim is live or the outcome is unknown")
	required(cmd, "reason")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Namespace, request.Key = args[0], args[1]
		return server.with(cmd, 0, func(ctx context.Context, to *client) error {
			answer, err := to.admin.ForgetRecord(ctx, &request)
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				p.head("FORGOTTEN", green, "the key is as new")
				p.field("revision", fmt.Sprint(answer.GetRevision()))
			})
		})
	}
	return cmd
}

func newRecordsCommand() *cobra.Command {
	request := &dualcheckv1.ListRecordsRequest{}
	cmd := &cobra.Command{
		Use:   "records NAMESPACE",
		Short: "List a namespace's records",
		Long: `List a namespace's records, in no told order and without the bodies of results.
More than --limit are had by giving the page token that it ends with.`,
		Args: arguments("NAMESPACE"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	state := choiceFlag(cmd, "state", "only records in this state", "pending", "released", "unknown", "succeeded", "failed")
	list := listing[*dualcheckv1.Record]{name: "records", head: recordHead, row: recordRow}
	list.addFlags(cmd, 100)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Namespace = args[0]
		request.State = dualcheckv1.State(enumValue(dualcheckv1.State_value, "STATE_", state.value))
		list.fetch = func(ctx context.Context, to *client, size int32, token string) ([]*dualcheckv1.Record, string, error) {
			request.PageSize, request.PageToken = size, token
			answer, err := to.admin.ListRecords(ctx, request)
			return answer.GetRecords(), answer.GetNextPageToken(), err
		}
		return list.print(cmd, server)
	}
	return cmd
}

func newResolveCommand() *cobra.Command {
	var (
		result  resultFlags
		failure failureFlags
	)
	request := &dualcheckv1.ResolveRecordRequest{}
	cmd := &cobra.Command{
		Use:   "resolve NAMESPACE KEY --state succeeded|failed|released --reason WHY",
		Short: "Say what became of work whose outcome is unknown",
		Long: `Say what became of work whose outcome is unknown, of a claim that lapsed, or of a
key whose attempts are used up. succeeded stores a result (empty unless given),
failed stores a failure for good, released says that nothing happened: the key is
free again.`,
		Example: `  dualcheck resolve payments order-4711 --state succeeded --reason "seen at the bank"`,
		Args:    arguments("NAMESPACE", "KEY"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	state := choiceFlag(cmd, "state", "what became of it (required)", "succeeded", "failed", "released")
	cmd.Flags().StringVar(&request.Reason, "reason", "", "why; kept in the log (required)")
	required(cmd, "state", "reason")
	result.add(cmd)
	cmd.Flags().StringVar(&failure.message, "message", "", "with failed: what went wrong, for people")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Namespace, request.Key = args[0], args[1]
		request.State = dualcheckv1.State(enumValue(dualcheckv1.State_value, "STATE_", state.value))
		stored, err := result.read(cmd)
		if err != nil {
			return err
		}
		switch request.State {
		case dualcheckv1.State_STATE_SUCCEEDED:
			if cmd.Flags().Changed("message") {
				return usageErrorf("--message goes with --state failed")
			}
			if stored == nil {
				stored = &dualcheckv1.Result{}
			}
			request.Outcome = &dualcheckv1.ResolveRecordRequest_Result{Result: stored}
		case dualcheckv1.State_STATE_FAILED:
			if result.hasBody(cmd) {
				return usageErrorf("a body, content type and metadata go with --state succeeded")
			}
			request.Outcome = &dualcheckv1.ResolveRecordRequest_Failure{Failure: &dualcheckv1.Failure{
				Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL, Code: result.code, Message: failure.message,
			}}
		default:
			if stored != nil || cmd.Flags().Changed("message") {
				return usageErrorf("--state released goes with neither a result nor a failure")
			}
		}
		return showRecord(cmd, server, request.GetResult(), func(ctx context.Context, to *client) (*dualcheckv1.ResolveRecordResponse, error) {
			return to.admin.ResolveRecord(ctx, request)
		})
	}
	return cmd
}

// leaseLeft is how much of a pending record's lease is left, below zero if it has
// lapsed; pending is false for a record without such a lease.
func leaseLeft(r *dualcheckv1.Record) (left time.Duration, pending bool) {
	if r.GetState() != dualcheckv1.State_STATE_PENDING || r.GetLeaseUntil() == nil {
		return 0, false
	}
	return time.Until(r.GetLeaseUntil().AsTime()), true
}

// pendingMeaning says how a pending record stands.
func pendingMeaning(r *dualcheckv1.Record) string {
	switch left, pending := leaseLeft(r); {
	case !pending:
		return "a claim was given and has not been finished"
	case left > 0:
		return "a claim is live; its lease ends in " + shortDuration(left)
	default:
		return "lease lapsed " + shortDuration(-left) + " ago: the next begin may take it over"
	}
}

// printState shows a record under its state.
func printState(p *page, r *dualcheckv1.Record, given []string) {
	meaning := map[dualcheckv1.State]struct{ color, text string }{
		dualcheckv1.State_STATE_PENDING:  {yellow, pendingMeaning(r)},
		dualcheckv1.State_STATE_RELEASED: {yellow, "nothing happened; the key is free, its fingerprint still binds"},
		dualcheckv1.State_STATE_UNKNOWN: {yellow, "nobody can say whether it happened; find out, then: " +
			commandLine("resolve", []string{r.GetNamespace(), r.GetKey()}, given, resolveChoices...)},
		dualcheckv1.State_STATE_SUCCEEDED: {green, "done"},
		dualcheckv1.State_STATE_FAILED:    {red, "failed for good"},
	}[r.GetState()]
	p.head(trimEnum(r.GetState().String(), "STATE_"), meaning.color, meaning.text)
	printRecord(p, r)
}

// printRecord shows what a record has.
func printRecord(p *page, r *dualcheckv1.Record) {
	if r.GetKey() != "" {
		p.field("key", printable(r.GetNamespace()+" "+r.GetKey()))
	}
	p.field("operation", printable(r.GetOperation()))
	p.field("fingerprint", hex.EncodeToString(r.GetFingerprint()))
	p.field("owner", printable(r.GetOwner()))
	if r.GetAttempt() > 0 {
		p.field("attempt", fmt.Sprint(r.GetAttempt()))
	}
	p.field("created", clockTime(r.GetCreatedAt()))
	p.field("claimed", clockTime(r.GetClaimedAt()))
	p.field("lease until", clockTime(r.GetLeaseUntil()))
	p.field("finished", clockTime(r.GetFinishedAt()))
	p.field("result until", clockTime(r.GetResultUntil()))
	p.field("key until", clockTime(r.GetKeyUntil()))
	p.field("labels", printPairs(r.GetLabels()))
	p.field("trace", printable(r.GetTraceId()))
	p.field("digest", hex.EncodeToString(r.GetDigest()))
	if failure := r.GetFailure(); failure != nil {
		p.field("failure", printable(fmt.Sprintf("%s, code %d: %s",
			trimEnum(failure.GetClass().String(), "FAILURE_CLASS_"), failure.GetCode(), failure.GetMessage())))
		if n := len(failure.GetDetails()); n > 0 {
			p.field("details", fmt.Sprintf("%d; -o json shows them", n))
		}
	}
	if result := r.GetResult(); result != nil {
		if result.GetCode() != 0 {
			p.field("code", fmt.Sprint(result.GetCode()))
		}
		p.field("content type", printable(result.GetContentType()))
		p.field("metadata", printPairs(result.GetMetadata()))
	}
	switch body := r.GetResult().GetBody(); {
	case r.GetResultOmitted():
		p.field("body", fmt.Sprintf("%d bytes, not kept", r.GetResultSize()))
	case len(body) > shownBody || !utf8.Valid(body):
		p.field("body", fmt.Sprintf("%d bytes; -o json has them in base64", len(body)))
	case len(body) > 0:
		p.field("body", printable(string(body)))
	}
}

// recordHead names the cells of recordRow.
var recordHead = []string{"KEY", "STATE", "LEASE", "ATTEMPT", "OWNER", "CLAIMED", "FINISHED", "SIZE"}

// recordRow is a record's line in a list.
func recordRow(r *dualcheckv1.Record) []string {
	size := "-"
	if r.GetState() == dualcheckv1.State_STATE_SUCCEEDED {
		size = strconv.FormatInt(r.GetResultSize(), 10)
	}
	return []string{
		printable(r.GetKey()), trimEnum(r.GetState().String(), "STATE_"), leaseCell(r), fmt.Sprint(r.GetAttempt()),
		dash(printable(r.GetOwner())), dash(clockTime(r.GetClaimedAt())), dash(clockTime(r.GetFinishedAt())), size,
	}
}

// leaseCell is a record's lease in a list.
func leaseCell(r *dualcheckv1.Record) string {
	switch left, pending := leaseLeft(r); {
	case !pending:
		return "-"
	case left > 0:
		return shortDuration(left) + " left"
	default:
		return "lapsed " + shortDuration(-left) + " ago"
	}
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func printPairs(pairs map[string]string) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(pairs)) {
		words = append(words, printable(name+"="+pairs[name]))
	}
	return strings.Join(words, " ")
}

// clockTime is a time in the local zone to the second; empty if there is none.
func clockTime(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().Local().Format(time.RFC3339)
}

// shortDuration rounds for people.
func shortDuration(d time.Duration) string {
	switch {
	case d >= time.Minute:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Millisecond).String()
}

// trimEnum is an enum's name without the prefix that all its names have.
func trimEnum(name, prefix string) string { return strings.TrimPrefix(name, prefix) }

// enumValue is the number of an enum's value by its name without the prefix; 0 if
// word is empty.
func enumValue(values map[string]int32, prefix, word string) int32 {
	if word == "" {
		return 0
	}
	return values[prefix+strings.ReplaceAll(strings.ToUpper(word), "-", "_")]
}

// required marks flags that must be given.
func required(cmd *cobra.Command, flags ...string) {
	for _, name := range flags {
		// It fails only for a flag that was not added.
		_ = cmd.MarkFlagRequired(name)
	}
}
