package recency_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/recency"
)

const day = 24 * time.Hour

// seen has a record's key come back so many times at this age, the last of them now.
func seen(h *recency.Habits, supplier string, times int, age, now time.Duration) {
	for range times {
		h.Observe(finished("ns", supplier, now-age), claim.Instant(now))
	}
}

// ttl is that of an entry written when its record is this old.
func ttl(h *recency.Habits, supplier string, age, now time.Duration) time.Duration {
	return h.TTL(finished("ns", supplier, now-age), claim.Instant(now), usual)
}

// learned are habits that were watched for long enough, with 2,000 repeats of this age.
func learned(supplier string, age, now time.Duration) *recency.Habits {
	h := recency.New(nil)
	seen(h, supplier, 1, age, now-usual.CacheTTLMax)
	seen(h, supplier, 1999, age, now)
	return h
}

func TestNothingIsShortenedBeforeSomethingIsKnown(t *testing.T) {
	const now = 10 * day
	var none *recency.Habits
	none.Observe(finished("ns", "", now), claim.Instant(now))
	few := recency.New(nil)
	seen(few, "", 1, time.Second, now-day)
	seen(few, "", 998, time.Second, now)
	young := recency.New(nil)
	seen(young, "", 1, time.Second, now-usual.CacheTTLMax+1)
	seen(young, "", 5000, time.Second, now)
	other := recency.New(nil)
	for i := range 3000 {
		at := now - day + time.Duration(i)*time.Minute/3
		other.Observe(&claim.Record{Namespace: "other", State: claim.Failed, ResultRetention: day, ResultUntil: claim.Instant(at + day)}, claim.Instant(at))
	}
	for name, h := range map[string]*recency.Habits{"nil": none, "nothing": recency.New(nil), "few repeats": few, "watched for too short a time": young, "another namespace": other} {
		for _, age := range []time.Duration{0, time.Minute, 3 * day} {
			if got := ttl(h, "", age, now); got != usual.CacheTTLMax {
				t.Errorf("%s: %v", name, got)
			}
		}
	}
	seen(few, "", 1, time.Second, now)
	if got := ttl(few, "", 0, now); got != usual.CacheTTLMin {
		t.Errorf("the thousandth repeat leaves it at %v", got)
	}
	if got := ttl(young, "", 0, now+1); got != usual.CacheTTLMin {
		t.Errorf("watched for long enough: %v", got)
	}
}

func TestTheTTLReachesWhatComesBack(t *testing.T) {
	const now = 10 * day
	for _, c := range []struct{ age, low, high time.Duration }{
		{0, 5 * time.Minute, 5 * time.Minute},
		{4 * time.Minute, 5 * time.Minute, 5 * time.Minute},
		{10 * time.Minute, 10 * time.Minute, 12 * time.Minute},
		{time.Hour, time.Hour, 72 * time.Minute},
		{119 * time.Minute, 2 * time.Hour, 2 * time.Hour},
		// No TTL reaches these.
		{3 * time.Hour, 5 * time.Minute, 5 * time.Minute},
		{100 * day, 5 * time.Minute, 5 * time.Minute},
	} {
		h := learned("", c.age, now)
		if got := ttl(h, "", 0, now); got < c.low || got > c.high {
			t.Errorf("repeats after %v: %v", c.age, got)
		}
	}
}

// A share of one in two hundred may be later, and no more.
func TestTheTail(t *testing.T) {
	const now = 10 * day
	h := learned("", time.Minute, now) // 2,000
	seen(h, "", 10, time.Hour, now)    // 10 of 2,010
	if got := ttl(h, "", 0, now); got != usual.CacheTTLMin {
		t.Errorf("10 of 2,010: %v", got)
	}
	seen(h, "", 1, time.Hour, now)
	if got := ttl(h, "", 0, now); got < time.Hour {
		t.Errorf("11 of 2,011: %v", got)
	}
}

func TestASupplierHasItsOwnHabit(t *testing.T) {
	const now = 10 * day
	h := learned("hasty", time.Minute, now)
	seen(h, "slow", 1, 40*time.Minute, now-usual.CacheTTLMax)
	if got := ttl(h, "new", 0, now); got != usual.CacheTTLMin {
		t.Errorf("a supplier that nobody knows has %v, not its namespace's", got)
	}
	if got := ttl(h, "slow", 0, now); got < 40*time.Minute || got > time.Hour {
		t.Errorf("that a supplier was late once counts at once: %v", got)
	}
	if got := ttl(h, "hasty", 0, now); got != usual.CacheTTLMin {
		t.Errorf("another's lateness counts for one that is known: %v", got)
	}
	seen(h, "slow", 1999, 90*time.Minute, now)
	for supplier, low := range map[string]time.Duration{"slow": 90 * time.Minute, "hasty": usual.CacheTTLMin, "": 90 * time.Minute} {
		if got := ttl(h, supplier, 0, now); got < low || got > low*6/5 {
			t.Errorf("%q: %v", supplier, got)
		}
	}
}

func TestAFillHasTheRest(t *testing.T) {
	const now = 10 * day
	h := learned("", 50*time.Minute, now)
	whole := ttl(h, "", 0, now)
	for _, c := range []struct{ age, want time.Duration }{
		{10 * time.Minute, whole - 10*time.Minute},
		{20 * time.Minute, whole - 20*time.Minute},
		{whole - time.Minute, whole - time.Minute}, // as long again
		{100 * time.Minute, 100 * time.Minute},
		{5 * time.Hour, usual.CacheTTLMax},
	} {
		if got := ttl(h, "", c.age, now); got != c.want {
			t.Errorf("found missing after %v: %v, want %v", c.age, got, c.want)
		}
	}
}

func TestAChangeOfHabitIsFollowed(t *testing.T) {
	now := 10 * day
	h := learned("", time.Hour, now)
	if got := ttl(h, "", 0, now); got < time.Hour {
		t.Fatal(got)
	}
	from := now
	for ttl(h, "", 0, now) != usual.CacheTTLMin {
		if now += time.Minute; now > from+2*day+time.Hour {
			t.Fatal("an hour is still remembered after two days")
		}
		seen(h, "", 2, time.Minute, now)
	}
	seen(h, "", 60, time.Hour, now)
	if got := ttl(h, "", 0, now); got < time.Hour {
		t.Errorf("60 late repeats leave it at %v", got)
	}
	// Who sleeps forgets nothing, and one repeat does not wake another habit.
	now += 100 * day
	seen(h, "", 1, time.Minute, now)
	if got := ttl(h, "", 0, now); got < time.Hour {
		t.Errorf("after a long sleep: %v", got)
	}
}

func TestTimeThatWentBackBeginsTheWatchAnew(t *testing.T) {
	const now = 10 * day
	h := learned("", time.Minute, now)
	if got := ttl(h, "", 0, now); got != usual.CacheTTLMin {
		t.Fatal(got)
	}
	if got := ttl(h, "", 0, day); got != usual.CacheTTLMax {
		t.Errorf("right after: %v", got)
	}
	if got := ttl(h, "", 0, day+usual.CacheTTLMax); got != usual.CacheTTLMin {
		t.Errorf("watched again: %v", got)
	}
}

func TestWhatHasNoAgeIsLeftOut(t *testing.T) {
	h := recency.New(nil)
	for _, rec := range []*claim.Record{
		nil,
		{Namespace: "ns", State: claim.Pending, ResultUntil: claim.Instant(day), ResultRetention: time.Hour},
		{Namespace: "ns", State: claim.Succeeded},
		{Namespace: "ns", State: claim.Succeeded, ResultUntil: claim.Never, ResultRetention: time.Hour},
	} {
		h.Observe(rec, claim.Instant(day))
	}
	if h.Len() != 0 {
		t.Errorf("%d habits", h.Len())
	}
}

// Calls of different length end in another order than they began, at the turn of a cycle
// too.
func TestALittleDisorderIsNoNewWatch(t *testing.T) {
	now := 10 * day
	h := learned("", time.Minute, now)
	for range 3 {
		now += day
		seen(h, "", 1000, time.Minute, now)
		seen(h, "", 1, time.Minute, now-20*time.Second)
		if got := ttl(h, "", 0, now); got != usual.CacheTTLMin {
			t.Fatalf("the watch began anew: %v", got)
		}
	}
}

// Suppliers that are invented call by call take a bounded room, and push out neither
// their namespace nor other shards.
func TestTheTableIsBounded(t *testing.T) {
	const now = 10 * day
	h := learned("", time.Minute, now)
	for i := range 20_000 {
		seen(h, fmt.Sprint("invented-", i), 1, time.Minute, now)
	}
	if n := h.Len(); n > 256 {
		t.Errorf("%d habits of one namespace", n)
	}
	for i := range 20_000 {
		h.Observe(&claim.Record{Namespace: fmt.Sprint(i), State: claim.Failed, ResultRetention: day, ResultUntil: claim.Instant(now + day)}, claim.Instant(now))
	}
	if n := h.Len(); n > 4096 {
		t.Errorf("%d habits", n)
	}
	h = learned("", time.Minute, now)
	for i := range 20_000 {
		seen(h, fmt.Sprint("invented-", i), 1, time.Minute, now)
	}
	if got := ttl(h, "", 0, now); got != usual.CacheTTLMin {
		t.Errorf("the namespace was forgotten: %v", got)
	}
}

// TestProperties: whatever was seen, in whatever order, a TTL is within the policy's
// range; and for a habit that is known, it reaches all but the tail of the repeats.
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := claim.Policy{CacheTTLMin: time.Duration(rapid.Int64Range(int64(time.Second), int64(time.Hour)).Draw(t, "min"))}
		p.CacheTTLMax = p.CacheTTLMin + time.Duration(rapid.Int64Range(0, int64(day)).Draw(t, "more"))
		h := recency.New(nil)
		now := 100 * day
		suppliers := rapid.SliceOfN(rapid.SampledFrom([]string{"", "a", "b"}), 1, 3).Draw(t, "suppliers")
		groups := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) [2]int64 {
			return [2]int64{rapid.Int64Range(-int64(time.Second), int64(60*day)).Draw(t, "age"), rapid.Int64Range(1, 700).Draw(t, "times")}
		}), 1, 8).Draw(t, "groups")
		retention := 100 * day
		var ages []time.Duration
		for i, g := range groups {
			supplier := suppliers[i%len(suppliers)]
			for range g[1] {
				rec := finished("ns", supplier, 0)
				rec.ResultRetention, rec.ResultUntil = retention, claim.Instant(now-time.Duration(g[0])+retention)
				h.Observe(rec, claim.Instant(now))
				ages = append(ages, time.Duration(g[0]))
			}
			now += p.CacheTTLMax / 4
		}
		for _, supplier := range []string{"", "a", "b", "c"} {
			age := time.Duration(rapid.Int64Range(-int64(time.Second), int64(60*day)).Draw(t, "age of the entry"))
			rec := finished("ns", supplier, 0)
			rec.ResultRetention, rec.ResultUntil = retention, claim.Instant(now-age+retention)
			if ttl := h.TTL(rec, claim.Instant(now), p); ttl < p.CacheTTLMin || ttl > p.CacheTTLMax {
				t.Fatalf("%q: %v is not within %v and %v", supplier, ttl, p.CacheTTLMin, p.CacheTTLMax)
			}
		}
		if groups := len(groups); p.CacheTTLMax/4*time.Duration(groups) >= day {
			return // older ones may have made room
		}
		reach, reached, late := h.TTL(finished("ns", "", now), claim.Instant(now), p), 0, 0
		if reach == p.CacheTTLMax {
			return
		}
		for _, age := range ages {
			if age <= p.CacheTTLMax*6/5 { // the bucket of the longest TTL may reach so far beyond it
				reached++
			}
			if reach < age && age <= p.CacheTTLMax {
				late++
			}
		}
		if len(ages) < 1000 || late*200 > reached {
			t.Fatalf("%d of %d repeats are later than %v", late, reached, reach)
		}
	})
}

// counting is an Observer.
type counting struct {
	mu sync.Mutex
	by map[string]int
}

func (c *counting) TTL(by string, _ time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.by[by]++
}

func TestAnObserverIsToldOfEachTTL(t *testing.T) {
	const now = 10 * day
	c := &counting{by: map[string]int{}}
	h := recency.New(c)
	ttl(h, "", 0, now)
	seen(h, "slow", 1, time.Minute, now-usual.CacheTTLMax)
	seen(h, "slow", 1999, time.Minute, now)
	seen(h, "late", 1, time.Hour, now)
	ttl(h, "slow", 0, now)
	ttl(h, "late", 0, now)
	ttl(h, "", 0, now)
	ttl(h, "new", 0, now)
	if got := fmt.Sprint(c.by); got != "map[namespace:2 nothing:1 supplier:2]" {
		t.Error(got)
	}
}

// Many at once, for the race detector.
func TestManyAtOnce(t *testing.T) {
	h := recency.New(&counting{by: map[string]int{}})
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for j := range 2000 {
				now := time.Duration(j) * time.Minute
				supplier := fmt.Sprint(j % 3)
				seen(h, supplier, 1, time.Duration(i)*time.Minute, now+time.Hour)
				ttl(h, supplier, 0, now)
				h.Len()
			}
		})
	}
	group.Wait()
}

// told is a Store that answers this.
type told struct {
	claim.Store
	answer claim.Answer
	found  claim.Found
	err    error
}

func (s told) Begin(context.Context, *claim.BeginRequest) (claim.Answer, error) {
	return s.answer, s.err
}

func (s told) BeginTogether(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	begun := make([]claim.Begun, len(reqs))
	for i := range begun {
		begun[i] = claim.Begun{Answer: s.answer, Err: s.err}
	}
	return begun
}

func (s told) Get(context.Context, *claim.GetRequest) (claim.Found, error) { return s.found, s.err }

func TestAStoreIsWatched(t *testing.T) {
	const now = 10 * day
	rec, at := finished("ns", "", now-time.Minute), claim.Instant(now)
	for _, c := range []struct {
		what     string
		behind   told
		observed bool
	}{
		{"replay", told{answer: claim.Answer{Verdict: claim.Replay, Record: rec, Now: at}}, true},
		{"failure", told{answer: claim.Answer{Verdict: claim.ReplayFailure, Record: rec, Now: at}}, true},
		{"stale", told{answer: claim.Answer{Verdict: claim.Replay, Record: rec, Now: at, Stale: true}}, false},
		{"first", told{answer: claim.Answer{Verdict: claim.First, Now: at}}, false},
		{"expired", told{answer: claim.Answer{Verdict: claim.Expired, Record: rec, Now: at}}, false},
		{"conflict", told{answer: claim.Answer{Verdict: claim.Conflict, Now: at}}, false},
		{"error", told{answer: claim.Answer{Verdict: claim.Replay, Record: rec, Now: at}, err: errors.New("no")}, false},
	} {
		for name, call := range map[string]func(s claim.Store){
			"alone":    func(s claim.Store) { _, _ = s.Begin(t.Context(), nil) },
			"together": func(s claim.Store) { s.BeginTogether(t.Context(), make([]*claim.BeginRequest, 3)) },
		} {
			h := recency.New(nil)
			call(h.Front(c.behind))
			if got := h.Len() == 1; got != c.observed {
				t.Errorf("%s, %s: observed %v", c.what, name, got)
			}
		}
	}
	for _, c := range []struct {
		what     string
		behind   told
		observed bool
	}{
		{"finished", told{found: claim.Found{Record: rec, Now: at}}, true},
		{"pending", told{found: claim.Found{Record: &claim.Record{Namespace: "ns", State: claim.Pending}, Now: at}}, false},
		{"nothing", told{found: claim.Found{Now: at}}, false},
		{"stale", told{found: claim.Found{Record: rec, Now: at, Stale: true}}, false},
		{"error", told{found: claim.Found{Record: rec, Now: at}, err: errors.New("no")}, false},
	} {
		h := recency.New(nil)
		_, _ = h.Front(c.behind).Get(t.Context(), &claim.GetRequest{})
		if got := h.Len() == 1; got != c.observed {
			t.Errorf("get, %s: observed %v", c.what, got)
		}
	}
}

func BenchmarkObserve(b *testing.B) {
	for _, supplier := range []string{"", "acme"} {
		b.Run(fmt.Sprintf("supplier=%q", supplier), func(b *testing.B) {
			h := learned(supplier, time.Minute, 10*day)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				rec, now := finished("ns", supplier, 10*day), 10*day
				for pb.Next() {
					now += time.Millisecond
					h.Observe(rec, claim.Instant(now))
				}
			})
		})
	}
}

func BenchmarkTTL(b *testing.B) {
	for _, supplier := range []string{"", "acme"} {
		b.Run(fmt.Sprintf("supplier=%q", supplier), func(b *testing.B) {
			h := learned(supplier, time.Minute, 10*day)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				rec := finished("ns", supplier, 10*day)
				for pb.Next() {
					if h.TTL(rec, claim.Instant(10*day), usual) == math.MaxInt64 {
						b.Fatal("not a TTL")
					}
				}
			})
		})
	}
}
