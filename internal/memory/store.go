package memory

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Finding is what a look into the memory came to. All but Hit have the Store behind asked.
type Finding string

// The findings.
const (
	// Hit: it answered. Absent: nothing is there.
	Hit    Finding = "hit"
	Absent Finding = "absent"
	// Expired: too near to a deadline of the record, or kept for long enough. Epoch: it was
	// taken back.
	Expired Finding = "expired"
	Epoch   Finding = "epoch"
	// Undecided: the record does not answer this request.
	Undecided Finding = "undecided"
	// Bypassed by an operator. Disbelieved: the watch has not reached a read of etcd that
	// was sent lately. Undeclared: the namespace is, and must not be.
	Bypassed    Finding = "bypassed"
	Disbelieved Finding = "disbelieved"
	Undeclared  Finding = "undeclared"
)

// Store is a claim.Store with the node's memory in front.
type Store struct {
	claim.Store
	cache *Cache
}

var _ claim.Store = Store{}

// Front puts the memory in front of a Store.
func (c *Cache) Front(behind claim.Store) Store { return Store{behind, c} }

// askBehindFor bounds how long the Store behind is asked while etcd has not been heard
// from, where there is another answer. Redis, in between, gives etcd half of it.
const askBehindFor = 2 * time.Second

// Begin answers a repeat of something finished from memory. For everything else the Store
// behind is asked.
func (s Store) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	at := name{req.Namespace, req.Key}
	return answer(ctx, s.cache, at,
		func(rec *claim.Record, v *claim.View, now claim.Instant, stale bool) (claim.Answer, bool) {
			begun, ok := judge(rec, []*claim.BeginRequest{req}, v, now, stale)
			if !ok {
				return claim.Answer{}, false
			}
			return begun[0].Answer, true
		},
		func(ctx context.Context) (claim.Answer, error) {
			a, err := s.Store.Begin(ctx, req)
			s.cache.absent.met(at)
			return a, err
		})
}

// BeginTogether answers all from memory, or none.
func (s Store) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	at := name{reqs[0].Namespace, reqs[0].Key}
	begun, _ := answer(ctx, s.cache, at, // each has its own error
		func(rec *claim.Record, v *claim.View, now claim.Instant, stale bool) ([]claim.Begun, bool) {
			return judge(rec, reqs, v, now, stale)
		},
		func(ctx context.Context) ([]claim.Begun, error) {
			begun := s.Store.BeginTogether(ctx, reqs)
			s.cache.absent.met(at)
			return begun, begun[0].Err
		})
	return begun
}

// judge answers Begins from a finished record; false if the Store behind has to.
func judge(rec *claim.Record, reqs []*claim.BeginRequest, v *claim.View, now claim.Instant, stale bool) ([]claim.Begun, bool) {
	p, err := v.Policy(rec.Namespace)
	if err != nil {
		return nil, false
	}
	return claim.Replayed(rec, reqs, claim.Moment{Now: now, Policy: p, Jitter: rand.Float64()}, claim.SourceMemory, stale)
}

// Get answers for something finished from memory; and that there is no such key, if that
// was so a moment ago and the caller says that this will do.
func (s Store) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	at := name{req.Namespace, req.Key}
	return answer(ctx, s.cache, at,
		func(rec *claim.Record, _ *claim.View, now claim.Instant, stale bool) (claim.Found, bool) {
			return claim.Found{Record: rec.At(now), Now: now, Revision: rec.Revision, Source: claim.SourceMemory, Stale: stale}, true
		},
		func(ctx context.Context) (claim.Found, error) {
			if req.Cached && s.cache.knownAbsent(at) {
				return claim.Found{}, claim.Known(nil, at.namespace, claim.Moment{})
			}
			sent := s.cache.cfg.Monotonic()
			found, err := s.Store.Get(ctx, req)
			switch {
			case err == nil:
				s.cache.absent.met(at)
			case req.Cached && claim.ReasonOf(err) == claim.RecordNotFound:
				s.cache.absent.missed(at, sent)
			}
			return found, err
		})
}

// Finish notes that the key is there.
func (s Store) Finish(ctx context.Context, req *claim.FinishRequest) (claim.Found, error) {
	defer s.cache.absent.met(name{req.Namespace, req.Key})
	return s.Store.Finish(ctx, req)
}

// Extend notes that the key is there.
func (s Store) Extend(ctx context.Context, req *claim.ExtendRequest) (*claim.Grant, error) {
	defer s.cache.absent.met(name{req.Namespace, req.Key})
	return s.Store.Extend(ctx, req)
}

// Resolve notes that the key is there.
func (s Store) Resolve(ctx context.Context, req *claim.ResolveRequest) (claim.Found, error) {
	defer s.cache.absent.met(name{req.Namespace, req.Key})
	return s.Store.Resolve(ctx, req)
}

// Forget notes that the key was there: what is true of it now is for a read to say.
func (s Store) Forget(ctx context.Context, req *claim.ForgetRequest) (int64, error) {
	defer s.cache.absent.met(name{req.Namespace, req.Key})
	return s.Store.Forget(ctx, req)
}

// List notes that the keys are there.
func (s Store) List(ctx context.Context, req *claim.ListRequest) (claim.Page, error) {
	page, err := s.Store.List(ctx, req)
	for _, rec := range page.Records {
		s.cache.absent.met(name{rec.Namespace, rec.Key})
	}
	return page, err
}

// knownAbsent reports whether a cached Get may be told that there is no such key.
func (c *Cache) knownAbsent(at name) bool {
	by := byRead
	if !c.absent.read(at) {
		by = byFilter
		if c.cfg.Absent == nil || c.absent.metLately(at) || !c.cfg.Absent(at.namespace, at.key) {
			return false
		}
	}
	v, err := c.cfg.View.View()
	if err != nil || v.BypassMemory {
		return false
	}
	if _, err := v.Policy(at.namespace); err != nil {
		return false // the Store behind says so
	}
	c.cfg.Observe.Absent(by)
	return true
}

// looked is what a look came to.
type looked struct {
	finding Finding
	// view is from after the entry was found, so that it is no older than the entry's own.
	view claim.View
	// entry is set with Hit. With Disbelieved it is set if the namespace is told what was
	// true when etcd could last be asked.
	entry *entry
}

// look looks for a record and whether it may be told.
func (c *Cache) look(at name) (l looked) {
	e, ok := c.records.GetIfPresent(at)
	if !ok {
		l.finding = Absent
		return l
	}
	var err error
	if l.view, err = c.cfg.View.View(); err != nil {
		l.finding = Disbelieved
		return l
	}
	v := &l.view
	p, err := v.Policy(at.namespace)
	switch {
	case err != nil: // the Store behind says so
		l.finding = Undeclared
	case v.BypassMemory:
		l.finding = Bypassed
	case v.Epochs(e.slot) != e.epochs:
		l.finding = Epoch
		c.drop(at, e)
	case !v.Believed:
		l.finding = Disbelieved
		if p.ReplayWithoutEtcd {
			l.entry = e
		}
	case v.Now >= e.until:
		l.finding = Expired
		c.drop(at, e)
	default:
		l.finding, l.entry = Hit, e
	}
	return l
}

// answer tells what is there, or asks the Store behind; and if etcd cannot be asked, it
// tells what is there and was true when it last could, where the namespace has that. tell
// reports false if what is there is no answer to this question.
func answer[T any](ctx context.Context, c *Cache, at name, tell func(rec *claim.Record, v *claim.View, now claim.Instant, stale bool) (T, bool), ask func(context.Context) (T, error)) (T, error) {
	l := c.look(at)
	if l.finding == Hit {
		if told, ok := tell(c.told(l.entry), &l.view, l.view.Now, false); ok {
			c.cfg.Observe.Remembered(string(Hit))
			return told, nil
		}
		l.finding, l.entry = Undecided, nil
	}
	c.cfg.Observe.Remembered(string(l.finding))
	if l.entry == nil {
		return ask(ctx)
	}
	asked, cancel := context.WithTimeout(ctx, patience(ctx))
	defer cancel()
	told, err := ask(asked)
	if claim.ReasonOf(err) != claim.StoreUnavailable {
		return told, err
	}
	if v, now, ok := c.stale(l.entry); ok {
		if old, ok := tell(c.told(l.entry), &v, now, true); ok {
			return old, nil
		}
	}
	return told, err
}

// stale returns the view and the time by which an entry is told while etcd cannot be
// asked. false: its time is over, or an operator's act was heard of meanwhile.
func (c *Cache) stale(e *entry) (claim.View, claim.Instant, bool) {
	v, err := c.cfg.View.View()
	if err != nil || v.BypassMemory || v.Epochs(e.slot) != e.epochs {
		return v, 0, false
	}
	now := v.Latest()
	return v, now, now < e.until
}

// patience is how long the Store behind is asked, so that there is time for another answer.
func patience(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(askBehindFor, time.Until(deadline)/2)
	}
	return askBehindFor
}
