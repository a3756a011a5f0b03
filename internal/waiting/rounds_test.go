package waiting_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// C09: each key is looked at once a second, a hundred together, and the looks are spread
// over the second, however the keys came.
func TestC09RoundsAreFewAndEven(t *testing.T) {
	for name, apart := range map[string]time.Duration{"all at once": 0, "one after another": 100 * time.Microsecond} {
		t.Run(name, bubble(func(t *testing.T) {
			const many = 10_000
			h := open(t)
			ctx, cancel := context.WithCancel(t.Context())
			began := time.Now()
			var ends []<-chan told
			for i := range many {
				key, ctx := fmt.Sprint(i), ctx
				if i%2 == 1 {
					ctx = t.Context()
				}
				h.held(key, time.Hour)
				ends = append(ends, h.begin(ctx, request(key, "b"), nil))
				if apart > 0 {
					pass(apart)
				}
			}
			pass(3 * time.Second) // each was looked at a first time, and the looks have spread
			even := time.Now()
			pass(5 * time.Second)
			h.even(even, 5, many/100)
			// Half of them go, and the others are still looked at in time.
			cancel()
			pass(2 * time.Second)
			even = time.Now()
			pass(5 * time.Second)
			h.even(even, 5, many/2/100)
			if asks, reads := h.store.since(began); len(asks) != 0 || reads > 17*many/100 {
				t.Errorf("%d asks and %d looks", len(asks), reads)
			}
			h.apart(5 * time.Millisecond)
			h.inTime(began, func(i int) bool { return i%2 == 1 })
			h.drain()
			for i, end := range ends {
				if i%2 == 1 {
					h.want(end, claim.InProgress)
				} else {
					<-end
				}
			}
			synctest.Wait()
			if h.seen.groups != 0 || h.changes.following() != 0 {
				t.Errorf("%d groups are left", h.seen.groups)
			}
			// Nobody is looked at once nobody is there.
			pass(time.Millisecond)
			idle := time.Now()
			pass(10 * time.Second)
			if _, reads := h.store.since(idle); reads != 0 {
				t.Errorf("%d looks for nobody", reads)
			}
		}))
	}
}

// even checks that there were so many looks a second since then, evenly spread.
func (h *hall) even(since time.Time, seconds, perSecond int) {
	h.t.Helper()
	_, reads := h.store.since(since)
	if want := seconds * perSecond; reads < want-2 || reads > want+2 {
		h.t.Errorf("%d looks in %d s, want %d", reads, seconds, want)
	}
	h.store.mu.Lock()
	defer h.store.mu.Unlock()
	tenths := map[time.Duration]int{}
	for _, r := range h.store.reads {
		if at := r.at.Sub(since); at >= 0 {
			tenths[at/(100*time.Millisecond)]++
		}
	}
	for tenth, n := range tenths {
		if n > perSecond/10+2 {
			h.t.Errorf("%d looks within the %dth tenth of a second", n, tenth)
		}
	}
}

// apart checks that no two looks followed each other sooner.
func (h *hall) apart(least time.Duration) {
	h.t.Helper()
	h.store.mu.Lock()
	defer h.store.mu.Unlock()
	for i, r := range h.store.reads[1:] {
		if gap := r.at.Sub(h.store.reads[i].at); gap < least {
			h.t.Fatalf("look %d came %v after the one before", i+1, gap)
		}
	}
}

// inTime checks that no key of these went without a look for more than a second.
func (h *hall) inTime(since time.Time, of func(i int) bool) {
	h.t.Helper()
	now := time.Now()
	h.store.mu.Lock()
	defer h.store.mu.Unlock()
	for key, name := range h.store.keys {
		var i int
		if _, err := fmt.Sscan(name, &i); err != nil || !of(i) {
			continue
		}
		looks := append(h.store.read[key], now)
		for n, at := range looks[1:] {
			if gap := at.Sub(looks[n]); gap > time.Second {
				h.t.Fatalf("key %d was not looked at for %v, from %v on", i, gap, looks[n].Sub(since))
			}
		}
	}
}

// Keys that come while the rounds sleep do not wait for their end.
func TestAKeyThatComesLateIsLookedAtSoon(t *testing.T) {
	bubble(func(t *testing.T) {
		h := open(t)
		h.held("k", time.Hour)
		h.held("l", time.Hour)
		first := h.begin(t.Context(), request("k", "b"), nil)
		pass(500 * time.Millisecond)
		began := time.Now()
		second := h.begin(t.Context(), request("l", "b"), nil)
		pass(time.Second)
		h.store.mu.Lock()
		looks := h.store.read[layout.NameOf("a", "l").Key]
		h.store.mu.Unlock()
		if len(looks) == 0 || looks[0].Sub(began) > 100*time.Millisecond {
			t.Errorf("looked at %v after %v", looks, began)
		}
		h.drain()
		h.want(first, claim.InProgress)
		h.want(second, claim.InProgress)
	})(t)
}
