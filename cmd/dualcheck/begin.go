package main

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/fingerprint"
)

// beginScript shows what a script does for each exit status.
const beginScript = `    answer=$(dualcheck begin payments "$order" --operation payment.capture -o json)
    case $? in
    0)    # FIRST: the work is ours
          token=$(printf %s "$answer" | jq -r .claim.token)
          if result=$(./capture "$order"); then
            dualcheck complete payments "$order" --token="$token" --body="$result"
          else
            dualcheck fail payments "$order" --token="$token" --class=unknown
          fi ;;
    7|11) echo "$order is done already" ;;
    3|10) echo "$order: again later, with the same key"; exit 75 ;;
    5)    echo "$order: find out what happened, then dualcheck resolve"; exit 1 ;;
    *)    echo "$order cannot be done under this key"; exit 1 ;;
    esac
`

func newBeginCommand() *cobra.Command {
	var (
		request          dualcheckv1.BeginRequest
		lease, wait      time.Duration
		digest, digestOf string
		exclude, labels  []string
	)
	cmd := &cobra.Command{
		Use:   "begin NAMESPACE KEY",
		Short: "Ask whether work has been done, and maybe get the claim to do it",
		Long: `Ask whether a piece of work has been done. FIRST gives its claim: do the work,
then say what came of it with complete or fail before the lease ends, or ask for
more time with extend. Every other verdict says what became of it.

The exit status is 0 for FIRST alone, so that begin … && work never does the work
again, and 11 if it is done already:
` + exitCodesText() + `
In a shell script:

` + beginScript + `
If no answer came (10), the claim may have been given all the same: begin prints
the --request-id with which the very call is repeated, and gets it then.`,
		Example: `  dualcheck begin payments order-4711 --operation payment.capture --fingerprint-of order.json
  dualcheck begin payments order-4711 --wait 30s -o json | jq -r .claim.token`,
		Args: arguments("NAMESPACE", "KEY"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	f := cmd.Flags()
	f.Lookup("timeout").Usage = "how long one call may take, on top of --wait"
	f.StringVar(&request.Operation, "operation", "", "what is done to the key, for instance payment.capture; compared with the key's if both are given; left out, it is not compared")
	f.StringVar(&digest, "fingerprint", "", "SHA-256 of the canonical request, hexadecimal or base64; compared with the key's if both are given; left out, it is not compared")
	f.StringVar(&digestOf, "fingerprint-of", "", "make the fingerprint of this JSON file (RFC 8785); - is the standard input")
	f.StringArrayVar(&exclude, "fingerprint-exclude", nil, "leave what this JSON Pointer leads to out of the fingerprint, for instance /sent_at (may be repeated)")
	f.StringVar(&request.RequestId, "request-id", "", "this call's own random id, the same only when the very call is sent again (default a new UUID)")
	f.StringVar(&request.Owner, "owner", "", "who asks (default user@host)")
	f.DurationVar(&lease, "lease", 0, "how long to hold the claim (default the namespace's)")
	f.DurationVar(&wait, "wait", 0, "how long to wait for a key in progress, up to 30s; it answers as soon as the key is no longer")
	f.StringArrayVar(&labels, "label", nil, "name=value to keep with the claim (may be repeated)")
	cmd.MarkFlagsMutuallyExclusive("fingerprint", "fingerprint-of")
	fileFlag(cmd, "fingerprint-of")

	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Namespace, request.Key = args[0], args[1]
		var err error
		if request.Fingerprint, err = readFingerprint(cmd, digest, digestOf, exclude); err != nil {
			return err
		}
		if request.Labels, err = parsePairs("label", labels); err != nil {
			return err
		}
		if request.RequestId == "" {
			request.RequestId = uuid.NewString()
		}
		if request.Owner == "" {
			request.Owner = defaultOwner()
		}
		server.requestID = request.RequestId
		request.Lease = changedDuration(cmd, "lease", lease)
		if wait != 0 {
			request.Wait = durationpb.New(wait)
		}
		return server.with(cmd, max(wait, 0), func(ctx context.Context, to *client) error {
			answer, err := to.dedup.Begin(ctx, &request)
			if err != nil {
				return err
			}
			err = printMessage(cmd, answer, func(p *page) { printVerdict(p, &request, answer, server.given(cmd)) })
			if err != nil {
				return err
			}
			if code := verdictExit(answer.GetVerdict()); code != exitOK {
				return &exitError{code: code}
			}
			return nil
		})
	}
	return cmd
}

// readFingerprint is the fingerprint that the flags give or have made.
func readFingerprint(cmd *cobra.Command, digest, of string, exclude []string) ([]byte, error) {
	if of == "" {
		if len(exclude) > 0 {
			return nil, usageErrorf("--fingerprint-exclude needs --fingerprint-of")
		}
		return parseDigest("fingerprint", digest)
	}
	pointers, err := parsePointers("fingerprint-exclude", exclude)
	if err != nil {
		return nil, err
	}
	raw, err := readFile(cmd, "fingerprint-of", of)
	if err != nil {
		return nil, err
	}
	made, err := fingerprint.OfJSON(raw, pointers...)
	if err != nil {
		return nil, inputErrorf("%s has no fingerprint: %w", inputName("--fingerprint-of", of), err)
	}
	return made[:], nil
}

func parsePointers(flag string, texts []string) ([]fingerprint.Pointer, error) {
	var pointers []fingerprint.Pointer
	for _, text := range texts {
		p, err := fingerprint.ParsePointer(text)
		if err != nil {
			return nil, usageErrorf("--%s: %w", flag, err)
		}
		pointers = append(pointers, p)
	}
	return pointers, nil
}

// defaultOwner is user@host, as far as they are known, in at most 128 bytes.
func defaultOwner() string {
	name := os.Getenv("USER")
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	owner := strings.ToValidUTF8(name+"@"+host, "?")
	if len(owner) > 128 {
		owner = strings.ToValidUTF8(owner[:128], "")
	}
	return owner
}

// printVerdict says what the answer is, then what to do next.
func printVerdict(p *page, q *dualcheckv1.BeginRequest, a *dualcheckv1.BeginResponse, given []string) {
	names := []string{q.GetNamespace(), q.GetKey()}
	again := "ask again in " + shortDuration(a.GetRetryAfter().AsDuration())
	switch a.GetVerdict() {
	case dualcheckv1.Verdict_VERDICT_FIRST:
		p.head("FIRST", green, "do the work, then say what came of it")
	case dualcheckv1.Verdict_VERDICT_IN_PROGRESS:
		p.head("IN_PROGRESS", yellow, "another claim is live; "+again+" with the same key, or with --wait")
	case dualcheckv1.Verdict_VERDICT_REPLAY:
		p.head("REPLAY", green, "it has been done; do nothing, this is what came of it")
	case dualcheckv1.Verdict_VERDICT_REPLAY_FAILURE:
		p.head("REPLAY_FAILURE", red, "it failed for good; if it is still wanted, it needs a new key")
	case dualcheckv1.Verdict_VERDICT_CONFLICT:
		p.head("CONFLICT", red, "this key names other work (another fingerprint or operation); this work needs a new key")
	case dualcheckv1.Verdict_VERDICT_EXPIRED:
		p.head("EXPIRED", yellow, "it was done, and its result is no longer kept; do nothing")
	case dualcheckv1.Verdict_VERDICT_UNKNOWN_OUTCOME:
		p.head("UNKNOWN_OUTCOME", yellow, "nobody may run it until its outcome is resolved; find out, then: "+
			commandLine("resolve", names, given, resolveChoices...))
	default:
		p.head(a.GetVerdict().String(), yellow, "this version does not know this verdict")
	}
	p.field("detail", printable(a.GetDetail()))
	if a.GetSource() != dualcheckv1.Source_SOURCE_UNSPECIFIED && a.GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
		p.field("source", trimEnum(a.GetSource().String(), "SOURCE_"))
	}
	if a.GetStale() {
		p.field("stale", "etcd could not be asked; this was surely so")
	}
	if !a.GetEnforced() {
		p.field("observed", trimEnum(a.GetObserved().String(), "VERDICT_")+" (outside the rollout: nobody is held back)")
	}
	if claim := a.GetClaim(); claim != nil {
		printClaim(p, claim)
		if a.GetRepeat() {
			p.field("repeat", "this call had been answered before; it is the same claim")
		}
		token := "--token=" + shellWord(claim.GetToken())
		p.line("")
		p.line("It went well:")
		p.line("  " + commandLine("complete", names, given, token))
		p.line("It failed:")
		p.line("  " + commandLine("fail", names, given, token, "--class=retryable|terminal|unknown", "--message=WHY"))
		p.line("It needs more time:")
		p.line("  " + commandLine("extend", names, given, token))
	}
	if a.GetRecord() != nil {
		printRecord(p, a.GetRecord())
	}
}

func printClaim(p *page, claim *dualcheckv1.Claim) {
	p.field("token", printable(claim.GetToken()))
	p.field("attempt", fmt.Sprint(claim.GetAttempt()))
	p.field("fence", fmt.Sprint(claim.GetFence()))
	p.field("lease left", shortDuration(claim.GetLeaseLeft().AsDuration()))
	p.field("expires", clockTime(claim.GetExpiresAt()))
	switch claim.GetPrevious() {
	case dualcheckv1.Previous_PREVIOUS_LAPSED:
		p.field("previous", "LAPSED: an earlier attempt may have happened")
	case dualcheckv1.Previous_PREVIOUS_RELEASED:
		p.field("previous", "RELEASED: an earlier attempt did nothing")
	}
}

// commandLine is a command line to be pasted: the command, its arguments, the
// flags that say which server, and more. A word of more that offers a choice is
// left as it is.
func commandLine(command string, names, given []string, more ...string) string {
	words := []string{program(), command}
	for _, word := range given {
		name, value, _ := strings.Cut(word, "=")
		words = append(words, name+"="+shellWord(value))
	}
	var quoted []string
	odd := false
	for _, name := range names {
		quoted = append(quoted, shellWord(name))
		odd = odd || strings.HasPrefix(name, "-")
	}
	if odd {
		return strings.Join(append(append(append(words, more...), "--"), quoted...), " ")
	}
	return strings.Join(append(append(words, quoted...), more...), " ")
}
