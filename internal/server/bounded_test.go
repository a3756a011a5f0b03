package server

import (
	"context"
	"sync/atomic"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// H27: a node that is asked more than it can answer says so, and when to come back;
// finishes and extensions pass all the same.
func TestH27OverloadNeverHoldsUpAFinish(t *testing.T) {
	w := start(t, func(c *Config) { c.MaxInFlight = 1 })
	ctx := t.Context()
	held, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "held"})
	if err != nil {
		t.Fatal(err)
	}
	asked, answer := make(chan struct{}), make(chan struct{})
	var slow atomic.Bool
	slow.Store(true)
	w.store.before(func(context.Context, *claim.BeginRequest) error {
		if slow.Swap(false) {
			close(asked)
			<-answer
		}
		return nil
	})
	done := make(chan error, 1)
	go func() {
		_, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "slow"})
		done <- err
	}()
	<-asked
	_, err = w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"})
	s := status.Convert(err)
	if s.Code() != codes.ResourceExhausted || reasonOf(s) != string(claim.Overloaded) {
		t.Fatalf("%v", err)
	}
	comeBack := false
	for _, d := range s.Details() {
		retry, ok := d.(*errdetails.RetryInfo)
		comeBack = comeBack || ok && retry.GetRetryDelay().AsDuration() > 0
	}
	if !comeBack {
		t.Errorf("details %v: no RetryInfo", s.Details())
	}
	if _, err := w.Extend(ctx, &dualcheckv1.ExtendRequest{Namespace: "a", Key: "held", Token: held.GetClaim().GetToken(), Lease: durationpb.New(60e9)}); err != nil {
		t.Errorf("extend: %v", err)
	}
	if _, err := w.Complete(ctx, &dualcheckv1.CompleteRequest{Namespace: "a", Key: "held", Token: held.GetClaim().GetToken()}); err != nil {
		t.Errorf("complete: %v", err)
	}
	close(answer)
	if err := <-done; err != nil {
		t.Errorf("the slow one: %v", err)
	}
	if _, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// A namespace that fills the node does not keep the others out: each may have its share.
func TestTheRoomOfOneNamespaceIsNotTheOthers(t *testing.T) {
	r := &room{most: 8, of: map[string]int{}}
	for r.enter("storm") {
	}
	if r.total != 8 {
		t.Errorf("the storm has %d of 8", r.total)
	}
	for r.enter("calm") {
	}
	if r.of["calm"] == 0 || r.total > 16 {
		t.Errorf("the calm one has %d, all have %d", r.of["calm"], r.total)
	}
	if r.enter("storm") {
		t.Error("the storm is let in beyond the bound")
	}
	for ns, n := range map[string]int{"storm": r.of["storm"], "calm": r.of["calm"]} {
		for range n {
			r.leave(ns)
		}
	}
	if r.total != 0 || len(r.of) != 0 {
		t.Errorf("%d are left of %v", r.total, r.of)
	}
}
