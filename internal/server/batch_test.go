package server

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
)

func TestC38TheSameKeyTwiceInOneBatch(t *testing.T) {
	w := start(t)
	req := func(key, f string) *dualcheckv1.BeginRequest {
		return &dualcheckv1.BeginRequest{Namespace: "a", Key: key, Fingerprint: fingerprint(f)}
	}
	waiting := req("w", "f")
	waiting.Wait = durationpb.New(time.Second)
	resp, err := w.BatchBegin(t.Context(), &dualcheckv1.BatchBeginRequest{Requests: []*dualcheckv1.BeginRequest{
		req("k", "f"), req("k", "f"), req("k", "g"), req("", "f"), req("k2", "f"), waiting,
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"VERDICT_FIRST", "VERDICT_IN_PROGRESS", "VERDICT_CONFLICT", "KEY_INVALID", "VERDICT_FIRST", "WAIT_INVALID"}
	for i, r := range resp.GetResponses() {
		got := r.GetError().GetReason()
		if r.GetBegin() != nil {
			got = r.GetBegin().GetVerdict().String()
		}
		if got != want[i] {
			t.Errorf("%d: got %s, want %s", i, got, want[i])
		}
	}
	if e := resp.GetResponses()[3].GetError(); e.GetCode() != int32(codes.InvalidArgument) || e.GetMessage() == "" {
		t.Errorf("error %v", e)
	}
}

// Members of one key are asked for one after the other and in order; those of
// different keys at the same time, but no more than 64.
func TestBatchOrderAndBound(t *testing.T) {
	w := start(t)
	var mu sync.Mutex
	running, most := map[string]int{}, 0
	var order []string
	full := make(chan struct{})
	w.store.before(func(ctx context.Context, req *claim.BeginRequest) error {
		mu.Lock()
		running[req.Key]++
		if running[req.Key] > 1 {
			t.Errorf("two of %s at once", req.Key)
		}
		if req.Key == "k0" {
			order = append(order, req.Owner)
		}
		most = max(most, len(running))
		if len(running) == atOnce {
			select {
			case <-full:
			default:
				close(full)
			}
		}
		mu.Unlock()
		select {
		case <-full: // all that may be under way are
		case <-ctx.Done():
		}
		mu.Lock()
		delete(running, req.Key)
		mu.Unlock()
		return nil
	})
	batch := &dualcheckv1.BatchBeginRequest{}
	for i := range 1000 {
		batch.Requests = append(batch.Requests, &dualcheckv1.BeginRequest{Namespace: "a", Key: fmt.Sprintf("k%d", i%100), Owner: fmt.Sprintf("%04d", i)})
	}
	resp, err := w.BatchBegin(t.Context(), batch)
	if err != nil || len(resp.GetResponses()) != 1000 {
		t.Fatalf("%d responses, %v", len(resp.GetResponses()), err)
	}
	if most != atOnce {
		t.Errorf("%d at once, want %d", most, atOnce)
	}
	for i := 1; i < len(order); i++ {
		if order[i] < order[i-1] {
			t.Fatalf("out of order: %v", order)
		}
	}
	for i, r := range resp.GetResponses() {
		wanted := dualcheckv1.Verdict_VERDICT_IN_PROGRESS
		if i < 100 {
			wanted = dualcheckv1.Verdict_VERDICT_FIRST
		}
		if r.GetBegin().GetVerdict() != wanted {
			t.Fatalf("%d: %v", i, r)
		}
	}
}

func TestBatchTooLarge(t *testing.T) {
	w := start(t)
	many := &dualcheckv1.BatchBeginRequest{}
	for range claim.MaxBatch + 1 {
		many.Requests = append(many.Requests, &dualcheckv1.BeginRequest{})
	}
	_, err := w.BatchBegin(t.Context(), many)
	want(t, err, claim.BatchTooLarge, codes.InvalidArgument)
	_, err = w.BatchFinish(t.Context(), &dualcheckv1.BatchFinishRequest{Requests: []*dualcheckv1.FinishRequest{completing("k", "", make([]byte, claim.MaxBatchBytes))}})
	want(t, err, claim.BatchTooLarge, codes.InvalidArgument)
	if empty, err := w.BatchBegin(t.Context(), &dualcheckv1.BatchBeginRequest{}); err != nil || len(empty.GetResponses()) != 0 {
		t.Errorf("an empty batch: %v %v", empty, err)
	}
}

func completing(key, token string, body []byte) *dualcheckv1.FinishRequest {
	return &dualcheckv1.FinishRequest{Finish: &dualcheckv1.FinishRequest_Complete{Complete: &dualcheckv1.CompleteRequest{
		Namespace: "a", Key: key, Token: token, Outcome: &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{Body: body}},
	}}}
}

func TestBatchFinish(t *testing.T) {
	w := start(t)
	k1, k2 := w.first("k1").GetToken(), w.first("k2").GetToken()
	resp, err := w.BatchFinish(t.Context(), &dualcheckv1.BatchFinishRequest{Requests: []*dualcheckv1.FinishRequest{
		completing("k1", k1, []byte("r1")),
		{},
		{Finish: &dualcheckv1.FinishRequest_Fail{Fail: &dualcheckv1.FailRequest{Namespace: "a", Key: "k2", Token: k2, Failure: &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL}}}},
		completing("k1", k1, []byte("r2")),
		completing("k1", k2, nil),
	}})
	if err != nil {
		t.Fatal(err)
	}
	r := resp.GetResponses()
	if r[0].GetFinish().GetRecord().GetState() != dualcheckv1.State_STATE_SUCCEEDED || r[2].GetFinish().GetRecord().GetState() != dualcheckv1.State_STATE_FAILED {
		t.Errorf("finishes: %v %v", r[0], r[2])
	}
	for i, reason := range map[int]string{1: "REQUEST_INVALID", 3: "ALREADY_FINISHED", 4: "TOKEN_INVALID"} {
		if r[i].GetError().GetReason() != reason {
			t.Errorf("%d: %v, want %s", i, r[i], reason)
		}
	}
	if r[3].GetError().GetMetadata()["digest"] == "" || r[3].GetError().GetCode() != int32(codes.AlreadyExists) {
		t.Errorf("no digest in %v", r[3])
	}
}

// An answer never outgrows a message: what does not fit is asked for again.
func TestBatchAnswerFits(t *testing.T) {
	w := start(t)
	roomy := claimtest.DefaultPolicy()
	roomy.MaxResultBytes = claim.MaxResult
	w.store.PutPolicy("a", roomy)
	batch := &dualcheckv1.BatchBeginRequest{}
	for i := range 20 {
		key := fmt.Sprintf("k%d", i)
		token := w.first(key).GetToken()
		if _, err := w.Complete(t.Context(), completing(key, token, make([]byte, claim.MaxResult)).GetComplete()); err != nil {
			t.Fatal(err)
		}
		batch.Requests = append(batch.Requests, &dualcheckv1.BeginRequest{Namespace: "a", Key: key})
	}
	batch.Requests = append(batch.Requests, &dualcheckv1.BeginRequest{Namespace: "a", Key: "new"})
	resp, err := w.BatchBegin(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	if n := proto.Size(resp); n > claim.MaxMessage {
		t.Errorf("%d bytes", n)
	}
	replays := 0
	for i, r := range resp.GetResponses()[:20] {
		if r.GetBegin().GetVerdict() == dualcheckv1.Verdict_VERDICT_REPLAY {
			replays++
		} else if r.GetError().GetReason() != "BATCH_TOO_LARGE" {
			t.Errorf("%d: %v", i, r.GetError())
		}
	}
	if replays < 15 || replays == 20 {
		t.Errorf("%d replays", replays)
	}
	if last := resp.GetResponses()[20]; last.GetBegin().GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
		t.Errorf("a claim was dropped: %v", last)
	}
}

// A finish that was stored is told as such, also where its record does not fit.
func TestABatchOfFinishesThatWereStoredTellsEachOfThem(t *testing.T) {
	w := start(t)
	roomy := claimtest.DefaultPolicy()
	roomy.MaxResultBytes = claim.MaxResult
	w.store.PutPolicy("a", roomy)
	batch := &dualcheckv1.BatchFinishRequest{}
	for i := range 20 {
		key := fmt.Sprintf("k%d", i)
		token := w.first(key).GetToken()
		done, err := w.Complete(t.Context(), completing(key, token, make([]byte, claim.MaxResult)).GetComplete())
		if err != nil {
			t.Fatal(err)
		}
		// The same finish again, by its digest.
		batch.Requests = append(batch.Requests, &dualcheckv1.FinishRequest{Finish: &dualcheckv1.FinishRequest_Complete{Complete: &dualcheckv1.CompleteRequest{
			Namespace: "a", Key: key, Token: token, Outcome: &dualcheckv1.CompleteRequest_Omitted{Omitted: &dualcheckv1.Omitted{Digest: done.GetRecord().GetDigest(), Size: claim.MaxResult}},
		}}})
	}
	resp, err := w.BatchFinish(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	if n := proto.Size(resp); n > claim.MaxMessage {
		t.Errorf("%d bytes", n)
	}
	whole := 0
	for i, r := range resp.GetResponses() {
		record := r.GetFinish().GetRecord()
		if record.GetState() != dualcheckv1.State_STATE_SUCCEEDED || record.GetResultSize() != claim.MaxResult || record.GetResult() == nil || record.GetResultOmitted() {
			t.Errorf("%d: %.300v", i, r)
		}
		if len(record.GetResult().GetBody()) > 0 {
			whole++
		}
	}
	if whole < 10 || whole == 20 {
		t.Errorf("%d bodies", whole)
	}
}

func TestWhatARecordLosesToFit(t *testing.T) {
	record := func() *dualcheckv1.Record {
		return &dualcheckv1.Record{Key: "k", Labels: map[string]string{"a": "b"}, Result: &dualcheckv1.Result{ContentType: "c", Body: make([]byte, 1000)}}
	}
	for room, want := range map[int64]*dualcheckv1.Record{
		2000: record(),
		100:  {Key: "k", Labels: map[string]string{"a": "b"}, Result: &dualcheckv1.Result{ContentType: "c"}},
		0:    {Key: "k"},
	} {
		got := record()
		newAnswerRoom(claim.MaxMessage - room).fit(got)
		if !proto.Equal(got, want) {
			t.Errorf("room %d: %.200v", room, got)
		}
	}
}
