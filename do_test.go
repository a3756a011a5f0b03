package dualcheck

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// The tests of this file run on a fake clock: minutes pass at once, and what happens at
// which moment is exact.

func away(s *fakeSession, c *dualcheckv1.SessionCall) error {
	return s.answer(refused(c, ErrStoreUnavailable, codes.Unavailable))
}

func TestRetriesKeepTheirNumberAndTheirDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var waits []time.Duration
		f, c := inMemory(t, away, WithTries(4), WithObserver(observer(func(r Retry) { waits = append(waits, r.Wait) })))
		_, err := c.Begin(t.Context(), k("a"))
		e, ok := errors.AsType[*Error](err)
		if !ok || e.Reason != ErrStoreUnavailable || e.Tries != 4 || !e.MaybeAccepted || len(f.calls()) != 4 {
			t.Fatalf("%d calls, %+v", len(f.calls()), e)
		}
		for i, w := range waits {
			if w <= 0 || w > ceiling(i+1)+1 {
				t.Errorf("wait %d took %v", i+1, w)
			}
		}
		// A finish goes on until its context ends, and never beyond.
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		began := time.Now()
		_, err = c.Complete(ctx, &Claim{Key: k("a"), Token: "x"}, Result{})
		if took := time.Since(began); took > 20*time.Second || took < 10*time.Second || !errors.Is(err, ErrStoreUnavailable) {
			t.Errorf("after %v: %v", took, err)
		}
	})
}

func TestRetryAfterIsALowerBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		_, c := inMemory(t, func(s *fakeSession, call *dualcheckv1.SessionCall) error {
			if n++; n > 1 {
				return s.answer(well(call))
			}
			a := refused(call, ErrOverloaded, codes.ResourceExhausted)
			a.GetError().RetryAfter = durationpb.New(3 * time.Second)
			return s.answer(a)
		})
		began := time.Now()
		if _, err := c.Begin(t.Context(), k("a")); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < 3*time.Second || took > 3200*time.Millisecond {
			t.Errorf("came back after %v", took)
		}
	})
}

func TestWhatIsNotRetried(t *testing.T) {
	for reason, code := range map[Reason]codes.Code{
		ErrKeyInvalid: codes.InvalidArgument, ErrClaimLost: codes.Aborted, ErrAlreadyFinished: codes.AlreadyExists,
		ErrRequestIDSpent: codes.FailedPrecondition, ErrRecordNotFound: codes.NotFound, ErrNamespaceDenied: codes.PermissionDenied,
		ErrInternal: codes.Internal, ErrStoreFull: codes.ResourceExhausted, ErrStoreRestored: codes.Unavailable,
	} {
		e := &Error{Reason: reason, Code: code, RetryAfter: time.Second}
		if again(e) != never {
			t.Errorf("%s is retried", reason)
		}
	}
	for _, e := range []*Error{
		{Reason: ErrStoreUnavailable, Code: codes.DeadlineExceeded}, {Reason: "NEW", Code: codes.Unavailable},
		{Reason: ErrOverloaded, Code: codes.ResourceExhausted}, {Reason: "NEW", Code: codes.ResourceExhausted, RetryAfter: 1},
	} {
		if again(e) == never {
			t.Errorf("%+v is not retried", e)
		}
	}
}

func TestC34CompleteGoesOnWhileTheStoreIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		back := time.Now().Add(50 * time.Second)
		f, c := inMemory(t, func(s *fakeSession, call *dualcheckv1.SessionCall) error {
			if time.Now().Before(back) {
				return away(s, call)
			}
			return s.answer(well(call))
		})
		if _, err := c.Complete(t.Context(), &Claim{Key: k("a"), Token: "x"}, Result{Code: 200}); err != nil {
			t.Fatal(err)
		}
		calls := f.calls()
		for i, call := range calls {
			if call.GetRetryCount() != uint32(i) || call.GetComplete().GetToken() != "x" {
				t.Errorf("call %d: %v", i, call)
			}
		}
		if len(calls) < 10 || len(calls) > 60 {
			t.Errorf("%d tries in 50 s", len(calls))
		}
	})
}

func TestH29DoStopsBeforeItsLeaseEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var gone atomic.Bool
		_, c := inMemory(t, func(s *fakeSession, call *dualcheckv1.SessionCall) error {
			if gone.Load() {
				return away(s, call)
			}
			gone.Store(true) // with the answer to Begin
			return s.answer(well(call))
		}, WithFinishPatience(time.Second))
		var left time.Duration
		_, err := c.Do(t.Context(), k("a"), func(ctx context.Context, claim *Claim) (Result, error) {
			<-ctx.Done()
			left = claim.LeaseLeft()
			return Result{}, context.Cause(ctx)
		})
		if left <= 0 || left > 2*time.Second {
			t.Errorf("stopped %v before the end", left)
		}
		failed, ok := errors.AsType[*StoreError](err)
		if !ok || !errors.Is(err, ErrLeaseLost) || failed.Failure.Class != ClassUnknown || failed.Claim.Token != "a" {
			t.Errorf("got %v", err)
		}
	})
}

func TestDoStopsAtOnceWhenItsClaimIsTakenAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, c := inMemory(t, func(s *fakeSession, call *dualcheckv1.SessionCall) error {
			if call.GetExtend() != nil {
				return s.answer(refused(call, ErrClaimLost, codes.Aborted))
			}
			return s.answer(well(call))
		})
		began := time.Now()
		_, err := c.Do(t.Context(), k("a"), func(ctx context.Context, _ *Claim) (Result, error) {
			<-ctx.Done()
			return Result{}, ctx.Err()
		})
		if took := time.Since(began); !errors.Is(err, ErrLeaseLost) || !errors.Is(err, ErrClaimLost) || took > 4*time.Second {
			t.Errorf("after %v: %v", took, err)
		}
	})
}

func TestDoExtendsWhileItsWorkRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, c := inMemory(t, nil)
		got, err := c.Do(t.Context(), k("a"), func(ctx context.Context, claim *Claim) (Result, error) {
			select {
			case <-ctx.Done():
			case <-time.After(time.Minute):
			}
			return Result{Code: 7}, ctx.Err()
		}, Lease(10*time.Second))
		if err != nil || got.Code != 7 || got.Replayed {
			t.Fatalf("%v, %v", got, err)
		}
		extends := 0
		for _, call := range f.calls() {
			if call.GetExtend() != nil {
				extends++
				if call.GetExtend().GetLease().AsDuration() != 10*time.Second {
					t.Errorf("extended by %v", call.GetExtend().GetLease())
				}
			}
		}
		if extends < 15 || extends > 20 {
			t.Errorf("%d extensions in a minute", extends)
		}
	})
}

func TestAClaimThatWasWaitedForIsExtendedBeforeItsWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lost atomic.Bool
		f, c := inMemory(t, func(s *fakeSession, call *dualcheckv1.SessionCall) error {
			switch {
			case call.GetBegin() != nil:
				time.AfterFunc(25*time.Second, func() { _ = s.answer(first(call)) })
				return nil
			case lost.Load() && call.GetExtend() != nil:
				return s.answer(refused(call, ErrClaimLost, codes.Aborted))
			}
			return s.answer(well(call))
		})
		if _, err := c.Do(t.Context(), k("a"), func(ctx context.Context, claim *Claim) (Result, error) {
			if left := claim.LeaseLeft(); left < 9*time.Second {
				t.Errorf("%v left", left)
			}
			return Result{}, ctx.Err()
		}); err != nil {
			t.Error(err)
		}
		lost.Store(true)
		before := len(f.calls())
		unused := func(context.Context, *Claim) (Result, error) { return Result{}, errors.New("it ran") }
		if _, err := c.Do(t.Context(), k("a"), nil); !errors.Is(err, ErrRequestInvalid) {
			t.Errorf("without work: %v", err)
		}
		if _, err := c.Do(t.Context(), k("a"), unused); !errors.Is(err, ErrClaimLost) {
			t.Errorf("got %v", err)
		}
		calls := f.calls()[before:]
		if len(calls) != 3 || Class(calls[2].GetFail().GetFailure().GetClass()) != ClassRetryable {
			t.Errorf("sent %v", calls)
		}
	})
}

func TestAnObservedDoIsNeverHeldBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, c := inMemory(t, func(s *fakeSession, call *dualcheckv1.SessionCall) error {
			switch {
			case call.GetBegin() != nil:
				a := first(call)
				a.GetBegin().Enforced = false
				return s.answer(a)
			case call.GetExtend() != nil:
				return s.answer(refused(call, ErrClaimLost, codes.Aborted))
			}
			return s.answer(well(call))
		})
		if _, err := c.Do(t.Context(), k("a"), func(ctx context.Context, _ *Claim) (Result, error) {
			select {
			case <-ctx.Done():
			case <-time.After(time.Minute):
			}
			return Result{}, ctx.Err()
		}); err != nil {
			t.Error(err)
		}
	})
}

func TestDoWaitsForOthersUntilItsContextEnds(t *testing.T) {
	busy := func(call *dualcheckv1.SessionCall) *dualcheckv1.SessionAnswer {
		return &dualcheckv1.SessionAnswer{Id: call.GetId(), Answer: &dualcheckv1.SessionAnswer_Begin{Begin: &dualcheckv1.BeginResponse{
			Verdict: dualcheckv1.Verdict_VERDICT_IN_PROGRESS, KeyAction: dualcheckv1.KeyAction_KEY_ACTION_REUSE, RetryAfter: durationpb.New(300 * time.Millisecond),
		}}}
	}
	never := func(context.Context, *Claim) (Result, error) { return Result{}, errors.New("it ran") }
	synctest.Test(t, func(t *testing.T) {
		f, c := inMemory(t, func(s *fakeSession, call *dualcheckv1.SessionCall) error {
			time.AfterFunc(call.GetBegin().GetWait().AsDuration()-100*time.Millisecond, func() { _ = s.answer(busy(call)) })
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
		defer cancel()
		began := time.Now()
		_, err := c.Do(ctx, k("a"), never)
		v, ok := errors.AsType[*VerdictError](err)
		if took := time.Since(began); !ok || !errors.Is(err, ErrInProgress) || v.KeyAction != Reuse || took < 80*time.Second || took > 90*time.Second {
			t.Errorf("after %v: %v", took, err)
		}
		ids := map[string]bool{}
		for i, call := range f.calls() {
			ids[call.GetBegin().GetRequestId()] = true
			// The last asks once more what has become of it.
			if w := call.GetBegin().GetWait().AsDuration(); w < 0 || w > 30*time.Second || w == 0 && i+1 < len(f.calls()) {
				t.Errorf("a wait of %v", w)
			}
		}
		if took := time.Since(began); took < 89*time.Second || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %v: %v", took, err)
		}
		if n := len(f.calls()); n < 3 || n > 7 || len(ids) != n {
			t.Errorf("%d calls, %d request ids", n, len(ids))
		}
		if _, err := c.Do(t.Context(), k("a"), never, Wait(0)); !errors.Is(err, ErrInProgress) {
			t.Errorf("without waiting: %v", err)
		}
		gone, leave := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, leave)
		if _, err := c.Do(gone, k("a"), never); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	})
}

// What is finished in the last moments of a context is not missed.
func TestDoHasWhatIsFinishedJustInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		_, c := inMemory(t, func(s *fakeSession, call *dualcheckv1.SessionCall) error {
			answer := func() {
				b := &dualcheckv1.BeginResponse{Verdict: dualcheckv1.Verdict_VERDICT_IN_PROGRESS, RetryAfter: durationpb.New(300 * time.Millisecond)}
				if time.Since(began) >= 450*time.Millisecond {
					b = &dualcheckv1.BeginResponse{Verdict: dualcheckv1.Verdict_VERDICT_REPLAY, Record: &dualcheckv1.Record{Result: &dualcheckv1.Result{Code: 7}}}
				}
				_ = s.answer(&dualcheckv1.SessionAnswer{Id: call.GetId(), Answer: &dualcheckv1.SessionAnswer_Begin{Begin: b}})
			}
			time.AfterFunc(max(call.GetBegin().GetWait().AsDuration()-100*time.Millisecond, 0), answer)
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if r, err := c.Do(ctx, k("a"), func(context.Context, *Claim) (Result, error) { return Result{}, errors.New("it ran") }); err != nil || r.Code != 7 {
			t.Errorf("after %v: %+v, %v", time.Since(began), r, err)
		}
	})
}

func TestC40AFinaliserReportsWorkThatNeverReturned(t *testing.T) {
	f := start(t, nil)
	c := newClient(t, []string{f.addr})
	func() {
		defer func() {
			if v := recover(); v != "boom" {
				t.Errorf("recovered %v", v)
			}
		}()
		_, _ = c.Do(t.Context(), k("panics"), func(context.Context, *Claim) (Result, error) { panic("boom") })
	}()
	var gone sync.WaitGroup
	gone.Go(func() {
		_, _ = c.Do(t.Context(), k("exits"), func(context.Context, *Claim) (Result, error) { runtime.Goexit(); return Result{}, nil })
	})
	gone.Wait()
	for _, call := range f.calls() {
		if fail := call.GetFail(); call.GetBegin() == nil && fail.GetFailure().GetClass() != dualcheckv1.FailureClass_FAILURE_CLASS_UNKNOWN {
			t.Errorf("reported %v", call)
		}
	}
	if n := len(f.calls()); n != 4 {
		t.Errorf("%d calls", n)
	}
}

func TestClassesOfFailures(t *testing.T) {
	f := start(t, nil)
	plain := errors.New("plain")
	c := newClient(t, []string{f.addr})
	sure := newClient(t, []string{f.addr}, WithClassifier(func(error) Class { return ClassRetryable }))
	for _, tt := range []struct {
		name   string
		client *Client
		err    error
		want   Class
	}{
		{"plain", c, plain, ClassUnknown},
		{"classified", sure, plain, ClassRetryable},
		{"cancelled", sure, context.Canceled, ClassUnknown},
		{"retryable", c, Retryable(plain), ClassRetryable},
		{"terminal", sure, Terminal(plain), ClassTerminal},
		{"unknown", sure, Unknown(plain), ClassUnknown},
	} {
		before := len(f.calls())
		if _, err := tt.client.Do(t.Context(), k(tt.name), func(context.Context, *Claim) (Result, error) { return Result{}, tt.err }); err != tt.err {
			t.Errorf("%s: got %v", tt.name, err)
		}
		failure := f.calls()[before+1].GetFail().GetFailure()
		if Class(failure.GetClass()) != tt.want || failure.GetMessage() != tt.err.Error() {
			t.Errorf("%s: reported %v", tt.name, failure)
		}
	}
	if Terminal(nil) != nil {
		t.Error("no error became one")
	}
}

func TestAResultThatCannotBeStoredComesWithItsClaim(t *testing.T) {
	var gone atomic.Bool
	f := start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		if c.GetComplete() != nil && gone.Load() {
			return s.answer(refused(c, ErrStoreFull, codes.ResourceExhausted))
		}
		return s.answer(well(c))
	})
	c := newClient(t, []string{f.addr})
	gone.Store(true)
	got, err := c.Do(t.Context(), k("a"), func(context.Context, *Claim) (Result, error) { return Result{Code: 5}, nil })
	e, ok := errors.AsType[*StoreError](err)
	if !ok || !errors.Is(err, ErrStoreFull) || got.Code != 5 || e.Result.Code != 5 {
		t.Fatalf("%v, %v", got, err)
	}
	gone.Store(false)
	if _, err := c.Complete(t.Context(), e.Claim, *e.Result); err != nil {
		t.Error(err)
	}
}
