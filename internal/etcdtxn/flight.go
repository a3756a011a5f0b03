package etcdtxn

import (
	"context"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

const (
	// readsInFlight is how many reads a node has in flight; what is asked meanwhile goes
	// together with the next.
	readsInFlight = 4
	// readTogether is how many keys one read has at most, well within max-txn-ops, and
	// readBytes roughly how large its answer may be: one that takes long holds up small
	// ones.
	readTogether = 100
	readBytes    = 1 << 20
)

// flights shares reads. What is asked while as many are in flight as may be waits,
// and goes as one flat read of many keys, which costs etcd little more than a read of
// one. A caller may share only a read that is sent after it asked (H06); and of one
// key at most one read is in flight, however hot it is.
type flights struct {
	mu      sync.Mutex
	waiting lanes[*flight]
	// next are the reads to be sent, by key; flying the keys that are being read.
	next    map[string]*flight
	flying  map[string]bool
	readers int
	// usual is how large a value is, in bytes, as a moving average.
	usual int
}

// flight is one read of a key that callers wait for.
type flight struct {
	key   string
	since time.Duration
	done  chan struct{}
	// callers is how many wait for it; one that is not sent and has none is dropped.
	callers int
	// sent: it may still stand in the other lane. urgent: it stands in the urgent one.
	sent, urgent bool
	got          found
	see          seeing
	err          error
}

// readOne reads the operation's key, sharing the read with whom it may.
func (s *Store) readOne(ctx context.Context, op *operation, v *claim.View) (found, seeing, error) {
	f, err := s.ask(op)
	if err != nil {
		return found{}, seeing{}, err
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		s.flights.leave(f)
		return found{}, seeing{}, ctx.Err()
	}
	see := f.see
	see.admitted = f.err == nil && see.saw.Matches(v)
	return f.got, see, f.err
}

// ask returns a flight that has not been sent yet.
func (s *Store) ask(op *operation) (*flight, error) {
	fs := &s.flights
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f := fs.next[op.key]
	if f != nil && (f.urgent || !op.urgent) {
		f.callers++
		return f, nil
	}
	if f == nil {
		if !op.urgent && !fs.waiting.admits(op.namespace, s.cfg.WaitingMost) {
			s.cfg.Observe.Crowded("read")
			return nil, overloaded()
		}
		if fs.readers < readsInFlight && !fs.flying[op.key] {
			if err := s.sends.start(s.fly); err != nil {
				return nil, err
			}
			fs.readers++
		}
		f = &flight{key: op.key, since: s.cfg.Monotonic(), done: make(chan struct{})}
		fs.next[op.key] = f
	}
	f.callers++
	f.urgent = op.urgent
	fs.waiting.push(op.namespace, op.urgent, f)
	return f, nil
}

// leave takes one caller away.
func (fs *flights) leave(f *flight) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f.callers--
}

// fly reads what waits, for as long as something does.
func (s *Store) fly() {
	together := min(readTogether, s.commits.allowed()-2) // the guard and the tick are read too
	for batch := s.flights.take(nil, together); len(batch) > 0; batch = s.flights.take(batch, together) {
		keys := make([]string, len(batch))
		since := batch[0].since
		for i, f := range batch {
			keys[i], since = f.key, min(since, f.since)
		}
		s.cfg.Observe.Sent("read", len(batch), s.cfg.Monotonic()-since)
		began := time.Now()
		var see seeing
		got, err := unpanicked(func() (got []found, err error) {
			got, see, err = s.read(s.closing, keys)
			return got, err
		})
		s.cfg.Observe.Landed("read")
		outcome := "ok"
		if err != nil {
			outcome = string(classOf(err))
		}
		s.observe("read", outcome, began)
		for i, f := range batch {
			if f.see, f.err = see, err; err == nil {
				f.got = got[i]
			}
			close(f.done)
		}
	}
}

// take returns what a reader is to send next, at most so many together, once it has landed
// what it sent before; an empty batch ends the reader. A key that another reader has in flight waits.
func (fs *flights) take(landed []*flight, together int) (batch []*flight) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for _, l := range landed {
		delete(fs.flying, l.key)
		fs.usual += (len(l.got.value) - fs.usual) / 16
	}
	most := min(max(readBytes/max(fs.usual, 1), 1), together)
	fs.waiting.take(most, func(f *flight) pick {
		switch {
		case f.sent:
			return dropped // from the other lane
		case f.callers == 0:
			f.sent = true
			delete(fs.next, f.key)
			return dropped // all of them have left
		case fs.flying[f.key]:
			return left
		}
		f.sent = true
		delete(fs.next, f.key)
		fs.flying[f.key] = true
		batch = append(batch, f)
		return taken
	})
	if len(batch) == 0 {
		fs.readers--
	}
	return batch
}
