package server

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

func pack(m proto.Message) *anypb.Any { return must(anypb.New(m)) }

func TestDetailsThatCannotBeShownAreRefused(t *testing.T) {
	w := start(t)
	token := w.first("k").GetToken()
	for name, a := range map[string]*anypb.Any{
		"bytes that do not parse": {TypeUrl: "type.googleapis.com/google.rpc.ErrorInfo", Value: []byte{0xff}},
		"text that is not UTF-8":  {TypeUrl: "type.googleapis.com/google.rpc.ErrorInfo", Value: []byte{0x0a, 0x01, 0xff}},
		"a duration out of range": pack(&durationpb.Duration{Seconds: 1 << 60}),
		"a value of no kind":      pack(&structpb.Value{}),
		"no type":                 {Value: []byte{1}},
		"nothing":                 {},
	} {
		failure := &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL, Details: []*anypb.Any{a}}
		_, err := w.Fail(t.Context(), &dualcheckv1.FailRequest{Namespace: "a", Key: "k", Token: token, Failure: failure})
		if s := want(t, err, claim.FailureInvalid, codes.InvalidArgument); violated(s) != "failure.details" {
			t.Errorf("%s: field %q", name, violated(s))
		}
		_, err = w.admin.ResolveRecord(t.Context(), &dualcheckv1.ResolveRecordRequest{
			Namespace: "a", Key: "k", State: dualcheckv1.State_STATE_FAILED, Reason: "why", Outcome: &dualcheckv1.ResolveRecordRequest_Failure{Failure: failure},
		})
		want(t, err, claim.FailureInvalid, codes.InvalidArgument)
	}
}

func TestH30DetailsOverGRPCComeBackOverJSONAndTheOtherWayRound(t *testing.T) {
	w := start(t)
	unknown := &anypb.Any{TypeUrl: "types.example.com/erp.Refusal", Value: []byte{0xff, 0xfe}}
	info := pack(&errdetails.ErrorInfo{Reason: "SUPPLIER_QUOTA", Domain: "erp"})
	_, err := w.Fail(t.Context(), &dualcheckv1.FailRequest{Namespace: "a", Key: "k", Token: w.first("k").GetToken(), Failure: &dualcheckv1.Failure{
		Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL, Code: 8, Message: "quota", Details: []*anypb.Any{unknown, info},
	}})
	if err != nil {
		t.Fatal(err)
	}
	code, _, body := w.post("/v1/dedup:begin", `{"namespace":"a","key":"k"}`)
	var shown struct {
		Verdict string
		Record  struct {
			Failure struct {
				Class   string
				Code    int
				Details []map[string]any
			}
		}
	}
	if err := json.Unmarshal([]byte(body), &shown); err != nil || code != 200 {
		t.Fatalf("%d %v %s", code, err, body)
	}
	d := shown.Record.Failure.Details
	if shown.Verdict != "VERDICT_REPLAY_FAILURE" || shown.Record.Failure.Code != 8 || d[0]["value"] != "//4=" || d[1]["reason"] != "SUPPLIER_QUOTA" {
		t.Errorf("got %s", body)
	}
	token := w.first("k2").GetToken()
	code, _, body = w.post("/v1/dedup:fail", `{"namespace":"a","key":"k2","token":"`+token+`","failure":{"class":"FAILURE_CLASS_TERMINAL","details":[
		{"@type":"types.example.com/erp.Refusal","value":"//4="},{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"SUPPLIER_QUOTA","domain":"erp"}]}}`)
	if code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	got, err := w.Get(t.Context(), &dualcheckv1.GetRequest{Namespace: "a", Key: "k2"})
	if err != nil {
		t.Fatal(err)
	}
	details := got.GetRecord().GetFailure().GetDetails()
	if !proto.Equal(details[0], unknown) || !proto.Equal(details[1], info) {
		t.Errorf("got %v", details)
	}
}

func TestCodecOfAStreamsError(t *testing.T) {
	b, err := codec{}.Marshal(map[string]proto.Message{"error": &rpcstatus.Status{Code: 12, Message: "no"}})
	if err != nil || !strings.Contains(strings.ReplaceAll(string(b), " ", ""), `"code":12`) || strings.Contains(string(b), "error") {
		t.Errorf("%s %v", b, err)
	}
	if _, err := (codec{}).Marshal(7); err == nil {
		t.Error("7 is no message")
	}
	var buf bytes.Buffer
	if err := (codec{}).NewEncoder(&buf).Encode(&dualcheckv1.GetRequest{Key: "k"}); err != nil || !strings.HasSuffix(buf.String(), "}\n") {
		t.Errorf("%q %v", buf.String(), err)
	}
}
