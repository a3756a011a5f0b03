package waiting_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/waiting"
)

// C09: however many wait for one key, they are one question, asked in the order in which
// they came.
func TestC09AllWhoWaitAreOneQuestion(t *testing.T) {
	bubble(func(t *testing.T) {
		const many = 10_000
		h := open(t)
		token := h.held("k", time.Hour)
		began := time.Now()
		ends := make([]<-chan told, many)
		for i := range ends {
			ends[i] = h.begin(t.Context(), request("k", fmt.Sprint(i)), nil)
			synctest.Wait() // the order is that in which they came
		}
		pass(3500 * time.Millisecond)
		if asks, reads := h.store.since(began); len(asks) != 0 || reads > 5 {
			t.Errorf("%d asks and %d looks while nothing happened", len(asks), reads)
		}
		h.complete("k", token)
		h.changes.of("k")
		done := time.Now()
		for _, end := range ends {
			if got := h.want(end, claim.Replay); !got.at.Equal(done) {
				t.Fatalf("told %v late", got.at.Sub(done))
			}
		}
		asks, _ := h.store.since(began)
		if len(asks) != 1 || len(asks[0].reqs) != many {
			t.Fatalf("%d questions", len(asks))
		}
		// The record is known to be there: it is read, and no claim is tried for.
		if hint := asks[0].reqs[0].Hint; hint != claim.LikelyRepeat {
			t.Errorf("the Store is told %d of the key", hint)
		}
		for i, req := range asks[0].reqs {
			if req.Owner != fmt.Sprint(i) {
				t.Fatalf("%s is asked for as number %d", req.Owner, i)
			}
		}
		if h.changes.most != 1 {
			t.Errorf("the key was followed %d times at once", h.changes.most)
		}
	})(t)
}

// H24, C09: a key that is free again goes to who came first, and the others wait on.
func TestAFreeKeyGoesToWhoCameFirst(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Hour)
		var ends []<-chan told
		for i := range 5 {
			ends = append(ends, h.begin(t.Context(), request("k", fmt.Sprint(i)), nil))
			synctest.Wait()
		}
		for i, end := range ends {
			h.free("k", token)
			h.changes.of("k")
			token = h.want(end, claim.First).Claim.Token
			synctest.Wait()
			for _, other := range ends[i+1:] {
				if !waits(other) {
					t.Fatal("another was answered, too")
				}
			}
		}
	})(t)
}

// A key is waited for again and again, each time as the first time.
func TestAKeyIsWaitedForAgain(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Hour)
		for i := range 4 {
			began := time.Now()
			end := h.begin(t.Context(), request("k", fmt.Sprint(i)), nil)
			pass(10 * time.Millisecond)
			h.free("k", token)
			h.changes.of("k")
			got := h.want(end, claim.First)
			if got.at.Sub(began) != 10*time.Millisecond {
				t.Errorf("time %d: told after %v", i, got.at.Sub(began))
			}
			token = got.Claim.Token
			synctest.Wait()
			if n := h.changes.following(); n != 0 {
				t.Errorf("%d keys are still followed", n)
			}
		}
	})(t)
}

// H06: who comes while an ask is in flight does not share it, and is asked for at once when
// it is back.
func TestH06WhoComesLaterIsAskedForLater(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Hour)
		early := h.begin(t.Context(), request("k", "early"), nil)
		synctest.Wait()
		flying, land := 0, make(chan struct{})
		h.store.answers(func(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			begun := h.store.current().BeginTogether(t.Context(), reqs)
			if flying++; flying != 1 {
				t.Error("two asks are in flight")
			}
			<-land
			flying--
			return begun
		})
		h.changes.of("k") // nothing but an extension, say
		synctest.Wait()
		late := h.begin(t.Context(), request("k", "late"), nil)
		synctest.Wait()
		h.complete("k", token)
		h.changes.of("k")
		synctest.Wait()
		began := time.Now()
		close(land)
		h.want(early, claim.Replay)
		h.want(late, claim.Replay)
		asks, _ := h.store.since(time.Time{})
		if len(asks) != 2 || len(asks[0].reqs) != 1 || len(asks[1].reqs) != 2 || time.Since(began) != 0 {
			t.Errorf("%d questions, %v", len(asks), time.Since(began))
		}
	})(t)
}

// A change that was told before a waiter came, and after it had asked, is the group's
// knowledge: it is asked for at once.
func TestWhoComesWithAnOldAnswerIsAskedForAtOnce(t *testing.T) {
	for name, during := range map[string]bool{"during the ask": true, "after the ask": false} {
		t.Run(name, bubble(func(t *testing.T) {
			h := open(t)
			token := h.held("k", time.Hour)
			old, err := h.store.current().Begin(t.Context(), request("k", "late"))
			if err != nil {
				t.Fatal(err)
			}
			first, second := h.begin(t.Context(), request("k", "1"), nil), (<-chan told)(nil)
			synctest.Wait()
			second = h.begin(t.Context(), request("k", "2"), nil)
			synctest.Wait()
			land := make(chan struct{})
			h.store.answers(func(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
				begun := h.store.current().BeginTogether(t.Context(), reqs)
				<-land
				return begun
			})
			if !during {
				close(land)
			}
			h.free("k", token)
			h.changes.of("k")
			synctest.Wait()
			late := h.wait(t.Context(), request("k", "late"), old, nil)
			synctest.Wait()
			if during {
				close(land)
			}
			token = h.want(first, claim.First).Claim.Token
			synctest.Wait()
			asks, _ := h.store.since(time.Time{})
			if n := len(asks); n != 2 || len(asks[1].reqs) != 2 {
				t.Errorf("%d questions", n)
			}
			h.complete("k", token)
			h.changes.of("k")
			h.want(second, claim.Replay)
			h.want(late, claim.Replay)
		}))
	}
}

// The same call sent twice waits twice, and both are given the one claim.
func TestTheSameCallTwice(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Hour)
		one := h.begin(t.Context(), request("k", "b"), nil)
		synctest.Wait()
		two := h.begin(t.Context(), request("k", "b"), nil)
		synctest.Wait()
		other := h.begin(t.Context(), request("k", "c"), nil)
		pass(time.Second)
		h.free("k", token)
		h.changes.of("k")
		a, b := h.want(one, claim.First), h.want(two, claim.First)
		if a.Claim.Token != b.Claim.Token || a.Repeat || !b.Repeat {
			t.Errorf("%+v and %+v", a.Claim, b.Claim)
		}
		h.drain()
		h.want(other, claim.InProgress)
	})(t)
}

// H24: who goes is not asked for; where an ask is in flight, what it was given stays, and
// the same call is told.
func TestH24WhoGoesBeforeTheAskIsNotAskedFor(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		gone := h.begin(ctx, request("k", "gone"), nil)
		synctest.Wait()
		enough := make(chan struct{})
		sated := h.begin(t.Context(), request("k", "sated"), enough)
		synctest.Wait()
		stays := h.begin(t.Context(), request("k", "stays"), nil)
		synctest.Wait()
		h.free("k", token)
		// All at once: whichever is first, neither is given the claim.
		h.changes.of("k")
		cancel()
		close(enough)
		h.want(stays, claim.First)
		if got := <-gone; !errors.Is(got.err, context.Canceled) {
			t.Errorf("%+v", got)
		}
		h.want(sated, claim.InProgress)
	})(t)
}

// ended is the context of a caller who has gone and whose call does not know it yet.
type ended struct{ context.Context }

func (ended) Done() <-chan struct{} { return nil }
func (ended) Err() error            { return context.Canceled }

// A caller that has gone is not asked for, though it has not left.
func TestH24WhoIsAboutToLeaveIsNotAskedFor(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Hour)
		gone := h.begin(ended{t.Context()}, request("k", "gone"), nil)
		synctest.Wait()
		stays := h.begin(t.Context(), request("k", "stays"), nil)
		synctest.Wait()
		h.free("k", token)
		h.changes.of("k")
		h.want(stays, claim.First)
		asks, _ := h.store.since(time.Time{})
		if len(asks) != 1 || len(asks[0].reqs) != 1 {
			t.Errorf("%d questions", len(asks))
		}
		h.drain()
		h.want(gone, claim.InProgress)
	})(t)
}

func TestH24AClaimStaysThoughItsCallerHasGone(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		token := h.held("k", time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		gone, stays := h.begin(ctx, request("k", "gone"), nil), (<-chan told)(nil)
		synctest.Wait()
		stays = h.begin(t.Context(), request("k", "stays"), nil)
		synctest.Wait()
		land := make(chan struct{})
		h.store.answers(func(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			<-land
			if ctx.Err() != nil {
				t.Error("the ask was given up though somebody waits for it")
			}
			return nil
		})
		h.free("k", token)
		h.changes.of("k")
		synctest.Wait()
		began := time.Now()
		cancel()
		if got := <-gone; !errors.Is(got.err, context.Canceled) || got.at != began {
			t.Errorf("%+v", got)
		}
		close(land)
		synctest.Wait()
		if !waits(stays) {
			t.Error("the claim was taken from who was given it")
		}
		a, err := h.store.current().Begin(t.Context(), request("k", "gone"))
		if err != nil || a.Verdict != claim.First || !a.Repeat {
			t.Errorf("the same call is told %+v, %v", a, err)
		}
		h.drain()
		h.want(stays, claim.InProgress)
	})(t)
}

// An ask that nobody waits for any more is given up.
func TestAnAskForNobodyIsGivenUp(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		one, two := h.begin(ctx, request("k", "1"), nil), h.begin(ctx, request("k", "2"), nil)
		synctest.Wait()
		givenUp := false
		h.store.answers(func(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			<-ctx.Done()
			givenUp = true
			return claim.NoneBegun(len(reqs), ctx.Err())
		})
		h.changes.of("k")
		synctest.Wait()
		began := time.Now()
		cancel()
		<-one
		<-two
		synctest.Wait()
		if !givenUp || time.Since(began) != 0 {
			t.Errorf("given up %v after %v", givenUp, time.Since(began))
		}
	})(t)
}

// Whose time comes while it is in an ask is told what that ask was told, for that may be
// the claim.
func TestAnAskInFlightIsAwaited(t *testing.T) {
	for name, end := range map[string]func(h *hall, enough chan struct{}){
		"the wait is over":    func(*hall, chan struct{}) { pass(2 * time.Second) },
		"the node drains":     func(h *hall, _ chan struct{}) { h.drain() },
		"the caller had it":   func(_ *hall, enough chan struct{}) { close(enough) },
		"all of them at once": func(h *hall, enough chan struct{}) { pass(2 * time.Second); h.drain(); close(enough) },
	} {
		for _, free := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", the key is free: ", free), bubble(func(t *testing.T) {
				h := open(t)
				token := h.held("k", time.Hour)
				req, enough := request("k", "b"), make(chan struct{})
				req.Wait = 2 * time.Second
				told := h.begin(t.Context(), req, enough)
				synctest.Wait()
				land := make(chan struct{})
				h.store.answers(func(context.Context, []*claim.BeginRequest) []claim.Begun { <-land; return nil })
				h.changes.of("k")
				synctest.Wait()
				end(h, enough)
				synctest.Wait()
				if !waits(told) {
					t.Fatal("it was answered while it might be given the claim")
				}
				verdict := claim.InProgress
				if free {
					h.free("k", token)
					verdict = claim.First
				}
				began := time.Now()
				close(land)
				if got := h.want(told, verdict); got.at != began {
					t.Error("it was told late")
				}
			}))
		}
	}
}

func TestDeadlines(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if got := h.want(h.begin(ctx, request("k", "b"), nil), claim.InProgress); got.at.Sub(began) != 1900*time.Millisecond {
			t.Errorf("answered after %v", got.at.Sub(began))
		}
		// In an ask, the outcome is awaited, and for as long as the caller is there.
		ctx, cancel = context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		h.store.answers(func(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			<-ctx.Done()
			return claim.NoneBegun(len(reqs), ctx.Err())
		})
		end := h.begin(ctx, request("k", "b"), nil)
		synctest.Wait()
		h.changes.of("k")
		began = time.Now()
		if got := <-end; !errors.Is(got.err, context.DeadlineExceeded) || got.at.Sub(began) != 2*time.Second {
			t.Errorf("%+v after %v", got, got.at.Sub(began))
		}
	})(t)
}

// An ask is bounded though its waiters are patient.
func TestAnAskIsBounded(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		h.store.answers(func(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			<-ctx.Done()
			return claim.NoneBegun(len(reqs), claim.Unavailable("no answer", ctx.Err()))
		})
		end := h.begin(t.Context(), request("k", "b"), nil)
		synctest.Wait()
		h.changes.of("k")
		began := time.Now()
		if got := <-end; claim.ReasonOf(got.err) != claim.StoreUnavailable || got.at.Sub(began) != claim.AnswerWithin {
			t.Errorf("%+v after %v", got, got.at.Sub(began))
		}
	})(t)
}

func TestDrainingAnswersAll(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		h.held("l", time.Hour)
		ends := []<-chan told{h.begin(t.Context(), request("k", "1"), nil), h.begin(t.Context(), request("k", "2"), nil), h.begin(t.Context(), request("l", "1"), nil)}
		pass(1700 * time.Millisecond)
		began := time.Now()
		h.drain()
		for _, end := range ends {
			if got := h.want(end, claim.InProgress); got.at != began || got.RetryAfter <= 0 {
				t.Errorf("%+v", got)
			}
		}
	})(t)
}

func TestMoreThanMostAreOverloaded(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t, func(c *waiting.Config) { c.Most = 3 })
		h.held("k", time.Hour)
		h.held("l", time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		one := h.begin(ctx, request("k", "1"), nil)
		h.begin(t.Context(), request("k", "2"), nil)
		h.begin(t.Context(), request("l", "3"), nil)
		synctest.Wait()
		got := <-h.begin(t.Context(), request("l", "4"), nil)
		refused, ok := errors.AsType[*claim.Error](got.err)
		if !ok || refused.Reason != claim.Overloaded || refused.RetryAfter <= 0 {
			t.Errorf("%+v", got)
		}
		cancel()
		<-one
		if again := h.begin(t.Context(), request("l", "4"), nil); true {
			synctest.Wait()
			if !waits(again) {
				t.Error("there is room again, and it may not wait")
			}
		}
		h.drain()
	})(t)
}

// OVERLOADED was not asked: it waits on, and asks again after the given time. Any other error is
// the answer, for it may have given the claim; so is a panic, which is not the end of the
// node.
func TestErrorsOfAnAsk(t *testing.T) {
	for name, c := range map[string]struct {
		begin func(*claim.BeginRequest) claim.Begun
		want  claim.Reason // of the first; "" waits on
	}{
		"overloaded": {func(*claim.BeginRequest) claim.Begun {
			return claim.Begun{Err: &claim.Error{Reason: claim.Overloaded, RetryAfter: 150 * time.Millisecond}}
		}, ""},
		"unavailable": {func(*claim.BeginRequest) claim.Begun { return claim.Begun{Err: claim.Unavailable("in doubt", nil)} }, claim.StoreUnavailable},
		"a panic":     {func(*claim.BeginRequest) claim.Begun { panic("a bug") }, claim.Internal},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			h := open(t)
			token := h.held("k", time.Hour)
			one := h.begin(t.Context(), request("k", "1"), nil)
			synctest.Wait()
			h.complete("k", token)
			h.store.answers(func(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
				h.store.answers(nil)
				return []claim.Begun{c.begin(reqs[0])}
			})
			h.changes.of("k")
			began := time.Now()
			if c.want == "" {
				if got := h.want(one, claim.Replay); got.at.Sub(began) != 150*time.Millisecond {
					t.Errorf("told %v later", got.at.Sub(began))
				}
				return
			}
			if got := <-one; claim.ReasonOf(got.err) != c.want || got.at != began {
				t.Errorf("%+v", got)
			}
		}))
	}
}

// Of those who are asked for together each has its own error.
func TestOnlyWhoseErrorItIsMeetsIt(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		bad, good := h.begin(t.Context(), request("k", "bad"), nil), h.begin(t.Context(), request("k", "good"), nil)
		synctest.Wait()
		h.store.answers(func(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			begun := h.store.current().BeginTogether(t.Context(), reqs)
			for i, req := range reqs {
				if req.Owner == "bad" {
					begun[i] = claim.Begun{Err: claim.Errorf(claim.RequestIDSpent, "spent")}
				}
			}
			return begun
		})
		h.changes.of("k")
		if got := <-bad; claim.ReasonOf(got.err) != claim.RequestIDSpent {
			t.Errorf("%+v", got)
		}
		synctest.Wait()
		if !waits(good) {
			t.Error("the other was answered, too")
		}
		h.drain()
		h.want(good, claim.InProgress)
	})(t)
}

func TestClose(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		h.held("l", time.Hour)
		idle, asking := h.begin(t.Context(), request("k", "1"), nil), h.begin(t.Context(), request("l", "1"), nil)
		synctest.Wait()
		h.store.answers(func(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
			<-ctx.Done()
			return claim.NoneBegun(len(reqs), claim.Unavailable("given up", ctx.Err()))
		})
		h.changes.of("l")
		synctest.Wait()
		h.Close()
		h.want(idle, claim.InProgress)
		if got := <-asking; claim.ReasonOf(got.err) != claim.StoreUnavailable {
			t.Errorf("%+v", got)
		}
		h.want(h.begin(t.Context(), request("k", "2"), nil), claim.InProgress)
		h.Close()
	})(t)
}

// A large group whose key changes all the time rests between its asks.
func TestALargeGroupRests(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		for range 10_000 {
			h.begin(t.Context(), request("k", "b"), nil)
		}
		synctest.Wait()
		began := time.Now()
		for range 1000 {
			h.changes.of("k")
			pass(time.Millisecond)
		}
		if asks, _ := h.store.since(began); len(asks) < 40 || len(asks) > 110 {
			t.Errorf("%d asks in a second", len(asks))
		}
		h.drain()
	})(t)
}
