package rediscache

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Finding is what a look into Redis came to. All but Hit have etcd asked.
type Finding string

// The findings.
const (
	// Hit: it answered.
	Hit Finding = "hit"
	// Absent, Marked (somebody asked a moment ago) and Staged (somebody is finishing
	// it) are as they should be.
	Absent Finding = "absent"
	Marked Finding = "marked"
	Staged Finding = "staged"
	// Expired: too near to a deadline of the record.
	Expired Finding = "expired"
	// Epoch: the epochs moved while Redis was asked.
	Epoch Finding = "epoch"
	// Digest: the bytes are not those of the digest. HMAC: the entry was not made by
	// this cluster for this key. Revision: it names none. Garbage: it is no entry.
	// Unreadable: this version cannot read it.
	Digest     Finding = "digest"
	HMAC       Finding = "hmac"
	Revision   Finding = "revision"
	Garbage    Finding = "garbage"
	Unreadable Finding = "unreadable"
	// Undecided: the entry is good and yet does not answer this request.
	Undecided Finding = "undecided"
	// Slow: no answer in time. Crowded: as much waits for Redis as may. Failed: Redis or
	// the way to it. Open: the breaker is.
	Slow    Finding = "slow"
	Crowded Finding = "crowded"
	Failed  Finding = "failed"
	Open    Finding = "open"
	// Bypassed by an operator. Disbelieved: the watch has not reached a read of etcd that
	// was sent lately. Undeclared: the namespace is, and must not be.
	Bypassed    Finding = "bypassed"
	Disbelieved Finding = "disbelieved"
	Undeclared  Finding = "undeclared"
)

// damaged reports whether the entry is one that should not be there: it is removed.
// An unreadable one is authentic, and for a newer version.
func (f Finding) damaged() bool {
	switch f {
	case Digest, HMAC, Revision, Garbage:
		return true
	}
	return false
}

// hint is what a finding says of what etcd will be found to have.
func (f Finding) hint() claim.Hint {
	switch f {
	case Absent:
		return claim.LikelyNew
	case Slow, Crowded, Failed, Open, Bypassed, Disbelieved, Undeclared:
		return claim.NoHint
	}
	return claim.LikelyRepeat
}

// looked is what a look into Redis came to.
type looked struct {
	finding Finding
	// view is from after Redis was asked, if it was.
	view claim.View
	// record is set with Hit. With Disbelieved it is set if the namespace is told what
	// was true when etcd could last be asked.
	record *claim.Record
}

// look asks Redis for a record, and leaves a mark for who asks next if mark is set.
// It takes askWithin at most.
func (c *Cache) look(ctx context.Context, namespace, key string, mark bool) looked {
	before, err := c.cfg.View.View()
	if err != nil {
		return looked{finding: Disbelieved}
	}
	if f, refused := refusal(&before, namespace); refused {
		return looked{finding: f, view: before}
	}
	name := layout.NameOf(namespace, key)
	at := keyOf(&before, name)
	entry, failed := c.of[name.Slot].ask(ctx, at, mark)
	after, err := c.cfg.View.View()
	if err != nil {
		return looked{finding: Disbelieved}
	}
	found := looked{view: after}
	if failed != nil {
		found.finding = findingOf(failed)
	} else {
		found.record, found.finding = readEntry([]byte(entry), after.Sealer, at, namespace, key)
	}
	if found.finding.damaged() && !after.BypassRedis {
		c.discard(name.Slot, at, entry, found.finding)
	}
	if found.finding == Hit {
		found.trust(&before, name.Slot)
	}
	return found
}

// refusal reports whether Redis is not to be asked under a view, and why.
func refusal(v *claim.View, namespace string) (Finding, bool) {
	p, err := v.Policy(namespace)
	switch {
	case err != nil: // the Store behind says so
		return Undeclared, true
	case v.BypassRedis:
		return Bypassed, true
	case !v.Believed && !p.ReplayWithoutEtcd:
		return Disbelieved, true
	}
	return "", false
}

// findingOf is what an error of an ask comes to.
func findingOf(err error) Finding {
	switch {
	case errors.Is(err, redis.Nil):
		return Absent
	case errors.Is(err, errOpen):
		return Open
	case errors.Is(err, errCrowded):
		return Crowded
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, errGone):
		return Slow
	case ofKey(err):
		return Garbage
	}
	return Failed
}

// trust takes the hit back unless its record may be told by what this node knows now:
// what it knew before Redis was asked is in the entry's name alone.
func (l *looked) trust(before *claim.View, slot int) {
	now := &l.view
	switch {
	case now.BypassRedis:
		l.finding, l.record = Bypassed, nil
	case before.Epochs(slot) != now.Epochs(slot):
		l.finding, l.record = Epoch, nil
	case !now.Believed:
		l.finding = Disbelieved
		if p, err := now.Policy(l.record.Namespace); err != nil || !p.ReplayWithoutEtcd {
			l.record = nil
		}
	case now.Now >= l.record.CachedUntil():
		l.finding, l.record = Expired, nil
	}
}

// ask reads an entry, with all who ask at the same time.
func (s *shard) ask(ctx context.Context, key string, mark bool) (string, error) {
	type answer struct {
		entry string
		err   error
	}
	answered := make(chan answer, 1)
	var left atomic.Bool
	cmd := &command{
		key: key, args: []any{"GET", key}, gone: left.Load,
		done: func(entry string, err error) { answered <- answer{entry, err} },
	}
	if mark {
		cmd.args = markArgs(key)
	}
	late := time.NewTimer(askWithin)
	defer late.Stop()
	s.asks.submit(s.asks.question(cmd))
	select {
	case a := <-answered:
		return a.entry, a.err
	case <-late.C:
	case <-ctx.Done():
	}
	select { // on a busy node both may be there
	case a := <-answered:
		return a.entry, a.err
	default:
		left.Store(true)
		return "", context.DeadlineExceeded
	}
}

// markArgs leave a mark where there is nothing, and read what there is.
func markArgs(key string) []any {
	return []any{"SET", key, markKind, "NX", "GET", "PX", markFor.Milliseconds()}
}
