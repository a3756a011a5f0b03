package feed

import (
	"context"
	"errors"
	"io"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/watch"
)

const (
	// startWithin is how long a subscriber waits for the feed to be there.
	startWithin = 10 * time.Second
	// aheadMost is how long a token may be ahead of the feed, as one from another node is
	// for a moment, before it is taken for one of an etcd that is no more.
	aheadMost = 3 * time.Second
	// batchMost and batchBytes bound what a subscriber is told at once; the changes of one
	// revision are never parted.
	batchMost  = 1000
	batchBytes = 192 << 10
	// lookMost is how many changes are looked through at a time.
	lookMost = 4096
)

// Subscription is one subscriber's place in the feed. Its methods, apart from Close, are
// for one goroutine.
type Subscription struct {
	feed      *Feed
	req       Request
	namespace string // its id
	woken     chan struct{}
	close     func()

	// step is what the next Next does.
	step func(ctx context.Context) (Batch, bool, error)
	// era is the one of which it has been told; everything up to revision, in epoch; next
	// is the number of the change to look at next.
	era      uint64
	epoch    claim.ID
	revision int64
	next     int64
	spoke    time.Duration // when it was last told of changes

	// Of a snapshot: the scan, the number of the piece to be told next, and up to where,
	// as of when, the pieces that were told go. seen is until which revision that matters.
	scan   *scan
	joined *scan // the scan whose reader it counts as; the feed's mu is its
	number int
	told   []told
	seen   int64
	trying time.Duration // since when no piece could be had; 0: it could
}

// told is a piece that the subscriber has: of keys less than before, and not less than
// those of the piece before, it has what was there at the revision.
type told struct {
	before   string
	revision int64
}

// Subscribe makes a subscription. Error: REQUEST_INVALID for what is no token,
// NAMESPACE_NOT_FOUND, STORE_UNAVAILABLE.
func (f *Feed) Subscribe(_ context.Context, req Request) (*Subscription, error) {
	v, err := f.cfg.Govern.View()
	if err != nil {
		return nil, err
	}
	if _, err := v.Policy(req.Namespace); err != nil {
		return nil, err
	}
	s := &Subscription{feed: f, req: req, namespace: layout.NamespaceID(req.Namespace), woken: make(chan struct{}, 1)}
	switch {
	case req.Token != "":
		from, err := parseToken(req.Token)
		if err != nil {
			return nil, err
		}
		s.step = s.starting(&from, causeToken)
	case req.Snapshot:
		s.step = s.starting(nil, causeAsked)
	default:
		s.step = s.starting(nil, "")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.readers[s.namespace] == nil {
		f.readers[s.namespace] = map[*Subscription]struct{}{}
	}
	f.readers[s.namespace][s] = struct{}{}
	f.subscribers++
	f.join()
	s.close = sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		s.leaveScan()
		delete(f.readers[s.namespace], s)
		f.subscribers--
		if len(f.readers[s.namespace]) == 0 {
			delete(f.readers, s.namespace)
		}
		f.leave()
	})
	return s, nil
}

// leaveScan takes note that it is no longer at a scan; the feed's mu is held.
func (s *Subscription) leaveScan() {
	if s.joined != nil {
		s.joined.readers--
		s.joined = nil
	}
}

// Close ends the subscription.
func (s *Subscription) Close() { s.close() }

func (s *Subscription) wake() { signal(s.woken) }

// Next waits until there is something to tell, or nothing has been told for a heartbeat:
// then it is progress, or, amid a snapshot, a Batch of nothing.
// Error: ctx's; STORE_UNAVAILABLE, when the feed cannot be had or what is there cannot be
// read; RECORD_UNREADABLE. After an error the reader comes back with its last token.
func (s *Subscription) Next(ctx context.Context) (Batch, error) {
	began := s.feed.cfg.Monotonic()
	for {
		b, ok, err := s.step(ctx)
		if ctx.Err() != nil {
			return Batch{}, ctx.Err()
		}
		b.Partial = s.partial()
		if ok || err != nil {
			return b, err
		}
		if s.scan != nil && s.feed.cfg.Monotonic()-began >= s.feed.cfg.Heartbeat {
			return Batch{Token: s.token(), Partial: true}, nil // it is looking, and has found nothing of the reader's
		}
	}
}

// void reports whether what was told is void, and why; f.mu is held.
func (s *Subscription) void() (cause string, void bool) {
	f := s.feed
	if s.era != f.era {
		return f.cause, true
	}
	if s.next < f.ring.first {
		return causeSlow, true
	}
	return "", false
}

// pause waits until it is woken, or so long; ctx's error when that ends.
func (s *Subscription) pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-s.woken:
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err()
}

// rest waits so long, whatever is changed; ctx's error when that ends.
func (s *Subscription) rest(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err()
}

// starting waits for the feed, and has the subscriber go on from where it was; or else,
// or from nowhere, begin anew for a cause; without one, begin now.
func (s *Subscription) starting(from *position, cause string) func(context.Context) (Batch, bool, error) {
	f := s.feed
	began := f.cfg.Monotonic()
	return func(ctx context.Context) (Batch, bool, error) {
		f.mu.Lock()
		ready := f.ready()
		known := ready && from != nil && !from.partial && from.epoch == f.epoch && from.revision > f.doubt &&
			(from.feed == f.id || !f.cfg.Govern.Disowned())
		ahead := known && from.revision > f.ring.applied
		waited := f.cfg.Monotonic() - began
		if !ready || ahead && waited < aheadMost {
			if ahead && f.source != nil {
				f.source.Hurry()
			}
			f.mu.Unlock()
			if !ready && waited >= startWithin {
				return Batch{}, false, claim.Unavailable("this node does not follow etcd yet: come back, or ask another node", nil)
			}
			return Batch{}, false, s.rest(ctx, 100*time.Millisecond)
		}
		defer f.mu.Unlock()
		s.era, s.epoch = f.era, f.epoch
		kept := false
		if from != nil && from.partial {
			cause = causeCut
		} else if from != nil && from.epoch != f.epoch {
			cause = causeEpoch
		}
		switch {
		case from == nil && cause == "":
			s.revision, s.next, kept = f.ring.applied, f.ring.next(), true
		case known && !ahead:
			s.revision = from.revision
			s.next, kept = f.ring.after(from.revision)
		}
		if !kept {
			s.step = s.renewing(cause)
			return Batch{}, false, nil
		}
		s.step = s.following
		return Batch{Token: s.token(), Progress: from == nil}, true, nil // what is since is to come
	}
}

// ready reports whether there is a ring to begin with; f.mu is held.
func (f *Feed) ready() bool {
	return f.era != 0 && f.state == watch.Live && f.known
}

// token is where the subscriber is. Amid a snapshot, and for as long as changes may come
// that a piece of it had, it is no place to go on from.
func (s *Subscription) token() string {
	return position{s.epoch, s.feed.id, s.revision, s.partial()}.token()
}

func (s *Subscription) partial() bool { return s.scan != nil || s.told != nil }

// renewing has the subscriber begin anew.
func (s *Subscription) renewing(cause string) func(context.Context) (Batch, bool, error) {
	f := s.feed
	return func(ctx context.Context) (Batch, bool, error) {
		f.mu.Lock()
		if !f.ready() {
			f.mu.Unlock()
			s.step = s.starting(nil, cause) // with its patience
			return Batch{}, false, nil
		}
		s.leaveScan()
		scan, wait := f.scanOf(s.req.Namespace)
		if scan == nil {
			f.mu.Unlock()
			return Batch{}, false, s.rest(ctx, wait)
		}
		defer f.mu.Unlock()
		s.era, s.epoch = f.era, f.epoch
		s.revision = scan.from
		s.next, _ = f.ring.after(scan.from)
		s.scan, s.joined, s.number, s.told, s.seen = scan, scan, 0, nil, 0
		s.step = s.telling
		return Batch{Token: s.token(), Begin: true, Cause: cause}, true, nil
	}
}

// telling tells of what is there, piece by piece, and of changes since. A change of a
// part that is yet to be told is left out, for the piece has it; one of a part that was
// told is left out if the piece had it. So each key's revisions only grow, and a reader
// need not remember what was deleted.
func (s *Subscription) telling(ctx context.Context) (Batch, bool, error) {
	piece, err := s.scan.piece(ctx, s.number)
	if errors.Is(err, io.EOF) {
		return s.ending(ctx)
	}
	if errors.Is(err, errOvertaken) {
		s.step = s.renewing(causeSlow)
		return Batch{}, false, nil
	}
	if err != nil {
		return s.retrying(ctx, err)
	}
	s.trying = 0
	b, more, void, err := s.changes(piece.Revision)
	if err != nil || void {
		return Batch{}, false, err
	}
	if len(b.Events) > 0 || more {
		b.Token = s.token()
		return b, len(b.Events) > 0, nil
	}
	b = Batch{Token: s.token()}
	for _, r := range piece.Records {
		if strings.HasPrefix(r.Key, s.req.Prefix) {
			b.Events = append(b.Events, Event{Record: r, Now: piece.Now})
		}
	}
	s.number++
	before := piece.Before
	if piece.Next == "" {
		before = layout.Statuses // after all records
	}
	s.told = append(s.told, told{before, piece.Revision})
	s.seen = piece.Revision
	return b, len(b.Events) > 0, nil
}

// ending waits until the feed has reached the moment of the last piece, and ends the
// snapshot: so that what the reader has is right at once, and its token one to go on from.
func (s *Subscription) ending(ctx context.Context) (Batch, bool, error) {
	b, more, void, err := s.changes(maxRevision)
	switch {
	case err != nil || void:
		return Batch{}, false, err
	case len(b.Events) > 0 || more:
		b.Token = s.token()
		return b, len(b.Events) > 0, nil
	}
	now := s.feed.cfg.Monotonic()
	if s.revision < s.seen && (s.trying == 0 || now-s.trying < aheadMost) {
		if s.trying == 0 {
			s.trying = now
		}
		s.feed.hurry()
		return Batch{}, false, s.pause(ctx, 50*time.Millisecond)
	}
	s.feed.mu.Lock()
	s.leaveScan()
	s.feed.mu.Unlock()
	s.trying, s.scan = 0, nil
	if s.revision >= s.seen {
		s.told = nil
	}
	s.step = s.following
	return Batch{Token: s.token(), End: true, Progress: s.told == nil && s.live() == nil}, true, nil
}

// hurry has the watch asked how far it is.
func (f *Feed) hurry() {
	f.mu.RLock()
	source := f.source
	f.mu.RUnlock()
	if source != nil {
		source.Hurry()
	}
}

// retrying has a piece asked for again for a while, if that may help.
func (s *Subscription) retrying(ctx context.Context, err error) (Batch, bool, error) {
	now := s.feed.cfg.Monotonic()
	if s.trying == 0 {
		s.trying = now
	}
	if claim.ReasonOf(err) != claim.StoreUnavailable || now-s.trying >= startWithin {
		return Batch{}, false, err
	}
	return Batch{}, false, s.rest(ctx, 200*time.Millisecond)
}

// following tells of changes as they come.
func (s *Subscription) following(ctx context.Context) (Batch, bool, error) {
	began := s.feed.cfg.Monotonic()
	if wait := s.spoke + s.feed.breath() - began; wait > 0 && s.spoke > 0 {
		if err := s.rest(ctx, wait); err != nil {
			return Batch{}, false, err
		}
	}
	for {
		b, more, void, err := s.changes(maxRevision)
		switch {
		case err != nil || void:
			return Batch{}, false, err
		case len(b.Events) > 0:
			b.Token, b.Progress = s.token(), !more && s.told == nil && s.live() == nil
			s.spoke = s.feed.cfg.Monotonic()
			return b, true, nil
		case more:
			continue
		}
		left := s.feed.cfg.Heartbeat - (s.feed.cfg.Monotonic() - began)
		if left <= 0 {
			err := s.live()
			if now := s.feed.cfg.Monotonic(); err != nil && now-s.feed.lostSince() >= startWithin {
				return Batch{}, false, err // another node may be better off
			}
			return Batch{Token: s.token(), Progress: err == nil && s.told == nil}, true, nil
		}
		if err := s.pause(ctx, left); err != nil {
			return Batch{}, false, err
		}
	}
}

// live reports nil if the feed is in step with etcd, so that who has been told all has
// all there is.
func (s *Subscription) live() error {
	if s.feed.Live() {
		return nil
	}
	return claim.Unavailable("this node does not follow etcd just now: go on at another with the last resume token", nil)
}

// lostSince is when the feed was last live.
func (f *Feed) lostSince() time.Duration {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.lost
}

const maxRevision = 1<<63 - 1

// breathFor is for how long a subscriber of whom there are many is told nothing after it
// was told something, for each of them; breathMost is the longest. What comes meanwhile
// goes together: a message costs more than what is in it.
const (
	breathFor  = 20 * time.Microsecond
	breathMost = 50 * time.Millisecond
)

// breath is how long a subscriber rests between two messages: the few are told at once.
func (f *Feed) breath() time.Duration {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return min(time.Duration(f.subscribers)*breathFor, breathMost)
}

// changes returns what is new for the subscriber, up to a revision; whether there may be
// more; or that what it was told is void, so that it begins anew with its next step.
func (s *Subscription) changes(until int64) (b Batch, more, void bool, err error) {
	found, now, more, cause := s.look(until)
	if cause != "" {
		s.step = s.renewing(cause)
		return Batch{}, false, true, nil
	}
	for _, c := range found {
		rec, err := c.decoded()
		if err != nil {
			return Batch{}, false, false, err
		}
		// Another namespace may have the same id. An opened mark was told of as it was held.
		if rec.Namespace != s.req.Namespace || !strings.HasPrefix(rec.Key, s.req.Prefix) || rec.Forgotten != nil && !rec.Forgets() {
			continue
		}
		b.Events = append(b.Events, Event{Deleted: rec.Forgotten != nil, Record: rec, Now: now})
	}
	return b, more, false, nil
}

// look goes through the changes that come next, and returns those of the namespace that
// the subscriber has not been told of in a snapshot.
func (s *Subscription) look(until int64) (found []*change, now claim.Instant, more bool, cause string) {
	f := s.feed
	f.mu.RLock()
	defer f.mu.RUnlock()
	if cause, void := s.void(); void {
		return nil, 0, false, cause
	}
	v, err := f.cfg.Govern.View()
	if err != nil {
		return nil, 0, false, "" // by no time could a deadline be told
	}
	now = v.Now
	all, _ := f.ring.from(s.next)
	bytes, start := int64(0), s.revision
	// whole is where the last revision ended that fits.
	whole := struct {
		found          int
		next, revision int64
	}{0, s.next, s.revision}
	for i, c := range all {
		if c.revision > until {
			break
		}
		if c.revision != s.revision {
			if bytes > batchBytes && whole.found > 0 {
				s.next, s.revision = whole.next, whole.revision
				return found[:whole.found], now, true, ""
			}
			if i >= lookMost || len(found) >= batchMost || bytes > batchBytes {
				return found, now, true, ""
			}
			whole.found, whole.next, whole.revision = len(found), s.next, s.revision
		}
		s.next++
		if c.revision <= start {
			continue
		}
		s.revision = c.revision
		if c.namespace == s.namespace && !s.covered(c) {
			found = append(found, c)
			bytes += c.size()
		}
	}
	s.revision = max(s.revision, min(f.ring.applied, until))
	if s.scan == nil && s.told != nil && s.revision >= s.seen {
		s.told = nil // no older change comes any more
	}
	return found, now, false, ""
}

// covered reports whether a change is not to be told because a piece of the snapshot has
// it, or will have it.
func (s *Subscription) covered(c *change) bool {
	if s.scan == nil && s.told == nil {
		return false
	}
	i := sort.Search(len(s.told), func(i int) bool { return c.key < s.told[i].before })
	return i == len(s.told) || c.revision <= s.told[i].revision
}
