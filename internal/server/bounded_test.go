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
