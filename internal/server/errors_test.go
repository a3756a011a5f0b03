package server

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// declaredReasons reads the reasons from their source, so that none can be added
// without a row.
func declaredReasons(t *testing.T) []claim.Reason {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "../claim/error.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all []claim.Reason
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if typ, ok := spec.Type.(*ast.Ident); ok && typ.Name == "Reason" {
			text, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, claim.Reason(text))
		}
		return true
	})
	if len(all) < 30 {
		t.Fatalf("only %d reasons found: has their declaration moved?", len(all))
	}
	return all
}

func TestEveryReasonHasARow(t *testing.T) {
	reasons := declaredReasons(t)
	for _, r := range reasons {
		if _, ok := table[r]; !ok {
			t.Errorf("%s has no row", r)
		}
		if len(r) > 63 || strings.ToUpper(string(r)) != string(r) {
			t.Errorf("%s is no UPPER_SNAKE of at most 63", r)
		}
	}
	if len(table) != len(reasons) {
		t.Errorf("the table has %d rows for %d reasons", len(table), len(reasons))
	}
}

// The table as callers know it; written out apart from the code's.
func TestEveryRowsCode(t *testing.T) {
	for code, reasons := range map[codes.Code]string{
		codes.InvalidArgument: "NAMESPACE_INVALID KEY_INVALID OPERATION_INVALID FINGERPRINT_INVALID FINGERPRINT_REQUIRED REQUEST_ID_INVALID LEASE_INVALID WAIT_INVALID " +
			"TOKEN_INVALID FAILURE_INVALID RESULT_INVALID LABELS_INVALID POLICY_INVALID BATCH_TOO_LARGE REQUEST_INVALID",
		codes.Aborted:            "CLAIM_LOST POLICY_STALE",
		codes.AlreadyExists:      "ALREADY_FINISHED",
		codes.FailedPrecondition: "REQUEST_ID_SPENT CLAIM_LIVE NAMESPACE_NOT_EMPTY",
		codes.NotFound:           "RECORD_NOT_FOUND NAMESPACE_NOT_FOUND",
		codes.Unavailable:        "STORE_UNAVAILABLE DRAINING",
		codes.ResourceExhausted:  "STORE_FULL OVERLOADED",
		codes.Internal:           "RECORD_UNREADABLE KEY_COLLISION INTERNAL",
		codes.Unimplemented:      "UNIMPLEMENTED",
	} {
		for r := range strings.FieldsSeq(reasons) {
			s := faultOf(t.Context(), claim.Errorf(claim.Reason(r), "why")).status()
			if s.Code() != code || infoOf(s).GetReason() != r || infoOf(s).GetDomain() != "dualcheck" {
				t.Errorf("%s: %v %v", r, s.Code(), s.Details())
			}
			if r != "INTERNAL" && s.Message() != "why" {
				t.Errorf("%s: message %q", r, s.Message())
			}
		}
	}
}

func TestErrorCarriesWhatItHas(t *testing.T) {
	s := faultOf(t.Context(), &claim.Error{
		Reason: claim.ClaimLost, Message: "lost", Field: "token", Metadata: map[string]string{"state": "STATE_SUCCEEDED"}, RetryAfter: 1500 * time.Millisecond, Err: errTest,
	}).status()
	if infoOf(s).GetMetadata()["state"] != "STATE_SUCCEEDED" {
		t.Errorf("metadata %v", infoOf(s).GetMetadata())
	}
	if bad, ok := detail[*errdetails.BadRequest](s); !ok || bad.GetFieldViolations()[0].GetField() != "token" {
		t.Errorf("violations %v", bad)
	}
	if retry, ok := detail[*errdetails.RetryInfo](s); !ok || retry.GetRetryDelay().AsDuration() != 1500*time.Millisecond {
		t.Errorf("retry %v", retry)
	}
	if strings.Contains(s.String(), errTest.Error()) {
		t.Error("what is behind an error was sent")
	}
}

func TestWhatIsInNoRowIsInternalAndTellsNothing(t *testing.T) {
	w := start(t)
	for name, err := range map[string]error{
		"plain":          errTest,
		"unknown reason": claim.Errorf("NOVEL", "secret of the store"),
		"internal":       claim.Errorf(claim.Internal, "secret of the store"),
		"status":         status.Error(codes.NotFound, "secret of the store"),
	} {
		w.store.before(func(context.Context, *claim.BeginRequest) error { return err })
		_, got := w.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"})
		s := want(t, got, claim.Internal, codes.Internal)
		if strings.Contains(s.String(), "secret") {
			t.Errorf("%s: told %q", name, s.String())
		}
		incident := infoOf(s).GetMetadata()["incident"]
		if incident == "" || !strings.Contains(w.logs.String(), "incident="+incident) || !strings.Contains(w.logs.String(), "secret of the store") {
			t.Errorf("%s: the log does not say more under %q:\n%s", name, incident, w.logs)
		}
	}
}

func TestPanicIsInternalAndCounted(t *testing.T) {
	w := start(t)
	w.store.before(func(context.Context, *claim.BeginRequest) error { panic("a bug") })
	_, err := w.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"})
	want(t, err, claim.Internal, codes.Internal)
	resp, err := w.BatchBegin(t.Context(), &dualcheckv1.BatchBeginRequest{Requests: []*dualcheckv1.BeginRequest{{Namespace: "a", Key: "k"}}})
	if err != nil {
		t.Fatal(err)
	}
	if got := resp.GetResponses()[0].GetError(); got.GetReason() != "INTERNAL" || got.GetCode() != int32(codes.Internal) {
		t.Errorf("member: %v", got)
	}
	if log := w.logs.String(); !strings.Contains(log, "a bug") || !strings.Contains(log, "errors_test.go") {
		t.Errorf("the log has no stack:\n%s", log)
	}
	if _, metrics := w.get("/metrics"); !strings.Contains(metrics, "dualcheck_panics_total 2") {
		t.Error("the panics were not counted")
	}
}

func TestAnswersThatWereNotEstablished(t *testing.T) {
	w := start(t)
	for name, c := range map[string]struct {
		fails    error
		deadline bool
		code     codes.Code
	}{
		"the store gave up":         {&claim.Error{Reason: claim.StoreUnavailable, Message: "no", RetryAfter: time.Second}, false, codes.Unavailable},
		"the server's own deadline": {context.DeadlineExceeded, false, codes.Unavailable},
		"cancelled within":          {context.Canceled, false, codes.Unavailable},
		"the caller's deadline":     {context.DeadlineExceeded, true, codes.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			w.store.before(func(ctx context.Context, _ *claim.BeginRequest) error {
				if c.deadline {
					<-ctx.Done()
				}
				return c.fails
			})
			ctx := t.Context()
			if c.deadline {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, 50*time.Millisecond)
				defer cancel()
			}
			_, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"})
			if c.deadline {
				if status.Code(err) != c.code {
					t.Errorf("got %v", err)
				}
				return // the client has given up before the server's answer comes
			}
			s := want(t, err, claim.StoreUnavailable, c.code)
			if retry, ok := detail[*errdetails.RetryInfo](s); !ok || retry.GetRetryDelay().AsDuration() <= 0 {
				t.Errorf("no RetryInfo: %v", s.Details())
			}
		})
	}
	done, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	if f := faultOf(done, context.DeadlineExceeded); f.code != codes.DeadlineExceeded || f.Reason != claim.StoreUnavailable {
		t.Errorf("fault %v %v", f.code, f.Reason)
	}
}

func TestUndecodableMessages(t *testing.T) {
	w := start(t)
	for name, raw := range map[string]rawMessage{
		"not a message": {0xff, 0xff, 0xff},
		"invalid UTF-8": {0x0a, 0x02, 0xc3, 0x28},
		"too large":     make(rawMessage, claim.MaxMessage+1),
	} {
		err := w.conn.Invoke(t.Context(), dualcheckv1.DedupService_Begin_FullMethodName, raw, &rawMessage{}, forceRaw)
		s := want(t, err, claim.RequestInvalid, codes.InvalidArgument)
		t.Log(name, s.Message())
	}
	if n := w.store.begins.Load(); n != 0 {
		t.Errorf("the store was asked %d times", n)
	}
}

func TestUnknownMethods(t *testing.T) {
	w := start(t)
	for _, method := range []string{"/dualcheck.v1.DedupService/Guess", "/no.such.Service/Begin"} {
		err := w.conn.Invoke(t.Context(), method, rawMessage{}, &rawMessage{}, forceRaw)
		want(t, err, claim.Unimplemented, codes.Unimplemented)
	}
}

// violated is the field that a status blames.
func violated(s *status.Status) string {
	bad, _ := detail[*errdetails.BadRequest](s)
	if len(bad.GetFieldViolations()) == 0 {
		return ""
	}
	return bad.GetFieldViolations()[0].GetField()
}

// An outage is one line every few seconds, which tells how many it stands for.
func TestAnOutageDoesNotFillTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var logs logBuffer
		c := newCalls(telemetry.NewMetrics(telemetry.Build{}), slog.New(slog.NewTextHandler(&logs, nil)))
		for range 1000 { // 20 s of 50 calls a second
			c.report(t.Context(), "/m", faultOf(t.Context(), claim.Unavailable("etcd does not answer", errTest)))
			<-time.After(20 * time.Millisecond)
		}
		lines := strings.Split(strings.TrimSpace(logs.String()), "\n")
		if most := int(20*time.Second/warnEvery) + 1; len(lines) > most || len(lines) < 3 {
			t.Errorf("%d lines", len(lines))
		}
		if strings.Contains(lines[0], "left_out") || !strings.Contains(lines[1], "left_out=2") || !strings.Contains(lines[1], "level=WARN") {
			t.Errorf("the count:\n%s\n%s", lines[0], lines[1])
		}
	})
}

// Records that cannot be read are told of now and then, and an outage meanwhile does
// not keep them out; a line with an incident is always there.
func TestBrokenRecordsDoNotFillTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var logs logBuffer
		c := newCalls(telemetry.NewMetrics(telemetry.Build{}), slog.New(slog.NewTextHandler(&logs, nil)))
		c.report(t.Context(), "/m", faultOf(t.Context(), claim.Unavailable("etcd does not answer", errTest)))
		for range 100 {
			c.report(t.Context(), "/m", faultOf(t.Context(), claim.Errorf(claim.RecordUnreadable, "unreadable")))
			c.report(t.Context(), "/m", faultOf(t.Context(), claim.Errorf(claim.KeyCollision, "collision")))
			c.report(t.Context(), "/m", faultOf(t.Context(), errTest))
		}
		<-time.After(warnEvery)
		c.report(t.Context(), "/m", faultOf(t.Context(), claim.Errorf(claim.KeyCollision, "collision")))
		text := logs.String()
		if n := strings.Count(text, "unreadable") + strings.Count(text, "collision"); n != 2 || !strings.Contains(text, "left_out=199") {
			t.Errorf("%d lines of broken records:\n%s", n, text)
		}
		if n := strings.Count(text, "incident="); n != 100 {
			t.Errorf("%d lines of incidents", n)
		}
	})
}

// What gRPC and the gateway make of their own goes by the table too.
func TestCompleteGoesByTheTable(t *testing.T) {
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		s := complete(status.New(code, "why"))
		reason := claim.Reason(reasonOf(s))
		if own := reason == claim.StoreUnavailable; own != (code == codes.Canceled || code == codes.DeadlineExceeded) || !own && s.Code() != table[reason] || own && s.Code() != code {
			t.Errorf("%v became %v %s", code, s.Code(), reason)
		}
	}
}
