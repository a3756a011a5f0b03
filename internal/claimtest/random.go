package claimtest

import (
	"context"
	"fmt"
	"time"

	"pgregory.net/rapid"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// randomHistories sends arbitrary calls of several callers to the Store and to
// Memory, and compares what they are told. Time plays no part in it.
func randomHistories(b *bench) {
	b.policy(func(p *claim.Policy) { p.MaxAttempts = 3 })
	p := DefaultPolicy()
	p.DefaultLease, p.MaxAttempts, p.MaxResultBytes = time.Hour, 3, 1024
	round := 0
	for range 3 { // of rapid.checks histories each
		rapid.Check(b.T, func(t *rapid.T) {
			round++
			m := NewMemory()
			m.PutPolicy(b.ns, p)
			h := &pair{store: b.Store, model: m, ns: b.ns, round: round, tokens: map[string][][2]string{}}
			for _, step := range rapid.SliceOfN(rapid.Custom(drawStep), 5, 30).Draw(t, "steps") {
				if want, got := h.carryOut(b.Context(), step); got != want {
					t.Fatalf("%+v:\n got %s\nwant %s", step, got, want)
				}
			}
		})
	}
}

// step is one call.
type step struct {
	Act              string
	Key              string
	Request, Owner   string
	Print, Operation string
	// Claim is whose token is used: the newest is 0.
	Claim   int
	Outcome string
}

func drawStep(t *rapid.T) step {
	return step{
		Act:       rapid.SampledFrom([]string{"begin", "begin", "finish", "finish", "extend", "resolve", "get"}).Draw(t, "act"),
		Key:       rapid.SampledFrom([]string{"a", "a", "b"}).Draw(t, "key"),
		Request:   rapid.SampledFrom([]string{"", "r1", "r2"}).Draw(t, "request id"),
		Owner:     rapid.SampledFrom([]string{"erp-1", "erp-2"}).Draw(t, "owner"),
		Print:     rapid.SampledFrom([]string{"", "\x01", "\x01", "\x02"}).Draw(t, "print"),
		Operation: rapid.SampledFrom([]string{"", "x", "x", "y"}).Draw(t, "operation"),
		Claim:     rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(t, "claim"),
		Outcome:   rapid.SampledFrom([]string{"done", "otherwise", "blocked", "passing", "passing", "unsure"}).Draw(t, "outcome"),
	}
}

// pair is the Store and its model, and the tokens that both gave for each claim.
type pair struct {
	store, model claim.Store
	ns           string
	round        int
	tokens       map[string][][2]string
}

func (p *pair) carryOut(ctx context.Context, s step) (want, got string) {
	key := fmt.Sprintf("%d-%s", p.round, s.Key)
	if s.Act == "begin" {
		req := &claim.BeginRequest{Namespace: p.ns, Key: key, Operation: s.Operation, RequestID: s.Request, Owner: s.Owner}
		if s.Print != "" {
			req.Fingerprint = fmt.Appendf(nil, "%32s", s.Print)
		}
		a, err := p.model.Begin(ctx, req)
		real, realErr := p.store.Begin(ctx, req)
		if err == nil && realErr == nil && a.Claim != nil && real.Claim != nil && !a.Repeat && !real.Repeat {
			p.tokens[key] = append(p.tokens[key], [2]string{a.Claim.Token, real.Claim.Token})
		}
		return p.tellAnswer(key, 0, a, err), p.tellAnswer(key, 1, real, realErr)
	}
	return p.act(ctx, 0, p.model, key, s), p.act(ctx, 1, p.store, key, s)
}

// act carries out what is not a Begin, on one side.
func (p *pair) act(ctx context.Context, side int, store claim.Store, key string, s step) string {
	switch s.Act {
	case "finish":
		req := map[string]claim.FinishRequest{"done": done, "otherwise": otherwise, "blocked": blocked, "passing": passing, "unsure": unsure}[s.Outcome]
		req.Namespace, req.Key, req.Token = p.ns, key, p.token(key, side, s.Claim)
		f, err := store.Finish(ctx, &req)
		return tellFound(f, err)
	case "extend":
		lease := time.Hour
		g, err := store.Extend(ctx, &claim.ExtendRequest{Namespace: p.ns, Key: key, Token: p.token(key, side, s.Claim), Lease: &lease})
		if err != nil {
			return string(claim.ReasonOf(err))
		}
		return fmt.Sprintf("extended attempt %d after %d", g.Attempt, g.Previous)
	case "resolve":
		req := &claim.ResolveRequest{Namespace: p.ns, Key: key, State: claim.Released, Reason: "test"}
		switch s.Outcome {
		case "done":
			req.State, req.Result = claim.Succeeded, done.Result
		case "blocked":
			req.State, req.Failure = claim.Failed, blocked.Failure
		}
		f, err := store.Resolve(ctx, req)
		return tellFound(f, err)
	}
	f, err := store.Get(ctx, &claim.GetRequest{Namespace: p.ns, Key: key})
	return tellFound(f, err)
}

// token is the one that this side gave for a claim of the key.
func (p *pair) token(key string, side, age int) string {
	given := p.tokens[key]
	if age >= len(given) {
		return "none"
	}
	return given[len(given)-1-age][side]
}

func (p *pair) tellAnswer(key string, side int, a claim.Answer, err error) string {
	if err != nil {
		return string(claim.ReasonOf(err))
	}
	told := fmt.Sprintf("verdict %d action %d repeat %v detail %q", a.Verdict, a.KeyAction(), a.Repeat, a.Detail)
	if a.Claim != nil {
		nth := -1
		for i, tokens := range p.tokens[key] {
			if tokens[side] == a.Claim.Token {
				nth = i
			}
		}
		told += fmt.Sprintf(" claim %d attempt %d after %d", nth, a.Claim.Attempt, a.Claim.Previous)
	}
	if a.Record != nil {
		told += " " + tellRecord(a.Record)
	}
	return told
}

func tellFound(f claim.Found, err error) string {
	if err != nil {
		return string(claim.ReasonOf(err))
	}
	return tellRecord(f.Record)
}

// tellRecord writes what two stores must agree on.
func tellRecord(r *claim.Record) string {
	told := fmt.Sprintf("%v attempt %d of %q by %q print %x digest %x omitted %v size %d", r.State, r.Attempt, r.Operation, r.Owner, r.Fingerprint, r.Digest, r.ResultOmitted, r.ResultSize)
	if r.Result != nil {
		told += fmt.Sprintf(" result %+v", *r.Result)
	}
	if r.Failure != nil {
		told += fmt.Sprintf(" failure %+v", *r.Failure)
	}
	return told
}
