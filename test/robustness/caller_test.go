package robustness

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/sdktest"
)

const namespace = "torture"

// cluster is what is tortured, and the record of what it was asked and told.
type cluster struct {
	// stores are the nodes, and after them the SDK's clients of all of them.
	stores []claim.Store
	keys   []string
	books  map[string]*book
	start  time.Time
	seed   uint64
	stats  tally
}

func newCluster(keys int, seed uint64, stores ...claim.Store) *cluster {
	c := &cluster{stores: stores, books: map[string]*book{}, start: time.Now(), seed: seed}
	for i := range keys {
		key := fmt.Sprintf("order-%02d", i)
		c.keys = append(c.keys, key)
		c.books[key] = newBook(key, func() time.Duration { return time.Since(c.start) })
	}
	return c
}

// caller is one of a supplier's services, or an operator, with its own luck.
type caller struct {
	*cluster
	name string
	// by is which of the stores it asks, below 0: any node.
	by int
	// owner is who it says it is.
	owner string
	// insists is in how many of a hundred cases it asks again whatever it was told.
	insists int
	*rand.Rand
	made   int
	tokens []kept // of earlier claims
}

type kept struct{ key, token string }

func (c *cluster) caller(name string, n int) *caller {
	name = fmt.Sprintf("%s%d", name, n)
	return &caller{cluster: c, name: name, by: -1, owner: name, insists: 3, Rand: rand.New(rand.NewPCG(c.seed, uint64(n)<<8|uint64(name[0])))}
}

// through has it ask by one of the SDK's clients, in the name that this has.
func (w *caller) through(client int) *caller {
	w.by, w.owner = nodes+client, fmt.Sprintf("client%d", client)
	return w
}

// one tells in how many of a hundred cases something happens.
func (w *caller) one(percent int) bool { return w.IntN(100) < percent }

func (w *caller) between(least, most time.Duration) time.Duration {
	return least + time.Duration(w.Int64N(int64(most-least)))
}

// pause waits; false if ctx ended meanwhile.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// call sends a call to a node, and records it.
func (w *caller) call(ctx context.Context, c *call, patience time.Duration, do func(context.Context, claim.Store)) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ctx, retries := sdktest.CountRetries(ctx)
	c.who = w.name
	b := w.books[c.key]
	b.sent(c)
	do(ctx, w.stores[c.node])
	c.retries = int(retries.Load())
	b.answered(c)
	w.stats.count(c)
}

// patience is how long a caller waits for an answer: now and then it hangs up at once.
func (w *caller) patience() time.Duration {
	if w.one(2) {
		return w.between(time.Millisecond/2, 20*time.Millisecond)
	}
	return time.Second
}

// node is whom it asks.
func (w *caller) node() int {
	if w.by >= 0 {
		return w.by
	}
	return w.IntN(nodes)
}

// held is how long a claim is held from when a call was sent: the SDK says until when.
func (w *caller) held(c *call, s claim.Store, g *claim.Grant) time.Duration {
	if sdk, ok := s.(*sdktest.Store); ok {
		if until := sdk.Until(g.Token); !until.IsZero() {
			return until.Sub(w.start) - c.start
		}
	}
	return g.Left
}

// key is any, a few of them more often.
func (w *caller) key() string {
	if w.one(20) {
		return w.keys[w.IntN(min(4, len(w.keys)))]
	}
	return w.keys[w.IntN(len(w.keys))]
}

func (w *caller) begin(ctx context.Context, key, request string, lease time.Duration) *call {
	c := &call{op: begin, key: key, node: w.node(), request: request}
	id, owner, _ := strings.Cut(request, "@")
	var wait time.Duration // of the SDK's alone
	if w.one(10) {
		wait = w.between(20*time.Millisecond, 150*time.Millisecond)
	}
	w.call(ctx, c, w.patience(), func(ctx context.Context, s claim.Store) {
		a, err := s.Begin(ctx, &claim.BeginRequest{Namespace: namespace, Key: key, Operation: "order.import", RequestID: id, Owner: owner, Lease: &lease, Wait: wait})
		if c.toldError(err); err != nil {
			return
		}
		c.verdict, c.repeat, c.source, c.revision, c.stale = a.Verdict, a.Repeat, a.Source, a.Revision, a.Stale
		c.toldRecord(a.Record, a.Revision)
		if a.Claim != nil {
			c.toldGrant(a.Claim, w.held(c, s, a.Claim))
		}
	})
	return c
}

func (w *caller) get(ctx context.Context, key string) {
	c := &call{op: get, key: key, node: w.node()}
	w.call(ctx, c, w.patience(), func(ctx context.Context, s claim.Store) {
		f, err := s.Get(ctx, &claim.GetRequest{Namespace: namespace, Key: key})
		if c.toldError(err); err != nil {
			return
		}
		c.source, c.stale = f.Source, f.Stale
		c.toldRecord(f.Record, f.Record.Revision)
	})
}

func (w *caller) extend(ctx context.Context, key, token string, lease time.Duration) {
	c := &call{op: extend, key: key, node: w.node(), token: token}
	w.call(ctx, c, w.patience(), func(ctx context.Context, s claim.Store) {
		g, err := s.Extend(ctx, &claim.ExtendRequest{Namespace: namespace, Key: key, Token: token, Lease: &lease})
		if c.toldError(err); err != nil {
			return
		}
		c.left, c.attempt, c.fence = w.held(c, s, g), g.Attempt, g.Fence
	})
}

// outcome is a finish that no other call sends.
func (w *caller) outcome(key, token string, attempt int32) *claim.FinishRequest {
	w.made++
	id := fmt.Sprintf("%s.%s.%d.%s.%d", key, short(token), attempt, w.name, w.made)
	req := &claim.FinishRequest{Namespace: namespace, Key: key, Token: token}
	switch n := w.IntN(100); {
	case n < 66:
		req.Result = &claim.Result{
			Code: int32(200 + w.IntN(5)), ContentType: "text/plain",
			Body: []byte(id + " " + strings.Repeat("x", w.IntN(600))), Metadata: map[string]string{"location": "/" + id},
		}
	case n < 76:
		req.Failure = &claim.Failure{Class: claim.Terminal, Code: 3, Message: id, Details: []claim.Detail{{TypeURL: "t/d", Value: []byte(id)}}}
	default:
		req.Failure = &claim.Failure{Class: claim.Retryable, Message: id}
	}
	return req
}

// finish sends a finish, and again for as long as there is no answer, some of the
// time; it tells whether there was one.
func (w *caller) finish(ctx context.Context, req *claim.FinishRequest) bool {
	for {
		c := &call{op: finish, key: req.Key, node: w.node(), token: req.Token, sent: tell(req.Result, req.Failure)}
		if req.Failure != nil {
			c.class = req.Failure.Class
		}
		w.call(ctx, c, w.patience(), func(ctx context.Context, s claim.Store) {
			f, err := s.Finish(ctx, req)
			c.toldError(err)
			if e, ok := err.(*claim.Error); ok {
				c.digest = e.Metadata["digest"]
			}
			if err != nil {
				return
			}
			c.source = f.Source
			c.toldRecord(f.Record, f.Record.Revision)
		})
		if !c.unanswered() {
			return true
		}
		if ctx.Err() != nil || w.one(30) {
			return false
		}
	}
}

// serve does what a service does until ctx ends.
func (w *caller) serve(ctx context.Context) {
	for pause(ctx, w.between(0, 8*time.Millisecond)) {
		key := w.key()
		switch n := w.IntN(100); {
		case n < 15:
			w.get(ctx, key)
		case n < 18 && len(w.tokens) > 0:
			w.comeLate(ctx, w.tokens[w.IntN(len(w.tokens))])
		case n < 24:
			w.crowd(ctx, key)
		default:
			w.ask(ctx, key)
		}
	}
}

// comeLate comes with the token of an earlier claim.
func (w *caller) comeLate(ctx context.Context, k kept) {
	if w.one(30) {
		w.extend(ctx, k.key, k.token, time.Second)
		return
	}
	w.finish(ctx, w.outcome(k.key, k.token, 0))
}

// ask begins, again with the same request id if there was no answer, and does the
// work if it is to.
func (w *caller) ask(ctx context.Context, key string) {
	w.made++
	request := fmt.Sprintf("%s.%d@%s", w.name, w.made, w.owner)
	lease := time.Second + time.Duration(w.IntN(3))*500*time.Millisecond
	for range 5 {
		c := w.begin(ctx, key, request, lease)
		again := c.unanswered() && w.one(80) || w.one(w.insists)
		if c.verdict == claim.First && !again {
			w.tokens = append(w.tokens, kept{key, c.given})
			if len(w.tokens) > 20 {
				w.tokens = w.tokens[1:]
			}
			w.work(ctx, c, lease)
		}
		if !again || ctx.Err() != nil {
			return
		}
	}
}

// crowd asks for one key from several threads at once, as where a message was
// delivered again and again: they may be judged together. Asking again tells whether
// each was told its own.
func (w *caller) crowd(ctx context.Context, key string) {
	var all sync.WaitGroup
	for i := range 3 + w.IntN(6) {
		one := w.twin()
		one.made, one.insists = 1_000_000*(i+1)+w.made, 30
		all.Go(func() { one.ask(ctx, key) })
	}
	all.Wait()
	w.made++
}

// work is what the holder of a claim does.
func (w *caller) work(ctx context.Context, c *call, lease time.Duration) {
	if w.one(22) {
		return // it vanishes
	}
	took := w.between(0, 30*time.Millisecond)
	switch n := w.IntN(100); {
	case n < 10:
		took = w.between(100*time.Millisecond, lease)
	case n < 16: // it stalls, and comes back about when its lease is over
		took = w.between(lease, lease+2*time.Second)
	}
	if !pause(ctx, took/2) {
		return
	}
	if w.one(15) {
		w.extend(ctx, c.key, c.given, w.between(time.Second, 2*time.Second))
		if w.one(20) {
			w.begin(ctx, c.key, c.request, lease)
		}
	}
	if !pause(ctx, took/2) {
		return
	}
	req := w.outcome(c.key, c.given, c.attempt)
	if w.one(10) { // two of its threads do not agree
		other, rest := w.outcome(c.key, c.given, c.attempt), w.twin()
		var both sync.WaitGroup
		both.Go(func() { rest.finish(ctx, other) })
		w.finish(ctx, req)
		both.Wait()
		return
	}
	w.finish(ctx, req)
	switch n := w.IntN(100); {
	case n < 10:
		w.finish(ctx, req)
	case n < 25:
		w.finish(ctx, w.outcome(c.key, c.given, c.attempt))
	}
}

// twin is a caller of the same name, with luck of its own.
func (w *caller) twin() *caller {
	return &caller{cluster: w.cluster, name: w.name, by: w.by, owner: w.owner, insists: w.insists, Rand: rand.New(rand.NewPCG(w.Uint64(), w.Uint64()))}
}

// operate forgets keys at random until ctx ends, and waits for each answer.
func (w *caller) operate(ctx context.Context) {
	for pause(ctx, w.between(0, time.Second)) {
		c := &call{op: forget, key: w.key(), node: w.node()}
		w.call(context.WithoutCancel(ctx), c, 40*time.Second, func(ctx context.Context, s claim.Store) {
			var err error
			c.revision, err = s.Forget(ctx, &claim.ForgetRequest{Namespace: namespace, Key: c.key, Reason: "torture", Force: w.one(15)})
			c.toldError(err)
		})
	}
}
