package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// resultFlags are the flags of a result.
type resultFlags struct {
	code        int32
	contentType string
	body        string
	bodyFile    string
	metadata    []string
}

func (r *resultFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Int32Var(&r.code, "code", 0, "your own status code, for instance an HTTP status")
	f.StringVar(&r.contentType, "content-type", "", "the body's media type")
	f.StringVar(&r.body, "body", "", "the result's body")
	f.StringVar(&r.bodyFile, "body-file", "", "read the body from this file; - is the standard input")
	f.StringArrayVar(&r.metadata, "metadata", nil, "name=value, a header worth keeping (may be repeated)")
	cmd.MarkFlagsMutuallyExclusive("body", "body-file")
	fileFlag(cmd, "body-file")
}

// hasBody says whether a flag was given that only a result has.
func (r *resultFlags) hasBody(cmd *cobra.Command) bool {
	for _, name := range []string{"content-type", "body", "body-file", "metadata"} {
		if cmd.Flags().Changed(name) {
			return true
		}
	}
	return false
}

// read is the result that the flags give; nil if none of them was given.
func (r *resultFlags) read(cmd *cobra.Command) (*dualcheckv1.Result, error) {
	if !r.hasBody(cmd) && !cmd.Flags().Changed("code") {
		return nil, nil
	}
	metadata, err := parsePairs("metadata", r.metadata)
	if err != nil {
		return nil, err
	}
	body := []byte(r.body)
	if r.bodyFile != "" {
		if body, err = readFile(cmd, "body-file", r.bodyFile); err != nil {
			return nil, err
		}
	}
	if len(body) > claim.MaxMessage-(64<<10) {
		return nil, inputErrorf("the body has %d bytes, more than a message may have: send --omitted-digest and --omitted-size instead", len(body))
	}
	return &dualcheckv1.Result{Code: r.code, ContentType: r.contentType, Body: body, Metadata: metadata}, nil
}

// warnNotKept warns of a result's body that was sent and is not kept.
func warnNotKept(cmd *cobra.Command, sent *dualcheckv1.Result, r *dualcheckv1.Record, namespace string, given []string) {
	if len(sent.GetBody()) == 0 || !r.GetResultOmitted() {
		return
	}
	warn(cmd, "the body of %d bytes was not kept, the key is finished all the same: the namespace's max_result_bytes is less (256 KiB by default); "+
		"%s raises it to at most 1048576 (the policy is put as a whole: %s shows what it has)", len(sent.GetBody()),
		commandLine("namespace put", []string{namespace}, given, "--max-result-bytes=BYTES"),
		commandLine("namespace get", []string{namespace}, given))
}

// showRecord makes a call that settles a key and shows the record that came of it.
// sent is the result that the call stores, if there is one.
func showRecord[A interface {
	proto.Message
	GetRecord() *dualcheckv1.Record
}](cmd *cobra.Command, server *clientFlags, sent *dualcheckv1.Result, call func(context.Context, *client) (A, error)) error {
	return server.with(cmd, 0, func(ctx context.Context, to *client) error {
		answer, err := call(ctx, to)
		if err != nil {
			return err
		}
		given := server.given(cmd)
		warnNotKept(cmd, sent, answer.GetRecord(), cmd.Flags().Arg(0), given)
		return printMessage(cmd, answer, func(p *page) { printState(p, answer.GetRecord(), given) })
	})
}

func newCompleteCommand() *cobra.Command {
	var (
		result        resultFlags
		omittedDigest string
		omittedSize   int64
	)
	request := &dualcheckv1.CompleteRequest{}
	cmd := &cobra.Command{
		Use:   "complete NAMESPACE KEY --token TOKEN",
		Short: "Store the result of the work; the key is finished for good",
		Long: `Store the result of the work; the key is finished for good, and everyone else is
given the result.

A body is kept up to the namespace's max_result_bytes: 256 KiB by default, 1 MiB at
most (namespace put --max-result-bytes). Of a longer one the size and digest alone
are kept, the key is finished all the same, and complete warns of it.`,
		Example: `  dualcheck complete payments order-4711 --token=… --code 201 --content-type application/json --body '{"id":7}'
  make-report | dualcheck complete reports may --token=… --body-file -`,
		Args: arguments("NAMESPACE", "KEY"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	token := addTokenFlags(cmd)
	result.add(cmd)
	f := cmd.Flags()
	f.StringVar(&omittedDigest, "omitted-digest", "", "instead of a result that is too large to send: its SHA-256 (as Record.digest), hexadecimal or base64")
	f.Int64Var(&omittedSize, "omitted-size", 0, "and the size of its body in bytes")
	cmd.MarkFlagsRequiredTogether("omitted-digest", "omitted-size")
	for _, name := range []string{"code", "content-type", "body", "body-file", "metadata"} {
		cmd.MarkFlagsMutuallyExclusive("omitted-digest", name)
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Namespace, request.Key = args[0], args[1]
		if err := oneStdin(cmd, "token-file", "body-file"); err != nil {
			return err
		}
		var err error
		if request.Token, err = token.read(cmd); err != nil {
			return err
		}
		stored, err := result.read(cmd)
		if err != nil {
			return err
		}
		if stored != nil {
			request.Outcome = &dualcheckv1.CompleteRequest_Result{Result: stored}
		}
		if omittedDigest != "" {
			digest, err := parseDigest("omitted-digest", omittedDigest)
			if err != nil {
				return err
			}
			request.Outcome = &dualcheckv1.CompleteRequest_Omitted{Omitted: &dualcheckv1.Omitted{Digest: digest, Size: omittedSize}}
		}
		return showRecord(cmd, server, stored, func(ctx context.Context, to *client) (*dualcheckv1.FinishResponse, error) {
			return to.dedup.Complete(ctx, request)
		})
	}
	return cmd
}

// failureFlags are the flags of a failure.
type failureFlags struct {
	code    int32
	message string
}

func newFailCommand() *cobra.Command {
	var failure failureFlags
	request := &dualcheckv1.FailRequest{}
	cmd := &cobra.Command{
		Use:   "fail NAMESPACE KEY --token TOKEN --class retryable|terminal|unknown",
		Short: "Say that the work failed, and how",
		Long: `Say that the work failed. Its class decides what becomes of the key:

  retryable  nothing happened: the key is free, the next begin is FIRST
  terminal   it failed for good: stored, and replayed to everyone
  unknown    it may have happened: the key is held until it is resolved`,
		Args: arguments("NAMESPACE", "KEY"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	token := addTokenFlags(cmd)
	class := choiceFlag(cmd, "class", "what the failure means for the key (required)", "retryable", "terminal", "unknown")
	required(cmd, "class")
	cmd.Flags().Int32Var(&failure.code, "code", 0, "your own code, for instance a gRPC code")
	cmd.Flags().StringVar(&failure.message, "message", "", "what went wrong, for people")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Namespace, request.Key = args[0], args[1]
		var err error
		if request.Token, err = token.read(cmd); err != nil {
			return err
		}
		request.Failure = &dualcheckv1.Failure{
			Class:   failureClass(class.value),
			Code:    failure.code,
			Message: failure.message,
		}
		return showRecord(cmd, server, nil, func(ctx context.Context, to *client) (*dualcheckv1.FinishResponse, error) {
			return to.dedup.Fail(ctx, request)
		})
	}
	return cmd
}

func failureClass(word string) dualcheckv1.FailureClass {
	return dualcheckv1.FailureClass(enumValue(dualcheckv1.FailureClass_value, "FAILURE_CLASS_", word))
}

func newExtendCommand() *cobra.Command {
	var lease time.Duration
	request := &dualcheckv1.ExtendRequest{}
	cmd := &cobra.Command{
		Use:   "extend NAMESPACE KEY --token TOKEN",
		Short: "Ask for more time for a claim",
		Args:  arguments("NAMESPACE", "KEY"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	token := addTokenFlags(cmd)
	cmd.Flags().DurationVar(&lease, "lease", 0, "how long from now (default the namespace's)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Namespace, request.Key = args[0], args[1]
		var err error
		if request.Token, err = token.read(cmd); err != nil {
			return err
		}
		request.Lease = changedDuration(cmd, "lease", lease)
		return server.with(cmd, 0, func(ctx context.Context, to *client) error {
			answer, err := to.dedup.Extend(ctx, request)
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				p.head("EXTENDED", green, fmt.Sprintf("the claim holds for %s", shortDuration(answer.GetClaim().GetLeaseLeft().AsDuration())))
				printClaim(p, answer.GetClaim())
			})
		})
	}
	return cmd
}
