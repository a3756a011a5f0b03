package ingest

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// Bounds of the lines that have been read and are not dealt with, in bytes.
const (
	// maxPending is for all of them; one line is always let in.
	maxPending = 64 << 20
	// lineCost is what a line takes besides its own bytes.
	lineCost = 512
)

// queue holds the lines that have been read, by name. A name's lines are given out
// one at a time, in their order; names take turns.
type queue struct {
	room *semaphore.Weighted

	mu      sync.Mutex
	changed sync.Cond
	// waiting has the lines of each name that is in ready or given out.
	waiting map[name][]line
	// ready are the names whose next line may be given out.
	ready  []name
	closed bool
}

func newQueue() *queue {
	q := &queue{room: semaphore.NewWeighted(maxPending), waiting: map[name][]line{}}
	q.changed.L = &q.mu
	return q
}

// weight is what a line takes of the room.
func weight(ln line) int64 { return min(int64(ln.size)+lineCost, maxPending) }

// push adds a line when there is room for it; false if ctx was done first.
func (q *queue) push(ctx context.Context, ln line) bool {
	if q.room.Acquire(ctx, weight(ln)) != nil {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	lines, known := q.waiting[ln.name]
	q.waiting[ln.name] = append(lines, ln)
	if !known {
		q.ready = append(q.ready, ln.name)
		q.changed.Signal()
	}
	return true
}

// close says that there are no more lines to come.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.changed.Broadcast()
}

// next waits for a line that may be dealt with; done must be called when it has
// been. False: there is none to come, except of names that are given out, whose
// workers come back for them.
func (q *queue) next() (line, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.ready) == 0 {
		if q.closed {
			return line{}, false
		}
		q.changed.Wait()
	}
	n := q.ready[0]
	q.ready = q.ready[1:]
	lines := q.waiting[n]
	ln := lines[0]
	// The line's bytes are not to be kept by the array that it was in.
	lines[0] = line{}
	q.waiting[n] = lines[1:]
	return ln, true
}

// done makes the next line of ln's name ready.
func (q *queue) done(ln line) {
	q.mu.Lock()
	if len(q.waiting[ln.name]) > 0 {
		q.ready = append(q.ready, ln.name)
		q.changed.Signal()
	} else {
		delete(q.waiting, ln.name)
	}
	q.mu.Unlock()
	q.room.Release(weight(ln))
}
