package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

func fingerprint(s string) []byte { sum := sha256.Sum256([]byte(s)); return sum[:] }

// first begins a key and fails the test unless the answer is FIRST.
func (w *world) first(key string) *dualcheckv1.Claim {
	w.t.Helper()
	resp, err := w.Begin(w.t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: key, Fingerprint: fingerprint("f")})
	if err != nil {
		w.t.Fatal(err)
	}
	if resp.GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
		w.t.Fatalf("got %v", resp)
	}
	return resp.GetClaim()
}

func TestBeginCompleteReplay(t *testing.T) {
	w := start(t)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	before := time.Now()
	resp, err := w.Begin(ctx, &dualcheckv1.BeginRequest{
		Namespace: "a", Key: "k", Operation: "invoice.issue", Fingerprint: fingerprint("f"), RequestId: "r1", Owner: "me",
		Lease: durationpb.New(10 * time.Second), Labels: map[string]string{"supplier": "7"},
	})
	if err != nil {
		t.Fatal(err)
	}
	c := resp.GetClaim()
	if resp.GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST || resp.GetKeyAction() != dualcheckv1.KeyAction_KEY_ACTION_PROCEED || !resp.GetEnforced() ||
		resp.GetSource() != dualcheckv1.Source_SOURCE_ETCD || resp.GetRevision() == 0 || resp.GetRecord() != nil || resp.GetRetryAfter() != nil ||
		c.GetToken() == "" || c.GetAttempt() != 1 || c.GetFence() == 0 || c.GetPrevious() != dualcheckv1.Previous_PREVIOUS_NONE {
		t.Errorf("first: %v", resp)
	}
	if left := c.GetLeaseLeft().AsDuration(); left <= 9*time.Second || left > 9900*time.Millisecond {
		t.Errorf("lease left %v", left)
	}
	if e := c.GetExpiresAt().AsTime(); e.Before(before.Add(9*time.Second)) || e.After(time.Now().Add(10*time.Second)) {
		t.Errorf("expires at %v", e)
	}
	again, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", Fingerprint: fingerprint("f"), RequestId: "r1", Owner: "me"})
	if err != nil || !again.GetRepeat() || again.GetClaim().GetToken() != c.GetToken() {
		t.Errorf("repeat: %v %v", again, err)
	}
	held, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", Fingerprint: fingerprint("f")})
	if err != nil || held.GetVerdict() != dualcheckv1.Verdict_VERDICT_IN_PROGRESS || held.GetRetryAfter().AsDuration() <= 0 || held.GetClaim() != nil || held.GetRecord() != nil {
		t.Errorf("in progress: %v %v", held, err)
	}
	conflict, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", Fingerprint: fingerprint("g")})
	if err != nil || conflict.GetVerdict() != dualcheckv1.Verdict_VERDICT_CONFLICT || conflict.GetRecord().GetCreatedAt() == nil {
		t.Fatalf("conflict: %v %v", conflict, err)
	}
	if r := conflict.GetRecord(); r.GetNamespace()+r.GetKey()+r.GetOwner()+r.GetTraceId() != "" || r.GetState() != 0 || r.GetFingerprint() != nil || r.GetRevision() != 0 {
		t.Errorf("a conflict shows more than created_at: %v", r)
	}
	body := []byte{0, 1, 0xff}
	finish, err := w.Complete(ctx, &dualcheckv1.CompleteRequest{Namespace: "a", Key: "k", Token: c.GetToken(), Outcome: &dualcheckv1.CompleteRequest_Result{
		Result: &dualcheckv1.Result{Code: 201, ContentType: "x/y", Body: body, Metadata: map[string]string{"ETag": "1", "Cookie": "no"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	replay, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", Fingerprint: fingerprint("f")})
	if err != nil {
		t.Fatal(err)
	}
	got, err := w.Get(ctx, &dualcheckv1.GetRequest{Namespace: "a", Key: "k", Cached: true})
	if err != nil || got.GetSource() != dualcheckv1.Source_SOURCE_ETCD || got.GetRevision() == 0 {
		t.Fatalf("get: %v %v", got, err)
	}
	for name, r := range map[string]*dualcheckv1.Record{"finish": finish.GetRecord(), "replay": replay.GetRecord(), "get": got.GetRecord()} {
		if r.GetState() != dualcheckv1.State_STATE_SUCCEEDED || !bytes.Equal(r.GetResult().GetBody(), body) || r.GetResult().GetCode() != 201 ||
			len(r.GetResult().GetMetadata()) != 1 || r.GetResult().GetMetadata()["etag"] != "1" || r.GetResultSize() != 3 || len(r.GetDigest()) != 32 ||
			r.GetOwner() != "me" || r.GetAttempt() != 1 || r.GetOperation() != "invoice.issue" || r.GetLabels()["supplier"] != "7" ||
			r.GetTraceId() != "0af7651916cd43dd8448eb211c80319c" || r.GetRevision() == 0 || r.GetFinishRevision() == 0 ||
			r.GetFinishedAt() == nil || r.GetClaimedAt() == nil || r.GetCreatedAt() == nil || r.GetLeaseUntil() != nil {
			t.Errorf("%s: %v", name, r)
		}
		if until := r.GetResultUntil().AsTime(); until.Before(before.Add(24*time.Hour)) || until.After(time.Now().Add(24*time.Hour)) {
			t.Errorf("%s: result until %v", name, until)
		}
		if until := r.GetKeyUntil().AsTime(); until.Before(before.Add(72*time.Hour)) || until.After(time.Now().Add(72*time.Hour)) {
			t.Errorf("%s: key until %v", name, until)
		}
	}
	w.store.Advance(25 * time.Hour)
	expired, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", Fingerprint: fingerprint("f")})
	if err != nil || expired.GetVerdict() != dualcheckv1.Verdict_VERDICT_EXPIRED || expired.GetKeyAction() != dualcheckv1.KeyAction_KEY_ACTION_STOP {
		t.Fatalf("expired: %v %v", expired, err)
	}
	if r := expired.GetRecord(); r.GetState() != dualcheckv1.State_STATE_SUCCEEDED || r.GetFinishedAt() == nil || len(r.GetDigest()) != 32 || r.GetResult() != nil || r.GetCreatedAt() != nil || r.GetKey() != "" {
		t.Errorf("expired shows %v", r)
	}
}

func TestExtend(t *testing.T) {
	w := start(t)
	c := w.first("k")
	resp, err := w.Extend(t.Context(), &dualcheckv1.ExtendRequest{Namespace: "a", Key: "k", Token: c.GetToken(), Lease: durationpb.New(10 * time.Minute)})
	if err != nil || resp.GetClaim().GetLeaseLeft().AsDuration() < 9*time.Minute || resp.GetClaim().GetToken() != c.GetToken() || resp.GetClaim().GetFence() != c.GetFence() {
		t.Fatalf("extend: %v %v", resp, err)
	}
	_, err = w.Extend(t.Context(), &dualcheckv1.ExtendRequest{Namespace: "a", Key: "k", Token: c.GetToken(), Lease: durationpb.New(0)})
	want(t, err, claim.LeaseInvalid, codes.InvalidArgument)
}

func TestBeginRefusals(t *testing.T) {
	w := start(t)
	for name, c := range map[string]struct {
		tune   func(*dualcheckv1.BeginRequest)
		reason claim.Reason
		field  string
	}{
		"namespace":         {func(r *dualcheckv1.BeginRequest) { r.Namespace = "A" }, claim.NamespaceInvalid, "namespace"},
		"key":               {func(r *dualcheckv1.BeginRequest) { r.Key = " k" }, claim.KeyInvalid, "key"},
		"operation":         {func(r *dualcheckv1.BeginRequest) { r.Operation = "a b" }, claim.OperationInvalid, "operation"},
		"fingerprint":       {func(r *dualcheckv1.BeginRequest) { r.Fingerprint = []byte("abc") }, claim.FingerprintInvalid, "fingerprint"},
		"request id":        {func(r *dualcheckv1.BeginRequest) { r.RequestId = strings.Repeat("r", 129) }, claim.RequestIDInvalid, "request_id"},
		"owner":             {func(r *dualcheckv1.BeginRequest) { r.Owner = strings.Repeat("o", 129) }, claim.RequestInvalid, "owner"},
		"no lease":          {func(r *dualcheckv1.BeginRequest) { r.Lease = durationpb.New(0) }, claim.LeaseInvalid, "lease"},
		"negative lease":    {func(r *dualcheckv1.BeginRequest) { r.Lease = durationpb.New(-time.Second) }, claim.LeaseInvalid, "lease"},
		"lease no duration": {func(r *dualcheckv1.BeginRequest) { r.Lease = &durationpb.Duration{Seconds: 1, Nanos: -1} }, claim.LeaseInvalid, "lease"},
		"lease too far":     {func(r *dualcheckv1.BeginRequest) { r.Lease = &durationpb.Duration{Seconds: 1 << 60} }, claim.LeaseInvalid, "lease"},
		"long wait":         {func(r *dualcheckv1.BeginRequest) { r.Wait = durationpb.New(31 * time.Second) }, claim.WaitInvalid, "wait"},
		"negative wait":     {func(r *dualcheckv1.BeginRequest) { r.Wait = durationpb.New(-1) }, claim.WaitInvalid, "wait"},
		"wait no duration":  {func(r *dualcheckv1.BeginRequest) { r.Wait = &durationpb.Duration{Nanos: 2e9} }, claim.WaitInvalid, "wait"},
		"label":             {func(r *dualcheckv1.BeginRequest) { r.Labels = map[string]string{"": "x"} }, claim.LabelsInvalid, "labels"},
	} {
		t.Run(name, func(t *testing.T) {
			req := &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"}
			c.tune(req)
			_, err := w.Begin(t.Context(), req)
			s := want(t, err, c.reason, codes.InvalidArgument)
			if got := violated(s); got != c.field {
				t.Errorf("field %q, want %q", got, c.field)
			}
		})
	}
	if n := w.store.begins.Load(); n != 0 {
		t.Errorf("the store was asked %d times", n)
	}
}

func TestFinishRefusals(t *testing.T) {
	w := start(t)
	token := w.first("k").GetToken()
	fail := func(f *dualcheckv1.Failure) error {
		_, err := w.Fail(t.Context(), &dualcheckv1.FailRequest{Namespace: "a", Key: "k", Token: token, Failure: f})
		return err
	}
	complete := func(o *dualcheckv1.CompleteRequest) error {
		o.Namespace, o.Key = "a", "k"
		_, err := w.Complete(t.Context(), o)
		return err
	}
	want(t, fail(nil), claim.FailureInvalid, codes.InvalidArgument)
	want(t, fail(&dualcheckv1.Failure{}), claim.FailureInvalid, codes.InvalidArgument)
	for _, class := range []dualcheckv1.FailureClass{-1, 4, 257, 258, 1 << 30} {
		want(t, fail(&dualcheckv1.Failure{Class: class}), claim.FailureInvalid, codes.InvalidArgument)
	}
	want(t, complete(&dualcheckv1.CompleteRequest{Token: ""}), claim.TokenInvalid, codes.InvalidArgument)
	want(t, complete(&dualcheckv1.CompleteRequest{Token: token, Outcome: &dualcheckv1.CompleteRequest_Omitted{}}), claim.ResultInvalid, codes.InvalidArgument)
	want(t, complete(&dualcheckv1.CompleteRequest{Token: token, Outcome: &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{Metadata: map[string]string{"a": "1", "A": "2"}}}}), claim.ResultInvalid, codes.InvalidArgument)
	if err := complete(&dualcheckv1.CompleteRequest{Token: token}); err != nil {
		t.Fatalf("an empty result: %v", err)
	}
	s := want(t, fail(&dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL}), claim.AlreadyFinished, codes.AlreadyExists)
	for _, name := range []string{"state", "digest", "finished_at", "attempt"} {
		if infoOf(s).GetMetadata()[name] == "" {
			t.Errorf("no %s in %v", name, infoOf(s).GetMetadata())
		}
	}
}

func TestH32OmittedResult(t *testing.T) {
	w := start(t)
	token := w.first("k").GetToken()
	resp, err := w.Complete(t.Context(), &dualcheckv1.CompleteRequest{Namespace: "a", Key: "k", Token: token, Outcome: &dualcheckv1.CompleteRequest_Omitted{Omitted: &dualcheckv1.Omitted{Digest: fingerprint("body"), Size: 1 << 40}}})
	if err != nil || !resp.GetRecord().GetResultOmitted() || resp.GetRecord().GetResultSize() != 1<<40 || resp.GetRecord().GetResult() != nil {
		t.Fatalf("%v %v", resp, err)
	}
}

func TestWaitMayGetTheClaim(t *testing.T) {
	w := start(t)
	c := w.first("k")
	got := make(chan *dualcheckv1.BeginResponse, 1)
	go func() {
		resp, err := w.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", Wait: durationpb.New(20 * time.Second)})
		if err != nil {
			t.Error(err)
		}
		got <- resp
	}()
	eventually(t, "it waits", func() bool { _, m := w.get("/metrics"); return strings.Contains(m, "dualcheck_begins_waiting 1") })
	if _, err := w.Fail(t.Context(), &dualcheckv1.FailRequest{Namespace: "a", Key: "k", Token: c.GetToken(), Failure: &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE}}); err != nil {
		t.Fatal(err)
	}
	if resp := <-got; resp.GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST || resp.GetClaim().GetAttempt() != 2 {
		t.Errorf("got %v", resp)
	}
}

func TestCallsHaveADeadline(t *testing.T) {
	w := start(t)
	var left time.Duration
	w.store.before(func(ctx context.Context, _ *claim.BeginRequest) error {
		deadline, ok := ctx.Deadline()
		if !ok {
			return errTest
		}
		left = time.Until(deadline)
		return nil
	})
	for wait, most := range map[time.Duration]time.Duration{0: 30 * time.Second, 10 * time.Second: 40 * time.Second} {
		if _, err := w.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: fmt.Sprint(wait), Wait: durationpb.New(wait)}); err != nil {
			t.Fatal(err)
		}
		if left > most || left < most-5*time.Second {
			t.Errorf("wait %v: %v left, want %v", wait, left, most)
		}
	}
}
