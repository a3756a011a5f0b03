package dualcheck_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/dualcheck/dualcheck"
	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// The tests of this file ask a real server, over sessions and over unary calls.

func both(t *testing.T, test func(t *testing.T, client *dualcheck.Client)) {
	for name, opts := range map[string][]dualcheck.Option{"session": nil, "unary": {dualcheck.WithUnary()}} {
		t.Run(name, func(t *testing.T) {
			addr, stop := serve()
			defer stop()
			client, err := dualcheck.New([]string{addr}, opts...)
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			test(t, client)
		})
	}
}

func TestALifeAgainstAServer(t *testing.T) {
	both(t, func(t *testing.T, client *dualcheck.Client) {
		ctx := t.Context()
		key := dualcheck.Key{Namespace: "orders", Key: "a", Operation: "op", Fingerprint: make([]byte, 32)}
		out, err := client.Begin(ctx, key, dualcheck.Labels(map[string]string{"tenant": "t"}), dualcheck.RequestID("r"))
		if err != nil || out.Verdict != dualcheck.First || !out.Enforced || out.Claim.Fence == 0 {
			t.Fatalf("%+v, %v", out, err)
		}
		repeat, err := client.Begin(ctx, key, dualcheck.RequestID("r"))
		if err != nil || !repeat.Repeat || repeat.Claim.Token != out.Claim.Token {
			t.Fatalf("%+v, %v", repeat, err)
		}
		before := out.Claim.Until()
		if err := client.Extend(ctx, out.Claim, time.Minute); err != nil || !out.Claim.Until().After(before) {
			t.Fatalf("extended to %v, %v", out.Claim.Until(), err)
		}
		got, err := client.Get(ctx, key)
		if err != nil {
			t.Fatal(err)
		}
		if record, err := got.Record(); err != nil || record.GetState() != dualcheckv1.State_STATE_PENDING || record.GetLabels()["tenant"] != "t" {
			t.Fatalf("%v, %v", record, err)
		}
		if stored, err := client.Fail(ctx, out.Claim, dualcheck.Failure{Class: dualcheck.ClassRetryable}); err != nil {
			t.Fatal(err)
		} else if record, err := stored.Record(); err != nil || record.GetState() != dualcheckv1.State_STATE_RELEASED {
			t.Fatalf("%v, %v", record, err)
		}
		if _, err := client.Begin(ctx, key, dualcheck.RequestID("r")); !errors.Is(err, dualcheck.ErrRequestIDSpent) {
			t.Errorf("a spent request id: %v", err)
		}
		next, err := client.Begin(ctx, key)
		if err != nil || next.Claim.Attempt != 2 || next.Claim.Previous != dualcheck.PreviousReleased {
			t.Fatalf("%+v, %v", next, err)
		}
		_, err = client.Complete(ctx, out.Claim, dualcheck.Result{})
		if e, ok := errors.AsType[*dualcheck.Error](err); !ok || !errors.Is(err, dualcheck.ErrClaimLost) || e.Code != codes.Aborted || e.Metadata["attempt"] != "2" {
			t.Errorf("an older claim: %#v", err)
		}
		other := key
		other.Fingerprint = bytes.Repeat([]byte{1}, 32)
		_, err = client.Do(ctx, other, never(t))
		if v, ok := errors.AsType[*dualcheck.VerdictError](err); !ok || !errors.Is(err, dualcheck.ErrConflict) || v.KeyAction != dualcheck.Rotate {
			t.Errorf("another request: %v", err)
		}
		if _, err := client.Get(ctx, dualcheck.Key{Namespace: "orders", Key: "none"}); !errors.Is(err, dualcheck.ErrRecordNotFound) || status.Code(err) != codes.NotFound {
			t.Errorf("nothing there: %v", err)
		}
	})
}

func TestC13ALeaseOfNothing(t *testing.T) {
	both(t, func(t *testing.T, client *dualcheck.Client) {
		key := dualcheck.Key{Namespace: "orders", Key: "a"}
		for _, lease := range []time.Duration{0, -time.Second} {
			if _, err := client.Begin(t.Context(), key, dualcheck.Lease(lease)); !errors.Is(err, dualcheck.ErrLeaseInvalid) {
				t.Errorf("%v: %v", lease, err)
			}
		}
		if out, err := client.Begin(t.Context(), key); err != nil || out.Claim.LeaseLeft() < 20*time.Second {
			t.Errorf("none said: %v", err)
		}
	})
}

func TestC36AFailureComesBackTyped(t *testing.T) {
	both(t, func(t *testing.T, client *dualcheck.Client) {
		ctx := t.Context()
		key := dualcheck.Key{Namespace: "orders", Key: "a"}
		out, err := client.Begin(ctx, key)
		if err != nil {
			t.Fatal(err)
		}
		detail := &anypb.Any{TypeUrl: "type.example/Unheard", Value: []byte{1, 2, 3}}
		if _, err := client.Fail(ctx, out.Claim, dualcheck.Failure{Class: dualcheck.ClassTerminal, Code: int32(codes.ResourceExhausted), Message: "no", Details: []*anypb.Any{detail}}); err != nil {
			t.Fatal(err)
		}
		_, err = client.Do(ctx, key, never(t))
		failed, ok := errors.AsType[*dualcheck.FailureError](err)
		if !ok || failed.Class != dualcheck.ClassTerminal || failed.Details[0].GetTypeUrl() != detail.TypeUrl || !bytes.Equal(failed.Details[0].GetValue(), detail.Value) {
			t.Fatalf("got %v", err)
		}
		if s, ok := status.FromError(err); !ok || s.Code() != codes.ResourceExhausted || s.Message() != "no" || len(s.Proto().GetDetails()) != 1 {
			t.Errorf("as a status: %v", err)
		}
	})
}

func TestC40AnEmptyResultReplaysAsEmpty(t *testing.T) {
	both(t, func(t *testing.T, client *dualcheck.Client) {
		key := dualcheck.Key{Namespace: "orders", Key: "a"}
		for i := range 2 {
			got, err := client.Do(t.Context(), key, func(context.Context, *dualcheck.Claim) (dualcheck.Result, error) {
				return dualcheck.Result{}, nil
			})
			if err != nil || len(got.Body) != 0 || got.Omitted || got.Replayed != (i == 1) {
				t.Errorf("%+v, %v", got, err)
			}
		}
	})
}

func TestC39AResultThatFitsNoMessageIsOmittedAndTheKeyFinished(t *testing.T) {
	both(t, func(t *testing.T, client *dualcheck.Client) {
		key := dualcheck.Key{Namespace: "orders", Key: "a"}
		body := make([]byte, 17<<20)
		for i := range 2 {
			got, err := client.Do(t.Context(), key, func(context.Context, *dualcheck.Claim) (dualcheck.Result, error) {
				return dualcheck.Result{Body: body}, nil
			})
			if err != nil || got.Omitted != (i == 1) {
				t.Fatalf("omitted %v, %v", got.Omitted, err)
			}
			if got.Omitted && got.Size != int64(len(body)) {
				t.Errorf("it had %d bytes", got.Size)
			}
		}
	})
}

func TestManyDosOfOneKeyRunItsWorkOnce(t *testing.T) {
	both(t, func(t *testing.T, client *dualcheck.Client) {
		var ran atomic.Int64
		var all sync.WaitGroup
		for i := range 200 {
			all.Go(func() {
				got, err := client.Do(t.Context(), dualcheck.Key{Namespace: "orders", Key: fmt.Sprint(i % 5)}, func(context.Context, *dualcheck.Claim) (dualcheck.Result, error) {
					ran.Add(1)
					return dualcheck.Result{Code: 7}, nil
				})
				if err != nil || got.Code != 7 {
					t.Errorf("%+v, %v", got, err)
				}
			})
		}
		all.Wait()
		if n := ran.Load(); n != 5 {
			t.Errorf("5 keys ran %d times", n)
		}
	})
}

func TestAServerThatStopsLosesNoFinish(t *testing.T) {
	addr, stop := serve()
	client := connect(addr)
	defer client.Close()
	key := dualcheck.Key{Namespace: "orders", Key: "a"}
	out, err := client.Begin(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() {
		again, err := client.Begin(t.Context(), key, dualcheck.Wait(20*time.Second))
		if err == nil && again.Verdict != dualcheck.InProgress && again.Verdict != dualcheck.Replay {
			err = fmt.Errorf("told %v", again.Verdict)
		}
		waited <- err
	}()
	if _, err := client.Complete(t.Context(), out.Claim, dualcheck.Result{}); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := <-waited; err != nil && !errors.Is(err, dualcheck.ErrUnreachable) && !errors.Is(err, dualcheck.ErrConnectionLost) {
		t.Errorf("who waited: %v", err)
	}
	if _, err := client.Begin(t.Context(), key); !errors.Is(err, dualcheck.ErrUnreachable) {
		t.Errorf("nobody is there: %v", err)
	}
}

// never is work that must not run.
func never(t *testing.T) dualcheck.Work {
	return func(context.Context, *dualcheck.Claim) (dualcheck.Result, error) {
		t.Error("the work ran")
		return dualcheck.Result{}, nil
	}
}

func TestNewRefusesWhatIsNoAddress(t *testing.T) {
	for _, addr := range []string{"localhost", "http://localhost:7070", "localhost:abc", "localhost:99999", "localhost:0", " localhost:7070", "a:1,b:2", ":7070"} {
		if c, err := dualcheck.New([]string{addr}); err == nil {
			t.Errorf("%q is taken", addr)
			c.Close()
		}
	}
	for _, addr := range []string{"localhost:7070", "127.0.0.1:1", "[::1]:7070", "dns:///localhost:7070", "unix:/run/dualcheck"} {
		c, err := dualcheck.New([]string{addr})
		if err != nil {
			t.Errorf("%q: %v", addr, err)
			continue
		}
		c.Close()
	}
}
