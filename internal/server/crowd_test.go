package server

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// Requests of a few KiB that would be a GiB in memory are refused before they are.
func TestCrowdsAreRefusedBeforeTheyAreDecoded(t *testing.T) {
	w := start(t)
	for name, c := range map[string]struct {
		method string
		raw    []byte
		says   string
	}{
		"members":  {dualcheckv1.DedupService_BatchBegin_FullMethodName, bytes.Repeat([]byte{0x0a, 0x00}, 4<<20), "parts"},
		"details":  {dualcheckv1.DedupService_Fail_FullMethodName, failing(4 << 20), "parts"},
		"elements": {dualcheckv1.AdminService_PutNamespace_FullMethodName, allowing(4 << 20), "parts"},
		// What no field has costs what it takes on the wire.
		"no field": {dualcheckv1.DedupService_Begin_FullMethodName, bytes.Repeat([]byte{0xf8, 0x07, 0x00}, 1<<20), "a namespace is"},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := w.conn.Invoke(t.Context(), c.method, rawMessage(c.raw), new(rawMessage), grpc.ForceCodec(rawCodec{}), grpc.UseCompressor(gzip.Name))
			runtime.ReadMemStats(&after)
			s := status.Convert(err)
			if s.Code() != codes.InvalidArgument || !strings.Contains(s.Message(), c.says) {
				t.Errorf("%v", err)
			}
			if took := after.TotalAlloc - before.TotalAlloc; took > 200<<20 {
				t.Errorf("it took %d MiB", took>>20)
			}
		})
	}
	code, _, body := w.post("/v1/dedup:batchBegin", `{"requests":[`+strings.Repeat("{},", 1<<20)+`{}]}`)
	if e := parseError(t, body); code != 400 || e.reason() != "REQUEST_INVALID" || !strings.Contains(e.Message, "parts") {
		t.Errorf("%d %.300s", code, body)
	}
}

// failing is a Fail with so many empty details.
func failing(details int) []byte {
	b, err := proto.Marshal(&dualcheckv1.FailRequest{Failure: &dualcheckv1.Failure{Details: make([]*anypb.Any, details)}})
	if err != nil {
		panic(err)
	}
	return b
}

// allowing is a policy with so many empty names.
func allowing(names int) []byte {
	b, err := proto.Marshal(&dualcheckv1.PutNamespaceRequest{Namespace: &dualcheckv1.Namespace{Policy: &dualcheckv1.Policy{Rollout: &dualcheckv1.Rollout{Allow: make([]string, names)}}}})
	if err != nil {
		panic(err)
	}
	return b
}

// Full batches are no crowds: neither of Begins nor of Completes with metadata.
func TestAFullBatchOfFinishesIsNoCrowd(t *testing.T) {
	for entries, refused := range map[int]bool{66: false, 190: false, 300: true} {
		metadata := map[string]string{}
		for i := range entries {
			metadata[fmt.Sprintf("name-%d", i)] = "v"
		}
		batch := &dualcheckv1.BatchFinishRequest{}
		for range claim.MaxBatch {
			batch.Requests = append(batch.Requests, &dualcheckv1.FinishRequest{Finish: &dualcheckv1.FinishRequest_Complete{Complete: &dualcheckv1.CompleteRequest{
				Namespace: "n", Key: "k", Token: strings.Repeat("t", 43), Outcome: &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{Code: 1, ContentType: "text/plain", Body: []byte("b"), Metadata: metadata}},
			}}})
		}
		b, err := proto.Marshal(batch)
		if err != nil {
			t.Fatal(err)
		}
		if got := crowd(batch.ProtoReflect().Descriptor(), b); got != refused {
			t.Errorf("%d entries in each, %d bytes: refused %v", entries, len(b), got)
		}
	}
}

func TestAFullBatchIsNoCrowd(t *testing.T) {
	labels := map[string]string{}
	for i := range claim.MaxLabels {
		labels[strings.Repeat("l", i+1)] = "as long as they are"
	}
	batch := &dualcheckv1.BatchBeginRequest{}
	for range claim.MaxBatch {
		batch.Requests = append(batch.Requests, &dualcheckv1.BeginRequest{Namespace: "n", Key: "k", Operation: "o", Fingerprint: make([]byte, 32), RequestId: "r", Owner: "o", Labels: labels})
	}
	b, err := proto.Marshal(batch)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) < crowdFrom || crowd(batch.ProtoReflect().Descriptor(), b) {
		t.Errorf("%d bytes count as a crowd", len(b))
	}
}
