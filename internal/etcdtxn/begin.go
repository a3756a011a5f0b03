package etcdtxn

import (
	"context"
	"errors"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// markPatience is how long a node that has met a held mark waits for the node that
// wrote it, before it opens the mark itself.
const markPatience = 10 * time.Second

// Begin asks for the claim. The usual case is one transaction: if the key is
// absent put the claim, else get the record. Where a repeat is likely the key is read
// first, for a read needs no raft.
func (s *Store) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	begun := s.BeginTogether(ctx, []*claim.BeginRequest{req})
	return begun[0].Answer, begun[0].Err
}

// BeginTogether asks for several Begins of one key as for one: one read, one write at
// most. They may share both, for none is sent before all of them have asked (H06).
func (s *Store) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	ctx, cancel := bounded(ctx)
	defer cancel()
	name := layout.NameOf(reqs[0].Namespace, reqs[0].Key)
	for {
		begun, again, err := s.beginOnce(ctx, name, reqs)
		switch {
		case err != nil:
			return claim.NoneBegun(len(reqs), err)
		case !again:
			return begun
		}
	}
}

// beginOnce judges once; again asks for another round, with another claim id.
func (s *Store) beginOnce(ctx context.Context, name layout.Name, reqs []*claim.BeginRequest) (begun []claim.Begun, again bool, err error) {
	namespace, key, hint := reqs[0].Namespace, reqs[0].Key, reqs[0].Hint
	var absent *guess
	if !s.repeatLikely(name, namespace, hint) {
		absent = &guess{}
	}
	writer := len(reqs)
	c, err := s.onRecord(ctx, business{kind: "begin", namespace: namespace, key: key, name: name, id: claim.NewID(), guess: absent},
		func(rec *claim.Record, m claim.Moment) (write *claim.Record, err error) {
			begun, write, writer = claim.Together(rec, reqs, m)
			return write, nil
		})
	if err != nil {
		return nil, false, err
	}
	s.began(namespace, hint, !c.written)
	if s.overdueMark(name, c.record) {
		return nil, true, s.open(ctx, namespace, key, c.record.Revision)
	}
	lease := time.Duration(0)
	if c.written {
		lease = c.record.LeaseUntil.Sub(c.record.Claimed)
		if claim.Renew(c.record, lease, s.elapsed(c.outcome)) != nil {
			c, err = s.renewed(ctx, name, lease, c)
			if errors.Is(err, errTakenAway) {
				return nil, true, nil
			}
			if err != nil {
				return nil, false, err
			}
		}
		s.remember(name, c)
	}
	now := s.elapsed(c.outcome)
	for i := range begun {
		a := &begun[i].Answer
		a.Source, a.Guard = claim.SourceEtcd, c.view.Guard
		if i >= writer && begun[i].Err == nil {
			a.Now, a.Revision = c.now, c.record.Revision
		}
		if a.Verdict != claim.First || begun[i].Err != nil {
			continue
		}
		if !c.written {
			if now >= c.record.LeaseUntil {
				return nil, true, nil // it lapsed on the way: judged as anyone's
			}
			lease = c.record.LeaseUntil.Sub(c.record.Claimed)
		}
		a.Claim = c.record.Grant(lease, now)
		a.Claim.Token = c.view.Sealer.Seal(namespace, key, a.Claim.ID)
	}
	return begun, false, nil
}

// repeatLikely reports whether a Begin had better read before it writes: because this
// node has met the key, a layer in front expects it, or Begins like this one have
// mostly been repeats in this namespace.
func (s *Store) repeatLikely(name layout.Name, namespace string, hint claim.Hint) bool {
	return hint == claim.LikelyRepeat || s.known.has(name.Key) || s.mostlyRepeats(namespace, hint)
}

var errTakenAway = errors.New("the claim is no longer this call's")

// renewed sets the claim's deadline anew, by compare on that very claim, for as long
// as less than half of its lease is left: nobody must be told of a claim that is
// about to lapse, and one that nobody was told of must not stay behind.
func (s *Store) renewed(ctx context.Context, name layout.Name, lease time.Duration, c concluded) (concluded, error) {
	for claim.Renew(c.record, lease, s.elapsed(c.outcome)) != nil {
		id := c.record.ClaimID
		next, err := s.onRecord(ctx, business{kind: "begin", urgent: true, namespace: c.record.Namespace, key: c.record.Key, name: name, id: id, guess: &guess{c.there, c.view.Generation}},
			func(rec *claim.Record, m claim.Moment) (*claim.Record, error) {
				if rec.Gone(m.Now) || rec.ClaimID != id || rec.State != claim.Pending {
					return nil, errTakenAway
				}
				return claim.Renew(rec, lease, max(m.Now, s.elapsed(c.outcome))), nil
			})
		if err != nil {
			return concluded{}, err
		}
		c = next
	}
	return c, nil
}

// overdueMark reports whether the record is a held mark that this node met long
// enough ago to open it.
func (s *Store) overdueMark(name layout.Name, rec *claim.Record) bool {
	if rec == nil || rec.Forgotten == nil || rec.Forgotten.Opened {
		s.marks.Remove(name.Key)
		return false
	}
	now := s.cfg.Monotonic()
	met, ok := s.marks.Get(name.Key)
	if !ok || met.revision != rec.Revision {
		s.marks.Add(name.Key, metMark{rec.Revision, now})
		return false
	}
	return now-met.at >= markPatience
}
