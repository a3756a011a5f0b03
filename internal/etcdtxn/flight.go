package etcdtxn

import (
	"context"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// flights shares the reads of hot keys: of one key at most one read is in flight
// on a node. A caller may share only a read that is sent after it asked, so one
// that comes while a read is in flight waits for the next, with all who came
// meanwhile (H06).
type flights struct {
	mu sync.Mutex
	// next is, for each key that is being read, the read to be sent after it; nil
	// while nobody waits for one.
	next map[string]*flight
}

// flight is one read that callers wait for.
type flight struct {
	done chan struct{}
	got  found
	see  seeing
	err  error
}

// readOne reads a key, sharing the read with whom it may.
func (s *Store) readOne(ctx context.Context, v *claim.View, key string) (found, seeing, error) {
	s.flights.mu.Lock()
	f, flying := s.flights.next[key]
	if !flying {
		f = &flight{done: make(chan struct{})}
		if err := s.reads.start(func() { s.fly(key, f) }); err != nil {
			s.flights.mu.Unlock()
			return found{}, seeing{}, err
		}
		s.flights.next[key] = nil
	} else if f == nil {
		f = &flight{done: make(chan struct{})}
		s.flights.next[key] = f
	}
	s.flights.mu.Unlock()
	select {
	case <-f.done:
	case <-ctx.Done():
		return found{}, seeing{}, ctx.Err()
	}
	see := f.see
	see.admitted = f.err == nil && see.saw.Matches(v)
	return f.got, see, f.err
}

// fly reads for one flight after the other, until nobody waits for the next.
func (s *Store) fly(key string, f *flight) {
	for f != nil {
		var got []found
		began := time.Now()
		got, f.err = unpanicked(func() (got []found, err error) {
			got, f.see, err = s.read(context.Background(), []string{key})
			return got, err
		})
		if f.err == nil {
			f.got = got[0]
			s.observe("read", "ok", began)
		} else {
			s.observe("read", string(classOf(f.err)), began)
		}
		close(f.done)
		s.flights.mu.Lock()
		if f = s.flights.next[key]; f == nil {
			delete(s.flights.next, key)
		} else {
			s.flights.next[key] = nil
		}
		s.flights.mu.Unlock()
	}
}
