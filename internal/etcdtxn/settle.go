package etcdtxn

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// operation is one caller's business with one key.
type operation struct {
	kind      string
	namespace string
	key       string
	// urgent: it ends or keeps a claim.
	urgent bool
	// guess is what the key is taken to be before it has been read; nil reads first,
	// else a write is tried at once. A guess is never told. One with a revision is
	// good for one generation of the view: should etcd have gone back since, that
	// revision may be another claim's.
	guess      *found
	generation uint64
	// before, if set, is called before each view is taken, and each write goes alone: it
	// moves the guard.
	before func(context.Context) error
	// decide says what to write over what is there; nil: nothing. What it decides on
	// a guess counts only if it is committed.
	decide func(there found, v *claim.View, now claim.Instant) ([]put, error)

	// sent are the writes whose fate is not known: found again, one of them is this
	// operation's own.
	sent []put
	// doubt: one of them may still arrive.
	doubt bool
}

// outcome is how an operation ended.
type outcome struct {
	view *claim.View
	// now is the node's clock or the tick that etcd answered with, if that is later.
	now claim.Instant
	// tick is the time of that tick, and asked when the question was sent that it
	// answers, by this process's own clock.
	tick  claim.Instant
	asked time.Duration
	// there is what the key is: as written, if written is set.
	there   found
	written bool
	// revision is etcd's at that moment.
	revision int64
}

// settle carries an operation through: decide, write under the guard, and again on
// whatever was found instead, until its answer is established or ctx ends.
func (s *Store) settle(ctx context.Context, op *operation) (outcome, error) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 20*time.Millisecond, 500*time.Millisecond
	guess := op.guess
	for {
		if op.before != nil {
			if err := op.before(ctx); err != nil {
				return outcome{}, err
			}
		}
		view, err := s.cfg.View.View()
		if err != nil {
			return outcome{}, err
		}
		if guess != nil && guess.revision != 0 && (view.Generation == 0 || view.Generation != op.generation) {
			guess = nil
		}
		end, err := s.underView(ctx, op, &view, guess, wait)
		if !errors.Is(err, errRefused) {
			return end, err
		}
		// What was sent before is dead, or done: a read tells which.
		guess = nil
	}
}

// errRefused: what was decided under a view may not be told. This node has caught up.
var errRefused = errors.New("refused by the guard or the tick window")

// underView carries an operation through for as long as its view holds.
func (s *Store) underView(ctx context.Context, op *operation, view *claim.View, guess *found, wait *backoff.ExponentialBackOff) (outcome, error) {
	at := outcome{view: view, now: view.Now}
	known := guess == nil // at.there was read, or found in the way of a write
	if guess != nil {
		at.there = *guess
	} else if err := s.look(ctx, op, &at, wait); err != nil {
		return outcome{}, err
	}
	for {
		if known && op.owns(at.there) {
			s.cfg.Observe.Settled(op.kind)
			at.written = true
			return at, nil
		}
		puts, err := op.decide(at.there, view, at.now)
		if (err != nil || puts == nil) && known {
			return at, err
		}
		if err != nil || puts == nil { // a guess is never told: read
			if err := s.look(ctx, op, &at, wait); err != nil {
				return outcome{}, err
			}
			known = true
			continue
		}
		got, see, err := s.writeOne(ctx, op, view, at.there, puts, wait)
		switch {
		case errors.Is(err, errFull):
			return s.afterFull(ctx, op)
		case errors.Is(err, errBehind):
			if err := s.look(ctx, op, &at, wait); err != nil {
				return outcome{}, err
			}
			known = true
			continue
		case err != nil:
			return outcome{}, err
		}
		if !see.admitted {
			if err := s.catchUp(ctx, view, see); err != nil {
				return outcome{}, err
			}
			return outcome{}, errRefused
		}
		at.saw(see)
		if got.written {
			at.there, at.written = found{value: puts[0].value, revision: see.revision}, true
			return at, nil
		}
		at.there, known = got.there, true
	}
}

// look reads the key under the view.
func (s *Store) look(ctx context.Context, op *operation, at *outcome, wait *backoff.ExponentialBackOff) error {
	for {
		got, see, err := s.readOne(ctx, op, at.view)
		if err != nil {
			if err := s.pause(ctx, wait, err, len(op.sent) > 0); err != nil {
				return err
			}
			continue
		}
		if !see.admitted {
			if err := s.catchUp(ctx, at.view, see); err != nil {
				return err
			}
			return errRefused
		}
		at.there = got
		at.saw(see)
		return nil
	}
}

// saw takes over what etcd's answer tells of the clock.
func (o *outcome) saw(see seeing) {
	if see.saw.Tick.Time >= o.tick {
		o.tick, o.asked = see.saw.Tick.Time, see.sent
	}
	o.now = max(o.now, o.tick)
	o.revision = see.revision
}

// errFull: etcd's database is. The write was applied, or was not and never will be.
var errFull = errors.New("etcd's database is full")

// writeOne sends one conditional write, the very same again for as long as its fate
// is not known.
func (s *Store) writeOne(ctx context.Context, op *operation, v *claim.View, there found, puts []put, wait *backoff.ExponentialBackOff) (settled, seeing, error) {
	doubt := false
	for {
		began := time.Now()
		out, see, err := s.submit(ctx, op, v, member{key: op.key, revision: there.revision, puts: puts}, doubt)
		_, told := errors.AsType[*claim.Error](err)
		switch {
		case !doubt && (told || errors.Is(err, errBehind)):
			return settled{}, seeing{}, err
		case errors.Is(err, errStale):
			s.cfg.Observe.Refused("tick")
			return settled{}, seeing{}, errRefused
		case errors.Is(err, errBehind):
			continue // the fate of the first try is what its repetition tells
		}
		if err == nil {
			switch {
			case !see.admitted:
				s.observe(op.kind, "refused", began)
				return settled{}, see, nil
			case out.written:
				s.observe(op.kind, "ok", began)
				if doubt {
					s.cfg.Observe.Settled(op.kind)
				}
			default:
				s.observe(op.kind, "lost", began)
			}
			return out, see, nil
		}
		class := classOf(err)
		s.observe(op.kind, string(class), began)
		if (class == ambiguous || class == full) && !doubt {
			op.sent = append(op.sent, puts[0])
		}
		if class == full {
			s.seldomFull.Do(func() { s.log.Warn("etcd's database is full: nothing new can be stored until room has been made") })
			op.doubt = op.doubt || doubt
			return settled{}, seeing{}, errFull
		}
		doubt = doubt || class == ambiguous
		if err := s.pause(ctx, wait, err, doubt); err != nil {
			return settled{}, seeing{}, err
		}
		if now, err := s.cfg.View.View(); err != nil || now.Generation != v.Generation {
			// etcd may have gone back meanwhile, and the revision be another claim's.
			return settled{}, seeing{}, errRefused
		}
	}
}

// submit sends one conditional write: with others, unless it moves the guard that they
// compare.
func (s *Store) submit(ctx context.Context, op *operation, v *claim.View, m member, again bool) (settled, seeing, error) {
	if op.before == nil {
		return s.propose(ctx, v, op.namespace, op.urgent || again, again, m)
	}
	out, see, err := s.write(ctx, termsOf([]*proposal{{view: v}}), []member{m})
	if err != nil || !see.admitted {
		return settled{}, see, err
	}
	return out[0], see, nil
}

// afterFull answers from a read once etcd has said that it is full: its own write
// if that was applied, whatever needs no write, or STORE_FULL. A try from before,
// whose fate is not known, may still arrive: then nothing is established.
func (s *Store) afterFull(ctx context.Context, op *operation) (outcome, error) {
	return s.settle(ctx, &operation{
		kind: op.kind, namespace: op.namespace, key: op.key, urgent: op.urgent, sent: op.sent, before: op.before,
		decide: func(there found, v *claim.View, now claim.Instant) ([]put, error) {
			puts, err := op.decide(there, v, now)
			switch {
			case err != nil || puts == nil:
				return nil, err
			case op.doubt:
				return nil, claim.Unavailable(inDoubt, errFull)
			}
			return nil, &claim.Error{Reason: claim.StoreFull, Message: "etcd's database is full: nothing new can be stored until room has been made", RetryAfter: 5 * time.Second}
		},
	})
}

// owns reports whether what was found is what this operation sent.
func (op *operation) owns(there found) bool {
	absent := there.revision == 0
	for _, p := range op.sent {
		if p.remove && absent || !p.remove && !absent && bytes.Equal(p.value, there.value) {
			return true
		}
	}
	return false
}

// inDoubt is what a caller is told whose write may have been applied.
const inDoubt = "whether this was stored could not be established: send the same call again, with the same request id or token"

// pause waits before another try. It returns the error to give up with, if the
// failure is final or ctx ends; doubt tells that an earlier try may yet arrive.
func (s *Store) pause(ctx context.Context, wait *backoff.ExponentialBackOff, cause error, doubt bool) error {
	message := "etcd does not answer: send the same call again"
	if doubt {
		message = inDoubt
	}
	if told, ok := errors.AsType[*claim.Error](cause); ok {
		if doubt {
			return claim.Unavailable(inDoubt, told)
		}
		return told
	}
	if classOf(cause) == denied {
		s.log.Error("etcd refuses what this node asks", "error", cause)
		if !doubt {
			message = "etcd refuses what this node asks: an operator must look at its log"
		}
		return claim.Unavailable(message, cause)
	}
	select {
	case <-ctx.Done():
	case <-time.After(wait.NextBackOff()):
		if ctx.Err() == nil {
			return nil
		}
	}
	return claim.Unavailable(message, cause)
}

func (s *Store) catchUp(ctx context.Context, used *claim.View, see seeing) error {
	cause := "tick"
	if see.saw.Guard != used.Guard {
		cause = "guard"
	}
	s.cfg.Observe.Refused(cause)
	return s.cfg.View.CatchUp(ctx, *used, see.saw)
}

func (s *Store) observe(kind, outcome string, began time.Time) {
	s.cfg.Observe.Call(kind, outcome, time.Since(began))
}
