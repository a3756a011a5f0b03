package rediscache

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Store is a claim.Store with Redis in front: it answers from a confirmed entry, and
// otherwise asks the Store behind, telling it what to expect. Everything but Begin and
// Get goes straight through.
type Store struct {
	claim.Store
	cache *Cache
}

var _ claim.Store = Store{}

// Front puts the cache in front of a Store.
func (c *Cache) Front(behind claim.Store) Store { return Store{behind, c} }

// withoutEtcd bounds how long etcd is asked while it has not been heard from, where
// the namespace has replays without it.
const withoutEtcd = 2 * time.Second

// Begin answers a repeat of something finished from Redis. For everything else the
// Store behind is asked.
func (s Store) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	found := s.cache.look(ctx, req.Namespace, req.Key, true)
	if found.finding == Hit {
		if a, ok := judge(&found.view, found.view.Now, found.record, req); ok {
			return a, nil
		}
	}
	hinted := *req
	hinted.Hint = hintOf(found.finding)
	if found.finding != Disbelieved || found.record == nil {
		return s.Store.Begin(ctx, &hinted)
	}
	asked, cancel := context.WithTimeout(ctx, patience(ctx))
	defer cancel()
	answer, err := s.Store.Begin(asked, &hinted)
	if err == nil || claim.ReasonOf(err) != claim.StoreUnavailable {
		return answer, err
	}
	if v, now, ok := s.stale(&found); ok {
		if a, ok := judge(&v, now, found.record, req); ok {
			a.Stale = true
			return a, nil
		}
	}
	return answer, err
}

// Get answers for something finished from Redis.
func (s Store) Get(ctx context.Context, namespace, key string) (claim.Found, error) {
	found := s.cache.look(ctx, namespace, key, false)
	if found.finding == Hit {
		return told(found.record, found.view.Now), nil
	}
	if found.finding != Disbelieved || found.record == nil {
		return s.Store.Get(ctx, namespace, key)
	}
	asked, cancel := context.WithTimeout(ctx, patience(ctx))
	defer cancel()
	answer, err := s.Store.Get(asked, namespace, key)
	if err == nil || claim.ReasonOf(err) != claim.StoreUnavailable {
		return answer, err
	}
	if _, now, ok := s.stale(&found); ok {
		answer = told(found.record, now)
		answer.Stale = true
		return answer, nil
	}
	return answer, err
}

// judge answers a Begin from a finished record; false if the Store behind has to.
func judge(v *claim.View, now claim.Instant, rec *claim.Record, req *claim.BeginRequest) (claim.Answer, bool) {
	p, err := v.Policy(req.Namespace)
	if err != nil {
		return claim.Answer{}, false
	}
	a, write, err := claim.Begin(rec, req, claim.Moment{Now: now, Policy: p, Jitter: rand.Float64()})
	if err != nil || write != nil {
		return claim.Answer{}, false
	}
	switch a.Verdict {
	case claim.Replay, claim.ReplayFailure, claim.Conflict:
		a.Source = claim.SourceRedis
		return a, true
	}
	return claim.Answer{}, false
}

func told(rec *claim.Record, now claim.Instant) claim.Found {
	return claim.Found{Record: rec.At(now), Now: now, Revision: rec.Revision, Source: claim.SourceRedis}
}

// stale returns the view and the time by which a record is told while etcd cannot be
// asked: the last tick and all the time since, so that it is never told for too long.
// false: its time is over, or an operator's act was heard of meanwhile.
func (s Store) stale(found *looked) (claim.View, claim.Instant, bool) {
	v, err := s.cache.cfg.View.View()
	slot := layout.NameOf(found.record.Namespace, found.record.Key).Slot
	if err != nil || v.BypassRedis || !sameEpochs(&v, &found.view, slot) {
		return v, 0, false
	}
	now := v.Tick.Time.Add(v.TickAge)
	return v, now, now < until(found.record)
}

// patience is how long etcd is asked, so that there is time for another answer.
func patience(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(withoutEtcd, time.Until(deadline)/2)
	}
	return withoutEtcd
}

// hintOf is what a finding says of what etcd will be found to have.
func hintOf(f Finding) claim.Hint {
	switch f {
	case Absent:
		return claim.LikelyNew
	case Slow, Failed, Open, Bypassed, Disbelieved:
		return claim.NoHint
	}
	return claim.LikelyRepeat
}
