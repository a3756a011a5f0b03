package server

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// bounded is a Store that is asked so many questions at once and no more. What ends
// or keeps a claim is never held up: refusing a Complete would have its work run
// again (H27). A namespace that has fewer than its share under way is let in beyond the
// bound: it is others who have filled it.
type bounded struct {
	claim.Store
	room *room
}

func newBounded(store claim.Store, most int) bounded {
	return bounded{store, &room{most: most, of: map[string]int{}}}
}

// room counts what is under way, by namespace.
type room struct {
	most  int
	mu    sync.Mutex
	total int
	of    map[string]int
}

func (r *room) enter(namespace string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.total >= r.most && (r.total >= 2*r.most || r.of[namespace] >= r.most/(len(r.of)+1)) {
		return false
	}
	r.total++
	r.of[namespace]++
	return true
}

func (r *room) leave(namespace string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total--
	if r.of[namespace]--; r.of[namespace] == 0 {
		delete(r.of, namespace)
	}
}

func (b bounded) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	return within(b, req.Namespace, func() (claim.Answer, error) { return b.Store.Begin(ctx, req) })
}

// BeginTogether is one question, however many ask it.
func (b bounded) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	begun, err := within(b, reqs[0].Namespace, func() ([]claim.Begun, error) { return b.Store.BeginTogether(ctx, reqs), nil })
	if err != nil {
		return claim.NoneBegun(len(reqs), err)
	}
	return begun
}

func (b bounded) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	return within(b, req.Namespace, func() (claim.Found, error) { return b.Store.Get(ctx, req) })
}

func (b bounded) List(ctx context.Context, req *claim.ListRequest) (claim.Page, error) {
	return within(b, req.Namespace, func() (claim.Page, error) { return b.Store.List(ctx, req) })
}

// within asks if there is room.
func within[T any](b bounded, namespace string, ask func() (T, error)) (T, error) {
	if !b.room.enter(namespace) {
		var none T
		return none, overloaded()
	}
	defer b.room.leave(namespace)
	return ask()
}

func overloaded() error {
	return &claim.Error{
		Reason:     claim.Overloaded,
		Message:    "this node is asked more than it can answer: come back after the given time, or ask another node",
		RetryAfter: time.Duration(50+rand.IntN(150)) * time.Millisecond,
	}
}
