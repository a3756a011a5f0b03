package robustness

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// The judge is judged: each history is told as it may be, and then with one answer
// that breaks a promise.

const ms = time.Millisecond

// story is a history made by hand. Each call takes 10 ms and begins when the one
// before has ended, unless it says otherwise.
type story struct {
	*book
	clock time.Duration
}

func newStory() *story {
	s := &story{}
	s.book = newBook("k", func() time.Duration { return time.Hour })
	return s
}

func (s *story) add(c *call) *call {
	if c.end == 0 {
		c.start, c.end = s.clock+ms, s.clock+10*ms
	}
	c.who, c.key = "w0", "k"
	s.clock = max(s.clock, c.end)
	s.enter(c)
	return c
}

// later lets time pass.
func (s *story) later(d time.Duration) *story {
	s.clock += d
	return s
}

func (s *story) first(fence int64, attempt int32, previous claim.Previous) *call {
	return s.add(first(fence, attempt, previous))
}

func first(fence int64, attempt int32, previous claim.Previous) *call {
	token := "token" + string(rune('a'+fence%26))
	return &call{op: begin, request: "r@" + token, verdict: claim.First, given: token, fence: fence, attempt: attempt, previous: previous, left: time.Second, revision: fence, source: claim.SourceEtcd}
}

func completed(of *call, what string, revision int64) *call {
	return &call{op: finish, token: of.given, sent: what, state: claim.Succeeded, shown: what, digest: "digest of " + what, finished: revision, revision: revision}
}

func (s *story) completes(of *call, what string, revision int64) *call {
	return s.add(completed(of, what, revision))
}

func released(of *call) *call {
	return &call{op: finish, class: claim.Retryable, token: of.given, sent: "released", state: claim.Released}
}

func extended(of *call, left time.Duration) *call {
	return &call{op: extend, token: of.given, fence: of.fence, attempt: of.attempt, left: left}
}

func replayed(of *call) *call {
	return &call{op: begin, request: "x@x", verdict: claim.Replay, state: claim.Succeeded, shown: of.sent, digest: "digest of " + of.sent, finished: of.finished, revision: of.finished, source: claim.SourceRedis}
}

func (s *story) replays(of *call) *call { return s.add(replayed(of)) }

func (s *story) forgets(revision int64) *call { return s.add(&call{op: forget, revision: revision}) }

func refused(o op, token string, why claim.Reason) *call {
	return &call{op: o, token: token, sent: "refused by " + token, reason: why}
}

func inProgress() *call { return &call{op: begin, request: "y@y", verdict: claim.InProgress} }

func at(start, end time.Duration, c *call) *call {
	c.start, c.end = start, end
	return c
}

var stories = []struct {
	name string
	tell func(s *story)
	// wrong is part of what is to be said; "": nothing is wrong.
	wrong string
}{
	{"a life", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.add(inProgress())
		s.add(released(a))
		b := s.first(12, 2, claim.PreviousReleased)
		f := s.completes(b, "b", 13)
		s.replays(f)
		s.add(refused(finish, a.given, claim.ClaimLost))
		s.add(refused(finish, b.given, claim.AlreadyFinished))
		s.forgets(14)
		s.later(3 * time.Second).add(refused(get, "", claim.RecordNotFound))
		c := s.first(16, 1, claim.PreviousNone)
		s.add(refused(finish, b.given, claim.ClaimLost))
		s.replays(s.completes(c, "c", 17))
	}, ""},
	{"a takeover", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.later(time.Second).first(12, 2, claim.PreviousLapsed)
	}, ""},
	{"a takeover too soon", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.later(900*ms).first(12, 2, claim.PreviousLapsed)
	}, "G1: two claims at once"},
	{"a takeover of what was extended", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.later(500 * ms).add(extended(a, time.Second))
		s.later(500*ms).first(12, 2, claim.PreviousLapsed)
	}, "G1: two claims at once"},
	{"two firsts", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.first(11, 1, claim.PreviousNone)
	}, "G1: two claims at once"},
	{"two firsts at the same time", func(s *story) {
		s.add(at(ms, 20*ms, first(10, 1, claim.PreviousNone)))
		s.add(at(2*ms, 19*ms, first(11, 2, claim.PreviousLapsed)))
	}, "G1: two claims at once"},
	{"one claim for two", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.first(10, 1, claim.PreviousNone)
	}, "G6: the claim with fence 10 was given twice"},
	{"a repeat", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		c := first(10, 1, claim.PreviousNone)
		c.repeat = true
		s.add(c)
	}, ""},
	{"a repeat for another", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		c := first(10, 1, claim.PreviousNone)
		c.repeat, c.request = true, "other@other"
		s.add(c)
	}, "G6: the claim with fence 10 was given to another call"},
	{"a repeat after a release", func(s *story) {
		s.add(released(s.first(10, 1, claim.PreviousNone)))
		c := first(10, 1, claim.PreviousNone)
		c.repeat = true
		s.add(c)
	}, "G1: given again after its release"},
	{"a fence going back", func(s *story) {
		s.add(released(s.first(10, 1, claim.PreviousNone)))
		s.first(9, 2, claim.PreviousReleased)
	}, "G1: given fence 9"},
	{"attempts going back", func(s *story) {
		s.add(released(s.first(10, 3, claim.PreviousNone)))
		s.first(12, 3, claim.PreviousReleased)
	}, "G1: attempt 3"},
	{"an attempt that nobody was told of", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.later(time.Second).add(&call{op: begin, request: "h@h", reason: claim.StoreUnavailable})
		s.later(2*time.Second).first(14, 3, claim.PreviousLapsed)
	}, ""},
	{"an attempt that nobody asked for", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.later(3*time.Second).first(14, 3, claim.PreviousLapsed)
	}, "G1: attempt 3"},
	{"after a release that was none", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.later(time.Second).first(12, 2, claim.PreviousReleased)
	}, "G1: fence 12 was given after a release"},
	{"a release that was refused when it was sent again", func(s *story) {
		r := refused(finish, s.first(10, 1, claim.PreviousNone).given, claim.ClaimLost)
		r.class, r.retries = claim.Retryable, 1
		s.add(at(20*ms, 30*ms, first(12, 2, claim.PreviousReleased)))
		s.add(at(11*ms, 50*ms, r))
	}, ""},
	{"an attempt hidden by a Begin that was sent again", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		b := inProgress()
		b.retries = 1
		s.add(b)
		s.add(released(a))
		s.later(2*time.Second).first(14, 3, claim.PreviousLapsed)
	}, ""},
	{"more attempts than were sent", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		b := inProgress()
		b.retries = 1
		s.add(b)
		s.add(released(a))
		s.later(4*time.Second).first(14, 5, claim.PreviousLapsed)
	}, "G1: attempt 5"},
	{"an attempt of what surely was not carried out", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.later(time.Second).add(&call{op: begin, request: "h@h", reason: claim.StoreUnavailable, never: true})
		s.later(2*time.Second).first(14, 3, claim.PreviousLapsed)
	}, "G1: attempt 3"},
	{"a finish that surely was not carried out", func(s *story) {
		f := completed(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(&call{op: finish, token: f.token, sent: "a", reason: claim.Draining, never: true, retries: 3})
		s.replays(f)
	}, "G3: it shows what a refused finish sent"},
	{"a first after the finish", func(s *story) {
		s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.later(2*time.Second).first(12, 2, claim.PreviousLapsed)
	}, "G2: finished at revision 11, and claimed again"},
	{"a first after a finish without an answer, which was seen", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		f := completed(a, "a", 11)
		s.replays(f)
		s.add(&call{op: finish, token: a.given, sent: "a", reason: claim.StoreUnavailable, start: ms * 12, end: ms * 13})
		s.later(2*time.Second).first(12, 2, claim.PreviousLapsed)
	}, "G2: finished at revision 11, and claimed again"},
	{"a first after a finish without an answer", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.add(&call{op: finish, token: a.given, sent: "a", reason: claim.StoreUnavailable})
		s.later(2*time.Second).first(12, 2, claim.PreviousLapsed)
	}, ""},
	{"a lost result", func(s *story) {
		s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(inProgress())
	}, "G2: a lost result"},
	{"a lost result, pending again", func(s *story) {
		s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(&call{op: get, state: claim.Pending, revision: 12})
	}, "G2: a lost result"},
	{"a lost key", func(s *story) {
		s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(refused(get, "", claim.RecordNotFound))
	}, "G4: it is not known"},
	{"a lost claim", func(s *story) {
		s.first(10, 1, claim.PreviousNone)
		s.add(refused(get, "", claim.RecordNotFound))
	}, "G4: it is not known"},
	{"claimed again while a forget has no answer yet", func(s *story) {
		// The finish is judged before the forget that came after it has ended.
		s.add(at(10*ms, 20*ms, first(10, 1, claim.PreviousNone)))
		f := s.add(at(30*ms, 40*ms, completed(s.waiting[0], "a", 11)))
		s.add(at(50*ms, 3200*ms, &call{op: forget, revision: 12}))
		s.add(at(3100*ms, 3110*ms, first(13, 1, claim.PreviousNone)))
		s.add(at(35*ms, 3105*ms, replayed(f)))
	}, ""},
	{"in progress while it is finished", func(s *story) {
		f := completed(s.first(10, 1, claim.PreviousNone), "a", 12)
		s.add(at(20*ms, 40*ms, inProgress()))
		s.add(at(21*ms, 30*ms, f))
	}, ""},
	{"in progress while it is forgotten", func(s *story) {
		s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(at(100*ms, 3100*ms, &call{op: forget, revision: 12}))
		s.add(at(200*ms, 210*ms, inProgress()))
	}, ""},
	{"a replay while it is forgotten", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(at(100*ms, 3100*ms, &call{op: forget, revision: 12}))
		s.add(at(200*ms, 210*ms, replayed(f)))
	}, ""},
	{"an old answer after a forget", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.forgets(12)
		s.replays(f)
	}, "G4: an old answer"},
	{"an old answer to a Get after a forget", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.forgets(12)
		c := replayed(f)
		c.op, c.verdict = get, 0
		s.add(c)
	}, "G4: an old answer"},
	{"an old answer after the next claim", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(at(100*ms, 3100*ms, &call{op: forget, revision: 12}))
		s.add(at(200*ms, 210*ms, first(13, 1, claim.PreviousNone)))
		s.add(at(220*ms, 230*ms, replayed(f)))
	}, "G4: an old answer"},
	{"an old answer after the next finish", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.forgets(12)
		s.later(3*time.Second).completes(s.first(13, 1, claim.PreviousNone), "b", 14)
		s.replays(f)
	}, "G4: an old answer"},
	{"freed by two forgets", func(s *story) {
		s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(at(100*ms, 3110*ms, &call{op: forget, revision: 12}))
		s.add(at(200*ms, 3210*ms, &call{op: forget, revision: 12}))
		s.add(at(3120*ms, 3130*ms, &call{op: forget, revision: 14}))
		s.add(at(3140*ms, 3150*ms, first(15, 1, claim.PreviousNone)))
	}, ""},
	{"freed too soon", func(s *story) {
		s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		s.add(at(100*ms, 3110*ms, &call{op: forget, revision: 12}))
		s.add(at(3080*ms, 3090*ms, first(13, 1, claim.PreviousNone)))
	}, "G4: fence 13 was given at 3.0900"},
	{"changed bytes", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		c := replayed(f)
		c.shown = "b"
		s.add(c)
	}, "G2: nobody sent what it shows"},
	{"a changed digest", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		c := replayed(f)
		c.digest = "other"
		s.add(c)
	}, "G2: a had digest"},
	{"another revision", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		c := replayed(f)
		c.finished = 12
		s.add(c)
	}, "G2: a was finished at revision 11"},
	{"a failure as a result", func(s *story) {
		f := s.completes(s.first(10, 1, claim.PreviousNone), "a", 11)
		c := replayed(f)
		c.verdict, c.state = claim.ReplayFailure, claim.Failed
		s.add(c)
	}, "G2: a was sent otherwise"},
	{"the bytes of a refused finish", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.completes(a, "a", 11)
		s.add(refused(finish, a.given, claim.AlreadyFinished))
		c := completed(a, "refused by "+a.given, 12)
		s.replays(c)
	}, "G3: it shows what a refused finish sent"},
	{"two finishes", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.completes(a, "a", 11)
		s.completes(a, "b", 12)
	}, "G2: finished at revision 11, and again at revision 12"},
	{"a finish by an older claim", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.later(time.Second).first(12, 2, claim.PreviousLapsed)
		s.completes(a, "a", 13)
	}, "G3: it was finished at revision 13 by the claim with fence 10"},
	{"a finish after a forget", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.forgets(11)
		s.completes(a, "a", 12)
	}, "G4: the claim with fence 10 was forgotten"},
	{"told of another's finish", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.completes(a, "a", 11)
		c := completed(a, "a", 11)
		c.sent = "b"
		s.add(c)
	}, "G2: it was told that it finished the key"},
	{"refused though the newest", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.add(refused(finish, a.given, claim.ClaimLost))
	}, "G3: the holder of the newest claim was refused"},
	{"already finished by nobody", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.add(refused(finish, a.given, claim.AlreadyFinished))
	}, "G2: nobody had finished it"},
	{"extended with another fence", func(s *story) {
		c := extended(s.first(10, 1, claim.PreviousNone), time.Second)
		c.fence = 11
		s.add(c)
	}, "G6: the claim with fence 10 and attempt 1 was extended as another"},
	{"extended after the takeover", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.later(2*time.Second).first(12, 2, claim.PreviousLapsed)
		s.add(extended(a, ms))
	}, "G3: the claim with fence 10 was extended"},
	{"released after the takeover", func(s *story) {
		a := s.first(10, 1, claim.PreviousNone)
		s.later(2*time.Second).first(12, 2, claim.PreviousLapsed)
		s.add(released(a))
	}, "G3: the claim with fence 10 was released"},
	{"attempt 1 twice", func(s *story) {
		s.add(released(s.first(10, 1, claim.PreviousNone)))
		s.first(12, 1, claim.PreviousNone)
	}, "G1: attempt 1 with fence 12"},
	{"internal", func(s *story) {
		s.add(refused(get, "", claim.Internal))
	}, "INTERNAL is never due here"},
	{"unreadable", func(s *story) {
		s.add(&call{op: begin, request: "x@x", reason: claim.RecordUnreadable})
	}, "RECORD_UNREADABLE is never due here"},
	{"a conflict with nothing", func(s *story) {
		s.add(&call{op: begin, request: "x@x", verdict: claim.Conflict})
	}, "CONFLICT is never due here"},
	{"spent and never given", func(s *story) {
		s.add(&call{op: begin, request: "x@x", reason: claim.RequestIDSpent})
	}, "G6: this request was never given"},
	{"stale", func(s *story) {
		c := replayed(s.completes(s.first(10, 1, claim.PreviousNone), "a", 11))
		c.stale = true
		s.add(c)
	}, "G7"},
}

func TestJudge(t *testing.T) {
	for _, tt := range stories {
		t.Run(tt.name, func(t *testing.T) {
			// In one piece, and call by call as it was told.
			whole := newStory()
			tt.tell(whole)
			calls := slices.Clone(whole.waiting)
			whole.judge()
			expect(t, whole.book, tt.wrong)

			pieces := newBook("k", func() time.Duration { return time.Hour })
			slices.SortStableFunc(calls, func(x, y *call) int { return int(x.end - y.end) })
			for i, c := range calls {
				for _, later := range calls[i:] {
					if later.start < c.end {
						pieces.flying[later] = true
					}
				}
				delete(pieces.flying, c)
				pieces.enter(c)
				pieces.judge()
			}
			pieces.judge()
			expect(t, pieces, tt.wrong)
		})
	}
}

func expect(t *testing.T, b *book, wrong string) {
	t.Helper()
	switch {
	case len(b.waiting) > 0:
		t.Errorf("%d calls were not judged", len(b.waiting))
	case wrong == "" && len(b.wrong) > 0:
		t.Errorf("refused: %s", b.wrong[0].what)
	case wrong != "" && !slices.ContainsFunc(b.wrong, func(v violation) bool { return strings.HasPrefix(v.what, wrong) }):
		t.Errorf("not refused as %q but %v\n%s", wrong, b.wrong, b.show(calls(b)[0]))
	}
}

func calls(b *book) []*call { return slices.Concat(b.past, b.waiting) }

// What anybody was told before counts, in whatever order it became known.
func TestTimeline(t *testing.T) {
	var l timeline
	if _, ok := l.before(time.Hour); ok {
		t.Error("something was told of nothing")
	}
	for _, p := range []point{{10, 1}, {30, 3}, {20, 5}, {40, 4}} {
		l.add(p.at, p.revision)
	}
	for at, want := range map[time.Duration]int64{11: 1, 20: 1, 21: 5, 31: 5, 100: 5} {
		if got, _ := l.before(at); got != want {
			t.Errorf("before %d: %d, want %d", at, got, want)
		}
	}
}
