package waiting_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/waiting"
)

// bubble runs a test on a clock of its own.
func bubble(f func(t *testing.T)) func(*testing.T) {
	return func(t *testing.T) { synctest.Test(t, f) }
}

func TestAChangeIsAskedForAtOnce(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Hour)
		end := h.begin(t.Context(), request("k", "b"), nil)
		pass(7300 * time.Millisecond)
		h.complete("k", token)
		done := time.Now()
		h.changes.of("k")
		if got := h.want(end, claim.Replay); got.at != done {
			t.Errorf("told %v late", got.at.Sub(done))
		}
		if h.seen.of("change") != 1 || len(h.seen.woken) != 1 || h.seen.woken[0] != 0 {
			t.Errorf("%+v", h.seen)
		}
		synctest.Wait()
		if n := h.changes.following(); n != 0 || h.seen.groups != 0 {
			t.Errorf("%d keys are still followed, %d groups are left", n, h.seen.groups)
		}
	})(t)
}

// What nobody told of is found within a second, and what happened before the key was
// followed at once.
func TestAChangeThatNobodyTellsIsFound(t *testing.T) {
	for name, c := range map[string]struct{ work, late time.Duration }{
		"right before it was followed": {0, 100 * time.Millisecond},
		"a while after":                {5500 * time.Millisecond, time.Second},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			h := open(t)
			token := h.held("k", time.Hour)
			end := h.begin(t.Context(), request("k", "b"), nil)
			pass(c.work)
			h.complete("k", token)
			done := time.Now()
			if got := h.want(end, claim.Replay); got.at.Sub(done) > c.late {
				t.Errorf("told %v late", got.at.Sub(done))
			}
			if h.seen.of("second") != 1 {
				t.Errorf("%v", h.seen.causes)
			}
		}))
	}
}

func TestAKeyThatStaysIsOnlyLookedAt(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		began := time.Now()
		var ends []<-chan told
		for range 50 {
			ends = append(ends, h.begin(t.Context(), request("k", "b"), nil))
		}
		for _, end := range ends {
			if got := h.want(end, claim.InProgress); got.at.Sub(began) != 30*time.Second {
				t.Errorf("waited %v", got.at.Sub(began))
			}
		}
		if asks, reads := h.store.since(began); len(asks) != 0 || reads < 29 || reads > 31 {
			t.Errorf("%d asks and %d looks in 30 s", len(asks), reads)
		}
	})(t)
}

// A policy or a switch may change what is told: the guard says that there is one.
func TestAGuardThatMovesIsAskedFor(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.store.guard = 7
		h.held("k", time.Hour)
		began := time.Now()
		end := h.begin(t.Context(), request("k", "b"), nil)
		pass(5 * time.Second)
		if asks, _ := h.store.since(began); len(asks) != 0 {
			t.Fatalf("%d asks before the guard moved", len(asks))
		}
		h.store.mu.Lock()
		h.store.guard = 9
		h.store.mu.Unlock()
		pass(5 * time.Second)
		if asks, _ := h.store.since(began); len(asks) != 1 || asks[0].at.Sub(began) > 6*time.Second {
			t.Errorf("%d asks after the guard moved", len(asks))
		}
		h.drain()
		h.want(end, claim.InProgress)
	})(t)
}

// Without Revisions, and for a record whose revision an answer does not tell, the Store is
// asked every second.
func TestEverySecondAtLeast(t *testing.T) {
	for name, blind := range map[string]bool{"no revisions": true, "a revision that is not told": false} {
		t.Run(name, bubble(func(t *testing.T) {
			h := open(t)
			if blind {
				h = open(t, func(c *waiting.Config) { c.Revisions = nil })
			}
			h.held("k", time.Hour)
			began := time.Now()
			last := claim.Answer{Verdict: claim.InProgress, RetryAfter: 3 * time.Second}
			h.store.answers(func(context.Context, []*claim.BeginRequest) []claim.Begun {
				return []claim.Begun{{Answer: last}}
			})
			h.want(h.wait(t.Context(), request("k", "b"), last, nil), claim.InProgress)
			asks, _ := h.store.since(began)
			at := began
			for _, a := range asks {
				if a.at.Sub(at) > time.Second {
					t.Errorf("%v without a question", a.at.Sub(at))
				}
				at = a.at
			}
			if n := len(asks); n < 29 || n > 31 {
				t.Errorf("%d asks in 30 s", n)
			}
		}))
	}
}

func TestALeasesEndIsAskedFor(t *testing.T) {
	for name, polls := range map[string]bool{"changes are told": false, "they are not": true} {
		t.Run(name, bubble(func(t *testing.T) {
			h := open(t)
			h.changes.live.Store(!polls)
			h.store.down = errors.New("no looks")
			h.held("k", 5300*time.Millisecond)
			began := time.Now()
			got := h.want(h.begin(t.Context(), request("k", "b"), nil), claim.First)
			if late := got.at.Sub(began) - 5300*time.Millisecond - claim.Grace; late != 0 {
				t.Errorf("given %v after the lease had lapsed", late)
			}
			if got.Claim.Previous != claim.PreviousLapsed || h.seen.of("lease") != 1 {
				t.Errorf("%+v %v", got.Claim, h.seen.causes)
			}
		}))
	}
}

// A claim that should have lapsed and has not, as while time stands still, is asked for at
// a measured pace.
func TestALeaseThatDoesNotEndIsAskedForNowAndThen(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		last := claim.Answer{Verdict: claim.InProgress, RetryAfter: 50 * time.Millisecond, LapsesIn: time.Nanosecond, Revision: 1}
		h.store.answers(func(context.Context, []*claim.BeginRequest) []claim.Begun { return []claim.Begun{{Answer: last}} })
		began := time.Now()
		req := request("k", "b")
		req.Wait = 5 * time.Second
		h.want(h.wait(t.Context(), req, last, nil), claim.InProgress)
		if asks, _ := h.store.since(began); len(asks) < 90 || len(asks) > 107 { // those of the seconds included
			t.Errorf("%d asks in 5 s", len(asks))
		}
	})(t)
}

func TestAnExtendedLeaseIsWaitedFor(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", 5*time.Second)
		began := time.Now()
		end := h.begin(t.Context(), request("k", "b"), nil)
		pass(4 * time.Second)
		lease := 10 * time.Second
		if _, err := h.store.current().Extend(t.Context(), &claim.ExtendRequest{Namespace: "a", Key: "k", Token: token, Lease: &lease}); err != nil {
			t.Fatal(err)
		}
		h.changes.of("k")
		got := h.want(end, claim.First)
		if took := got.at.Sub(began); took != 14*time.Second+claim.Grace {
			t.Errorf("given after %v", took)
		}
		if n := h.seen.of("lease"); n != 1 {
			t.Errorf("%d asks for the lease's end", n)
		}
	})(t)
}

// While changes are not told, a group asks after what its last answer said, within bounds.
func TestWhoIsNotToldAsks(t *testing.T) {
	for name, c := range map[string]struct {
		retryAfter, every time.Duration
	}{
		"as it was told":          {300 * time.Millisecond, 300 * time.Millisecond},
		"a second later at most":  {time.Minute, time.Second},
		"20 ms later at least":    {time.Nanosecond, 20 * time.Millisecond},
		"20 ms later, not at all": {0, 20 * time.Millisecond},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			h := open(t, polling)
			last := claim.Answer{Verdict: claim.InProgress, RetryAfter: c.retryAfter}
			h.store.answers(func(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
				begun := make([]claim.Begun, len(reqs))
				for i := range begun {
					begun[i].Answer = last
				}
				return begun
			})
			began := time.Now()
			var ends []<-chan told
			for range 20 {
				ends = append(ends, h.wait(t.Context(), request("k", "b"), last, nil))
			}
			pass(10*time.Second + time.Millisecond)
			asks, _ := h.store.since(began)
			if want := int(10 * time.Second / c.every); len(asks) < want-1 || len(asks) > want {
				t.Errorf("%d asks in 10 s, want %d", len(asks), want)
			}
			for i, a := range asks {
				if len(a.reqs) != 20 || i > 0 && a.at.Sub(asks[i-1].at) != c.every {
					t.Fatalf("ask %d for %d, %v after the one before", i, len(a.reqs), a.at.Sub(asks[max(i, 1)-1].at))
				}
			}
			h.drain()
			for _, end := range ends {
				h.want(end, claim.InProgress)
			}
		}))
	}
}

// Whose wait ends before the next question asks once more at its end.
func TestAShortWaitAsksOnce(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t, polling)
		token := h.held("k", time.Hour)
		req := request("k", "b")
		req.Wait = 100 * time.Millisecond
		end := h.begin(t.Context(), req, nil)
		pass(50 * time.Millisecond)
		h.complete("k", token)
		h.want(end, claim.Replay)
	})(t)
}

// Changes that are told no more are polled for within a second, and once they are told
// again nobody polls.
func TestChangesComeAndGo(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		end := h.begin(t.Context(), request("k", "b"), nil)
		span := func(what string, asks, looks int) {
			t.Helper()
			began := time.Now()
			pass(5 * time.Second)
			a, l := h.store.since(began)
			if len(a) < asks-1 || len(a) > asks+1 || l < looks-1 || l > looks+1 {
				t.Errorf("%s: %d asks and %d looks in 5 s", what, len(a), l)
			}
		}
		span("told", 0, 5)
		h.changes.live.Store(false)
		span("told no more", 5, 0)
		h.changes.live.Store(true)
		h.changes.of("k")
		span("told again", 2, 5)
		h.drain()
		h.want(end, claim.InProgress)
	})(t)
}

// A look that fails ends nobody's wait.
func TestALookThatFailsIsNoAnswer(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		began := time.Now()
		h.store.down = errors.New("etcd is away")
		h.want(h.begin(t.Context(), request("k", "b"), nil), claim.InProgress)
		if asks, _ := h.store.since(began); len(asks) != 0 || time.Since(began) != 30*time.Second {
			t.Errorf("%d asks", len(asks))
		}
	})(t)
}
