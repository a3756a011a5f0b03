package waiting_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// overloaded refuses all, and says when to come back.
func overloaded(n int) []claim.Begun {
	return claim.NoneBegun(n, &claim.Error{Reason: claim.Overloaded, RetryAfter: 150 * time.Millisecond})
}

// A group that is told OVERLOADED does not ask before it was told to, though a caller has
// come meanwhile whose answer is older than what the group knows.
func TestOverloadedIsHeeded(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Minute)
		h.begin(t.Context(), request("k", "1"), nil)
		synctest.Wait()
		var asks atomic.Int64
		h.store.answers(func(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			if asks.Add(1) > 1 {
				return overloaded(len(reqs))
			}
			stale, err := h.store.current().Begin(ctx, request("k", "2"))
			if err != nil {
				t.Error(err)
			}
			lease := 30 * time.Minute
			if _, err := h.store.current().Extend(ctx, &claim.ExtendRequest{Namespace: "a", Key: "k", Token: token, Lease: &lease}); err != nil {
				t.Error(err)
			}
			h.wait(t.Context(), request("k", "2"), stale, nil)
			<-time.After(time.Millisecond) // it has come
			return h.store.current().BeginTogether(ctx, reqs)
		})
		h.changes.of("k")
		pass(time.Second)
		if n := asks.Load(); n < 3 || n > 10 {
			t.Errorf("%d asks in a second, each told to come back after 150 ms", n)
		}
		h.store.answers(nil)
		h.drain()
	})(t)
}

// OVERLOADED shortly before the claim in the way lapses: it is asked again when that was
// said, and the waiter is given the claim.
func TestOverloadedBeforeALapse(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", 2*time.Second)
		pass(2470 * time.Millisecond) // it lapses at 2.5 s
		began := time.Now()
		one := h.begin(t.Context(), request("k", "1"), nil)
		pass(time.Millisecond)
		h.store.answers(func(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			h.store.answers(nil) // once
			return overloaded(len(reqs))
		})
		h.changes.of("k")
		got := <-one
		if took := got.at.Sub(began); got.Verdict != claim.First || took > time.Second {
			t.Errorf("verdict %d, %v after %v", got.Verdict, got.err, took)
		}
	})(t)
}
