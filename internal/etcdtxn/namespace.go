package etcdtxn

import (
	"context"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

const (
	// deleteWithin bounds one forced delete; repeated, it goes on.
	deleteWithin = 10 * time.Minute
	// emptyAtOnce bounds the keys that a forced delete holds in memory.
	emptyAtOnce = 1000
)

// PutNamespace stores a declaration and moves the guard in the same transaction, so
// that no node writes by an older one. Revision 0 is unconditional.
//
// Errors: POLICY_STALE, KEY_COLLISION.
func (s *Store) PutNamespace(ctx context.Context, n policy.Namespace) (policy.Namespace, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if err := n.Validate(); err != nil {
		return policy.Namespace{}, err
	}
	end, err := s.onPolicy(ctx, n.Name, func(there *policy.Namespace, _ *claim.View) (*policy.Namespace, []put, error) {
		switch {
		case there == nil && n.Revision != 0:
			return nil, nil, claim.Errorf(claim.PolicyStale, "namespace %q is not declared, or no longer: read it again", n.Name)
		case there != nil && n.Revision != 0 && n.Revision != there.Revision:
			return nil, nil, claim.Errorf(claim.PolicyStale, "namespace %q has revision %d, not %d: read it again", n.Name, there.Revision, n.Revision)
		case there != nil && there.Deleting:
			return nil, nil, beingDeleted()
		}
		return &policy.Namespace{Name: n.Name, Policy: n.Policy}, nil, nil
	})
	if err != nil {
		return policy.Namespace{}, err
	}
	n.Revision = end.there.revision
	return n, nil
}

// DeleteNamespace withdraws a declaration. With force it first holds the
// namespace's Begins and raises the epoch, in one transaction; forgets the records
// one by one; and withdraws the declaration last, so that a repeat goes on where an
// interrupted one stopped. It returns how many records were forgotten.
//
// Errors: NAMESPACE_NOT_FOUND, NAMESPACE_NOT_EMPTY.
func (s *Store) DeleteNamespace(ctx context.Context, name string, force bool) (int64, error) {
	if err := claim.ValidateNamespace(name); err != nil {
		return 0, err
	}
	return detach(ctx, s, deleteWithin, func(ctx context.Context) (int64, error) {
		forgotten := int64(0)
		if force {
			var err error
			if forgotten, err = s.empty(ctx, name); err != nil {
				return forgotten, err
			}
		} else if err := s.mustBeEmpty(ctx, name); err != nil {
			// Looked at before the transaction, which the tick window would refuse after a
			// long look: a claim given in between keeps its record, under the default
			// policy.
			return 0, err
		}
		_, err := s.onPolicy(ctx, name, func(there *policy.Namespace, _ *claim.View) (*policy.Namespace, []put, error) {
			if there == nil {
				return nil, nil, undeclared(name)
			}
			if force && !there.Deleting {
				return nil, nil, endedElsewhere(name)
			}
			if !force && there.Deleting { // its Begins are held until caches are void
				return nil, nil, beingDeleted()
			}
			return nil, nil, nil
		})
		return forgotten, err
	})
}

// empty forgets every record of a namespace whose Begins it holds.
func (s *Store) empty(ctx context.Context, name string) (int64, error) {
	_, err := s.onPolicy(ctx, name, func(there *policy.Namespace, v *claim.View) (*policy.Namespace, []put, error) {
		if there == nil {
			return nil, nil, undeclared(name)
		}
		held := *there
		held.Deleting = true
		epoch, err := nextEpoch(v.FenceBase)
		if err != nil {
			return nil, nil, err
		}
		return &held, []put{epoch}, nil
	})
	if err != nil {
		return 0, err
	}
	forgotten := int64(0)
	for at := (cursor{}); at.slot < claim.Slots; {
		var keys []string
		at, err = s.scan(ctx, name, at, refuse, func(rec *claim.Record, now claim.Instant) bool {
			if !rec.Gone(now) {
				keys = append(keys, rec.Key)
			}
			return len(keys) < emptyAtOnce
		})
		if err != nil {
			return forgotten, err
		}
		for _, key := range keys {
			if err := s.forgetHeld(ctx, name, key); err != nil {
				return forgotten, err
			}
			forgotten++
		}
	}
	return forgotten, s.hold(ctx, "the records are forgotten, and the namespace is still held: delete it again")
}

// forgetHeld forgets a record of a namespace whose Begins are held: its mark is
// open at once.
func (s *Store) forgetHeld(ctx context.Context, namespace, key string) error {
	_, err := s.onRecord(ctx, business{kind: "forget", namespace: namespace, key: key, name: layout.NameOf(namespace, key), takesBack: true},
		func(rec *claim.Record, m claim.Moment) (*claim.Record, error) {
			if !m.Policy.Held { // and so no claim is safe from this any more
				return nil, endedElsewhere(namespace)
			}
			if rec.Gone(m.Now) {
				return nil, nil
			}
			return claim.Mark(rec, true, m), nil
		})
	return err
}

// mustBeEmpty reports NAMESPACE_NOT_EMPTY at the first record that is still known.
func (s *Store) mustBeEmpty(ctx context.Context, name string) error {
	v, err := s.cfg.View.View()
	if err != nil {
		return err
	}
	if _, declared := v.Policies[name]; !declared {
		return undeclared(name)
	}
	empty := true
	_, err = s.scan(ctx, name, cursor{}, refuse, func(rec *claim.Record, now claim.Instant) bool {
		empty = rec.Gone(now)
		return empty
	})
	if err == nil && !empty {
		err = claim.Errorf(claim.NamespaceNotEmpty, "namespace %q has records: forget them, wait until they expire, or force the delete, which lets their work run again", name)
	}
	return err
}

// onPolicy settles an operation on a declaration, moving the guard with it. decide
// returns what to declare, nil to withdraw it, and what else to put.
func (s *Store) onPolicy(ctx context.Context, name string, decide func(there *policy.Namespace, v *claim.View) (*policy.Namespace, []put, error)) (outcome, error) {
	key := layout.PolicyOf(name)
	return s.govern(ctx, "policy", key, "policy of "+key, func(there found, v *claim.View) ([]put, error) {
		var declared *policy.Namespace
		if there.revision != 0 {
			n, err := layout.DecodePolicy(there.value, there.revision)
			if err != nil {
				return nil, &claim.Error{Reason: claim.RecordUnreadable, Message: "the namespace's policy cannot be read by this version: upgrade this node", Err: err}
			}
			if n.Name != name {
				return nil, claim.Errorf(claim.KeyCollision, "another namespace has the same hash: use another name")
			}
			declared = &n
		}
		next, extra, err := decide(declared, v)
		if err != nil {
			return nil, err
		}
		first := put{key: key, remove: next == nil}
		if next != nil {
			value, err := layout.EncodePolicy(*next)
			if err != nil {
				return nil, err
			}
			first.value = value
		}
		return append([]put{first}, extra...), nil
	})
}

// endedElsewhere is for a forced delete that finds its namespace no longer held:
// another one has ended meanwhile, and what is there now is new.
func endedElsewhere(name string) error {
	return claim.Errorf(claim.PolicyStale, "another delete of namespace %q has ended meanwhile: what is there now is new, and was left alone", name)
}

func beingDeleted() error {
	return &claim.Error{Reason: claim.PolicyStale, Message: "the namespace is being deleted: wait for the end of it, or repeat the forced delete if it was interrupted", RetryAfter: 5 * time.Second}
}

func undeclared(name string) error {
	return claim.Errorf(claim.NamespaceNotFound, "nobody declared namespace %q", name)
}
