package nodetest

import (
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// Clock waits for the cluster's clock, for claimtest's suite.
type Clock struct{ *Node }

// Advance waits until so much cluster time has passed.
func (c Clock) Advance(t *testing.T, d time.Duration) {
	t.Helper()
	Pass(t, c.Follower, d)
}

// Declare declares the policy that comes to this, through a node.
func Declare(t testing.TB, n *Node, namespace string, p claim.Policy) policy.Namespace {
	t.Helper()
	declared := policy.Policy{
		DefaultLease: &p.DefaultLease, MaxLease: &p.MaxLease,
		ResultRetention: &p.ResultRetention, KeyRetention: &p.KeyRetention,
		MaxAttempts: p.MaxAttempts, RequireFingerprint: p.RequireFingerprint, MaxResultBytes: p.MaxResultBytes,
		Takeover: policy.Auto,
	}
	if p.TakeoverNever {
		declared.Takeover = policy.NeverTakeOver
	}
	put, err := n.Behind.PutNamespace(Within(t, 20*time.Second), policy.Namespace{Name: namespace, Policy: declared})
	if err != nil {
		t.Fatal(err)
	}
	return put
}

// Holding is a Cache that is shown, while it is held, nothing of what etcd has answered.
type Holding struct {
	etcdtxn.Cache

	mu      sync.Mutex
	holding bool
	held    []func()
}

// Around puts it around a cache, for Options.Cache.
func (h *Holding) Around(c etcdtxn.Cache) etcdtxn.Cache { h.Cache = c; return h }

// Stage implements etcdtxn.Cache.
func (h *Holding) Stage(v *claim.View, rec *claim.Record, value []byte) func(int64) {
	committed := h.Cache.Stage(v, rec, value)
	return func(revision int64) { h.when(func() { committed(revision) }) }
}

// Found implements etcdtxn.Cache.
func (h *Holding) Found(v *claim.View, rec *claim.Record, value []byte) {
	then := *v
	h.when(func() { h.Cache.Found(&then, rec, value) })
}

func (h *Holding) when(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.holding {
		h.held = append(h.held, f)
		return
	}
	f()
}

// Hold holds from now on.
func (h *Holding) Hold() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holding = true
}

// Release shows all that was held, and returns how much that was.
func (h *Holding) Release() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.held {
		f()
	}
	n := len(h.held)
	h.holding, h.held = false, nil
	return n
}
