package etcdtxn_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// G4, H34: while a forced delete holds a namespace, neither a plain delete nor a forget
// lets its Begins go before no node can tell what was cached.
func TestNothingEndsTheHoldOfAForcedDelete(t *testing.T) {
	t.Parallel()
	c, n := one(t)
	other := startNode(t, c.Client(), options{})
	n.put(t, policy.Policy{})
	a := n.begin(t, claim.BeginRequest{})
	n.complete(t, "k", a.Claim.Token, "r1")
	began := time.Now()
	deleted := make(chan error, 1)
	go func() {
		_, err := n.DeleteNamespace(within(t, 30*time.Second), "ns", true)
		deleted <- err
	}()
	other.knowsPolicy(t, func(p claim.Policy) bool { return p.Held })
	eventually(t, 10*time.Second, "the record to be marked", func() error {
		_, err := other.Get(within(t, 10*time.Second), &claim.GetRequest{Namespace: "ns", Key: "k"})
		if claim.ReasonOf(err) != claim.RecordNotFound {
			return errors.New("it is there")
		}
		return nil
	})
	_, err := other.DeleteNamespace(within(t, 20*time.Second), "ns", false)
	wantReason(t, err, claim.PolicyStale)
	if a := other.begin(t, claim.BeginRequest{}); a.Verdict != claim.InProgress {
		t.Errorf("verdict %d after the plain delete", a.Verdict)
	}
	_, forgotten := other.Forget(within(t, 20*time.Second), &claim.ForgetRequest{Namespace: "ns", Key: "k", Reason: "test"})
	if took := time.Since(began); forgotten == nil && took < claim.BelievedFor {
		t.Errorf("a forget was answered %v after the delete began", took)
	}
	if err := <-deleted; err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < claim.BelievedFor {
		t.Errorf("the delete took %v", took)
	}
	want(t, other.begin(t, claim.BeginRequest{}), claim.First)
}

// Close abandons reads that etcd does not answer, whoever still waits for them.
func TestCloseAbandonsDeadReads(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	client := c.Client()
	n := startNode(t, client, options{keeps: true})
	cut := startNode(t, c.Client(p.Addr()), options{watch: client})
	a := n.begin(t, claim.BeginRequest{})
	n.complete(t, "k", a.Claim.Token, "r1")
	p.SwallowAnswers()
	for i := range 2000 {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := cut.Get(ctx, &claim.GetRequest{Namespace: "ns", Key: fmt.Sprint("k", i)}); err == nil {
			t.Fatal("it was answered")
		}
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	_ = cut.Close(ctx) // it may say that it was cut short
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("Close took %v", took)
	}
	p.Heal()
}
