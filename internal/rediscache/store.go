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
// Get goes straight through; what finishes write to Redis goes by etcdtxn.Cache.
type Store struct {
	claim.Store
	cache *Cache
}

var _ claim.Store = Store{}

// Front puts the cache in front of a Store.
func (c *Cache) Front(behind claim.Store) Store { return Store{behind, c} }

// askEtcdFor bounds how long etcd is asked while it has not been heard from, where
// there is another answer.
const askEtcdFor = time.Second

// Begin answers a repeat of something finished from Redis. For everything else the
// Store behind is asked.
func (s Store) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	begun := s.BeginTogether(ctx, []*claim.BeginRequest{req})
	return begun[0].Answer, begun[0].Err
}

// BeginTogether looks into Redis once. It answers all from there, or none.
func (s Store) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	found := s.cache.look(ctx, reqs[0].Namespace, reqs[0].Key, true)
	begun, _ := answer(ctx, s, &found, // each has its own error
		func(v *claim.View, now claim.Instant, stale bool) ([]claim.Begun, bool) {
			return judge(v, now, found.record, reqs, stale)
		},
		func(ctx context.Context) ([]claim.Begun, error) {
			hinted := *reqs[0]
			if hinted.Hint = found.finding.hint(); found.record != nil {
				hinted.Hint = claim.LikelyRepeat // a read, which leaves no claim that nobody was told of
			}
			begun := s.Store.BeginTogether(ctx, append([]*claim.BeginRequest{&hinted}, reqs[1:]...))
			return begun, begun[0].Err
		})
	return begun
}

// Get answers for something finished from Redis.
func (s Store) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	found := s.cache.look(ctx, req.Namespace, req.Key, false)
	return answer(ctx, s, &found,
		func(_ *claim.View, now claim.Instant, stale bool) (claim.Found, bool) {
			return claim.Found{Record: found.record.At(now), Now: now, Revision: found.record.Revision, Source: claim.SourceRedis, Stale: stale}, true
		},
		func(ctx context.Context) (claim.Found, error) { return s.Store.Get(ctx, req) })
}

// answer tells what was found, or asks the Store behind; and if etcd cannot be asked,
// it tells what was found and true when it last could, where the namespace has that.
// tell reports false if what was found is no answer to this question.
func answer[T any](ctx context.Context, s Store, found *looked, tell func(v *claim.View, now claim.Instant, stale bool) (T, bool), ask func(context.Context) (T, error)) (T, error) {
	if found.finding == Hit {
		told, ok := tell(&found.view, found.view.Now, false)
		if ok {
			s.cache.cfg.Observe.Looked(string(Hit))
			if s.cache.cfg.Told != nil {
				s.cache.cfg.Told(&found.view, found.record)
			}
			return told, nil
		}
		found.finding, found.record = Undecided, nil
	}
	s.cache.cfg.Observe.Looked(string(found.finding))
	if found.record == nil {
		return ask(ctx)
	}
	asked, cancel := context.WithTimeout(ctx, patience(ctx))
	defer cancel()
	told, err := ask(asked)
	if claim.ReasonOf(err) != claim.StoreUnavailable {
		return told, err
	}
	if v, now, ok := s.stale(found); ok {
		if old, ok := tell(&v, now, true); ok {
			return old, nil
		}
	}
	return told, err
}

// judge answers Begins from a finished record; false if the Store behind has to.
func judge(v *claim.View, now claim.Instant, rec *claim.Record, reqs []*claim.BeginRequest, stale bool) ([]claim.Begun, bool) {
	p, err := v.Policy(reqs[0].Namespace)
	if err != nil {
		return nil, false
	}
	return claim.Replayed(rec, reqs, claim.Moment{Now: now, Policy: p, Jitter: rand.Float64()}, claim.SourceRedis, stale)
}

// stale returns the view and the time by which a record is told while etcd cannot be
// asked: the last tick and all the time since, so that it is never told for too long.
// false: its time is over, or an operator's act was heard of meanwhile.
func (s Store) stale(found *looked) (claim.View, claim.Instant, bool) {
	v, err := s.cache.cfg.View.View()
	slot := layout.NameOf(found.record.Namespace, found.record.Key).Slot
	if err != nil || v.BypassRedis || v.Epochs(slot) != found.view.Epochs(slot) {
		return v, 0, false
	}
	now := v.Latest()
	return v, now, now < found.record.CachedUntil()
}

// patience is how long etcd is asked, so that there is time for another answer.
func patience(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(askEtcdFor, time.Until(deadline)/2)
	}
	return askEtcdFor
}
