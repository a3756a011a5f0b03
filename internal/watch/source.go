package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
)

const (
	// probeEvery is how often etcd is read linearizably, and the watch asked how far it is.
	probeEvery = time.Second
	// behindMost is how long the watch may take to reach what a read has seen before its
	// reader is not live.
	behindMost = 2 * time.Second
	// silentMost is how long a watch may bring nothing, though it is asked how far it is
	// every second, before its reader is not live; twice as long, or once it is known to be
	// behind, and it is taken for dead: a connection that was cut without a word looks like
	// this.
	silentMost = 3 * time.Second
	// unaskedMost is how long etcd may go without answering a read before it is not known
	// what the watch has yet to bring.
	unaskedMost = 4 * time.Second
	// hopelessAfter is how long a reader may stay behind before its backlog, which the
	// client keeps without bound, is dropped for a fresh list.
	hopelessAfter = 30 * time.Second
	probeTimeout  = time.Second

	againLeast, againMost = 50 * time.Millisecond, 2 * time.Second
)

// State is how far a reader can be relied on. Each lower one is worse.
type State uint8

// The states.
const (
	// Off: nothing is followed.
	Off State = iota
	// Resyncing: what the reader has is not vouched for; it begins with a list.
	Resyncing
	// CatchingUp: what the reader has is right as of some revision, and it has not yet
	// reached what etcd was seen to have a while ago.
	CatchingUp
	// Live: the reader has all that etcd had a moment ago.
	Live
)

// String names the state.
func (s State) String() string {
	return [...]string{"off", "resyncing", "catching-up", "live"}[s]
}

// Reader is what a Source serves. One goroutine calls its methods but Ask and Told,
// which may be called at the same time as the others.
type Reader interface {
	// List begins anew, with what is there or with nothing, and returns the revision
	// after which changes are to come.
	List(ctx context.Context) (revision int64, err error)
	// Apply takes changes over, oldest first, none of them older than the reader has. All
	// of a revision come together.
	Apply(events []*clientv3.Event)
	// Progressed: there were no changes up to this revision but those that were brought.
	Progressed(revision int64)
	// Ask reads etcd linearizably: its revision, and that up to which there was
	// something to bring, which the watch has to reach.
	Ask(ctx context.Context) (revision, goal int64, err error)
	// Told is how the reader stands from now on, and why, if it is not Live.
	Told(state State, cause error)
}

// SourceConfig says what to follow and how.
type SourceConfig struct {
	// Name is for the log.
	Name string
	// Client watches the range Key ... End.
	Client   *clientv3.Client
	Key, End string
	Reader   Reader
	// Resumes: after a cut the reader goes on where it was, if etcd still has the changes
	// since and has not gone back; else it always begins anew.
	Resumes bool
	Log     *slog.Logger
	// Monotonic is the process's own clock.
	Monotonic func() time.Duration
}

// Source follows a range of etcd for one reader: a list, then a watch from the next
// revision, again and again. Whatever befalls the watch - compaction, a cut, a member
// without a leader, a permission that was lost, silence, an etcd that went back - leads
// to a state that the reader is told, and to another try.
type Source struct {
	cfg SourceConfig
	// again asks for another beginning; it holds one request.
	again chan request
	// hurry asks for progress before it is due.
	hurry chan struct{}

	// standing is held while a state is found, set and told, so that the reader is told
	// of states in their order. It is taken before mu.
	standing sync.Mutex

	mu      sync.Mutex
	state   State
	applied int64
	// goal is a revision that a read has seen and the watch has to reach; since is when
	// the read was sent.
	goal  int64
	since time.Duration
	heard time.Duration // when the watch last brought anything
	asked time.Duration // when the last read was sent that was answered
	open  bool          // there is a watch
	void  bool          // the reader cannot go on where it was
	lists uint64
	cuts  uint64
}

// NewSource makes a Source; Run makes it follow.
func NewSource(cfg SourceConfig) *Source {
	return &Source{cfg: cfg, again: make(chan request, 1), hurry: make(chan struct{}, 1)}
}

// Run follows until ctx ends; nothing else ends it.
func (s *Source) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(clientv3.WithRequireLeader(ctx))
	g.Go(func() error { s.probe(ctx); return nil })
	g.Go(func() error { s.follow(ctx); return nil })
	err := g.Wait()
	s.stand(Off, nil)
	return err
}

// Again has the reader begin anew, with a list. Asking twice is asking once.
func (s *Source) Again(cause error) {
	s.mu.Lock()
	s.void = true
	s.mu.Unlock()
	s.restart(cause)
}

// Hurry has the watch asked how far it is now rather than within the second.
func (s *Source) Hurry() {
	select {
	case s.hurry <- struct{}{}:
	default:
	}
}

// Following is how far a Source is.
type Following struct {
	State State
	// Applied is the revision up to which the reader has everything. Behind is how far
	// behind what a read of etcd saw, in revisions, and for how long.
	Applied, Behind int64
	BehindFor       time.Duration
	// Lists counts beginnings anew, Cuts watches that ended.
	Lists, Cuts uint64
}

// Following tells how far the reader is.
func (s *Source) Following() Following {
	now := s.cfg.Monotonic()
	s.mu.Lock()
	defer s.mu.Unlock()
	f := Following{State: s.state, Applied: s.applied, Lists: s.lists, Cuts: s.cuts}
	if s.goal > s.applied {
		f.Behind, f.BehindFor = s.goal-s.applied, now-s.since
	}
	return f
}

// restart ends the watch that there is, for this cause.
func (s *Source) restart(cause error) {
	select {
	case s.again <- request{cause}:
	default:
	}
}

// follow begins and watches, again and again.
func (s *Source) follow(ctx context.Context) {
	wait := backoff.NewExponentialBackOff() // with jitter
	wait.InitialInterval, wait.MaxInterval = againLeast, againMost
	seldom := rate.Sometimes{Interval: 10 * time.Second}
	for ctx.Err() == nil {
		began := s.cfg.Monotonic()
		err := s.followOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		s.ended(err)
		seldom.Do(func() {
			s.cfg.Log.Warn("etcd is no longer followed; it is tried again", "watch", s.cfg.Name, "cause", err)
		})
		if s.cfg.Monotonic()-began > againMost {
			wait.Reset()
		}
		if _, asked := errors.AsType[askedFor](err); asked {
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait.NextBackOff()):
		}
	}
}

// request asks for another beginning; as an error, askedFor, it is not waited for.
type request struct{ cause error }

type askedFor request

func (a askedFor) Error() string { return a.cause.Error() }
func (a askedFor) Unwrap() error { return a.cause }

var (
	// ErrWentBack: etcd is no longer the one that was followed.
	ErrWentBack = errors.New("etcd went back: it was restored from a snapshot, or is another etcd")

	errClosed = errors.New("the watch was closed")
	// errNotCreated: etcd answers reads and not the watch.
	errNotCreated = errors.New("etcd does not answer the watch")
	errSilent     = errors.New("the watch brings nothing, not even how far it is")
	errHopeless   = errors.New("the watch is too far behind")
)

// ended takes note that there is no watch.
func (s *Source) ended(cause error) {
	s.mu.Lock()
	if s.open {
		s.open = false
		s.cuts++
	}
	// What etcd no longer has cannot be brought.
	s.void = s.void || errors.Is(cause, rpctypes.ErrCompacted) || errors.Is(cause, ErrWentBack) || errors.Is(cause, errHopeless)
	state := CatchingUp
	if s.void || !s.cfg.Resumes || s.lists == 0 {
		state = Resyncing
	}
	s.mu.Unlock()
	s.stand(state, cause)
}

// stand sets the state, and tells the reader of a change.
func (s *Source) stand(state State, cause error) {
	s.standing.Lock()
	defer s.standing.Unlock()
	s.mu.Lock()
	changed := s.state != state
	s.state = state
	s.mu.Unlock()
	if changed {
		s.cfg.Reader.Told(state, cause)
	}
}

// followOnce begins, then follows from the next revision until it cannot.
func (s *Source) followOnce(ctx context.Context) error {
	from, err := s.begin(ctx)
	if err != nil {
		return err
	}
	watching, stop := context.WithCancel(ctx)
	// Watch returns once etcd has answered, which it may never do: it is waited for
	// here, so that the reader can live on lists meanwhile.
	created := make(chan clientv3.WatchChan, 1)
	var creating sync.WaitGroup
	creating.Go(func() {
		created <- s.cfg.Client.Watch(watching, s.cfg.Key, clientv3.WithRange(s.cfg.End), clientv3.WithRev(from+1), clientv3.WithFragment())
	})
	defer creating.Wait()
	defer stop()
	patience := time.NewTimer(behindMost)
	defer patience.Stop()
	var watch clientv3.WatchChan
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case asked := <-s.again:
			return askedFor(asked)
		case <-patience.C:
			if watch == nil {
				return errNotCreated
			}
		case watch = <-created:
			s.brought(from, true)
		case resp, ok := <-watch:
			if !ok {
				return errClosed
			}
			if err := resp.Err(); err != nil {
				return fmt.Errorf("watch: %w", err)
			}
			s.take(resp)
		}
	}
}

// take hands on what the watch has brought.
func (s *Source) take(resp clientv3.WatchResponse) {
	s.mu.Lock()
	applied := s.applied
	s.mu.Unlock()
	if resp.IsProgressNotify() {
		if resp.Header.Revision > applied {
			s.cfg.Reader.Progressed(resp.Header.Revision)
		}
		s.brought(resp.Header.Revision, false)
		return
	}
	fresh := resp.Events
	for len(fresh) > 0 && fresh[0].Kv.ModRevision <= applied {
		fresh = fresh[1:] // the watch went back in time
	}
	if len(fresh) == 0 {
		return
	}
	s.cfg.Reader.Apply(fresh)
	s.brought(fresh[len(fresh)-1].Kv.ModRevision, false)
}

// brought takes note of how far the watch is.
func (s *Source) brought(revision int64, opened bool) {
	s.mu.Lock()
	s.open = s.open || opened
	s.applied = max(s.applied, revision)
	s.heard = s.cfg.Monotonic()
	s.mu.Unlock()
	if opened {
		s.Hurry()
	}
	s.assess()
}

// assess tells whether the reader is live.
func (s *Source) assess() {
	s.standing.Lock()
	defer s.standing.Unlock()
	now := s.cfg.Monotonic()
	s.mu.Lock()
	state, was := s.state, s.state
	var cause error
	switch {
	case !s.open:
	case s.goal > s.applied && now-s.since >= behindMost:
		cause = fmt.Errorf("it has not reached what etcd had %v ago", behindMost)
	case now-s.heard >= silentMost:
		cause = errSilent
	case now-s.asked >= unaskedMost:
		cause = fmt.Errorf("etcd has not answered for %v", unaskedMost)
	case s.goal <= s.applied: // else it is on its way there
		state = Live
	}
	if cause != nil {
		state = CatchingUp
	}
	s.state = state
	s.mu.Unlock()
	if state != was {
		s.cfg.Reader.Told(state, cause)
	}
}

// begin returns the revision after which changes are to come: where the reader was, or
// that of a fresh list.
func (s *Source) begin(ctx context.Context) (int64, error) {
	select {
	case <-s.again: // this beginning answers it
	default:
	}
	s.mu.Lock()
	from := s.applied
	resume := s.cfg.Resumes && s.lists > 0 && !s.void
	s.mu.Unlock()
	if resume {
		// A watch from a revision that etcd has not reached would bring nothing, and say
		// nothing, until it does.
		if err := s.ask(ctx); err != nil {
			return 0, err
		}
		return from, nil
	}
	s.stand(Resyncing, errors.New("it begins"))
	sent := s.cfg.Monotonic()
	revision, err := s.cfg.Reader.List(ctx)
	if err != nil {
		return 0, fmt.Errorf("list: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.applied, s.goal, s.void = revision, 0, false // a list answers every goal
	s.asked = sent
	s.lists++
	return revision, nil
}

// ask reads etcd. An error: it could not be read, or has gone back.
func (s *Source) ask(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	s.mu.Lock()
	before, lists := s.applied, s.lists
	s.mu.Unlock()
	sent := s.cfg.Monotonic()
	revision, goal, err := s.cfg.Reader.Ask(call)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case lists == 0 || lists != s.lists: // a list answers every question
		return err
	case errors.Is(err, ErrWentBack), err == nil && revision < before:
		s.void = true
		return ErrWentBack
	case err != nil:
		return err
	}
	s.asked = sent
	if s.goal <= s.applied {
		s.goal, s.since = goal, sent
	}
	return nil
}

// probe asks once a second, has the watch tell how far it is, and ends one that is dead
// or hopeless.
func (s *Source) probe(ctx context.Context) {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for {
		if err := s.ask(ctx); errors.Is(err, ErrWentBack) {
			s.restart(err)
		}
		s.askProgress(ctx)
		s.judge()
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-s.hurry:
		}
	}
}

// judge ends a watch that does not get anywhere.
func (s *Source) judge() {
	s.assess()
	now := s.cfg.Monotonic()
	s.mu.Lock()
	behind, silent := time.Duration(0), time.Duration(0)
	if s.open {
		silent = now - s.heard
		if s.goal > s.applied {
			behind = now - s.since
		}
	}
	s.mu.Unlock()
	switch {
	case behind >= hopelessAfter, behind >= behindMost && !s.cfg.Resumes:
		s.Again(errHopeless)
	case s.cfg.Resumes && silent >= silentMost && (behind >= behindMost || silent >= 2*silentMost):
		s.restart(errSilent)
	}
}

// askProgress has the watch tell how far it is: without it, silence and having nothing
// to bring look alike.
func (s *Source) askProgress(ctx context.Context) {
	s.mu.Lock()
	open := s.open
	s.mu.Unlock()
	if !open {
		return
	}
	call, cancel := context.WithTimeout(ctx, probeTimeout) // its metadata names the stream: as the watch's own
	defer cancel()
	if err := s.cfg.Client.RequestProgress(call); err != nil && ctx.Err() == nil {
		s.cfg.Log.Debug("the watch was not asked how far it is", "watch", s.cfg.Name, "cause", err)
	}
}
