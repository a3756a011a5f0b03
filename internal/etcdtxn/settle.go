package etcdtxn

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// operation is one caller's business with one key.
type operation struct {
	kind string
	key  string
	// guess is what the key is taken to be before it has been read: nil reads
	// first, else a write is tried at once. A guess is never told.
	guess *found
	// decide says what to write over what is there; nil: nothing. What it decides on
	// a guess counts only if it is committed.
	decide func(there found, v *claim.View, now claim.Instant) ([]put, error)

	// sent are the writes whose fate is not known: found again, one of them is this
	// operation's own.
	sent []put
}

// outcome is how an operation ended.
type outcome struct {
	view claim.View
	// now is the node's clock or the tick that etcd answered with, if that is later.
	now claim.Instant
	// tick is the time of that tick.
	tick claim.Instant
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
	var tick claim.Instant // the latest that etcd has answered with
	there := op.guess
	known := false // there was read under the guard of view
	var view claim.View
	var see seeing
	for {
		if !known {
			v, err := s.cfg.View.View()
			if err != nil {
				return outcome{}, err
			}
			view = v
		}
		if there == nil {
			var err error
			var got found
			began := time.Now()
			got, see, err = s.readOne(ctx, &view, op.key)
			if err != nil {
				s.observe("read", string(classOf(err)), began)
				if err = s.pause(ctx, wait, err, false); err != nil {
					return outcome{}, err
				}
				continue
			}
			if !see.admitted {
				s.observe("read", "refused", began)
				if err := s.catchUp(ctx, view, see); err != nil {
					return outcome{}, err
				}
				continue
			}
			s.observe("read", "ok", began)
			there, known = &got, true
			tick = max(tick, see.saw.Tick.Time)
		}
		now := max(view.Now, tick)
		end := outcome{view: view, now: now, tick: tick, there: *there, revision: see.revision}
		if known && op.owns(there) {
			s.cfg.Observe.Settled(op.kind)
			end.written = true
			return end, nil
		}
		puts, err := op.decide(*there, &view, now)
		if err != nil || puts == nil {
			if known {
				return end, err
			}
			there = nil // a guess is never told: read
			continue
		}
		written, err := s.writeOne(ctx, op, &view, *there, puts, wait)
		if err != nil {
			return outcome{}, err
		}
		switch {
		case written.full:
			return s.afterFull(ctx, op)
		case !written.see.admitted:
			if err := s.catchUp(ctx, view, written.see); err != nil {
				return outcome{}, err
			}
			known = false
			if len(op.sent) > 0 {
				there = nil // what was sent before is dead or done: a read tells which
			}
		case written.written:
			tick = max(tick, written.see.saw.Tick.Time)
			return outcome{
				view: view, now: max(now, tick), tick: tick, written: true, revision: written.revision,
				there: found{value: []byte(puts[0].value), revision: written.revision},
			}, nil
		default:
			there, known, see = &written.there, true, written.see
			tick = max(tick, see.saw.Tick.Time)
		}
	}
}

// attempt is what became of one write.
type attempt struct {
	settled
	see  seeing
	full bool
}

// writeOne sends one conditional write, the very same again for as long as its fate
// is not known.
func (s *Store) writeOne(ctx context.Context, op *operation, v *claim.View, there found, puts []put, wait *backoff.ExponentialBackOff) (attempt, error) {
	doubt := false
	for {
		began := time.Now()
		out, see, err := s.write(ctx, v, []member{{key: op.key, revision: there.revision, puts: puts}})
		if err == nil {
			if !see.admitted {
				s.observe(op.kind, "refused", began)
				return attempt{see: see}, nil
			}
			if out[0].written {
				s.observe(op.kind, "ok", began)
			} else {
				s.observe(op.kind, "lost", began)
			}
			if doubt && out[0].written {
				s.cfg.Observe.Settled(op.kind)
			}
			return attempt{settled: out[0], see: see}, nil
		}
		class := classOf(err)
		s.observe(op.kind, string(class), began)
		if (class == ambiguous || class == full) && !doubt {
			doubt = true
			op.sent = append(op.sent, puts[0])
		}
		if class == full {
			s.log.Warn("etcd's database is full", "kind", op.kind)
			return attempt{full: true}, nil
		}
		if err := s.pause(ctx, wait, err, doubt); err != nil {
			return attempt{}, err
		}
	}
}

// afterFull answers from a read once etcd has said that it is full: its own write
// if that was applied, whatever needs no write, or STORE_FULL.
func (s *Store) afterFull(ctx context.Context, op *operation) (outcome, error) {
	read := &operation{
		kind: op.kind, key: op.key, sent: op.sent,
		decide: func(there found, v *claim.View, now claim.Instant) ([]put, error) {
			puts, err := op.decide(there, v, now)
			if err == nil && puts != nil {
				err = &claim.Error{Reason: claim.StoreFull, Message: "etcd's database is full: nothing new can be stored until room has been made", RetryAfter: 5 * time.Second}
			}
			return nil, err
		},
	}
	return s.settle(ctx, read)
}

// owns reports whether what was found is what this operation sent.
func (op *operation) owns(there *found) bool {
	for _, p := range op.sent {
		absent := there.revision == 0
		if p.remove && absent || !p.remove && !absent && p.value == string(there.value) {
			return true
		}
	}
	return false
}

// pause waits before another try. It returns the error to give up with, if the
// failure is final or ctx ends.
func (s *Store) pause(ctx context.Context, wait *backoff.ExponentialBackOff, cause error, doubt bool) error {
	if told, ok := errors.AsType[*claim.Error](cause); ok {
		return told
	}
	if classOf(cause) == refused {
		s.log.Error("etcd refuses", "error", cause)
		return &claim.Error{Reason: claim.StoreUnavailable, Message: "etcd refuses what this node asks: an operator must look at its log", Err: cause}
	}
	select {
	case <-ctx.Done():
	case <-time.After(wait.NextBackOff()):
		if ctx.Err() == nil {
			return nil
		}
	}
	message := "etcd does not answer: send the same call again"
	if doubt {
		message = "whether this was stored could not be established: send the same call again, with the same request id or token"
	}
	return unavailable(message, cause)
}

func (s *Store) catchUp(ctx context.Context, used claim.View, see seeing) error {
	cause := "tick"
	if see.saw.Guard != used.Guard {
		cause = "guard"
	}
	s.cfg.Observe.Refused(cause)
	return s.cfg.View.CatchUp(ctx, used, see.saw)
}

func (s *Store) observe(kind, outcome string, began time.Time) {
	s.cfg.Observe.Call(kind, outcome, time.Since(began))
}

func unavailable(message string, cause error) error {
	return &claim.Error{Reason: claim.StoreUnavailable, Message: message, RetryAfter: time.Second, Err: cause}
}
