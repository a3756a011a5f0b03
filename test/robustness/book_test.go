package robustness

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// book is all that was asked and told of one key, and judges it.
//
// A claim, a finish and a forget are told with their revision, which orders them. When
// each call was sent and answered orders them too, and tells what its caller could
// have known: both orders must agree, and no answer may be older than what anybody
// had been told before it was asked for. A call is judged once everything has ended
// that was sent before its answer: nothing else can have had a part in it. A call
// without an answer may have happened at any time after it was sent, or not at all.
type book struct {
	key string
	now func() time.Duration

	mu      sync.Mutex
	flying  map[*call]bool
	waiting []*call // ended, and yet to be judged
	past    []*call // the newest of the judged, to be shown

	claims   []*held  // by fence
	finishes []*ended // by revision
	forgets  []*call  // by revision
	// lost are forgets, hidden Begins that may have been given claims that nobody was
	// told of.
	lost, hidden []*call
	byToken      map[string]*held
	byOutcome    map[string]*ended
	senders      map[string][]*call // finishes by the outcome they send
	requests     map[string]bool    // that were given a claim or may have been
	known, final timeline           // of all, of finishes alone

	wrong []violation
}

// violation is a promise that was not kept.
type violation struct {
	by   *call
	what string
}

// held is a claim that somebody was told of.
type held struct {
	fence     int64
	attempt   int32
	previous  claim.Previous
	token     string
	request   string
	first     *call         // who was told of it
	fresh     []*call       // to whom it was not called a repeat
	until     time.Duration // it is live until then, as its holder was told
	releases  []*call       // by its holder, that were not surely refused
	finishing []*call       // the same of Complete and TERMINAL
	wasJudged bool
}

// ended is a finish that somebody was told of.
type ended struct {
	revision  int64
	outcome   string
	digest    string
	wasJudged bool
}

func newBook(key string, now func() time.Duration) *book {
	return &book{
		key: key, now: now, flying: map[*call]bool{},
		byToken: map[string]*held{}, byOutcome: map[string]*ended{},
		senders: map[string][]*call{}, requests: map[string]bool{},
	}
}

// sent takes note of a call that is about to be sent.
func (b *book) sent(c *call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c.start = b.now()
	b.flying[c] = true
}

// answered takes note of its answer.
func (b *book) answered(c *call) {
	c.end = b.now()
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.flying, c)
	b.enter(c)
}

// enter takes over what a call shows to have happened.
func (b *book) enter(c *call) {
	b.waiting = append(b.waiting, c)
	switch c.op {
	case begin:
		if c.late() {
			b.hidden = append(b.hidden, c)
			b.requests[c.request] = true
		}
		if c.verdict == claim.First {
			b.enterClaim(c)
		}
	case extend:
		if h := b.byToken[c.token]; h != nil && c.reason == "" {
			h.until = max(h.until, c.start+c.left)
		}
	case finish:
		h := b.byToken[c.token]
		if h != nil && !c.without() {
			if c.release() {
				h.releases = append(h.releases, c)
			} else {
				h.finishing = append(h.finishing, c)
			}
		}
		if !c.release() {
			b.senders[c.sent] = append(b.senders[c.sent], c)
		}
	case forget:
		if c.unsure() {
			b.lost = append(b.lost, c)
		} else if c.reason == "" {
			i, _ := slices.BinarySearchFunc(b.forgets, c, func(a, b *call) int { return cmp.Compare(a.revision, b.revision) })
			b.forgets = slices.Insert(b.forgets, i, c)
			b.known.add(c.end, c.revision)
		}
	}
	if c.shows() && b.byOutcome[c.shown] == nil {
		e := &ended{revision: c.finished, outcome: c.shown, digest: c.digest}
		b.byOutcome[c.shown] = e
		i, _ := slices.BinarySearchFunc(b.finishes, e, func(a, b *ended) int { return cmp.Compare(a.revision, b.revision) })
		b.finishes = slices.Insert(b.finishes, i, e)
		b.known.add(c.end, e.revision)
		b.final.add(c.end, e.revision)
	}
}

func (b *book) enterClaim(c *call) {
	b.requests[c.request] = true
	i, found := slices.BinarySearchFunc(b.claims, c.fence, func(h *held, fence int64) int { return cmp.Compare(h.fence, fence) })
	if !found {
		h := &held{fence: c.fence, attempt: c.attempt, previous: c.previous, token: c.given, request: c.request, first: c}
		b.claims = slices.Insert(b.claims, i, h)
		b.known.add(c.end, c.fence)
		if b.byToken[c.given] == nil {
			b.byToken[c.given] = h
		}
	}
	h := b.claims[i]
	h.until = max(h.until, c.start+c.left)
	if !c.repeat {
		h.fresh = append(h.fresh, c)
	}
}

// judge judges what can be judged by now; all, if everything has ended.
func (b *book) judge() {
	b.mu.Lock()
	defer b.mu.Unlock()
	horizon := b.now()
	for c := range b.flying {
		horizon = min(horizon, c.start)
	}
	slices.SortFunc(b.waiting, func(x, y *call) int { return cmp.Compare(x.end, y.end) })
	n := 0
	for n < len(b.waiting) && b.waiting[n].end < horizon {
		b.judgeCall(b.waiting[n])
		n++
	}
	b.past = append(b.past, b.waiting[:n]...)
	b.waiting = slices.Clone(b.waiting[n:])
	if extra := len(b.past) - 2*remembered; extra > 0 {
		b.past = slices.Clone(b.past[len(b.past)-remembered:])
	}
}

// remembered is how many calls of a key are kept to be shown.
const remembered = 1500

func (b *book) fail(c *call, format string, args ...any) {
	if len(b.wrong) < 5 {
		b.wrong = append(b.wrong, violation{c, fmt.Sprintf(format, args...)})
	}
}

// allowed are the errors that each call may be told here.
var allowed = map[op][]claim.Reason{
	begin:  {claim.RequestIDSpent},
	finish: {claim.ClaimLost, claim.AlreadyFinished, claim.RecordNotFound},
	extend: {claim.ClaimLost, claim.RecordNotFound},
	get:    {claim.RecordNotFound},
	forget: {claim.ClaimLive, claim.RecordNotFound},
}

func (b *book) judgeCall(c *call) {
	if c.unanswered() {
		return
	}
	if c.reason != "" && !slices.Contains(allowed[c.op], c.reason) {
		b.fail(c, "%s is never due here: %s", c.reason, c.message)
		return
	}
	if c.stale {
		b.fail(c, "G7: this namespace has no stale answers")
	}
	newest, is := b.known.before(c.start)
	if c.shows() {
		b.judgeFinished(c, newest)
	}
	switch {
	case c.reason == claim.RecordNotFound:
		b.judgeUnknownKey(c)
	case c.op == begin:
		b.judgeBegin(c, newest)
	case c.op == extend || c.op == finish:
		b.judgeHolder(c, newest)
	case c.op == get && !c.shows():
		b.unfinished(c)
		if is && c.revision < newest {
			b.fail(c, "G4: it shows revision %d, and %d had been told before", c.revision, newest)
		}
	case c.op == forget && c.reason == claim.ClaimLive:
		b.unfinished(c)
	case c.op == forget:
		if c.revision < newest {
			b.fail(c, "G4: it forgot at revision %d, and %d had been told before", c.revision, newest)
		}
	}
}

// judgeFinished judges a finished record that was shown.
func (b *book) judgeFinished(c *call, newest int64) {
	e := b.byOutcome[c.shown]
	var by *call
	sent := false
	for _, s := range b.senders[c.shown] {
		sent = true
		if s.start < c.end && !s.without() {
			by = s
		}
	}
	switch {
	case by == nil && sent:
		b.fail(c, "G3: it shows what a refused finish sent: %s", c.shown)
		return
	case by == nil:
		b.fail(c, "G2: nobody sent what it shows: %s", c.shown)
		return
	case c.digest != e.digest:
		b.fail(c, "G2: %s had digest %s", c.shown, e.digest)
	case c.finished != e.revision:
		b.fail(c, "G2: %s was finished at revision %d", c.shown, e.revision)
	}
	if c.finished < newest {
		b.fail(c, "G4: an old answer: what it shows was finished at revision %d, and revision %d had been told before: %s", c.finished, newest, b.nameOf(newest))
	}
	if failed := by.class == claim.Terminal; failed != (c.state == claim.Failed) || c.verdict != 0 && failed != (c.verdict == claim.ReplayFailure) {
		b.fail(c, "G2: %s was sent otherwise", c.shown)
	}
	if !e.wasJudged {
		e.wasJudged = true
		b.judgeFinish(c, e, b.byToken[by.token])
	}
}

// judgeFinish judges a finish by what was before and after it.
func (b *book) judgeFinish(c *call, e *ended, h *held) {
	if h == nil || h.fence >= e.revision {
		b.fail(c, "G3: it was finished by a claim that was not given before")
		return
	}
	for _, other := range b.claims {
		if h.fence < other.fence && other.fence < e.revision {
			b.fail(c, "G3: it was finished at revision %d by the claim with fence %d, older than the one with fence %d", e.revision, h.fence, other.fence)
		}
		if other.fence > e.revision {
			// One that is yet to be judged will be, with this finish in view.
			if other.wasJudged && !b.mayForget(e.revision, other.fence, other.first.end) {
				b.fail(c, "G2: finished at revision %d, and claimed again with fence %d", e.revision, other.fence)
			}
			break
		}
	}
	for _, f := range b.forgets {
		if h.fence < f.revision && f.revision < e.revision {
			b.fail(c, "G4: the claim with fence %d was forgotten at revision %d, and finished the key at revision %d", h.fence, f.revision, e.revision)
		}
	}
	for _, other := range b.finishes {
		if other.revision < e.revision && !b.mayForget(other.revision, h.fence, c.end) {
			b.fail(c, "G2: finished at revision %d, and again at revision %d: %s, %s", other.revision, e.revision, other.outcome, e.outcome)
		}
	}
}

func (b *book) judgeBegin(c *call, newest int64) {
	switch {
	case c.reason == claim.RequestIDSpent:
		b.unfinished(c)
		if !b.requests[c.request] {
			b.fail(c, "G6: this request was never given a claim that could be spent")
		}
		return
	case c.verdict == claim.First:
		b.judgeFirst(c, newest)
	case c.verdict == claim.InProgress:
		b.unfinished(c)
		if c.revision != 0 && c.revision < newest {
			b.fail(c, "G4: it was judged by revision %d, and %d had been told before", c.revision, newest)
		}
	case c.verdict != claim.Replay && c.verdict != claim.ReplayFailure:
		b.fail(c, "%s is never due here", verdictNames[c.verdict])
	case !c.shows():
		b.fail(c, "G2: a replay of %v", c.state)
	}
}

// judgeFirst judges a claim that was given.
func (b *book) judgeFirst(c *call, newest int64) {
	i, _ := slices.BinarySearchFunc(b.claims, c.fence, func(h *held, fence int64) int { return cmp.Compare(h.fence, fence) })
	h := b.claims[i]
	switch {
	case c.fence < newest:
		b.fail(c, "G1: given fence %d, and revision %d had been told before: %s", c.fence, newest, b.nameOf(newest))
	case len(h.fresh) > 1:
		b.fail(c, "G6: the claim with fence %d was given twice, neither called a repeat", c.fence)
	case c.request != h.request:
		b.fail(c, "G6: the claim with fence %d was given to another call, %s", c.fence, h.request)
	case c.given != h.token || c.attempt != h.attempt || c.previous != h.previous || b.byToken[c.given] != h:
		b.fail(c, "G6: the claim with fence %d was told otherwise before", c.fence)
	case !c.repeat && c.left <= 0:
		b.fail(c, "G1: given a claim that is over")
	}
	if c.repeat {
		for _, r := range h.releases {
			if r.reason == "" && r.end < c.start {
				b.fail(c, "G1: given again after its release")
				break
			}
		}
	}
	if h.wasJudged {
		return
	}
	h.wasJudged = true
	if i > 0 {
		b.judgePair(c, b.claims[i-1], h)
	} else if h.attempt > 1 && !b.mayHide(int(h.attempt-1), 0, h.first.end) {
		b.fail(c, "G1: attempt %d, and nobody was given one before", h.attempt)
	}
	if i+1 < len(b.claims) && b.claims[i+1].wasJudged {
		b.judgePair(b.claims[i+1].first, h, b.claims[i+1])
	}
}

// judgePair judges two claims of which the second came next.
func (b *book) judgePair(c *call, one, next *held) {
	at := next.first.end
	forgotten := b.mayForget(one.fence, next.fence, at)
	released := slices.ContainsFunc(one.releases, func(r *call) bool { return r.start < at })
	lapsed := at >= one.until
	for _, e := range b.finishes {
		if one.fence < e.revision && e.revision < next.fence && !b.mayForget(e.revision, next.fence, at) {
			b.fail(c, "G2: finished at revision %d, and claimed again with fence %d", e.revision, next.fence)
		}
	}
	if !forgotten && !released && !lapsed {
		b.fail(c, "G1: two claims at once: fence %d was to be live until %.4f and given to %s, and fence %d was given at %.4f", one.fence, one.until.Seconds(), one.request, next.fence, at.Seconds())
		return
	}
	if forgotten {
		b.judgeHold(c, one, next)
	}
	var others int // claims between them that nobody was told of
	switch {
	case next.attempt == 1:
		if !forgotten {
			b.fail(c, "G1: attempt 1 with fence %d, and nobody had forgotten fence %d", next.fence, one.fence)
		}
		if next.previous != claim.PreviousNone {
			b.fail(c, "attempt 1 after %d", next.previous)
		}
		return
	case forgotten:
		others = int(next.attempt - 1)
	default:
		others = int(next.attempt - one.attempt - 1)
	}
	switch {
	case others < 0 || !b.mayHide(others, one.first.start, at):
		b.fail(c, "G1: attempt %d with fence %d comes after attempt %d with fence %d", next.attempt, next.fence, one.attempt, one.fence)
	case others > 0:
	case next.previous == claim.PreviousReleased && !released:
		b.fail(c, "G1: fence %d was given after a release, and nobody released fence %d", next.fence, one.fence)
	case next.previous == claim.PreviousLapsed && !lapsed:
		b.fail(c, "G1: fence %d was given at %.4f after a lapse, and fence %d was to be live until %.4f", next.fence, at.Seconds(), one.fence, one.until.Seconds())
	case next.previous == claim.PreviousNone:
		b.fail(c, "attempt %d after none", next.attempt)
	}
}

// judgeHold judges how long a forget has held the key between two claims: caches may
// replay the old answer until then.
func (b *book) judgeHold(c *call, one, next *held) {
	if len(b.lost) > 0 {
		return
	}
	var mark *call // who told of it and was sent first; whoever opens it makes a later revision
	for _, f := range b.forgets {
		if one.fence < f.revision && f.revision < next.fence && (mark == nil || f.revision == mark.revision && f.start < mark.start) {
			mark = f
		}
	}
	if free := mark.start + claim.BelievedFor; next.first.end < free {
		b.fail(c, "G4: fence %d was given at %.4f, and the key was forgotten at revision %d, sent at %.4f: a node may replay the old answer until %.4f", next.fence, next.first.end.Seconds(), mark.revision, mark.start.Seconds(), free.Seconds())
	}
}

// judgeHolder judges what the holder of a claim was told.
func (b *book) judgeHolder(c *call, newest int64) {
	h := b.byToken[c.token]
	if h == nil {
		b.fail(c, "G3: nobody was given this token")
		return
	}
	newer := slices.ContainsFunc(b.claims, func(o *held) bool { return o.fence > h.fence && o.first.start < c.end })
	for _, o := range b.hidden {
		newer = newer || o.start < c.end
	}
	released := slices.ContainsFunc(h.releases, func(r *call) bool { return r != c && r.start < c.end })
	finishing := slices.ContainsFunc(h.finishing, func(f *call) bool { return f != c && f.start < c.end })
	switch {
	case c.reason == claim.ClaimLost:
		if !newer && (c.op != extend || !released && !finishing) {
			b.fail(c, "G3: the holder of the newest claim was refused")
		}
	case c.reason == claim.AlreadyFinished:
		if !finishing {
			b.fail(c, "G2: nobody had finished it")
		}
	case c.op == extend:
		if c.fence != h.fence || c.attempt != h.attempt {
			b.fail(c, "G6: the claim with fence %d and attempt %d was extended as another, with fence %d and attempt %d", h.fence, h.attempt, c.fence, c.attempt)
		}
		if newest > h.fence {
			b.fail(c, "G3: the claim with fence %d was extended, and revision %d had been told before: %s", h.fence, newest, b.nameOf(newest))
		}
		if slices.ContainsFunc(h.releases, func(r *call) bool { return r.reason == "" && r.end < c.start }) {
			b.fail(c, "G3: extended after its release")
		}
	case c.release():
		if newest > h.fence && !released {
			b.fail(c, "G3: the claim with fence %d was released, and revision %d had been told before: %s", h.fence, newest, b.nameOf(newest))
		}
	case c.shown != c.sent:
		b.fail(c, "G2: it was told that it finished the key, as %s", c.shown)
	}
}

// judgeUnknownKey judges who was told that there is no such key.
func (b *book) judgeUnknownKey(c *call) {
	var since int64 = -1
	if h := b.byToken[c.token]; h != nil {
		since = h.fence
	}
	for _, h := range b.claims {
		if h.first.end < c.start {
			since = max(since, h.fence)
		}
	}
	if f, ok := b.final.before(c.start); ok {
		since = max(since, f)
	}
	if since >= 0 && !b.mayForget(since, 0, c.end) {
		b.fail(c, "G4: it is not known, and what was told at revision %d was not forgotten: %s", since, b.nameOf(since))
	}
}

// unfinished judges who was told that the key is not finished.
func (b *book) unfinished(c *call) {
	if f, ok := b.final.before(c.start); ok && !b.mayForget(f, 0, c.end) {
		b.fail(c, "G2: a lost result: finished at revision %d and not forgotten: %s", f, b.nameOf(f))
	}
}

// mayForget tells whether a forget may have happened after one revision, before
// another (0: any) and before this time.
func (b *book) mayForget(after, before int64, by time.Duration) bool {
	for _, f := range b.lost {
		if f.start < by {
			return true
		}
	}
	for _, f := range slices.Backward(b.forgets) {
		if f.revision <= after {
			return false
		}
		if f.start < by && (before == 0 || f.revision < before) {
			return true
		}
	}
	return false
}

// mayHide tells whether so many claims may have been given in this time that nobody
// was told of.
func (b *book) mayHide(n int, from, by time.Duration) bool {
	for _, c := range b.hidden {
		if n <= 0 {
			return true
		}
		if c.start < by && c.end+lateMost > from {
			n -= 1 + c.retries // each may have been given one, after the one before has lapsed
		}
	}
	return n <= 0
}

// lateMost is how long after its caller gave up a Begin may still be given a claim.
const lateMost = 10 * time.Second

// nameOf says what happened at a revision.
func (b *book) nameOf(revision int64) string {
	for _, h := range b.claims {
		if h.fence == revision {
			return fmt.Sprintf("a claim of %s", h.request)
		}
	}
	for _, e := range b.finishes {
		if e.revision == revision {
			return "finished as " + e.outcome
		}
	}
	for _, f := range b.forgets {
		if f.revision == revision {
			return "a forget by " + f.who
		}
	}
	return "nothing that was told"
}

// show returns what happened around a call.
func (b *book) show(around *call) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var told []*call
	for _, c := range slices.Concat(b.past, b.waiting) {
		if c.end >= around.start-8*time.Second && c.start <= around.end+time.Second {
			told = append(told, c)
		}
	}
	seen := map[*call]bool{}
	for _, c := range told {
		seen[c] = true
	}
	// Older calls that said what still counts.
	from := max(0, len(b.claims)-6)
	for _, h := range b.claims[from:] {
		if !seen[h.first] {
			told = append(told, h.first)
		}
	}
	slices.SortFunc(told, func(x, y *call) int { return cmp.Compare(x.start, y.start) })
	lines := make([]string, 0, len(told)+len(b.flying))
	for _, c := range told {
		mark := "  "
		if c == around {
			mark = "=>"
		}
		lines = append(lines, mark+c.String())
	}
	for c := range b.flying {
		lines = append(lines, fmt.Sprintf("  %10.4f   (no answer yet) %s %s %s %s", c.start.Seconds(), c.who, c.by(), c.op, c.request+short(c.token)))
	}
	return strings.Join(lines, "\n")
}

// timeline tells the newest revision that anybody had been told before some time.
type timeline struct {
	points []point // by time; revision is the newest so far
}

type point struct {
	at       time.Duration
	revision int64
}

func (l *timeline) add(at time.Duration, revision int64) {
	i := len(l.points)
	for i > 0 && l.points[i-1].at > at {
		i--
	}
	l.points = slices.Insert(l.points, i, point{at, revision})
	for ; i < len(l.points); i++ {
		if i > 0 {
			l.points[i].revision = max(l.points[i].revision, l.points[i-1].revision)
		}
	}
}

func (l *timeline) before(at time.Duration) (int64, bool) {
	i, _ := slices.BinarySearchFunc(l.points, at, func(p point, at time.Duration) int { return cmp.Compare(p.at, at) })
	if i == 0 {
		return 0, false
	}
	return l.points[i-1].revision, true
}
