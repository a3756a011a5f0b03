package dualcheck

import (
	"context"
	"iter"
	"sync"
)

// ChangeKind is what a Change tells.
type ChangeKind uint8

// What a Change tells.
const (
	// ChangePut: the key is there, as Entry says.
	ChangePut ChangeKind = iota + 1
	// ChangeGone: the key was forgotten or has expired; Entry is what was there.
	ChangeGone
	// ChangeResync: changes were passed over. What is there is in the copy: read All, and
	// follow what comes.
	ChangeResync
)

func (k ChangeKind) String() string {
	return name([]string{"UNSPECIFIED", "PUT", "GONE", "RESYNC"}, int32(k))
}

// Change is a change of a Watch's copy.
type Change struct {
	Kind  ChangeKind
	Key   string
	Entry Entry
	// Cause says, for people, why there is a ChangeResync.
	Cause string
}

// Changes ranges over the changes of the copy until ctx or the Watch ends, each key's in
// their order. It begins with a ChangeResync, once the copy is whole:
//
//	for change := range watch.Changes(ctx) {
//		switch change.Kind {
//		case dualcheck.ChangeResync:
//			clear(mine)
//			for key, entry := range watch.All() {
//				mine[key] = entry
//			}
//		case dualcheck.ChangePut:
//			mine[change.Key] = change.Entry
//		case dualcheck.ChangeGone:
//			delete(mine, change.Key)
//		}
//	}
//
// After a snapshot of the server's there is one ChangeResync, at its end, in place of its
// changes. The copy never waits for who ranges here: who is slower than what comes is
// told ChangeResync in place of what waited, which is how WithQueueBytes bounds it. What
// All has shown may be told once more.
func (w *Watch) Changes(ctx context.Context) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		q := &changeQueue{most: w.cfg.queue, wake: make(chan struct{}, 1)}
		w.mu.Lock()
		w.watchers[q] = struct{}{}
		if w.whole {
			q.void("this is the beginning")
		}
		w.mu.Unlock()
		defer func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			delete(w.watchers, q)
		}()
		for ctx.Err() == nil {
			if change, ok := q.pop(); ok {
				if !yield(change) {
					return
				}
				continue
			}
			select {
			case <-q.wake:
			case <-ctx.Done():
			case <-w.done:
				// What was told before the end is still there to be had.
				for change, ok := q.pop(); ok; change, ok = q.pop() {
					if ctx.Err() != nil || !yield(change) {
						return
					}
				}
				return
			}
		}
	}
}

// tell tells all who range over Changes. In a snapshot nothing is told: its end is.
func (w *Watch) tell(kind ChangeKind, it *item) {
	if len(w.watchers) == 0 || !w.whole {
		return
	}
	change := Change{Kind: kind, Key: it.key, Entry: it.entry()}
	for q := range w.watchers {
		q.push(change)
	}
}

// changeQueue is what waits for one who ranges over Changes.
type changeQueue struct {
	most int
	wake chan struct{}

	mu      sync.Mutex
	changes []Change
	head    int
	bytes   int
	// voided: a ChangeResync comes next, and until it is taken nothing is kept: what
	// happens meanwhile is in the copy that it sends its reader to.
	voided bool
	cause  string
}

// bytes is what a change takes, about.
func (c *Change) bytes() int {
	return len(c.Key) + len(c.Entry.Digest) + len(c.Entry.encoded) + itemBytes
}

func (q *changeQueue) push(change Change) {
	q.mu.Lock()
	defer q.mu.Unlock()
	size := change.bytes()
	switch {
	case q.voided:
		return
	case q.bytes+size > q.most:
		q.give("changes came faster than they were taken")
		return
	case q.head > len(q.changes)/2:
		// What was taken makes room, once it is half of all.
		n := copy(q.changes, q.changes[q.head:])
		clear(q.changes[n:])
		q.changes, q.head = q.changes[:n], 0
	}
	q.changes = append(q.changes, change)
	q.bytes += size
	q.rouse()
}

// void says that changes were passed over.
func (q *changeQueue) void(cause string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.give(cause)
}

// give gives up what waits, under the lock.
func (q *changeQueue) give(cause string) {
	q.voided, q.cause = true, cause
	q.changes, q.head, q.bytes = nil, 0, 0
	q.rouse()
}

func (q *changeQueue) rouse() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *changeQueue) pop() (Change, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.voided {
		q.voided = false
		return Change{Kind: ChangeResync, Cause: q.cause}, true
	}
	if q.head == len(q.changes) {
		return Change{}, false
	}
	change := q.changes[q.head]
	q.bytes -= change.bytes()
	q.changes[q.head] = Change{}
	q.head++
	return change, true
}
