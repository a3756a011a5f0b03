package server

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// What is encoded here is what the contract's own code reads, in frames of the size and
// number that are told.
func TestOutbox(t *testing.T) {
	var o outbox
	if o.take() != nil {
		t.Error("a frame of nothing")
	}
	var wanted []*dualcheckv1.SessionAnswer
	put := func(a *dualcheckv1.SessionAnswer, field answerNumber, m proto.Message) {
		t.Helper()
		wanted = append(wanted, a)
		if err := o.put(a.GetId(), field, m, proto.Size(m)); err != nil {
			t.Fatal(err)
		}
	}
	for id := range uint64(1500) {
		e := &dualcheckv1.BatchError{Code: 3, Reason: strings.Repeat("R", int(id%5000))}
		put(&dualcheckv1.SessionAnswer{Id: id, Answer: &dualcheckv1.SessionAnswer_Error{Error: e}}, errorField, e)
	}
	for _, size := range []int{0, firstChunk, chunkBytes, frameBytes, 2 * frameBytes} {
		f := &dualcheckv1.FinishResponse{Record: &dualcheckv1.Record{Result: &dualcheckv1.Result{Body: make([]byte, size)}}}
		put(&dualcheckv1.SessionAnswer{Id: 1 << 60, Answer: &dualcheckv1.SessionAnswer_Finish{Finish: f}}, answerField[kindFail], f)
		g := &dualcheckv1.GetResponse{Record: f.GetRecord()}
		put(&dualcheckv1.SessionAnswer{Id: 1, Answer: &dualcheckv1.SessionAnswer_Get{Get: g}}, answerField[kindGet], g)
		b := &dualcheckv1.BeginResponse{Verdict: 1}
		put(&dualcheckv1.SessionAnswer{Id: 2, Answer: &dualcheckv1.SessionAnswer_Begin{Begin: b}}, answerField[kindBegin], b)
		x := &dualcheckv1.ExtendResponse{Claim: &dualcheckv1.Claim{Fence: 3}}
		put(&dualcheckv1.SessionAnswer{Id: 3, Answer: &dualcheckv1.SessionAnswer_Extend{Extend: x}}, answerField[kindExtend], x)
	}
	broken := &dualcheckv1.BatchError{Message: "\xff"}
	if err := o.put(9, errorField, broken, proto.Size(broken)); err == nil {
		t.Error("text that is none was encoded")
	}
	var got []*dualcheckv1.SessionAnswer
	for f := o.take(); f != nil; f = o.take() {
		answers := f.answers
		f.tell(true, "redis")
		data := must(lenientCodec{}.Marshal(f))
		var m dualcheckv1.SessionResponse
		if err := proto.Unmarshal(data.Materialize(), &m); err != nil {
			t.Fatal(err)
		}
		if n := len(m.GetAnswers()); n != answers || n > claim.MaxBatch || n > 1 && data.Len() > frameBytes+100 || !m.GetDraining() || m.GetDegraded() != "redis" {
			t.Errorf("a frame of %d answers (%d were told) and %d bytes, %v %q", n, answers, data.Len(), m.GetDraining(), m.GetDegraded())
		}
		got = append(got, m.GetAnswers()...)
		data.Free()
	}
	if o.answers != 0 || o.bytes != 0 || len(got) != len(wanted) {
		t.Fatalf("%d answers and %d bytes are left; %d came, not %d", o.answers, o.bytes, len(got), len(wanted))
	}
	for i := range got {
		if !proto.Equal(got[i], wanted[i]) {
			t.Fatalf("%d: %.300v, not %.300v", i, got[i], wanted[i])
		}
	}
	o.due = true
	f := o.take()
	f.tell(false, "")
	if f.chunks.Len() != 0 || o.take() != nil {
		t.Error("a frame that is due has bytes, or is due again")
	}
}

// A call's context is what package context's own are: to those who wait for it, and to
// the contexts that are made of it.
func TestCallContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type name struct{}
		end := time.Now().Add(time.Second)
		for _, asked := range []bool{true, false} {
			c := &callContext{Context: context.WithValue(t.Context(), name{}, 7), deadline: end}
			if d, ok := c.Deadline(); !ok || !d.Equal(end) || c.Err() != nil || c.Value(name{}) != 7 {
				t.Errorf("%v %v %v", d, ok, c.Err())
			}
			if asked {
				select {
				case <-c.Done():
					t.Error("it has ended")
				default:
				}
			}
			var made []context.Context
			for range 4 {
				child, cancel := context.WithTimeout(c, 7*time.Second)
				defer cancel()
				made = append(made, child)
			}
			gone, leave := context.WithCancel(c)
			leave()
			stop := context.AfterFunc(c, func() { t.Error("it was stopped") })
			if !stop() || stop() {
				t.Error("stop lies")
			}
			var called bool
			context.AfterFunc(c, func() { called = true })
			c.end(context.DeadlineExceeded)
			c.end(context.Canceled)
			synctest.Wait()
			<-c.Done()
			for _, m := range made {
				<-m.Done()
				if m.Err() != context.DeadlineExceeded {
					t.Errorf("a child ended with %v", m.Err())
				}
			}
			if c.Err() != context.DeadlineExceeded || gone.Err() != context.Canceled || !called {
				t.Errorf("%v %v %v", c.Err(), gone.Err(), called)
			}
			late, cancel := context.WithCancel(c)
			defer cancel()
			<-late.Done()
			ran := make(chan struct{})
			if c.AfterFunc(func() { close(ran) })() {
				t.Error("it is too late to stop")
			}
			<-ran
		}
	})
}
