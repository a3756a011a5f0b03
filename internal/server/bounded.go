package server

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// bounded is a Store that is asked so many questions at once and no more. What ends
// or keeps a claim is never held up: refusing a Complete would have its work run
// again (H27).
type bounded struct {
	claim.Store
	room chan struct{}
}

func newBounded(store claim.Store, most int) bounded {
	return bounded{store, make(chan struct{}, most)}
}

func (b bounded) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	return within(b, func() (claim.Answer, error) { return b.Store.Begin(ctx, req) })
}

// BeginTogether is one question, however many ask it.
func (b bounded) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	begun, err := within(b, func() ([]claim.Begun, error) { return b.Store.BeginTogether(ctx, reqs), nil })
	if err != nil {
		return claim.NoneBegun(len(reqs), err)
	}
	return begun
}

func (b bounded) Get(ctx context.Context, namespace, key string) (claim.Found, error) {
	return within(b, func() (claim.Found, error) { return b.Store.Get(ctx, namespace, key) })
}

func (b bounded) List(ctx context.Context, req *claim.ListRequest) (claim.Page, error) {
	return within(b, func() (claim.Page, error) { return b.Store.List(ctx, req) })
}

// within asks if there is room.
func within[T any](b bounded, ask func() (T, error)) (T, error) {
	select {
	case b.room <- struct{}{}:
		defer func() { <-b.room }()
		return ask()
	default:
		var none T
		return none, overloaded()
	}
}

func overloaded() error {
	return &claim.Error{
		Reason:     claim.Overloaded,
		Message:    "this node is asked more than it can answer: come back after the given time, or ask another node",
		RetryAfter: time.Duration(50+rand.IntN(150)) * time.Millisecond,
	}
}
