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
	// beginsRoom is left in an answer for all but the records: claims, errors, verdicts.
	beginsRoom = 512 << 10
	// finishesRoom is left for all that remains of records without result, failure and
	// labels: every finish that was stored is told.
	finishesRoom = 1 << 20
)

func (d *dedup) BatchBegin(ctx context.Context, m *dualcheckv1.BatchBeginRequest) (*dualcheckv1.BatchBeginResponse, error) {
	if err := small(m, len(m.GetRequests())); err != nil {
		return nil, err
	}
	traceID := telemetry.TraceID(ctx)
	room := newAnswerRoom(beginsRoom)
	return &dualcheckv1.BatchBeginResponse{Responses: eachKey(ctx, d, batch[*dualcheckv1.BeginRequest, *dualcheckv1.BeginResult]{
		method:   dualcheckv1.DedupService_BatchBegin_FullMethodName,
		requests: m.GetRequests(),
		name:     func(m *dualcheckv1.BeginRequest) key { return key{m.GetNamespace(), m.GetKey()} },
		ask: func(members []*dualcheckv1.BeginRequest, tell func(int, *dualcheckv1.BeginResult, error)) {
			d.beginMembers(ctx, members, traceID, func(i int, answer *dualcheckv1.BeginResponse, err error) {
				if err == nil && !room.take(answer.GetRecord()) {
					err = tooMuch()
				}
				tell(i, &dualcheckv1.BeginResult{Outcome: &dualcheckv1.BeginResult_Begin{Begin: answer}}, err)
			})
		},
		failed: func(e *dualcheckv1.BatchError) *dualcheckv1.BeginResult {
			return &dualcheckv1.BeginResult{Outcome: &dualcheckv1.BeginResult_Error{Error: e}}
		},
	})}, nil
}

// beginMembers asks for the members of one key, together.
func (d *dedup) beginMembers(ctx context.Context, members []*dualcheckv1.BeginRequest, traceID []byte, tell func(int, *dualcheckv1.BeginResponse, error)) {
	var reqs []*claim.BeginRequest
	var of []int // which member each is
	for i, m := range members {
		req, err := beginRequest(m, traceID)
		if err == nil && req.Wait != 0 {
			err = refuse(claim.WaitInvalid, "wait", "a member of a batch does not wait: leave wait out")
		}
		if err != nil {
			tell(i, nil, err)
			continue
		}
		reqs, of = append(reqs, req), append(of, i)
	}
	if len(reqs) == 0 {
		return
	}
	for i, b := range d.beginTogether(ctx, reqs) {
		if b.Err != nil {
			tell(of[i], nil, b.Err)
			continue
		}
		tell(of[i], d.begun(reqs[i], b.Answer), nil)
	}
}

func (d *dedup) BatchFinish(ctx context.Context, m *dualcheckv1.BatchFinishRequest) (*dualcheckv1.BatchFinishResponse, error) {
	if err := small(m, len(m.GetRequests())); err != nil {
		return nil, err
	}
	room := newAnswerRoom(finishesRoom)
	return &dualcheckv1.BatchFinishResponse{Responses: eachKey(ctx, d, batch[*dualcheckv1.FinishRequest, *dualcheckv1.FinishResult]{
		method:   dualcheckv1.DedupService_BatchFinish_FullMethodName,
		requests: m.GetRequests(),
		name: func(m *dualcheckv1.FinishRequest) key {
			if c := m.GetComplete(); c != nil {
				return key{c.GetNamespace(), c.GetKey()}
			}
			return key{m.GetFail().GetNamespace(), m.GetFail().GetKey()}
		},
		ask: func(members []*dualcheckv1.FinishRequest, tell func(int, *dualcheckv1.FinishResult, error)) {
			var undecided error
			for i, m := range members {
				if undecided != nil { // what is behind it is judged by what became of it
					tell(i, nil, undecided)
					continue
				}
				answer, err := d.finishMember(ctx, m)
				if err == nil {
					room.fit(answer.GetRecord())
				} else if claim.ReasonOf(err) == claim.StoreUnavailable {
					undecided = err
				}
				tell(i, &dualcheckv1.FinishResult{Outcome: &dualcheckv1.FinishResult_Finish{Finish: answer}}, err)
			}
		},
		failed: func(e *dualcheckv1.BatchError) *dualcheckv1.FinishResult {
			return &dualcheckv1.FinishResult{Outcome: &dualcheckv1.FinishResult_Error{Error: e}}
		},
	})}, nil
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

// batch is what batches differ in: Q is a member, R what becomes of one.
type batch[Q, R any] struct {
	method   string
	requests []Q
	name     func(Q) key
	// ask asks for the members of one key in their order, and tells what became of each.
	ask    func(members []Q, tell func(int, R, error))
	failed func(*dualcheckv1.BatchError) R
}

// eachKey asks for every member and returns what became of each; errors go through
// the table. Members of one key are judged in their order, and share the fate of one
// before them whose outcome could not be established (H26); keys go at the same time.
func eachKey[Q, R any](ctx context.Context, d *dedup, b batch[Q, R]) []R {
	out := make([]R, len(b.requests))
	var g errgroup.Group
	g.SetLimit(atOnce)
	for _, of := range sameKey(b.requests, b.name) {
		g.Go(func() error {
			members, told := make([]Q, len(of)), make([]bool, len(of))
			for i, at := range of {
				members[i] = b.requests[at]
			}
			tell := func(i int, answer R, err error) {
				told[i] = true
				if err == nil {
					out[of[i]] = answer
					return
				}
				f := faultOf(callerOf(ctx), err)
				d.calls.report(ctx, b.method, f)
				out[of[i]] = b.failed(f.batch())
			}
			err := d.calls.guard(func() error { b.ask(members, tell); return nil })
			for i := range members {
				if !told[i] {
					var none R
					tell(i, none, err)
				}
			}
			return nil
		})
	}
	_ = g.Wait() // no member returns an error: each has its own
	return out
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

// tooMuch is for a Begin whose record no longer fits the answer. A record is of what
// was there before, so that nothing was done: asked for again, alone or in a smaller
// batch, it is told.
func tooMuch() error {
	return &claim.Error{
		Reason:  claim.BatchTooLarge,
		Message: "other records fill the answer: send this member again, alone or in a smaller batch",
	}
}

// key is a namespace and a key, valid or not.
type key struct{ namespace, key string }

// sameKey returns the indices of the members of each key, in their order.
func sameKey[Q any](members []Q, name func(Q) key) [][]int {
	at := make(map[key]int, len(members))
	var groups [][]int
	for i, m := range members {
		k := name(m)
		g, met := at[k]
		if !met {
			g = len(groups)
			at[k] = g
			groups = append(groups, nil)
		}
		groups[g] = append(groups[g], i)
	}
	return groups
}

// answerRoom is what is left of a batch's answer for records, which are all of it that
// can be large. It is taken as the answers come in, so that what will not fit is
// not kept: which records those are may depend on which came first.
type answerRoom struct{ left atomic.Int64 }

func newAnswerRoom(kept int64) *answerRoom {
	r := &answerRoom{}
	r.left.Store(claim.MaxMessage - kept)
	return r
}

// take reports whether the record fits.
func (r *answerRoom) take(record *dualcheckv1.Record) bool {
	n := int64(proto.Size(record))
	for {
		left := r.left.Load()
		if n > left {
			return false
		}
		if r.left.CompareAndSwap(left, left-n) {
			return true
		}
	}
}

// fit makes a record fit by leaving out what is largest in it. A finish that was stored
// is never answered as an error: it would be taken for one that was not.
func (r *answerRoom) fit(record *dualcheckv1.Record) {
	if r.take(record) {
		return
	}
	if record.GetResult() != nil {
		record.Result.Body = nil
		if r.take(record) {
			return
		}
	}
	record.Result, record.Failure, record.Labels = nil, nil, nil // the rest is in finishesRoom
}
