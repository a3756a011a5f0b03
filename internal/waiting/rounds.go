package waiting

import (
	"container/list"
	"time"

	"github.com/dualcheck/dualcheck/internal/layout"
)

const (
	// roundKeys is how many keys a round reads together.
	roundKeys = 100
	// freshAfter is when the key of a new group is looked at first: what changed between
	// its first waiter's question and its being followed nobody tells.
	freshAfter = 100 * time.Millisecond
	// together is how much earlier than it is due a key is read if that saves a read.
	together = 20 * time.Millisecond
	// betweenReads is the least between two reads, unless there are more than 20,000 keys.
	betweenReads = 5 * time.Millisecond
)

// toGoRound gives a group its place in the rounds; mu is held.
func (r *Room) toGoRound(g *group) {
	if r.cfg.Changes == nil {
		return // all poll
	}
	g.fresh, g.due = true, time.Now().Add(freshAfter)
	g.place = r.fresh.PushBack(g)
	switch n := r.fresh.Len() + r.settled.Len(); {
	case !r.going:
		r.going = true
		r.crew.Go(r.rounds)
	case n%roundKeys == 1 || r.fresh.Len() == 1: // they go faster from here on
		select {
		case r.poked <- struct{}{}:
		default:
		}
	}
}

// goneRound takes it out; mu is held.
func (r *Room) goneRound(g *group) {
	if g.place == nil {
		return
	}
	if g.fresh {
		r.fresh.Remove(g.place)
	} else {
		r.settled.Remove(g.place)
	}
	g.place = nil
}

// rounds look at each group's key once a second, in chunks that are spread over it, for as
// long as there is anybody.
func (r *Room) rounds() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	paced := time.Now() // when a chunk of settled groups was last read
	last := paced       // when anything was
	for {
		r.mu.Lock()
		settled, n := r.settled.Len(), r.settled.Len()+r.fresh.Len()
		if n == 0 || r.closed {
			r.going = false
			r.mu.Unlock()
			return
		}
		// So that each has its turn within a second, and chunks are full and evenly apart.
		turn := paced.Add(pace(settled))
		if at := front(&r.settled); !at.IsZero() && at.Before(turn) {
			turn = at
		}
		if settled == 0 {
			turn = time.Time{}
		}
		wake := sooner(turn, front(&r.fresh))
		if soonest := last.Add(min(betweenReads, pace(n))); wake.Before(soonest) {
			wake = soonest
		}
		r.mu.Unlock()
		timer.Reset(time.Until(wake))
		select {
		case <-timer.C:
		case <-r.poked:
			continue
		case <-r.ctx.Done():
			continue // it is closed
		}
		now := time.Now()
		itsTurn := !turn.IsZero() && !now.Before(turn)
		chunk := r.take(now, itsTurn)
		if last = now; itsTurn {
			paced = now
		}
		r.check(chunk, now)
	}
}

// pace is how far apart the chunks of so many groups are.
func pace(groups int) time.Duration {
	return askEvery / time.Duration(max((groups+roundKeys-1)/roundKeys, 1))
}

// front is when the first of a list is due; zero: there is none.
func front(l *list.List) time.Time {
	if e := l.Front(); e != nil {
		return e.Value.(*group).due
	}
	return time.Time{}
}

// take returns whose keys are to be read now: settled groups if it is their turn, and fresh
// ones that are about to be due.
func (r *Room) take(now time.Time, itsTurn bool) (chunk []*group) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if itsTurn {
		for range min(roundKeys, r.settled.Len()) {
			g := r.settled.Front().Value.(*group)
			g.due = now.Add(askEvery)
			r.settled.MoveToBack(g.place)
			chunk = append(chunk, g)
		}
	}
	for e := r.fresh.Front(); e != nil && len(chunk) < roundKeys; e = r.fresh.Front() {
		g := e.Value.(*group)
		if g.due.Sub(now) > together {
			break
		}
		r.fresh.Remove(e)
		g.fresh, g.due = false, now.Add(askEvery)
		g.place = r.settled.PushBack(g)
		chunk = append(chunk, g)
	}
	return chunk
}

// check looks at the keys of these groups.
func (r *Room) check(chunk []*group, now time.Time) {
	if len(chunk) == 0 {
		return
	}
	if !r.live() {
		for _, g := range chunk {
			g.rearm()
		}
		return
	}
	if r.cfg.Revisions == nil {
		for _, g := range chunk {
			g.checked(now, 0, 0)
		}
		return
	}
	// A policy or a switch that changes moves the guard, and may change what is told.
	keys := make([]string, 0, 1+len(chunk))
	keys = append(keys, layout.Guard)
	for _, g := range chunk {
		keys = append(keys, g.key)
	}
	revisions, err := r.cfg.Revisions(r.ctx, keys)
	if err != nil {
		// An ask would fare no better, and its error would end their wait. Changes that
		// are told no more are asked for.
		if r.ctx.Err() == nil {
			r.seldom.Do(func() {
				r.cfg.Log.Warn("the keys that callers wait for cannot be looked at", "error", err)
			})
		}
		return
	}
	r.cfg.Observe.Checked(len(chunk))
	for i, g := range chunk {
		g.checked(now, revisions[1+i], revisions[0])
	}
}
