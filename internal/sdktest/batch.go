package sdktest

import (
	"context"
	"sync"
	"testing"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Batches asks by the generated clients, and every Begin and finish in a batch: with
// all others that come while one is on its way.
type Batches struct {
	contract
	begins   gathering[*claim.BeginRequest, claim.Begun]
	finishes gathering[*claim.FinishRequest, finished]
}

var _ claim.Store = (*Batches)(nil)

// OpenBatches makes a Batches over servers of one cluster. It ends with the test.
func OpenBatches(t testing.TB, addrs []string) *Batches {
	t.Helper()
	b := &Batches{contract: dial(t, addrs)}
	b.begins.send, b.finishes.send = b.BeginTogether, b.finishTogether
	return b
}

// Begin implements claim.Store.
func (b *Batches) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	begun := b.begins.ask(ctx, req)
	return begun.Answer, begun.Err
}

// Finish implements claim.Store.
func (b *Batches) Finish(ctx context.Context, req *claim.FinishRequest) (claim.Found, error) {
	f := b.finishes.ask(ctx, req)
	return f.found, f.err
}

// gathering sends one batch at a time. Whoever finds none on its way sends what has
// gathered, its own included.
type gathering[Q, R any] struct {
	send func(context.Context, []Q) []R

	mu      sync.Mutex
	sending bool
	waiting []*member[Q, R]
}

type member[Q, R any] struct {
	asked Q
	told  R
	done  chan struct{}
}

func (g *gathering[Q, R]) ask(ctx context.Context, q Q) R {
	m := &member[Q, R]{asked: q, done: make(chan struct{})}
	g.mu.Lock()
	g.waiting = append(g.waiting, m)
	lead := !g.sending
	g.sending = true
	g.mu.Unlock()
	if lead {
		for g.flush(ctx) {
		}
	}
	<-m.done
	return m.told
}

// flush sends a batch; false: there was nothing to send.
func (g *gathering[Q, R]) flush(ctx context.Context) bool {
	g.mu.Lock()
	batch := g.waiting
	g.waiting = nil
	g.sending = len(batch) > 0
	g.mu.Unlock()
	asked := make([]Q, len(batch))
	for i, m := range batch {
		asked[i] = m.asked
	}
	if len(batch) == 0 {
		return false
	}
	for i, told := range g.send(ctx, asked) {
		batch[i].told = told
		close(batch[i].done)
	}
	return true
}
