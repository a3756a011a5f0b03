package etcdtxn_test

import (
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// TestSuite: what every Store must do, done by this one, over one etcd and two nodes
// that take turns.
func TestSuite(t *testing.T) {
	c := etcdtest.Start(t, 1)
	all := []*node{startNode(t, c.Client(), options{keeps: true}), startNode(t, c.Client(), options{})}
	var mu sync.Mutex
	next := 0
	claimtest.Suite(t, func(*testing.T) claimtest.Harness {
		mu.Lock()
		defer mu.Unlock()
		next++
		n := all[next%len(all)]
		return claimtest.Harness{
			Store: n,
			Clock: tickingClock{n},
			PutPolicy: func(t *testing.T, namespace string, p claim.Policy) {
				t.Helper()
				if _, err := n.PutNamespace(within(t, 20*time.Second), policy.Namespace{Name: namespace, Policy: declared(p)}); err != nil {
					t.Fatal(err)
				}
			},
		}
	})
}

// tickingClock lets time pass by ticking faster than time does.
type tickingClock struct{ *node }

func (c tickingClock) Advance(t *testing.T, d time.Duration) {
	t.Helper()
	start, err := c.follower.View()
	if err != nil {
		t.Fatal(err)
	}
	for {
		now, err := c.follower.View()
		if err != nil {
			t.Fatal(err)
		}
		if now.Now.Sub(start.Now) >= d {
			return
		}
		ticks(t, c.node, 1)
	}
}

// declared is the policy to declare that comes to this.
func declared(p claim.Policy) policy.Policy {
	out := policy.Policy{
		DefaultLease: &p.DefaultLease, MaxLease: &p.MaxLease,
		ResultRetention: &p.ResultRetention, KeyRetention: &p.KeyRetention,
		MaxAttempts: p.MaxAttempts, RequireFingerprint: p.RequireFingerprint, MaxResultBytes: p.MaxResultBytes,
		Takeover: policy.Auto,
	}
	if p.TakeoverNever {
		out.Takeover = policy.NeverTakeOver
	}
	return out
}
