package server

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/telemetry"
	"github.com/dualcheck/dualcheck/internal/waiting"
)

// alone is DedupService without a network, for tests on a clock of their own, with
// a key "k" that is held for this long, and its token.
func alone(t *testing.T, lease time.Duration) (d *dedup, store *memStore, token string) {
	t.Helper()
	store = newMemStore()
	metrics := telemetry.NewMetrics(telemetry.Build{})
	waits := waiting.New(waiting.Config{Store: store})
	t.Cleanup(waits.Close)
	d = &dedup{store: store, waits: waits, metrics: metrics, calls: newCalls(metrics, slog.New(slog.DiscardHandler)), draining: make(chan struct{})}
	resp, err := d.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", Lease: durationpb.New(lease)})
	if err != nil {
		t.Fatal(err)
	}
	return d, store, resp.GetClaim().GetToken()
}

func waitFor(wait time.Duration) *dualcheckv1.BeginRequest {
	return &dualcheckv1.BeginRequest{Namespace: "a", Key: "k", Wait: durationpb.New(wait)}
}

func TestAWaiterIsToldWithinASecondOfTheFinish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, _, token := alone(t, time.Hour)
		const work = 7300 * time.Millisecond
		go func() {
			<-time.After(work)
			if _, err := d.Complete(t.Context(), &dualcheckv1.CompleteRequest{Namespace: "a", Key: "k", Token: token}); err != nil {
				t.Error(err)
			}
		}()
		began := time.Now()
		resp, err := d.Begin(t.Context(), waitFor(30*time.Second))
		if err != nil || resp.GetVerdict() != dualcheckv1.Verdict_VERDICT_REPLAY {
			t.Fatalf("%v %v", resp, err)
		}
		if late := time.Since(began) - work; late < 0 || late > time.Second {
			t.Errorf("told %v after the finish", late)
		}
	})
}

func TestAWaiterTakesOverALapsedClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, _, _ := alone(t, 5*time.Second)
		began := time.Now()
		resp, err := d.Begin(t.Context(), waitFor(30*time.Second))
		if err != nil || resp.GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST || resp.GetClaim().GetPrevious() != dualcheckv1.Previous_PREVIOUS_LAPSED {
			t.Fatalf("%v %v", resp, err)
		}
		if late := time.Since(began) - 5*time.Second; late < claim.Grace || late > claim.Grace+100*time.Millisecond {
			t.Errorf("taken over %v after the lease's end", late)
		}
	})
}

func TestAWaitEnds(t *testing.T) {
	for name, c := range map[string]struct {
		wait, deadline, takes time.Duration
	}{
		"with the wait":       {wait: 3 * time.Second, takes: 3 * time.Second},
		"before the deadline": {wait: 30 * time.Second, deadline: 2 * time.Second, takes: 1900 * time.Millisecond},
		"at once":             {wait: 30 * time.Second, deadline: 90 * time.Millisecond, takes: 0},
		"a short wait":        {wait: time.Millisecond, takes: time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, store, _ := alone(t, time.Hour)
				ctx := t.Context()
				if c.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.deadline)
					defer cancel()
				}
				began := time.Now()
				resp, err := d.Begin(ctx, waitFor(c.wait))
				if err != nil || resp.GetVerdict() != dualcheckv1.Verdict_VERDICT_IN_PROGRESS || resp.GetRetryAfter().AsDuration() <= 0 {
					t.Fatalf("%v %v", resp, err)
				}
				if took := time.Since(began); took != c.takes {
					t.Errorf("answered after %v, want %v", took, c.takes)
				}
				if asks, most := store.begins.Load()-1, int64(c.takes/time.Second)+2; asks > most {
					t.Errorf("asked %d times, %d at most make sense", asks, most)
				}
			})
		})
	}
}

func TestAnErrorEndsAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, store, _ := alone(t, time.Hour)
		asked := store.begins.Load()
		store.before(func(context.Context, *claim.BeginRequest) error {
			if store.begins.Load() > asked+1 {
				return claim.Errorf(claim.StoreUnavailable, "the claim may have been given")
			}
			return nil
		})
		_, err := d.Begin(t.Context(), waitFor(30*time.Second))
		if claim.ReasonOf(err) != claim.StoreUnavailable {
			t.Errorf("got %v", err)
		}
	})
}

func TestH24ACallerThatGoesEndsAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, store, _ := alone(t, time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-time.After(1700 * time.Millisecond); cancel() }()
		began := time.Now()
		_, err := d.Begin(ctx, waitFor(30*time.Second))
		if !errors.Is(err, context.Canceled) || time.Since(began) != 1700*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if held, err := store.Get(t.Context(), &claim.GetRequest{Namespace: "a", Key: "k"}); err != nil || held.Record.State != claim.Pending {
			t.Error("the holder's claim did not survive it")
		}
	})
}

func TestDrainingEndsAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, store, _ := alone(t, time.Hour)
		draining := make(chan struct{})
		d.draining, d.waits = draining, waiting.New(waiting.Config{Store: store, Draining: draining})
		go func() { <-time.After(1700 * time.Millisecond); close(draining) }()
		began := time.Now()
		resp, err := d.Begin(t.Context(), waitFor(30*time.Second))
		if err != nil || resp.GetVerdict() != dualcheckv1.Verdict_VERDICT_IN_PROGRESS || time.Since(began) != 1700*time.Millisecond {
			t.Errorf("%v %v after %v", resp, err, time.Since(began))
		}
	})
}
