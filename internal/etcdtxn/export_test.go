package etcdtxn

import "github.com/dualcheck/dualcheck/internal/layout"

// Queued reports whether somebody waits for the read of a key that is sent after the
// one under way.
func (s *Store) Queued(namespace, key string) bool {
	s.flights.mu.Lock()
	defer s.flights.mu.Unlock()
	return s.flights.next[layout.NameOf(namespace, key).Key] != nil
}
