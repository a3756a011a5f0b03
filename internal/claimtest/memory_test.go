package claimtest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemory(t *testing.T) {
	claimtest.Suite(t, func(*testing.T) claimtest.Harness { return claimtest.NewMemory().Harness() })
}

// The suite passes too where all tests share one store and far more time passes
// than they ask for.
func TestMemoryShared(t *testing.T) {
	shared := claimtest.NewMemory()
	claimtest.Suite(t, func(*testing.T) claimtest.Harness {
		h := shared.Harness()
		h.Clock = hasty{shared}
		return h
	})
}

type hasty struct{ *claimtest.Memory }

func (c hasty) Advance(_ *testing.T, d time.Duration) { c.Memory.Advance(d + 3*time.Minute) }

// finished returns a store with one finished key.
func finished(t *testing.T) *claimtest.Memory {
	t.Helper()
	s := claimtest.NewMemory()
	a, err := s.Begin(t.Context(), &claim.BeginRequest{Namespace: "pay", Key: "k"})
	if err != nil || a.Verdict != claim.First {
		t.Fatalf("%+v, %v", a, err)
	}
	if _, err := s.Finish(t.Context(), &claim.FinishRequest{Namespace: "pay", Key: "k", Token: a.Claim.Token}); err != nil {
		t.Fatal(err)
	}
	return s
}

func verdict(t *testing.T, s claim.Store) claim.Verdict {
	t.Helper()
	a, err := s.Begin(t.Context(), &claim.BeginRequest{Namespace: "pay", Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	return a.Verdict
}

// Between the mark of a forget and its opening, Begin is held, Get finds nothing,
// and a second forget waits as well.
func TestMemoryHoldsTheKeyWhileItIsForgotten(t *testing.T) {
	s := finished(t)
	forget := &claim.ForgetRequest{Namespace: "pay", Key: "k", Reason: "test"}
	holds := 0
	s.Hold = func(ctx context.Context) error {
		if holds++; holds == 1 {
			if got := verdict(t, s); got != claim.InProgress {
				t.Errorf("held: verdict %d", got)
			}
			if _, err := s.Get(ctx, &claim.GetRequest{Namespace: "pay", Key: "k"}); claim.ReasonOf(err) != claim.RecordNotFound {
				t.Errorf("held: Get: %v", err)
			}
			if page, err := s.List(ctx, &claim.ListRequest{Namespace: "pay", Size: 10}); err != nil || len(page.Records) != 0 {
				t.Errorf("held: listed %v, %v", page.Records, err)
			}
			if _, err := s.Forget(ctx, forget); err != nil || holds != 2 {
				t.Errorf("held: a second forget, after %d holds: %v", holds, err)
			}
			if got := verdict(t, s); got != claim.First {
				t.Errorf("opened by the second: verdict %d", got)
			}
		}
		return nil
	}
	if _, err := s.Forget(t.Context(), forget); err != nil {
		t.Fatal(err)
	}
	if got := verdict(t, s); got != claim.InProgress {
		t.Errorf("the claim given meanwhile was opened over: verdict %d", got)
	}
}

// A forget whose wait fails leaves the key held, and can be repeated.
func TestMemoryStaysHeldIfTheWaitFails(t *testing.T) {
	s := finished(t)
	failure := errors.New("node goes away")
	s.Hold = func(context.Context) error { return failure }
	forget := &claim.ForgetRequest{Namespace: "pay", Key: "k", Reason: "test"}
	if _, err := s.Forget(t.Context(), forget); claim.ReasonOf(err) != claim.StoreUnavailable || !errors.Is(err, failure) {
		t.Fatal(err)
	}
	if got := verdict(t, s); got != claim.InProgress {
		t.Fatalf("verdict %d", got)
	}
	s.Hold = nil
	revision, err := s.Forget(t.Context(), forget)
	if err != nil {
		t.Fatal(err)
	}
	again, err := s.Forget(t.Context(), forget)
	if err != nil || again < revision {
		t.Fatalf("forgotten again: %d after %d, %v", again, revision, err)
	}
	if got := verdict(t, s); got != claim.First {
		t.Fatalf("verdict %d", got)
	}
}

// Time stands still until it is advanced, exactly.
func TestMemoryClock(t *testing.T) {
	s := claimtest.NewMemory()
	lease := time.Second
	if _, err := s.Begin(t.Context(), &claim.BeginRequest{Namespace: "pay", Key: "k", Lease: &lease}); err != nil {
		t.Fatal(err)
	}
	s.Advance(lease + claim.Grace - 1)
	if got := verdict(t, s); got != claim.InProgress {
		t.Fatalf("1 ns before: verdict %d", got)
	}
	s.Advance(1)
	if got := verdict(t, s); got != claim.First {
		t.Fatalf("at its time: verdict %d", got)
	}
}
