package waiting

import (
	"container/list"
	"context"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

const (
	// askEvery is how long a group goes without looking at its key, at most.
	askEvery = time.Second
	// askLeast keeps a group that polls from asking all the time.
	askLeast = 20 * time.Millisecond
	// lapseLeast is the same where a claim should have lapsed and has not: time stands
	// still while nobody ticks.
	lapseLeast = 50 * time.Millisecond
	// answerEarly is how long before its call's deadline a waiter answers.
	answerEarly = 100 * time.Millisecond
	// waitingMost is how many wait, unless the Config says.
	waitingMost = 100_000
)

// Store is what a Room asks of claim.Store.
type Store interface {
	BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun
}

// Changes tells of keys that may have changed.
type Changes interface {
	// Follow returns a channel that has a value when the key may have changed since the
	// last one was taken, and how to end it. The key is its name in etcd.
	Follow(key string) (changed <-chan struct{}, end func())
	// Live reports whether changes are being told now. What was missed before is told as a
	// change of every key.
	Live() bool
}

// Observer is told what happens, for metrics.
type Observer interface {
	// Groups are so many keys more, or fewer, that are waited for.
	Groups(more int)
	// Asked is one ask for so many waiters: change, lease, second, retry.
	Asked(cause string, waiters int)
	// Checked is one read of so many keys' revisions.
	Checked(keys int)
	// Woken is how long it took from what made a group ask to the answer of some of it.
	Woken(took time.Duration)
}

// Config is what a Room is made of. All but Store may be left out.
type Config struct {
	Store Store
	// Revisions returns the ModRevisions of keys of etcd, 0 for one that is absent, by one
	// linearizable read. Without it the Store is asked in its place.
	Revisions func(ctx context.Context, keys []string) ([]int64, error)
	// Changes may be nil: then nobody is told of changes, and groups poll.
	Changes Changes
	// Draining is closed when all are to be answered with what they have.
	Draining <-chan struct{}
	Log      *slog.Logger
	Observe  Observer
	// Most is how many wait at once, before more are OVERLOADED; 0: 100,000.
	Most int
}

// Room is where callers wait.
type Room struct {
	cfg    Config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	crew   sync.WaitGroup // asks, and the rounds
	// poked: there are more groups to go round than there were.
	poked chan struct{}
	// What would be said with every round is said seldom.
	seldom rate.Sometimes

	mu     sync.Mutex
	closed bool
	groups map[name]*group
	total  int // waiters
	// fresh are groups that no round has looked at yet, settled all others, each in the
	// order in which they are due.
	fresh, settled list.List
	going          bool // the rounds
}

type name struct{ namespace, key string }

// New makes a Room.
func New(cfg Config) *Room {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Observe == nil {
		cfg.Observe = nobody{}
	}
	if cfg.Most == 0 {
		cfg.Most = waitingMost
	}
	r := &Room{cfg: cfg, poked: make(chan struct{}, 1), groups: map[name]*group{}, seldom: rate.Sometimes{Interval: 10 * time.Second}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

type nobody struct{}

func (nobody) Groups(int)          {}
func (nobody) Asked(string, int)   {}
func (nobody) Checked(int)         {}
func (nobody) Woken(time.Duration) {}

// Close answers who still waits and is in no ask, gives the asks in flight up, and waits
// for them and for the rounds. Nobody should be waiting any more.
func (r *Room) Close() {
	r.mu.Lock()
	r.closed = true
	groups := make([]*group, 0, len(r.groups))
	for _, g := range r.groups {
		groups = append(groups, g)
	}
	r.mu.Unlock()
	r.cancel()
	r.crew.Wait()
	for _, g := range groups {
		g.dismiss()
	}
}

// start runs f, unless the Room is closed.
func (r *Room) start(f func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.crew.Go(f)
	return true
}

// live reports whether changes are being told now.
func (r *Room) live() bool { return r.cfg.Changes != nil && r.cfg.Changes.Live() }

// Wait waits until the key is no longer in progress, the caller's patience or deadline is
// near, enough is closed or the node drains; last is what the caller was told when it
// asked. An error of an ask is the answer: it may have given the claim, which only the same
// call sent again can learn.
func (r *Room) Wait(ctx context.Context, req *claim.BeginRequest, last claim.Answer, enough <-chan struct{}) (claim.Answer, error) {
	end := time.Now().Add(req.Wait)
	hurried := false // the deadline comes before the end of the wait
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerEarly).Before(end) {
		end, hurried = deadline.Add(-answerEarly), true
	}
	left := time.Until(end)
	if last.Verdict != claim.InProgress || left <= 0 {
		return last, nil
	}
	g, err := r.enter(name{req.Namespace, req.Key})
	switch {
	case err != nil:
		return claim.Answer{}, err
	case g == nil: // it is closed
		return last, nil
	}
	defer r.leave(g)
	w := &waiter{ctx: ctx, req: req, enough: enough, last: last, told: make(chan struct{}, 1)}
	g.join(w)
	timer := time.NewTimer(left)
	defer timer.Stop()
	changed, draining := g.changed, r.cfg.Draining
	for {
		select {
		case <-w.told:
			return w.last, w.err
		case <-ctx.Done():
			if g.abandon(w) {
				return claim.Answer{}, ctx.Err()
			}
			<-w.told // it was on its way
			return w.last, w.err
		case _, open := <-changed:
			if !open {
				changed = nil
				continue
			}
			g.want(causeChange)
			continue
		case <-timer.C:
			if !hurried && !r.live() && g.askOnceMore(w) {
				continue
			}
		case <-draining:
			draining = nil
		case <-enough:
			enough = nil
		}
		if g.answered(w) {
			return w.last, nil
		}
		// It is in an ask, whose outcome is its answer.
	}
}

// enter returns the group of a key, in which there is one more now; nil if the Room is
// closed.
func (r *Room) enter(n name) (*group, error) {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil, nil
	}
	if r.total >= r.cfg.Most {
		r.mu.Unlock()
		return nil, &claim.Error{Reason: claim.Overloaded, Message: "too many wait on this node: ask again after the given time, without wait, or ask another node", RetryAfter: askEvery}
	}
	r.total++
	g, isNew := r.groups[n], false
	if g == nil {
		isNew = true
		g = &group{room: r, name: n, key: layout.NameOf(n.namespace, n.key).Key}
		r.groups[n] = g
		r.toGoRound(g)
	}
	g.members++
	r.mu.Unlock()
	if isNew {
		r.cfg.Observe.Groups(1)
	}
	// Not under the Room's lock: whoever tells of changes has locks of its own.
	g.follow.Do(func() {
		if r.cfg.Changes != nil {
			g.changed, g.unfollow = r.cfg.Changes.Follow(g.key)
		}
	})
	return g, nil
}

// leave takes a waiter out of its group.
func (r *Room) leave(g *group) {
	r.mu.Lock()
	r.total--
	r.mu.Unlock()
	r.release(g)
}

// hold keeps a group for an ask, unless it is over.
func (r *Room) hold(g *group) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if g.members == 0 {
		return false
	}
	g.members++
	return true
}

// release lets a group go, which ends with the last to do so.
func (r *Room) release(g *group) {
	r.mu.Lock()
	g.members--
	over := g.members == 0
	if over {
		delete(r.groups, g.name)
		r.goneRound(g)
	}
	r.mu.Unlock()
	if !over {
		return
	}
	r.cfg.Observe.Groups(-1)
	g.end()
}
