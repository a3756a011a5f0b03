package recency

import (
	"context"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Store is a claim.Store that is watched: whoever answers, the ages of what is told
// again are observed. It goes in front of all caches.
type Store struct {
	claim.Store
	habits *Habits
}

var _ claim.Store = Store{}

// Front watches a Store.
func (h *Habits) Front(behind claim.Store) Store { return Store{behind, h} }

// Begin observes a replay.
func (s Store) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	a, err := s.Store.Begin(ctx, req)
	if err == nil {
		s.begun(&a)
	}
	return a, err
}

// BeginTogether observes each replay.
func (s Store) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	begun := s.Store.BeginTogether(ctx, reqs)
	for i := range begun {
		if begun[i].Err == nil {
			s.begun(&begun[i].Answer)
		}
	}
	return begun
}

// Get observes what is finished: a cache could have told it too.
func (s Store) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	found, err := s.Store.Get(ctx, req)
	if err == nil && !found.Stale {
		s.habits.Observe(found.Record, found.Now)
	}
	return found, err
}

// begun observes an answer. A conflict is left out: it shows no record, and is nobody's
// habit. So is what was told stale: the clock is not known then.
func (s Store) begun(a *claim.Answer) {
	if (a.Verdict == claim.Replay || a.Verdict == claim.ReplayFailure) && !a.Stale {
		s.habits.Observe(a.Record, a.Now)
	}
}
