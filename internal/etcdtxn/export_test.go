package etcdtxn

import (
	"context"
	"fmt"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Queued reports whether somebody waits for the read of a key that is sent after the
// one under way.
func (s *Store) Queued(namespace, key string) bool {
	s.flights.mu.Lock()
	defer s.flights.mu.Unlock()
	return s.flights.next[layout.NameOf(namespace, key).Key] != nil
}

// WritesInFlight is how many batches of writes a node has in flight.
const WritesInFlight = writesInFlight

// WritesWaiting is how many writes wait to be sent.
func (s *Store) WritesWaiting() int {
	s.commits.mu.Lock()
	defer s.commits.mu.Unlock()
	return s.commits.waiting.urgent.waiting + s.commits.waiting.usual.waiting
}

// TxnOps is how many operations a transaction is taken to be allowed.
func (s *Store) TxnOps() int { return s.commits.allowed() }

// WriteRaw sends a transaction of so many members of so many writes each, and reports
// whether etcd took it.
func (s *Store) WriteRaw(ctx context.Context, members, width int) error {
	v, err := s.cfg.View.View()
	if err != nil {
		return err
	}
	all := make([]member, members)
	for i := range all {
		all[i].key = fmt.Sprint("/test/", i)
		for w := range width {
			all[i].puts = append(all[i].puts, put{key: fmt.Sprint("/test/", i, "/", w)})
		}
	}
	_, _, err = s.write(ctx, termsOf([]*proposal{{view: &v}}), all)
	return err
}

// Takes returns how many members of so many writes each go together.
func Takes(ops, waiting, width int) int {
	c := commits{ops: ops, busy: map[string]*proposal{}}
	for range waiting {
		c.waiting.push("ns", false, &proposal{member: member{puts: make([]put, width)}, view: &claim.View{}})
	}
	return len(c.take(0))
}
