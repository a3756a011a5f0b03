package dualcheck

import (
	"bytes"
	"crypto/sha256"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

func TestFramesAreTheContract(t *testing.T) {
	key := Key{Namespace: "orders", Key: "po-1", Operation: "order.accept", Fingerprint: bytes.Repeat([]byte{7}, 32)}
	claim := &Claim{Key: key, Token: "token"}
	labels := map[string]string{"a": "1", "b": "", "long": string(make([]byte, 200))}
	result := Result{Code: -5, ContentType: "text/plain", Body: make([]byte, 300), Metadata: labels}
	o := gather([]CallOption{Lease(1500 * time.Millisecond), Wait(0), RequestID("id"), Labels(labels)})
	waits := gather([]CallOption{Wait(30 * time.Second), RequestID("id")})
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	now := time.Now()
	cases := []struct {
		call *call
		want *dualcheckv1.SessionCall
	}{
		{&call{kind: kindBegin, body: appendBegin(nil, &key, "me", &o)}, &dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Begin{Begin: &dualcheckv1.BeginRequest{
			Namespace: "orders", Key: "po-1", Operation: "order.accept", Fingerprint: key.Fingerprint, RequestId: "id", Owner: "me", Lease: durationpb.New(1500 * time.Millisecond), Labels: labels,
		}}}},
		{&call{kind: kindBegin, body: appendBegin(nil, &Key{Key: "k"}, "me", &waits), retries: 300, deadline: now.Add(1234567 * time.Microsecond)}, &dualcheckv1.SessionCall{
			RetryCount: 300, Timeout: durationpb.New(1234567 * time.Microsecond), Call: &dualcheckv1.SessionCall_Begin{Begin: &dualcheckv1.BeginRequest{
				Key: "k", RequestId: "id", Owner: "me", Wait: durationpb.New(30 * time.Second),
			}}}},
		{&call{kind: kindComplete, body: appendComplete(nil, claim, &result)}, &dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Complete{Complete: &dualcheckv1.CompleteRequest{
			Namespace: "orders", Key: "po-1", Token: "token", Outcome: &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{Code: -5, ContentType: "text/plain", Body: result.Body, Metadata: labels}},
		}}}},
		{&call{kind: kindComplete, body: appendComplete(nil, claim, &Result{})}, &dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Complete{Complete: &dualcheckv1.CompleteRequest{
			Namespace: "orders", Key: "po-1", Token: "token", Outcome: &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{}},
		}}}},
		{&call{kind: kindComplete, body: appendComplete(nil, claim, &Result{Omitted: true, Size: 1 << 30, Digest: key.Fingerprint})}, &dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Complete{Complete: &dualcheckv1.CompleteRequest{
			Namespace: "orders", Key: "po-1", Token: "token", Outcome: &dualcheckv1.CompleteRequest_Omitted{Omitted: &dualcheckv1.Omitted{Digest: key.Fingerprint, Size: 1 << 30}},
		}}}},
		{&call{kind: kindExtend, body: appendExtend(nil, claim, -time.Second)}, &dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Extend{Extend: &dualcheckv1.ExtendRequest{
			Namespace: "orders", Key: "po-1", Token: "token", Lease: durationpb.New(-time.Second),
		}}}},
		{&call{kind: kindGet, body: appendGet(nil, &key, true)}, &dualcheckv1.SessionCall{Call: &dualcheckv1.SessionCall_Get{Get: &dualcheckv1.GetRequest{Namespace: "orders", Key: "po-1", Cached: true}}}},
	}
	var batch []*call
	want := &dualcheckv1.SessionRequest{}
	for i, c := range cases {
		c.call.id, c.want.Id = uint64(i+200), uint64(i+200)
		if c.call.traced = i%2 == 0 && c.call.takeTrace(span); c.call.traced {
			c.want.Traceparent = "00-01000000000000000000000000000000-0200000000000000-01"
		}
		batch, want.Calls = append(batch, c.call), append(want.Calls, c.want)
	}
	want.Calls = append(want.Calls, &dualcheckv1.SessionCall{Id: 1 << 40, Call: &dualcheckv1.SessionCall_Cancel{Cancel: &dualcheckv1.SessionCancel{}}})
	frame := encode(batch, []uint64{1 << 40}, now)
	got := &dualcheckv1.SessionRequest{}
	if err := proto.Unmarshal(frame.ReadOnlyData(), got); err != nil {
		t.Fatal(err)
	}
	for i := range want.Calls {
		if !proto.Equal(got.Calls[i], want.Calls[i]) {
			t.Errorf("call %d\n is %v\nnot %v", i, got.Calls[i], want.Calls[i])
		}
	}
}

func TestARequestIDIsARandomUUID(t *testing.T) {
	a, b := string(appendUUID(nil)), string(appendUUID(nil))
	if a == b || len(a) != 36 || a[14] != '4' || a[8] != '-' || a[23] != '-' {
		t.Errorf("%q, %q", a, b)
	}
}

func TestAnswersAreTheContracts(t *testing.T) {
	sent := time.Now()
	record := &dualcheckv1.Record{
		Namespace: "orders", Key: "po-1", State: dualcheckv1.State_STATE_SUCCEEDED, ResultSize: 9, ResultOmitted: true, Digest: []byte{1, 2},
		Result:  &dualcheckv1.Result{Code: -3, ContentType: "a/b", Body: []byte("body"), Metadata: map[string]string{"k": "v", "": ""}},
		Failure: &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL, Code: 8, Message: "m", Details: []*anypb.Any{{TypeUrl: "t", Value: []byte("v")}}},
	}
	expires := timestamppb.New(time.Unix(1700000000, 5))
	m := &dualcheckv1.BeginResponse{
		Verdict: dualcheckv1.Verdict_VERDICT_REPLAY, KeyAction: dualcheckv1.KeyAction_KEY_ACTION_STOP, RetryAfter: durationpb.New(1500 * time.Millisecond),
		Claim:  &dualcheckv1.Claim{Token: "t", Attempt: 3, Fence: 1 << 41, LeaseLeft: durationpb.New(2500 * time.Millisecond), ExpiresAt: expires, Previous: dualcheckv1.Previous_PREVIOUS_LAPSED},
		Repeat: true, Record: record, Source: dualcheckv1.Source_SOURCE_REDIS, Revision: 5, Stale: true, Observed: dualcheckv1.Verdict_VERDICT_CONFLICT, Enforced: true, Detail: "d",
	}
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	o, e := decodeBegin(b, &Key{Key: "k"}, sent)
	if e != nil {
		t.Fatal(e)
	}
	if o.Verdict != Replay || o.KeyAction != Stop || o.RetryAfter != 1500*time.Millisecond || !o.Repeat || o.Source != FromRedis || o.Revision != 5 || !o.Stale || o.Observed != Conflict || !o.Enforced || o.Detail != "d" {
		t.Errorf("got %+v", o)
	}
	cl := o.Claim
	if cl.Key.Key != "k" || cl.Token != "t" || cl.Attempt != 3 || cl.Fence != 1<<41 || cl.Previous != PreviousLapsed || !cl.ExpiresAt.Equal(expires.AsTime()) || !cl.Until().Equal(sent.Add(2500*time.Millisecond)) {
		t.Errorf("got %+v", cl)
	}
	if got, err := o.Record(); err != nil || !proto.Equal(got, record) {
		t.Errorf("record %v, %v", got, err)
	}
	r, err := o.Result()
	if err != nil || r.Code != -3 || r.ContentType != "a/b" || string(r.Body) != "body" || r.Metadata["k"] != "v" || len(r.Metadata) != 2 || !r.Omitted || r.Size != 9 || !r.Replayed {
		t.Errorf("result %+v, %v", r, err)
	}
	if f, err := o.Failure(); err != nil || f.Class != ClassTerminal || f.Code != 8 || f.Message != "m" || len(f.Details) != 1 {
		t.Errorf("failure %+v, %v", f, err)
	}
	// Whatever is cut off is no answer, and nothing panics.
	for n := range b {
		if got, e := decodeBegin(b[:n], &Key{}, sent); e == nil {
			_, _ = got.Record()
			_, _ = got.Result()
		}
		_, _ = decodeStored(b[:n])
		_, _ = decodeExtend(b[:n])
		_ = decodeError(b[:n])
	}
}

func TestADigestIsTheContracts(t *testing.T) {
	r := Result{Code: 200, ContentType: "a", Body: []byte("xyz"), Metadata: map[string]string{"B": "2", "a": "1", "Set-Cookie": "secret"}}
	h := sha256.New()
	for _, part := range []string{"result", "200", "a", "2", "a", "1", "b", "2", "xyz"} {
		h.Write([]byte{0, 0, 0, 0, 0, 0, 0, byte(len(part))})
		h.Write([]byte(part))
	}
	if !bytes.Equal(r.digest(), h.Sum(nil)) {
		t.Error("another digest")
	}
}

func TestTooMuchOfAFailureIsCut(t *testing.T) {
	long := string(bytes.Repeat([]byte("é"), mostFailureMessage))
	if got := cut("x" + long); len(got) != mostFailureMessage-1 || cut("\xff") != "\ufffd" {
		t.Errorf("%d bytes", len(got))
	}
	many := []*anypb.Any{{Value: make([]byte, 5000)}, {Value: make([]byte, 3000)}, {Value: make([]byte, 3000)}}
	if got := fitting(many); len(got) != 2 {
		t.Errorf("%d details", len(got))
	}
}
