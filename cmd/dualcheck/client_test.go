package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

// outcome is what one command line came to.
type outcome struct {
	code           int
	stdout, stderr string
}

// command runs one command line in this process.
func command(t *testing.T, stdin string, args ...string) outcome {
	t.Helper()
	var out, talk bytes.Buffer
	code := execute(args, strings.NewReader(stdin), &out, &talk)
	return outcome{code, out.String(), talk.String()}
}

// wants fails the test unless the command ended with code and said each of the
// words on its standard output.
func (o outcome) wants(t *testing.T, code int, words ...string) {
	t.Helper()
	if o.code != code {
		t.Errorf("exit status %d, want %d; stdout %q, stderr %q", o.code, code, o.stdout, o.stderr)
	}
	// Columns are compared with one space between them.
	said := spaces.ReplaceAllString(o.stdout, " ")
	for _, word := range words {
		if !strings.Contains(said, word) {
			t.Errorf("it did not say %q, but %q", word, o.stdout)
		}
	}
}

var spaces = regexp.MustCompile(` {2,}`)

// complains is wants for the standard error.
func (o outcome) complains(t *testing.T, code int, words ...string) {
	t.Helper()
	if o.code != code {
		t.Errorf("exit status %d, want %d; stdout %q, stderr %q", o.code, code, o.stdout, o.stderr)
	}
	if strings.Count(o.stderr, "\n") != 1 {
		t.Errorf("an error is one line, not %q", o.stderr)
	}
	for _, word := range words {
		if !strings.Contains(o.stderr, word) {
			t.Errorf("it did not complain %q, but %q", word, o.stderr)
		}
	}
}

// object reads one JSON object.
func object(t *testing.T, text string) map[string]any {
	t.Helper()
	var o map[string]any
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatalf("%q is not one JSON object: %v", text, err)
	}
	return o
}

func TestTheLifeOfAKey(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)

	begun := command(t, "", "begin", "shop", "order 1", "--operation", "capture", "--label", "a=b=c", "--lease", "20s")
	begun.wants(t, exitOK, "FIRST: do the work", "token", "attempt", "dualcheck complete shop 'order 1' --token=token-1\n", "dualcheck extend shop 'order 1'")
	if !strings.HasPrefix(begun.stdout, "FIRST") {
		t.Error("the verdict is not the first thing it says")
	}
	command(t, "", "begin", "shop", "order 1").wants(t, exitInProgress, "IN_PROGRESS", "ask again in")
	command(t, "", "begin", "shop", "order 1", "--operation", "refund").wants(t, exitConflict, "CONFLICT")
	command(t, "", "extend", "shop", "order 1", "--token=token-1", "--lease", "1m").wants(t, exitOK, "EXTENDED")
	command(t, "", "complete", "shop", "order 1", "--token=no").complains(t, exitRefused, "CLAIM_LOST", "another claim decides now: dualcheck get shop 'order 1'\n")

	done := command(t, "a body\n", "complete", "shop", "order 1", "--token=token-1", "--code", "201",
		"--content-type", "text/plain", "--body-file", "-", "--metadata", "location=/x")
	done.wants(t, exitOK, "SUCCEEDED: done", "201", "location=/x", `a body\n`)
	command(t, "", "complete", "shop", "order 1", "--token=token-1", "--body", "another").complains(t, exitRefused, "ALREADY_FINISHED", "it is SUCCEEDED: dualcheck get shop 'order 1'\n")
	command(t, "", "begin", "shop", "order 1").wants(t, exitDone, "REPLAY", `a body\n`)
	command(t, "", "get", "shop", "order 1", "--cached").wants(t, exitOK, "SUCCEEDED", "ETCD, at revision")
	command(t, "", "get", "shop", "order 2").complains(t, exitNotFound, "nothing is known of the key (RECORD_NOT_FOUND)")
}

func TestAFailureEndsTheClaimByItsClass(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	for key, want := range map[string]struct {
		code  int
		words []string
	}{
		"retryable": {exitOK, []string{"FIRST", "previous", "RELEASED"}},
		"terminal":  {exitFailedForGood, []string{"REPLAY_FAILURE", "TERMINAL, code 7: no funds"}},
		"unknown":   {exitUnknownOutcome, []string{"UNKNOWN_OUTCOME", "dualcheck resolve n unknown --state=succeeded|failed|released --reason=WHY"}},
	} {
		begun := object(t, command(t, "", "begin", "n", key, "-o", "json").stdout)
		token := begun["claim"].(map[string]any)["token"].(string)
		command(t, token+"\n", "fail", "n", key, "--token-file", "-", "--class", key, "--code", "7", "--message", "no funds").wants(t, exitOK)
		command(t, "", "begin", "n", key).wants(t, want.code, want.words...)
	}
}

func TestThePastedLineFinishesTheClaim(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	begun := command(t, "", "begin", "n", "it's -odd; $key", "--addr", addr)
	begun.wants(t, exitOK)
	_, line, _ := strings.Cut(begun.stdout, "It went well:\n")
	line, _, _ = strings.Cut(line, "\n")
	if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	if state := service.Record("n", "it's -odd; $key").GetState(); state != dualcheckv1.State_STATE_SUCCEEDED {
		t.Errorf("the key is %v", state)
	}
}

func TestJSONIsTheContractsOwn(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	begun := command(t, "", "begin", "n", "a", "-o", "json")
	begun.wants(t, exitOK)
	answer := &dualcheckv1.BeginResponse{}
	if err := protojson.Unmarshal([]byte(begun.stdout), answer); err != nil {
		t.Fatal(err)
	}
	if answer.GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST || answer.GetClaim().GetToken() == "" {
		t.Errorf("got %v", answer)
	}
	conflict := command(t, "", "begin", "n", "a", "--operation=x", "-o", "json")
	conflict.wants(t, exitInProgress)
	if got := object(t, conflict.stdout)["verdict"]; got != "VERDICT_IN_PROGRESS" {
		t.Errorf("got %v", got)
	}
	problem := object(t, command(t, "", "get", "n", "none", "-o", "json").stderr)
	if problem["code"] != 5.0 || problem["status"] != "NOT_FOUND" || problem["reason"] != "RECORD_NOT_FOUND" || problem["exit_code"] != 8.0 || problem["message"] == "" {
		t.Errorf("got %v", problem)
	}
	lost := object(t, command(t, "", "complete", "n", "a", "--token=x", "-o", "json").stderr)
	if metadata, ok := lost["metadata"].(map[string]any); !ok || metadata["attempt"] != "1" {
		t.Errorf("got %v", lost)
	}
	usage := object(t, command(t, "", "begin", "n", "a", "-o", "json", "--lease", "soon").stderr)
	if usage["reason"] != "USAGE" || usage["exit_code"] != 2.0 {
		t.Errorf("got %v", usage)
	}
}

func mustMarshal(t *testing.T, m proto.Message) []byte {
	t.Helper()
	raw, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestADetailOfAnUnknownTypeIsItsBytes(t *testing.T) {
	raw, err := messageJSON(&dualcheckv1.ListRecordsResponse{Records: []*dualcheckv1.Record{{Failure: &dualcheckv1.Failure{Details: []*anypb.Any{
		{TypeUrl: "type.googleapis.com/acme.Reason", Value: []byte("abc")},
		{TypeUrl: "type.googleapis.com/google.protobuf.Duration", Value: mustMarshal(t, durationpb.New(2e9))},
	}}}}})
	if err != nil {
		t.Fatal(err)
	}
	want := `{"records":[{"failure":{"details":[{"@type":"type.googleapis.com/acme.Reason","value":"YWJj"},` +
		`{"@type":"type.googleapis.com/google.protobuf.Duration","value":"2s"}]}}]}`
	if string(raw) != want {
		t.Errorf("got %s, want %s", raw, want)
	}
}

func TestWhatAStrangerStoredDoesNotMoveTheCursor(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	command(t, "", "begin", "n", "a", "--owner", "me\x1b[2J\r\n").wants(t, exitOK)
	command(t, "", "complete", "n", "a", "--token=token-1", "--body", "x\x1b]0;title\x07\u202ey").wants(t, exitOK)
	shown := command(t, "", "begin", "n", "a")
	shown.wants(t, exitDone, `me\x1b[2J\r\n`, `x\x1b]0;title\a\u202ey`)
	if strings.ContainsAny(shown.stdout, "\x1b\r\a\u202e") {
		t.Errorf("it printed %q", shown.stdout)
	}
}

func TestACallThatIsUnavailableIsSentAgainAsItWas(t *testing.T) {
	var mu sync.Mutex
	ids := map[string]int{}
	unavailable := 3
	service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if begin, ok := q.(*dualcheckv1.BeginRequest); ok {
			ids[begin.GetRequestId()]++
			if ids[begin.GetRequestId()] <= unavailable {
				return ingesttest.Error(codes.Unavailable, "STORE_UNAVAILABLE", "no quorum", nil)
			}
		}
		return nil
	}}
	_, addr := startFake(t, service)
	command(t, "", "begin", "n", "a", "--addr", addr).wants(t, exitOK, "FIRST")
	if len(ids) != 1 {
		t.Errorf("it was sent as %d calls", len(ids))
	}
	mu.Lock()
	unavailable = 4
	mu.Unlock()
	command(t, "", "begin", "n", "b", "--addr", addr).complains(t, exitUnavailable, "no quorum (STORE_UNAVAILABLE)", "repeat it with --request-id=")
}

func TestACallThatTakesTooLongSaysThatItMayBeRepeated(t *testing.T) {
	service := &ingesttest.Service{Before: func(ctx context.Context, _ proto.Message) error {
		<-ctx.Done()
		return ctx.Err()
	}}
	_, addr := startFake(t, service)
	command(t, "", "get", "n", "a", "--addr", addr, "--timeout", "50ms").complains(t, exitUnavailable, "no answer within ", "ms; the same call may be repeated")
}

func TestNoServerSaysWhereItWasLookedFor(t *testing.T) {
	command(t, "", "get", "n", "a", "--addr", "127.0.0.1:1").complains(t, exitUnavailable, "no server answers at 127.0.0.1:1", "connection refused", "--addr")
	t.Setenv(addrVariable, "127.0.0.1:2")
	command(t, "", "get", "n", "a").complains(t, exitUnavailable, "no server answers at 127.0.0.1:2")
}

func TestFingerprints(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	t.Setenv(addrVariable, addr)
	const of = `{"b":2,"a":1}` // the SHA-256 of {"a":1,"b":2}
	const hexadecimal = "43258cff783fe7036d8a43033f830adfc60ec037382473548ac742b888292777"
	file := filepath.Join(t.TempDir(), "request.json")
	if err := os.WriteFile(file, []byte(of), 0o600); err != nil {
		t.Fatal(err)
	}
	command(t, "", "begin", "n", "a", "--fingerprint", hexadecimal).wants(t, exitOK, "FIRST")
	raw := service.Record("n", "a").GetFingerprint()
	for _, args := range [][]string{
		{"--fingerprint", base64.StdEncoding.EncodeToString(raw)},
		{"--fingerprint", base64.RawURLEncoding.EncodeToString(raw)},
		{"--fingerprint-of", file},
		{"--fingerprint-of", "-"},
		{"--fingerprint-of", "-", "--fingerprint-exclude", "/c"},
	} {
		stdin := of
		if len(args) == 4 {
			stdin = `{"a":1.0,"c":5,"b":2}`
		}
		command(t, stdin, append([]string{"begin", "n", "a"}, args...)...).wants(t, exitInProgress)
	}
	command(t, `{"a":2}`, "begin", "n", "a", "--fingerprint-of", "-").wants(t, exitConflict)
	for _, args := range [][]string{
		{"--fingerprint", "abc"},
		{"--fingerprint", hexadecimal, "--fingerprint-of", file},
		{"--fingerprint-of", "/no/such/file"},
		{"--fingerprint-exclude", "/a"},
		{"--fingerprint-of", file, "--fingerprint-exclude", "/z"},
		{"--fingerprint-of", file, "--fingerprint-exclude", "z"},
	} {
		command(t, "", append([]string{"begin", "n", "a"}, args...)...).complains(t, exitUsage)
	}
	command(t, `{"id":9007199254740993}`, "begin", "n", "a", "--fingerprint-of", "-").complains(t, exitUsage, "send it as a string", "/id")
}

func TestAnOmittedResult(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	t.Setenv(addrVariable, addr)
	command(t, "", "begin", "n", "a").wants(t, exitOK)
	digest := strings.Repeat("ab", 32)
	command(t, "", "complete", "n", "a", "--token=token-1", "--omitted-digest", digest).complains(t, exitUsage, "omitted-size")
	command(t, "", "complete", "n", "a", "--token=token-1", "--omitted-digest", digest, "--omitted-size", "9", "--body", "x").complains(t, exitUsage, "omitted-digest")
	command(t, "", "complete", "n", "a", "--token=token-1", "--omitted-digest", digest, "--omitted-size", "99").wants(t, exitOK, "99 bytes, not kept")
	if r := service.Record("n", "a"); !r.GetResultOmitted() || len(r.GetDigest()) != 32 {
		t.Errorf("got %v", r)
	}
}

func TestOperators(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	command(t, "", "forget", "n", "a", "--reason", "a test", "--force").wants(t, exitOK, "FORGOTTEN", "7")
	if q := server.forgotten; q.GetReason() != "a test" || !q.GetForce() {
		t.Errorf("sent %v", q)
	}
	command(t, "", "resolve", "n", "a", "--state", "succeeded", "--reason", "seen", "--code", "200", "--body", "x").wants(t, exitOK, "SUCCEEDED", "200")
	if q := server.resolved; string(q.GetResult().GetBody()) != "x" || q.GetReason() != "seen" {
		t.Errorf("sent %v", q)
	}
	command(t, "", "resolve", "n", "a", "--state", "failed", "--reason", "seen", "--code", "5", "--message", "refused").wants(t, exitOK, "FAILED", "TERMINAL, code 5: refused")
	command(t, "", "resolve", "n", "a", "--state", "released", "--reason", "never sent").wants(t, exitOK, "RELEASED")
	if q := server.resolved; q.GetOutcome() != nil {
		t.Errorf("sent %v", q)
	}
	command(t, "", "resolve", "n", "a", "--state", "released", "--reason", "x", "--body", "y").complains(t, exitUsage, "neither")
	command(t, "", "resolve", "n", "a", "--state", "failed", "--reason", "x", "--body", "y").complains(t, exitUsage)
	command(t, "", "cluster").wants(t, exitOK, "answers, ticks", "leader", "8.0 GiB", `connection refused \x1b[2J`, "tick 180")
	object(t, command(t, "", "cluster", "-o", "json").stdout)
}

func TestRecordsAreListedPageByPage(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	for _, key := range []string{"a", "b", "c", "d", "e"} {
		command(t, "", "begin", "n", key).wants(t, exitOK)
	}
	command(t, "", "complete", "n", "c", "--token=token-3").wants(t, exitOK)
	list := func(args ...string) []any {
		t.Helper()
		o := command(t, "", append([]string{"records", "n", "-o", "json"}, args...)...)
		o.wants(t, exitOK)
		records, _ := object(t, o.stdout)["records"].([]any)
		return records
	}
	for want, args := range map[int][]string{
		5: {},
		4: {"--state", "pending"},
		1: {"--state", "SUCCEEDED", "--limit", "0"},
		3: {"--limit", "3"},
		2: {"--limit", "3", "--page-token", "3"},
		0: {"--state", "failed"},
	} {
		if got := list(args...); len(got) != want {
			t.Errorf("%q listed %d, want %d", args, len(got), want)
		}
	}
	text := command(t, "", "records", "n", "--limit", "3")
	text.wants(t, exitOK, "KEY", "SUCCEEDED")
	if strings.Count(text.stdout, "\n") != 4 || !strings.Contains(text.stderr, "--page-token=3") {
		t.Errorf("got %q, %q", text.stdout, text.stderr)
	}
	command(t, "", "records", "n", "--limit", "-1").complains(t, exitUsage)
	command(t, "", "records", "n", "--state", "done").complains(t, exitUsage, "succeeded")
}

func TestNamespaces(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte("defaultLease: 60s\nretentionClass: RETENTION_LEDGER\nmaxResultBytes: 1000\nstateMachine:\n  initial: [new]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	command(t, "", "namespace", "put", "one", "-f", file, "--max-attempts", "5", "--default-lease", "90s").
		wants(t, exitOK, "PUT", "defaultLease=90s", "RETENTION_LEDGER", "TAKEOVER_AUTO")
	policy := server.namespaces["one"].GetPolicy()
	want := &dualcheckv1.Policy{
		DefaultLease: durationpb.New(90e9), RetentionClass: dualcheckv1.RetentionClass_RETENTION_LEDGER, MaxAttempts: 5,
		MaxResultBytes: 1000, StateMachine: &dualcheckv1.StateMachine{Initial: []string{"new"}},
	}
	if !proto.Equal(policy, want) {
		t.Errorf("put %v, want %v", policy, want)
	}
	command(t, "", "namespace", "put", "one", "--revision", "9").complains(t, exitRefused, "POLICY_STALE", "dualcheck namespace get one shows its revision now")
	command(t, "", "namespace", "put", "one", "--revision", "1", "--takeover", "never", "--without-etcd", "replay-only").wants(t, exitOK)
	command(t, "", "namespace", "put", "two").wants(t, exitOK)
	command(t, "", "ns", "put", "three").wants(t, exitOK)
	listed := object(t, command(t, "", "namespace", "list", "-o", "json").stdout)
	if got := listed["namespaces"].([]any); len(got) != 3 {
		t.Errorf("listed %v", got)
	}
	command(t, "", "namespace", "list").wants(t, exitOK, "takeover=TAKEOVER_NEVER withoutEtcd=WITHOUT_ETCD_REPLAY_ONLY")
	command(t, "", "namespace", "get", "one").wants(t, exitOK, "TAKEOVER_NEVER", "30s")
	command(t, "", "namespace", "get", "four").complains(t, exitNotFound, "NAMESPACE_NOT_FOUND", "; dualcheck namespace put four\n")
	command(t, "", "namespace", "delete", "two").wants(t, exitOK, "DELETED")
	command(t, "", "begin", "one", "a").wants(t, exitOK)
	command(t, "", "namespace", "delete", "one").complains(t, exitRefused, "NAMESPACE_NOT_EMPTY", "--force")
	command(t, "", "namespace", "delete", "one", "--force").wants(t, exitOK, "forgotten 1 record\n")
	command(t, "retentionClass: Ledger\ntakeover: retake\n", "namespace", "put", "x", "-f", "-").complains(t, exitUsage, "auto, never")
	for _, word := range []string{"ledger", "LEDGER", "retention_ledger", "RETENTION_LEDGER"} {
		command(t, "retentionClass: "+word+"\nwithout_etcd: fail-closed\n", "namespace", "put", "x", "-f", "-").wants(t, exitOK, "retentionClass=RETENTION_LEDGER withoutEtcd=WITHOUT_ETCD_FAIL_CLOSED")
	}
	if text := command(t, "leases: 60s\n", "namespace", "put", "x", "-f", "-").stderr; strings.Contains(text, "durations") {
		t.Errorf("it complained %q", text)
	}
	for text, complaint := range map[string]string{
		"defaultLease: 1m\n":             "durations are written in seconds",
		"default_lease: 60\n":            "default_lease is 60, and durations are written in seconds",
		"maxAttempts: many\n":            "the standard input is not a policy",
		"retentionClass: weekly\n":       "retentionClass is \"weekly\", it must be one of: retry, queue, ledger",
		"leases: 60s\n":                  "unknown field",
		"maxAttempts: 1\nmaxAttempts: 2": "already set",
		"[1]":                            "not a policy",
	} {
		command(t, text, "namespace", "put", "x", "-f", "-").complains(t, exitUsage, complaint)
	}
	command(t, "{}", "namespace", "put", "x", "-f", "-").wants(t, exitOK)
}

// TestEveryPolicyFieldHasAFlag: state machines come from a file.
func TestEveryPolicyFieldHasAFlag(t *testing.T) {
	cmd := newNamespacePutCommand()
	fields := (&dualcheckv1.Policy{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		name := strings.ReplaceAll(string(fields.Get(i).Name()), "_", "-")
		switch name {
		case "state-machine":
			continue
		case "rollout":
			name = "rollout-thousandths"
		}
		if cmd.Flags().Lookup(name) == nil {
			t.Errorf("the field %s has no flag --%s", fields.Get(i).Name(), name)
		}
	}
}

func TestMistakesInTheCommandLine(t *testing.T) {
	for _, c := range []struct {
		args []string
		word string
	}{
		{[]string{"begni"}, "begin"},
		{[]string{"begin"}, "takes NAMESPACE KEY"},
		{[]string{"begin", "n"}, "takes NAMESPACE KEY"},
		{[]string{"begin", "n", "k", "x"}, "takes NAMESPACE KEY"},
		{[]string{"begin", "n", "k\xff"}, "KEY is not valid UTF-8"},
		{[]string{"begin", "n", "k", "--leese", "1s"}, "--leese"},
		{[]string{"begin", "n", "k", "--lease", "1"}, "--lease"},
		{[]string{"begin", "n", "k", "--label", "x"}, "name=value"},
		{[]string{"begin", "n", "k", "--label", "x=1", "--label", "x=2"}, "twice"},
		{[]string{"begin", "n", "k", "-o", "xml"}, "text, json"},
		{[]string{"begin", "n", "k", "--timeout", "0s"}, "above zero"},
		{[]string{"begin", "n", "k", "--cert-file", "x"}, "key-file"},
		{[]string{"begin", "n", "k", "--ca-file", "/no/such"}, "--ca-file"},
		{[]string{"complete", "n", "k"}, "token"},
		{[]string{"complete", "n", "k", "--token", "x", "--token-file", "y"}, "token"},
		{[]string{"complete", "n", "k", "--token-file", "-", "--body-file", "-"}, "standard input"},
		{[]string{"fail", "n", "k", "--token", "x"}, "class"},
		{[]string{"fail", "n", "k", "--token", "x", "--class", "maybe"}, "retryable"},
		{[]string{"forget", "n", "k"}, "reason"},
		{[]string{"namespace"}, "needs one of"},
		{[]string{"namespace", "pot"}, "did you mean get or put"},
		{[]string{"namespace", "zzzzz"}, "it has"},
		{[]string{"ingest", "/no/such/file"}, "open the input"},
		{[]string{"ingest", "-", "--exec", "true"}, "--journal"},
		{[]string{"ingest", "-", "--journal", "x"}, "goes with --exec"},
		{[]string{"ingest", "-", "--workers", "0"}, "1 or more"},
		{[]string{"version", "x"}, "takes no arguments"},
	} {
		command(t, "", c.args...).complains(t, exitUsage, c.word)
	}
}

func TestHelpVersionAndManual(t *testing.T) {
	command(t, "", "help", "exit-codes").wants(t, exitOK, "130 interrupted", "CONFLICT")
	command(t, "", "begin", "--help").wants(t, exitOK, "130 interrupted", "--request-id")
	command(t, "").wants(t, exitOK, "ingest", "namespace")
	command(t, "", "completion", "bash").wants(t, exitOK, "__start_dualcheck")
	command(t, "", "__complete", "fail", "n", "k", "--class", "").wants(t, exitOK, "retryable\nterminal\nunknown")
	v := object(t, command(t, "", "version", "-o", "json").stdout)
	if v["proto_package"] != "dualcheck.v1" || v["storage_format"] != 1.0 || v["version"] == "" || v["commit"] == "" || !strings.HasPrefix(v["go_version"].(string), "go1.") {
		t.Errorf("got %v", v)
	}
	command(t, "", "version").wants(t, exitOK, "dualcheck.v1", "format 1")
	command(t, "", "--version").wants(t, exitOK, "dualcheck "+buildInfo().Version+"\n")
	command(t, "", "--help").wants(t, exitOK, " man ")
	command(t, "", "help", "begin").wants(t, exitOK, "--request-id", "case $? in")
	command(t, "", "help").wants(t, exitOK, "namespace")
	command(t, "", "__complete", "help", "namespace", "p").wants(t, exitOK, "put")
	command(t, "", "help", "nosuch").complains(t, exitUsage, "nosuch")
	command(t, "", "help", "namespace", "nosuch").complains(t, exitUsage, "nosuch")
	put := command(t, "", "namespace", "put", "--help")
	for _, name := range []string{"off", "rate-per-second", "max-records", "rollout-thousandths", "rollout-by", "rollout-allow"} {
		if !regexp.MustCompile(`--` + name + ` .*\(not served yet\)`).MatchString(put.stdout) {
			t.Errorf("--%s is not marked", name)
		}
	}
	dir := filepath.Join(t.TempDir(), "man")
	command(t, "", "man", "--dir", dir).wants(t, exitOK)
	page, err := os.ReadFile(filepath.Join(dir, "dualcheck-begin.1"))
	if err != nil || !strings.Contains(string(page), "fingerprint") || !strings.Contains(string(page), `.TH "DUALCHECK-BEGIN" "1"`) {
		t.Errorf("the manual page is %.200s (%v)", page, err)
	}
}

func TestTheTablesAreWhole(t *testing.T) {
	for reason := range advice {
		if strings.ToUpper(reason) != reason {
			t.Errorf("%s is not a reason", reason)
		}
	}
	before := -1
	for _, e := range exitCodes {
		if e.meaning == "" || e.code <= before {
			t.Errorf("exit status %d means %q, after %d", e.code, e.meaning, before)
		}
		before = e.code
	}
}
