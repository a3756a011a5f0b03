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
	mu sync.Mutex
	// waiting are the reads to be sent, by key, in the order of queue.
	waiting map[string]*flight
	queue   []string
	// flying are the keys that are being read, by sending readers.
	flying  map[string]bool
	readers int
	// usual is how large a value is, in bytes, as a moving average.
	usual int
}

// flight is one read of a key that callers wait for.
type flight struct {
	key  string
	done chan struct{}
	// callers is how many wait for it; one that is not sent and has none is dropped.
	callers int
	got     found
	see     seeing
	err     error
}

// readOne reads a key, sharing the read with whom it may.
func (s *Store) readOne(ctx context.Context, v *claim.View, key string) (found, seeing, error) {
	f, err := s.ask(key)
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
func (s *Store) ask(key string) (*flight, error) {
	s.flights.mu.Lock()
	defer s.flights.mu.Unlock()
	if f := s.flights.waiting[key]; f != nil {
		f.callers++
		return f, nil
	}
	if s.flights.readers < readsInFlight && !s.flights.flying[key] {
		if err := s.reads.start(s.fly); err != nil {
			return nil, err
		}
		s.flights.readers++
	}
	f := &flight{key: key, done: make(chan struct{}), callers: 1}
	s.flights.waiting[key] = f
	s.flights.queue = append(s.flights.queue, key)
	return f, nil
}

// leave takes one caller away.
func (f *flights) leave(one *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	one.callers--
}

// fly reads what waits, for as long as something does.
func (s *Store) fly() {
	for batch := s.flights.take(nil); len(batch) > 0; batch = s.flights.take(batch) {
		keys := make([]string, len(batch))
		for i, f := range batch {
			keys[i] = f.key
		}
		began := time.Now()
		var see seeing
		got, err := unpanicked(func() (got []found, err error) {
			got, see, err = s.read(s.closing, keys)
			return got, err
		})
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

// take returns what a reader is to send next, once it has landed what it sent before; an
// empty batch ends the reader. A key that another reader has in flight waits.
func (f *flights) take(landed []*flight) (batch []*flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range landed {
		delete(f.flying, l.key)
		f.usual += (len(l.got.value) - f.usual) / 16
	}
	most := min(max(readBytes/max(f.usual, 1), 1), readTogether)
	left := f.queue[:0]
	for i, key := range f.queue {
		if len(batch) == most {
			left = append(left, f.queue[i:]...)
			break
		}
		if f.flying[key] {
			left = append(left, key)
			continue
		}
		next := f.waiting[key]
		delete(f.waiting, key)
		if next.callers == 0 {
			continue // all of them have left
		}
		batch = append(batch, next)
		f.flying[key] = true
	}
	clear(f.queue[len(left):])
	f.queue = left
	if len(batch) == 0 {
		f.readers--
	}
	return batch
}
