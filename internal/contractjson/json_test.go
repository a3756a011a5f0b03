package contractjson

import (
	"encoding/json"
	"testing"
	"testing/quick"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func pack(m proto.Message) *anypb.Any { return must(anypb.New(m)) }

func replayed(details ...*anypb.Any) *dualcheckv1.BeginResponse {
	return &dualcheckv1.BeginResponse{Record: &dualcheckv1.Record{Failure: &dualcheckv1.Failure{Details: details}}}
}

func TestAnyRoundTrips(t *testing.T) {
	for name, a := range map[string]*anypb.Any{
		"known":                pack(&errdetails.ErrorInfo{Reason: "SUPPLIER_QUOTA", Domain: "erp"}),
		"well-known":           pack(durationpb.New(1500)),
		"struct":               pack(must(structpb.NewStruct(map[string]any{"a": []any{nil, "x", 1.5}}))),
		"bytes value":          pack(wrapperspb.Bytes([]byte{1, 2})),
		"known, other host":    {TypeUrl: "types.example.com/google.rpc.ErrorInfo"},
		"unknown":              {TypeUrl: "types.example.com/erp.Refusal", Value: []byte{0xff, 0, 1}},
		"unknown, empty":       {TypeUrl: "types.example.com/erp.Refusal"},
		"no slash":             {TypeUrl: "erp.Refusal", Value: []byte("not protobuf at all")},
		"of this contract":     pack(&dualcheckv1.Record{Key: "k"}),
		"a status with an any": pack(&rpcstatus.Status{Details: []*anypb.Any{{TypeUrl: "x/erp.Refusal", Value: []byte{9}}}}),
		"an any":               pack(&anypb.Any{TypeUrl: "x/erp.Refusal", Value: []byte{9}}),
	} {
		t.Run(name, func(t *testing.T) {
			before := replayed(a, pack(&errdetails.RetryInfo{}), a)
			kept := proto.Clone(before)
			b, err := Marshal(before)
			if err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(before, kept) {
				t.Error("marshalling changed the message")
			}
			after := &dualcheckv1.BeginResponse{}
			if err := Unmarshal(b, after); err != nil {
				t.Fatalf("%v: %s", err, b)
			}
			if !proto.Equal(before, after) {
				t.Errorf("%s became\n%v, was\n%v", b, after, before)
			}
			var shown struct {
				Record struct {
					Failure struct{ Details []map[string]any }
				}
			}
			if err := json.Unmarshal(b, &shown); err != nil {
				t.Fatal(err)
			}
			d := shown.Record.Failure.Details[0]
			if d["@type"] != a.GetTypeUrl() {
				t.Errorf("@type %v", d["@type"])
			}
			if !isKnown(a.GetTypeUrl()) && len(d) != 2 {
				t.Errorf("an unknown detail is @type and value alone, not %v", d)
			}
		})
	}
}

func TestUnknownAnyIsBase64(t *testing.T) {
	b := must(Marshal(replayed(&anypb.Any{TypeUrl: "x/erp.Refusal", Value: []byte{0xff, 0xfe}})))
	var shown struct {
		Record struct {
			Failure struct{ Details []map[string]any }
		}
	}
	if err := json.Unmarshal(b, &shown); err != nil {
		t.Fatal(err)
	}
	if d := shown.Record.Failure.Details[0]; d["value"] != "//4=" {
		t.Errorf("got %v", d)
	}
}

// Whatever is let in can be written as JSON, and read again as it was.
func TestWhatIsLetInCanBeShown(t *testing.T) {
	urls := []string{
		"type.googleapis.com/google.rpc.ErrorInfo", "type.googleapis.com/google.rpc.BadRequest", "type.googleapis.com/google.protobuf.Value",
		"type.googleapis.com/google.protobuf.Duration", "type.googleapis.com/google.protobuf.FieldMask", "type.googleapis.com/erp.Refusal",
	}
	check := func(which uint8, value []byte) bool {
		a := &anypb.Any{TypeUrl: urls[int(which)%len(urls)], Value: value}
		if Check(a) != nil {
			return true
		}
		b, err := Marshal(replayed(a))
		if err != nil {
			t.Logf("%v: %v", a, err)
			return false
		}
		after := &dualcheckv1.BeginResponse{}
		if err := Unmarshal(b, after); err != nil {
			t.Logf("%s: %v", b, err)
			return false
		}
		return true
	}
	if err := quick.Check(check, &quick.Config{MaxCount: 5000}); err != nil {
		t.Error(err)
	}
}
