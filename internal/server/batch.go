package server

import (
	"context"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

const (
	// atOnce is how many keys of one batch are asked for at the same time.
	atOnce = 64
	// roomFor is left in an answer for all but the records: claims, errors, verdicts.
	roomFor = 512 << 10
)

func (d *dedup) BatchBegin(ctx context.Context, m *dualcheckv1.BatchBeginRequest) (*dualcheckv1.BatchBeginResponse, error) {
	if err := small(m, len(m.GetRequests())); err != nil {
		return nil, err
	}
	traceID := telemetry.TraceID(ctx)
	out := make([]*dualcheckv1.BeginResult, len(m.GetRequests()))
	room := newAnswerRoom()
	name := func(i int) key { return key{m.Requests[i].GetNamespace(), m.Requests[i].GetKey()} }
	inOrder(len(out), name, func(i int) {
		var answer *dualcheckv1.BeginResponse
		err := d.calls.guard(func() (err error) {
			answer, err = d.beginMember(ctx, m.Requests[i], traceID)
			return err
		})
		if err == nil && !room.take(answer.GetRecord()) {
			err = tooMuch()
		}
		if err != nil {
			out[i] = &dualcheckv1.BeginResult{Outcome: &dualcheckv1.BeginResult_Error{Error: d.memberFault(ctx, dualcheckv1.DedupService_BatchBegin_FullMethodName, err)}}
			return
		}
		out[i] = &dualcheckv1.BeginResult{Outcome: &dualcheckv1.BeginResult_Begin{Begin: answer}}
	})
	return &dualcheckv1.BatchBeginResponse{Responses: out}, nil
}

func (d *dedup) beginMember(ctx context.Context, m *dualcheckv1.BeginRequest, traceID []byte) (*dualcheckv1.BeginResponse, error) {
	req, err := beginRequest(m, traceID)
	if err != nil {
		return nil, err
	}
	if req.Wait != 0 {
		return nil, refuse(claim.WaitInvalid, "wait", "a member of a batch does not wait: leave wait out")
	}
	answer, err := d.begin(ctx, req)
	if err != nil {
		return nil, err
	}
	return d.begun(req, answer), nil
}

func (d *dedup) BatchFinish(ctx context.Context, m *dualcheckv1.BatchFinishRequest) (*dualcheckv1.BatchFinishResponse, error) {
	if err := small(m, len(m.GetRequests())); err != nil {
		return nil, err
	}
	out := make([]*dualcheckv1.FinishResult, len(m.GetRequests()))
	room := newAnswerRoom()
	name := func(i int) key {
		if c := m.Requests[i].GetComplete(); c != nil {
			return key{c.GetNamespace(), c.GetKey()}
		}
		return key{m.Requests[i].GetFail().GetNamespace(), m.Requests[i].GetFail().GetKey()}
	}
	inOrder(len(out), name, func(i int) {
		var answer *dualcheckv1.FinishResponse
		err := d.calls.guard(func() (err error) {
			answer, err = d.finishMember(ctx, m.Requests[i])
			return err
		})
		if err == nil && !room.take(answer.GetRecord()) {
			err = tooMuch()
		}
		if err != nil {
			out[i] = &dualcheckv1.FinishResult{Outcome: &dualcheckv1.FinishResult_Error{Error: d.memberFault(ctx, dualcheckv1.DedupService_BatchFinish_FullMethodName, err)}}
			return
		}
		out[i] = &dualcheckv1.FinishResult{Outcome: &dualcheckv1.FinishResult_Finish{Finish: answer}}
	})
	return &dualcheckv1.BatchFinishResponse{Responses: out}, nil
}

func (d *dedup) finishMember(ctx context.Context, m *dualcheckv1.FinishRequest) (*dualcheckv1.FinishResponse, error) {
	switch m.GetFinish().(type) {
	case *dualcheckv1.FinishRequest_Complete:
		return d.Complete(ctx, m.GetComplete())
	case *dualcheckv1.FinishRequest_Fail:
		return d.Fail(ctx, m.GetFail())
	}
	return nil, refuse(claim.RequestInvalid, "requests.finish", "this member is neither: send a complete or a fail")
}

// memberFault puts a member's error through the table.
func (d *dedup) memberFault(ctx context.Context, method string, err error) *dualcheckv1.BatchError {
	f := faultOf(callerOf(ctx), err)
	d.calls.report(ctx, method, f)
	return f.batch()
}

// small reports BATCH_TOO_LARGE for a batch over the limits.
func small(m proto.Message, members int) error {
	if members > claim.MaxBatch {
		return refuse(claim.BatchTooLarge, "requests", fmt.Sprintf("a batch has at most %d members, this has %d: make it smaller", claim.MaxBatch, members))
	}
	if n := proto.Size(m); n > claim.MaxBatchBytes {
		return refuse(claim.BatchTooLarge, "requests", fmt.Sprintf("a batch has at most %s, this has %d bytes: make it smaller", size(claim.MaxBatchBytes), n))
	}
	return nil
}

// tooMuch is for a member whose record no longer fits the answer. What it asked for
// was done: asked for again, alone or in a smaller batch, it is told so.
func tooMuch() error {
	return &claim.Error{
		Reason:  claim.BatchTooLarge,
		Message: "other records fill the answer: send this member again, alone or in a smaller batch",
	}
}

// key is a namespace and a key, valid or not.
type key struct{ namespace, key string }

// inOrder calls do for 0 ... n-1: in order for equal keys, at the same time for
// different ones. It returns when all have been called.
func inOrder(n int, name func(int) key, do func(int)) {
	of := make(map[key][]int, n)
	var order []key
	for i := range n {
		k := name(i)
		if _, met := of[k]; !met {
			order = append(order, k)
		}
		of[k] = append(of[k], i)
	}
	var g errgroup.Group
	g.SetLimit(atOnce)
	for _, k := range order {
		g.Go(func() error {
			for _, i := range of[k] {
				do(i)
			}
			return nil
		})
	}
	_ = g.Wait() // no member returns an error: each has its own
}

// answerRoom is what is left of a batch's answer for records, which are all of it that
// can be large. It is taken as the answers come in, so that what will not fit is
// not kept: which records those are may depend on which came first.
type answerRoom struct{ left atomic.Int64 }

func newAnswerRoom() *answerRoom {
	r := &answerRoom{}
	r.left.Store(claim.MaxMessage - roomFor)
	return r
}

// take reports whether the record fits.
func (r *answerRoom) take(record *dualcheckv1.Record) bool {
	n := int64(proto.Size(record))
	if r.left.Add(-n) >= 0 {
		return true
	}
	r.left.Add(n)
	return false
}
