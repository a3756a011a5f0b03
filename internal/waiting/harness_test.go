package waiting_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/waiting"
)

func TestMain(m *testing.M) { os.Exit(etcdtest.Main(m)) }

// changes tells of what it is told.
type changes struct {
	live atomic.Bool

	mu     sync.Mutex
	follow map[string]map[chan struct{}]bool
	most   int // keys followed at once
}

func newChanges() *changes {
	c := &changes{follow: map[string]map[chan struct{}]bool{}}
	c.live.Store(true)
	return c
}

func (c *changes) Live() bool { return c.live.Load() }

func (c *changes) Follow(key string) (changed <-chan struct{}, end func()) {
	ch := make(chan struct{}, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.follow[key] == nil {
		c.follow[key] = map[chan struct{}]bool{}
	}
	c.follow[key][ch] = true
	c.most = max(c.most, len(c.follow[key]))
	return ch, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if delete(c.follow[key], ch); len(c.follow[key]) == 0 {
			delete(c.follow, key)
		}
	}
}

// of tells that a key may have changed.
func (c *changes) of(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for ch := range c.follow[layout.NameOf("a", key).Key] {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

func (c *changes) following() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.follow)
}

// asked is one question of a Room: when, and for whom.
type asked struct {
	at   time.Time
	reqs []*claim.BeginRequest
}

// memory is a Store in memory whose time passes as the test's does, and which takes note of
// what it is asked.
type memory struct {
	*claimtest.Memory
	mu    sync.Mutex
	seen  time.Time
	asks  []asked
	reads []asked // of revisions; reqs are missing
	keys  map[string]string
	read  map[string][]time.Time // by key, when its revision was
	guard int64
	// answer, if set, answers in the Store's place; nil: the Store does.
	answer func(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun
	down   error // of reads of revisions
}

func newMemory() *memory {
	return &memory{Memory: claimtest.NewMemory(), seen: time.Now(), keys: map[string]string{}, read: map[string][]time.Time{}}
}

func (m *memory) current() *claimtest.Memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	m.Advance(now.Sub(m.seen))
	m.seen = now
	return m.Memory
}

func (m *memory) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	m.mu.Lock()
	m.asks = append(m.asks, asked{time.Now(), reqs})
	answer, guard := m.answer, m.guard
	m.mu.Unlock()
	var begun []claim.Begun
	if answer != nil {
		begun = answer(ctx, reqs)
	}
	if begun == nil {
		begun = m.current().BeginTogether(ctx, reqs)
	}
	for i := range begun {
		begun[i].Answer.Guard = guard
	}
	return begun
}

// answers sets what answers in the Store's place.
func (m *memory) answers(answer func(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answer = answer
}

// Revisions reads the revisions of keys that Room asked for, and the guard's.
func (m *memory) Revisions(ctx context.Context, keys []string) ([]int64, error) {
	now := time.Now()
	m.mu.Lock()
	m.reads = append(m.reads, asked{at: now})
	err := m.down
	revisions := []int64{m.guard}
	names := []string{}
	for _, key := range keys[1:] {
		m.read[key] = append(m.read[key], now)
		names = append(names, m.keys[key])
	}
	m.mu.Unlock()
	if keys[0] != layout.Guard {
		return nil, fmt.Errorf("the first key is %s", keys[0])
	}
	for _, name := range names {
		revision := int64(0)
		if found, err := m.current().Get(ctx, &claim.GetRequest{Namespace: "a", Key: name}); err == nil {
			revision = found.Record.Revision
		}
		revisions = append(revisions, revision)
	}
	return revisions, err
}

// since returns what was asked, and how many reads of revisions there were, since then.
func (m *memory) since(t time.Time) (asks []asked, reads int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range m.asks {
		if !a.at.Before(t) {
			asks = append(asks, a)
		}
	}
	for _, r := range m.reads {
		if !r.at.Before(t) {
			reads++
		}
	}
	return asks, reads
}

// hall is a Room over a Store in memory.
type hall struct {
	*waiting.Room
	t       testing.TB
	store   *memory
	changes *changes
	drain   func()
	seen    *seen
}

// open opens one; changes are told, and rounds go, unless tune says otherwise.
func open(t testing.TB, tune ...func(*waiting.Config)) *hall {
	h := &hall{t: t, store: newMemory(), changes: newChanges(), seen: &seen{causes: map[string]int{}}}
	draining := make(chan struct{})
	h.drain = func() { close(draining) }
	cfg := waiting.Config{Store: h.store, Revisions: h.store.Revisions, Changes: h.changes, Draining: draining, Observe: h.seen}
	for _, f := range tune {
		f(&cfg)
	}
	h.Room = waiting.New(cfg)
	t.Cleanup(h.Close)
	return h
}

// polling leaves changes out.
func polling(c *waiting.Config) { c.Changes, c.Revisions = nil, nil }

// seen is an Observer.
type seen struct {
	mu     sync.Mutex
	groups int
	causes map[string]int
	keys   int
	woken  []time.Duration
}

func (s *seen) Groups(more int) { s.mu.Lock(); defer s.mu.Unlock(); s.groups += more }

func (s *seen) Asked(cause string, _ int) { s.mu.Lock(); defer s.mu.Unlock(); s.causes[cause]++ }

func (s *seen) Checked(keys int) { s.mu.Lock(); defer s.mu.Unlock(); s.keys += keys }

func (s *seen) Woken(took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.woken = append(s.woken, took)
}

func (s *seen) of(cause string) int { s.mu.Lock(); defer s.mu.Unlock(); return s.causes[cause] }

// request is one that waits for long, of a caller with this name.
func request(key, caller string) *claim.BeginRequest {
	return &claim.BeginRequest{Namespace: "a", Key: key, Owner: caller, RequestID: caller, Wait: 30 * time.Second}
}

// held has the key held for so long, and returns the token.
func (h *hall) held(key string, lease time.Duration) string {
	h.t.Helper()
	req := request(key, "holder")
	req.Lease = &lease
	a, err := h.store.current().Begin(h.t.Context(), req)
	if err != nil || a.Verdict != claim.First {
		h.t.Fatalf("%+v %v", a, err)
	}
	return a.Claim.Token
}

// told is what a waiter was told, and when.
type told struct {
	claim.Answer
	err error
	at  time.Time
}

// begin asks and waits, in a goroutine of its own.
func (h *hall) begin(ctx context.Context, req *claim.BeginRequest, enough <-chan struct{}) <-chan told {
	h.t.Helper()
	h.store.mu.Lock()
	h.store.keys[layout.NameOf(req.Namespace, req.Key).Key] = req.Key
	guard := h.store.guard
	h.store.mu.Unlock()
	last, err := h.store.current().Begin(ctx, req)
	if err != nil || last.Verdict != claim.InProgress {
		h.t.Fatalf("%+v %v", last, err)
	}
	last.Guard = guard
	return h.wait(ctx, req, last, enough)
}

// wait waits, in a goroutine of its own.
func (h *hall) wait(ctx context.Context, req *claim.BeginRequest, last claim.Answer, enough <-chan struct{}) <-chan told {
	end := make(chan told, 1)
	go func() {
		a, err := h.Wait(ctx, req, last, enough)
		end <- told{a, err, time.Now()}
	}()
	return end
}

func (h *hall) complete(key, token string) {
	h.t.Helper()
	req := &claim.FinishRequest{Namespace: "a", Key: key, Token: token, Result: &claim.Result{Body: []byte("done")}}
	if _, err := h.store.current().Finish(context.Background(), req); err != nil {
		h.t.Error(err)
	}
}

func (h *hall) free(key, token string) {
	h.t.Helper()
	req := &claim.FinishRequest{Namespace: "a", Key: key, Token: token, Failure: &claim.Failure{Class: claim.Retryable}}
	if _, err := h.store.current().Finish(context.Background(), req); err != nil {
		h.t.Error(err)
	}
}

// want checks an answer.
func (h *hall) want(end <-chan told, v claim.Verdict) told {
	h.t.Helper()
	got := <-end
	if got.err != nil || got.Verdict != v {
		h.t.Fatalf("told %d, %v, want %d", got.Verdict, got.err, v)
	}
	return got
}

// pass lets time pass.
func pass(d time.Duration) { <-time.After(d) }

// waits reports whether it has not been answered.
func waits(end <-chan told) bool {
	select {
	case <-end:
		return false
	default:
		return true
	}
}
