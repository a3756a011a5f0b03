package waiting

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// cause is why a group asks.
type cause string

const (
	causeNone   cause = ""
	causeChange cause = "change"
	causeLease  cause = "lease"
	causeSecond cause = "second"
	causeRetry  cause = "retry"
)

// waiter is one caller that waits. What is below ctx is under its group's mu, until it is
// told.
type waiter struct {
	ctx    context.Context
	req    *claim.BeginRequest
	enough <-chan struct{}

	// last is what it was told last, and err what it met instead.
	last claim.Answer
	err  error
	// told has a value once it is answered.
	told chan struct{}
	// asked is the ask in flight that it is in.
	asked *ask
	// final: the next outcome is its answer, whatever it is.
	final bool
	// gone: it is answered, or has left.
	gone bool
}

// gaveUp reports whether the caller waits no longer.
func (w *waiter) gaveUp() bool {
	select {
	case <-w.enough:
		return true
	default:
		return w.ctx.Err() != nil
	}
}

// tell answers it, once.
func (w *waiter) tell() {
	w.gone = true
	w.told <- struct{}{}
}

// ask is one question for many.
type ask struct {
	waiters []*waiter
	// here is how many of them have not left; with the last, the ask is given up.
	here   int
	cancel context.CancelFunc
}

// group is those who wait for one key.
type group struct {
	room *Room
	name name
	key  string // in etcd

	follow   sync.Once
	changed  <-chan struct{}
	unfollow func()

	// Under the Room's mu: who keeps the group, and its place in the rounds.

	members int
	place   *list.Element
	fresh   bool
	due     time.Time

	mu sync.Mutex
	// waiting are in the order in which they came; gone are those of them who are gone.
	waiting []*waiter
	gone    int
	// asking: a goroutine asks. again is why it is to ask once more.
	asking bool
	again  cause
	// wanted is since when an ask has been wanted, and sent when the last was sent.
	wanted, sent time.Time
	// rested is when it may ask again, if it is a large one.
	rested time.Time
	// revision is the key's, and guard the guard's, by which all were told that it is in
	// progress; 0: not known.
	revision, guard int64
	// lapse is when the claim in the way lapses, and retry when to ask while changes are
	// not told; zero: not known. pressed: the last ask was OVERLOADED, so that it asks at
	// retry, and not before.
	lapse, retry time.Time
	pressed      bool
	// timer is for whichever comes first, at wake and for reason.
	timer  *time.Timer
	wake   time.Time
	reason cause
	over   bool
}

// polite is how long a group that polls waits after an answer.
func polite(retryAfter time.Duration) time.Duration {
	return max(min(retryAfter, askEvery), askLeast)
}

// sooner returns the earlier of two times, of which zero is none.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// join takes a waiter in.
func (g *group) join(w *waiter) {
	now := time.Now()
	g.mu.Lock()
	late := false
	switch {
	case w.last.Revision != 0 && w.last.Revision < g.revision:
		late = true // the others know better: the change was told before it came
	case len(g.waiting) == g.gone:
		g.revision, g.guard = w.last.Revision, w.last.Guard
	case w.last.Guard != g.guard:
		g.guard = 0 // the older of both is what counts, and the next round asks
	}
	g.waiting = append(g.waiting, w)
	if w.last.LapsesIn > 0 {
		g.lapse = sooner(g.lapse, now.Add(w.last.LapsesIn))
	}
	g.retry = sooner(g.retry, now.Add(polite(w.last.RetryAfter)))
	if !g.asking {
		g.arm()
	}
	g.mu.Unlock()
	if late {
		g.want(causeChange)
	}
}

// abandon takes a waiter out whose context has ended; false: it is answered.
func (g *group) abandon(w *waiter) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.gone {
		return false
	}
	if w.asked != nil {
		if w.asked.here--; w.asked.here == 0 {
			w.asked.cancel() // it is for nobody any more
		}
	}
	g.drop(w)
	return true
}

// answered takes a waiter out that is to be answered with what it was told last. One that
// is in an ask stays for its outcome, for it may be given the claim: false.
func (g *group) answered(w *waiter) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.gone || w.asked != nil {
		w.final = true
		return false
	}
	g.drop(w)
	return true
}

// drop takes a waiter out; mu is held.
func (g *group) drop(w *waiter) {
	w.gone = true
	if g.gone++; 2*g.gone > len(g.waiting) {
		g.tidy()
	}
}

// tidy forgets who is gone; mu is held.
func (g *group) tidy() {
	here := g.waiting[:0]
	for _, w := range g.waiting {
		if !w.gone {
			here = append(here, w)
		}
	}
	clear(g.waiting[len(here):])
	g.waiting, g.gone = here, 0
}

// askOnceMore has the next outcome be the waiter's answer, and asks; false: there is none
// to be had soon.
func (g *group) askOnceMore(w *waiter) bool {
	g.mu.Lock()
	if g.pressed && !g.asking {
		g.mu.Unlock()
		return false
	}
	w.final = true
	underway := w.asked != nil
	g.mu.Unlock()
	if !underway {
		g.want(causeRetry)
	}
	return true
}

// want asks for all who wait: now, or once what is in flight is back.
func (g *group) want(why cause) {
	g.mu.Lock()
	if g.asking {
		if g.again == causeNone {
			g.again = why
		}
		g.mu.Unlock()
		return
	}
	if g.pressed && time.Now().Before(g.retry) {
		g.mu.Unlock()
		return // the timer asks once it is time to come back
	}
	g.asking, g.wanted = true, time.Now()
	g.mu.Unlock()
	if !g.room.hold(g) {
		return // a timer or a round came too late
	}
	asks := func() {
		defer g.room.release(g)
		g.ask(why)
	}
	if !g.room.start(asks) {
		g.dismiss()
		g.room.release(g)
	}
}

// dismiss answers all with what they have: the Room is closed.
func (g *group) dismiss() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, w := range g.waiting {
		if !w.gone && w.asked == nil {
			w.tell()
		}
	}
	g.tidy()
	g.asking = false
}

// end is called once nobody is left, the ask in flight included.
func (g *group) end() {
	g.mu.Lock()
	g.over = true
	if g.timer != nil {
		g.timer.Stop()
	}
	g.mu.Unlock()
	if g.unfollow != nil {
		g.unfollow()
	}
}

// ask asks until nothing more is to be asked.
func (g *group) ask(why cause) {
	for why != causeNone {
		g.rest()
		ctx, cancel := context.WithTimeout(g.room.ctx, claim.AnswerWithin)
		a := g.send(cancel)
		var begun []claim.Begun
		if len(a.waiters) > 0 {
			g.room.cfg.Observe.Asked(string(why), len(a.waiters))
			begun = g.beginTogether(ctx, a.waiters)
		}
		cancel()
		why = g.settle(a, begun, why)
	}
}

// restEach is how long a group rests after an ask, for each of its waiters: judging one
// takes about a microsecond, so that a large group whose key changes all the time takes a
// third of a processor, and a small one, which does not rest at all, notices nothing.
const (
	restEach  = 2 * time.Microsecond
	restLeast = time.Millisecond
)

// rest waits until the group has rested.
func (g *group) rest() {
	g.mu.Lock()
	left := time.Until(g.rested)
	g.mu.Unlock()
	if left <= 0 {
		return
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-g.room.ctx.Done():
	}
}

// send makes the ask of all who wait now.
func (g *group) send(cancel context.CancelFunc) *ask {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.again, g.sent = causeNone, time.Now()
	g.lapse, g.retry, g.pressed = time.Time{}, time.Time{}, false
	a := &ask{cancel: cancel, waiters: make([]*waiter, 0, len(g.waiting)-g.gone)}
	for _, w := range g.waiting {
		// Who has gone must not be given what others wait for; it leaves by itself.
		if !w.gone && !w.gaveUp() {
			w.asked = a
			a.waiters = append(a.waiters, w)
		}
	}
	a.here = len(a.waiters)
	return a
}

// beginTogether asks the Store. A panic is an error of all, and not the end of the node.
func (g *group) beginTogether(ctx context.Context, waiters []*waiter) (begun []claim.Begun) {
	defer func() {
		if p := recover(); p != nil {
			err := &claim.Error{Reason: claim.Internal, Message: "internal error", Err: fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
			begun = claim.NoneBegun(len(waiters), err)
		}
	}()
	reqs := make([]*claim.BeginRequest, len(waiters))
	for i, w := range waiters {
		reqs[i] = w.req
	}
	// There was a record a moment ago: a read tells, and leaves no claim behind.
	first := *reqs[0]
	first.Hint = claim.LikelyRepeat
	reqs[0] = &first
	return g.room.cfg.Store.BeginTogether(ctx, reqs)
}

// settle tells those who have an answer, and returns why to ask once more.
func (g *group) settle(a *ask, begun []claim.Begun, why cause) cause {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	told := false
	for i, w := range a.waiters {
		w.asked = nil
		if w.gone {
			continue
		}
		b := &begun[i]
		switch {
		case claim.ReasonOf(b.Err) == claim.Overloaded: // not asked: it is as it was
			g.pressed = true
			g.retry = sooner(g.retry, now.Add(polite(retryAfter(b.Err))))
		case b.Err != nil:
			w.last, w.err, w.final = claim.Answer{}, b.Err, true
		default:
			w.last = b.Answer
			w.final = w.final || w.last.Verdict != claim.InProgress
			g.revision, g.guard = w.last.Revision, w.last.Guard
		}
		if w.final {
			w.tell()
			told = true
		}
	}
	g.tidy()
	if rest := time.Duration(len(g.waiting)) * restEach; rest >= restLeast {
		g.rested = now.Add(rest)
	}
	if told {
		g.room.cfg.Observe.Woken(now.Sub(g.wanted))
	}
	if next := g.next(a, why, now); next != causeNone && len(g.waiting) > 0 {
		g.wanted = now
		return next
	}
	g.asking = false
	g.arm()
	return causeNone
}

// next notes when to ask again, and returns why to do so at once; mu is held.
func (g *group) next(a *ask, why cause, now time.Time) cause {
	least := askLeast
	if why == causeLease {
		least = lapseLeast
	}
	for _, w := range g.waiting {
		switch {
		case g.pressed: // to ask again at once is what OVERLOADED is there to prevent
		case !w.final && (w.last.Revision == 0 || w.last.Revision >= g.revision), w.gaveUp():
		case w.final:
			return causeRetry // its last question, for which it came too late
		default:
			return causeChange // it came while those were asked who know better
		}
	}
	// The first is who would be given the claim. One who gave up was not asked for: what it
	// was told is old.
	if i := slices.IndexFunc(g.waiting, func(w *waiter) bool { return !w.gaveUp() }); i >= 0 && len(a.waiters) > 0 {
		last := &g.waiting[i].last
		if !g.pressed {
			g.retry = sooner(g.retry, now.Add(polite(last.RetryAfter)))
		}
		if last.LapsesIn > 0 {
			g.lapse = sooner(g.lapse, now.Add(max(last.LapsesIn, least)))
		}
	}
	if g.pressed {
		return causeNone
	}
	return g.again
}

// retryAfter is how long an OVERLOADED caller is sent away.
func retryAfter(err error) time.Duration {
	if e, ok := errors.AsType[*claim.Error](err); ok {
		return e.RetryAfter
	}
	return 0
}

// arm sets the timer; mu is held, and nothing is being asked.
func (g *group) arm() {
	if g.over || len(g.waiting) == g.gone {
		return
	}
	wake, reason := g.lapse, causeLease
	switch {
	case g.pressed: // no sooner than OVERLOADED said, whatever else is due: it is asked then
		wake, reason = g.retry, causeRetry
	case !g.room.live():
		if t := sooner(wake, g.retry); !t.Equal(wake) {
			wake, reason = t, causeRetry
		}
	}
	if wake.Equal(g.wake) && !wake.IsZero() && reason == g.reason {
		return
	}
	g.wake, g.reason = wake, reason
	switch {
	case wake.IsZero():
		if g.timer != nil {
			g.timer.Stop()
		}
	case g.timer == nil:
		g.timer = time.AfterFunc(time.Until(wake), g.ring)
	default:
		g.timer.Reset(time.Until(wake))
	}
}

// ring asks, if it is time.
func (g *group) ring() {
	g.mu.Lock()
	if g.over || g.wake.IsZero() || time.Now().Before(g.wake) {
		g.mu.Unlock()
		return // it was set anew meanwhile
	}
	g.wake = time.Time{}
	asking, reason := g.asking, g.reason
	g.mu.Unlock()
	if !asking { // else what comes back says when to ask again
		g.want(reason)
	}
}

// rearm lets a group that nobody tells of changes any more poll.
func (g *group) rearm() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.asking {
		g.arm()
	}
}

// checked is told what a round read that was sent at this time, and asks if all were told
// something else.
func (g *group) checked(sent time.Time, revision, guard int64) {
	g.mu.Lock()
	// An ask that was sent since knows better.
	same := g.asking || !g.sent.Before(sent) || len(g.waiting) == g.gone ||
		revision != 0 && revision == g.revision && guard == g.guard
	g.mu.Unlock()
	if !same {
		g.want(causeSecond)
	}
}
