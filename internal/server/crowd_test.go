package server

import (
	"bytes"
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
	}{
		"members":  {dualcheckv1.DedupService_BatchBegin_FullMethodName, bytes.Repeat([]byte{0x0a, 0x00}, 4<<20)},
		"details":  {dualcheckv1.DedupService_Fail_FullMethodName, failing(4 << 20)},
		"no field": {dualcheckv1.DedupService_Begin_FullMethodName, bytes.Repeat([]byte{0xf8, 0x07, 0x00}, 1<<20)},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := w.conn.Invoke(t.Context(), c.method, rawMessage(c.raw), new(rawMessage), grpc.ForceCodec(rawCodec{}), grpc.UseCompressor(gzip.Name))
			runtime.ReadMemStats(&after)
			s := status.Convert(err)
			if s.Code() != codes.InvalidArgument || reasonOf(s) != string(claim.RequestInvalid) || !strings.Contains(s.Message(), "parts") {
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

// The fullest batch that is allowed is no crowd.
func TestAFullBatchIsNoCrowd(t *testing.T) {
	labels := map[string]string{}
	for i := range claim.MaxLabels {
		labels[strings.Repeat("l", i+1)] = "v"
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
