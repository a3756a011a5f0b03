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
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	name := layout.NameOf(req.Namespace, req.Key)
	for {
		answer, again, err := s.beginOnce(ctx, name, req)
		if err != nil || !again {
			return answer, err
		}
	}
}

// beginOnce judges once; again asks for another round, with another claim id.
func (s *Store) beginOnce(ctx context.Context, name layout.Name, req *claim.BeginRequest) (answer claim.Answer, again bool, err error) {
	var absent *guess
	if !s.repeatLikely(name, req) {
		absent = &guess{}
	}
	id := claim.NewID()
	c, err := s.onRecord(ctx, business{kind: "begin", namespace: req.Namespace, key: req.Key, name: name, id: id, guess: absent},
		func(rec *claim.Record, m claim.Moment) (write *claim.Record, err error) {
			answer, write, err = claim.Begin(rec, req, m)
			return write, err
		})
	if err != nil {
		return claim.Answer{}, false, err
	}
	answer.Source = claim.SourceEtcd
	s.began(req.Namespace, req.Hint, !c.written)
	if !c.written {
		if answer.Claim != nil {
			now := s.elapsed(c.outcome)
			if now >= c.record.LeaseUntil {
				return answer, true, nil // it lapsed on the way: judged as anyone's
			}
			answer.Claim = c.record.Grant(c.record.LeaseUntil.Sub(c.record.Claimed), now)
			answer.Claim.Token = c.view.Sealer.Seal(req.Namespace, req.Key, answer.Claim.ID)
		}
		if s.overdueMark(name, c.record) {
			return answer, true, s.open(ctx, req.Namespace, req.Key, c.record.Revision)
		}
		return answer, false, nil
	}
	lease := c.record.LeaseUntil.Sub(c.record.Claimed)
	c, err = s.renewed(ctx, name, req, lease, c)
	if errors.Is(err, errTakenAway) {
		return answer, true, nil
	}
	if err != nil {
		return claim.Answer{}, false, err
	}
	s.remember(name, c)
	grant := c.record.Grant(lease, s.elapsed(c.outcome))
	grant.Token = c.view.Sealer.Seal(req.Namespace, req.Key, id)
	return claim.Answer{
		Verdict: claim.First, Claim: grant, Now: c.now, Revision: c.record.Revision, Source: claim.SourceEtcd,
	}, false, nil
}

// repeatLikely reports whether a Begin had better read before it writes: because this
// node has met the key, a layer in front expects it, or Begins like this one have
// mostly been repeats in this namespace.
func (s *Store) repeatLikely(name layout.Name, req *claim.BeginRequest) bool {
	return req.Hint == claim.LikelyRepeat || s.known.Contains(name.Key) || s.mostlyRepeats(req.Namespace, req.Hint)
}

var errTakenAway = errors.New("the claim is no longer this call's")

// renewed sets the claim's deadline anew, by compare on that very claim, for as long
// as less than half of its lease is left: nobody must be told of a claim that is
// about to lapse, and one that nobody was told of must not stay behind.
func (s *Store) renewed(ctx context.Context, name layout.Name, req *claim.BeginRequest, lease time.Duration, c concluded) (concluded, error) {
	for claim.Renew(c.record, lease, s.elapsed(c.outcome)) != nil {
		id := c.record.ClaimID
		next, err := s.onRecord(ctx, business{kind: "begin", urgent: true, namespace: req.Namespace, key: req.Key, name: name, id: id, guess: &guess{c.there, c.view.Generation}},
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
