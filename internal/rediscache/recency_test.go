package rediscache_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/recency"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// TestTTLsFollowHabits: an entry lives for as long as keys of its kind are known to come
// back, within the policy's range and never beyond the record: from the finish, whether
// the finish wrote it or a read that missed it.
func TestTTLsFollowHabits(t *testing.T) {
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	n := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}))
	fixed := at(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), LongestTTL: true}))
	for ns, p := range map[string]policy.Policy{
		"ns":      {},
		"narrow":  {CacheTTLMin: new(30 * time.Minute), CacheTTLMax: new(40 * time.Minute)},
		"brief":   {ResultRetention: new(10 * time.Minute), KeyRetention: new(time.Hour)},
		"unknown": {CacheTTLMax: new(time.Hour)},
	} {
		n.in(ns).put(p)
	}
	for _, ns := range []string{"ns", "narrow", "brief"} {
		learn(n, ns, "", 20*time.Minute, 200_000)
		learn(n, ns, "slow", 80*time.Minute, 1000) // one in two hundred of all, and so not all's habit
	}
	left := func(n site, key string) time.Duration {
		ms, ok := redis.Do("PTTL", n.name(key)).(int64)
		if !ok || ms < 0 {
			t.Errorf("%s: expires in %d", key, ms)
		}
		return time.Duration(ms) * time.Millisecond
	}
	for _, c := range []struct {
		ns, supplier string
		n            site
		low, high    time.Duration
	}{
		{"ns", "", n, 20 * time.Minute, 24 * time.Minute},
		{"ns", "new", n, 20 * time.Minute, 24 * time.Minute},
		{"ns", "slow", n, 80 * time.Minute, 96 * time.Minute},
		{"narrow", "", n, 30 * time.Minute, 30 * time.Minute},
		{"narrow", "slow", n, 30 * time.Minute, 30 * time.Minute}, // which no TTL reaches
		{"brief", "", n, 10*time.Minute - claim.CacheMargin, 10*time.Minute - claim.CacheMargin},
		{"unknown", "", n, time.Hour, time.Hour},
		{"ns", "", fixed, 2 * time.Hour, 2 * time.Hour},
	} {
		t.Run(fmt.Sprintf("%s %s %v", c.ns, c.supplier, c.low), func(t *testing.T) {
			s, key := c.n.in(c.ns), fmt.Sprint("k ", c.supplier, " ", c.n.ID)
			req := &claim.BeginRequest{Namespace: c.ns, Key: key}
			if c.supplier != "" {
				req.Labels = map[string]string{recency.Label: c.supplier}
			}
			a, err := s.Begin(nodetest.Within(t, 20*time.Second), req)
			if err != nil || a.Verdict != claim.First {
				t.Fatalf("%s, %v", told(a), err)
			}
			if err := s.complete(key, a.Claim.Token, "r"); err != nil {
				t.Fatal(err)
			}
			for _, how := range []string{"finish", "fill"} {
				s.fromRedis(key, "r")
				if got := left(s, key); got > c.high || got < c.low-time.Minute {
					t.Errorf("written by a %s: expires in %v, not %v to %v", how, got, c.low, c.high)
				}
				redis.Flush()
			}
		})
	}
	if n.Seen.Of("ttl nothing") == 0 || n.Seen.Of("ttl namespace") == 0 || n.Seen.Of("ttl supplier") == 0 {
		t.Error(n.Seen)
	}
}

// learn has keys of a kind come back so many times at this age, and for long enough.
func learn(n site, namespace, supplier string, age time.Duration, times int) {
	rec := &claim.Record{Namespace: namespace, State: claim.Succeeded, ResultRetention: day}
	if supplier != "" {
		rec.Labels = map[string]string{recency.Label: supplier}
	}
	now := n.view().Now
	for i := range times {
		at := now
		if i == 0 {
			at = now.Add(-3 * time.Hour)
		}
		rec.ResultUntil = at.Add(day - age)
		n.Habits.Observe(rec, at)
	}
}

const day = 24 * time.Hour
