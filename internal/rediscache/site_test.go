package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// site is a node and a namespace that a test asks it about.
type site struct {
	*nodetest.Node
	t  testing.TB
	ns string
}

func at(t testing.TB, n *nodetest.Node) site { return site{n, t, "ns"} }

func (s site) in(ns string) site { s.ns = ns; return s }

// ask sends a Begin and gives it so long.
func (s site) ask(key string, within time.Duration) (claim.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	return s.Begin(ctx, &claim.BeginRequest{Namespace: s.ns, Key: key})
}

func (s site) begin(key string) claim.Answer {
	s.t.Helper()
	a, err := s.ask(key, 20*time.Second)
	if err != nil {
		s.t.Errorf("begin %s: %v", key, err)
	}
	return a
}

// take gets a key's claim and returns its token.
func (s site) take(key string) string {
	s.t.Helper()
	a := s.begin(key)
	if a.Verdict != claim.First {
		s.t.Errorf("begin %s: verdict %d, want FIRST", key, a.Verdict)
		return ""
	}
	return a.Claim.Token
}

func (s site) complete(key, token, body string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	_, err := s.Finish(ctx, &claim.FinishRequest{Namespace: s.ns, Key: key, Token: token, Result: &claim.Result{Code: 200, Body: []byte(body)}})
	return err
}

// finish does a key's work, from Begin to Complete.
func (s site) finish(key, body string) {
	s.t.Helper()
	if err := s.complete(key, s.take(key), body); err != nil {
		s.t.Errorf("complete %s: %v", key, err)
	}
}

// fromRedis asks until Redis answers with this result.
func (s site) fromRedis(key, body string) claim.Answer {
	s.t.Helper()
	var a claim.Answer
	nodetest.Eventually(s.t, 30*time.Second, "Redis to answer for "+key, func() error {
		a = s.begin(key)
		s.wantReplay(a, key, body)
		if a.Source != claim.SourceRedis {
			return fmt.Errorf("source %d; %v", a.Source, s.Seen)
		}
		return nil
	})
	return a
}

func (s site) wantReplay(a claim.Answer, key, body string) {
	s.t.Helper()
	if is := told(a); is != body {
		s.t.Errorf("%s: %s, want REPLAY of %q", key, is, body)
	}
}

// told is the result that an answer replays, or else what the answer is.
func told(a claim.Answer) string {
	if a.Verdict != claim.Replay || a.Record == nil || a.Record.Result == nil {
		return fmt.Sprintf("<verdict %d>", a.Verdict)
	}
	return string(a.Record.Result.Body)
}

// heard counts the looks in which Redis said something, whatever it was.
func (s site) heard() int {
	n := 0
	for _, f := range []rediscache.Finding{
		rediscache.Hit, rediscache.Absent, rediscache.Marked, rediscache.Staged, rediscache.Expired, rediscache.Epoch, rediscache.Digest,
		rediscache.HMAC, rediscache.Revision, rediscache.Garbage, rediscache.Unreadable, rediscache.Undecided,
	} {
		n += s.Seen.Of("look " + string(f))
	}
	return n
}

// listen asks for a key until Redis was heard so often meanwhile, and has each answer
// checked.
func (s site) listen(key string, often int, check func(claim.Answer)) {
	s.t.Helper()
	until := s.heard() + often
	nodetest.Eventually(s.t, 30*time.Second, "Redis to be heard", func() error {
		check(s.begin(key))
		if s.heard() < until {
			return errors.New("not yet")
		}
		return nil
	})
}

func (s site) view() claim.View {
	s.t.Helper()
	v, err := s.Follower.View()
	if err != nil {
		s.t.Fatal(err)
	}
	return v
}

// name is what a key's entry is called now.
func (s site) name(key string) string {
	v := s.view()
	return rediscache.KeyOf(&v, layout.NameOf(s.ns, key))
}

func (s site) put(p policy.Policy) {
	s.t.Helper()
	if _, err := s.Behind.PutNamespace(nodetest.Within(s.t, 20*time.Second), policy.Namespace{Name: s.ns, Policy: p}); err != nil {
		s.t.Fatal(err)
	}
}

// knows waits until the node follows the namespace's declaration.
func (s site) knows() {
	s.t.Helper()
	nodetest.Eventually(s.t, 20*time.Second, "the policy to be followed", func() error {
		if _, ok := s.view().Policies[s.ns]; !ok {
			return errors.New("not declared")
		}
		return nil
	})
}

func seconds(n int) *time.Duration {
	d := time.Duration(n) * time.Second
	return &d
}

// stored returns an entry's bytes; "" if there is none.
func stored(r *redistest.Server, name string) string {
	entry, _ := r.Do("GET", name).(string)
	return entry
}

// authentic reports whether what is there would be believed under that name.
func authentic(r *redistest.Server, v claim.View, name, namespace, key string) error {
	if _, found := rediscache.ReadEntry([]byte(stored(r, name)), v.Sealer, name, namespace, key); found != rediscache.Hit {
		return fmt.Errorf("%s: %s", name, found)
	}
	return nil
}

// each runs f for all of them at once.
func each[T any](all []T, f func(T)) {
	var running sync.WaitGroup
	for _, one := range all {
		running.Go(func() { f(one) })
	}
	running.Wait()
}

// finishUnconfirmed finishes a key, with r, whose stage is in Redis and whose confirm
// is held. It returns the key: the first for which Redis was well.
func finishUnconfirmed(p *nodetest.Holding, n site, r *redistest.Server) string {
	n.t.Helper()
	p.Hold()
	ended := func() int { return n.Seen.Of("stage ok") + n.Seen.Of("stage open") + n.Seen.Of("stage failed") }
	for i := 0; ; i++ {
		key, before := fmt.Sprintf("late-%d", i), ended()
		n.finish(key, "r1")
		nodetest.Eventually(n.t, 10*time.Second, "the stage", func() error {
			if ended() == before {
				return errors.New(n.Seen.String())
			}
			return nil
		})
		switch {
		case stored(r, n.name(key)) != "":
			return key
		case i == 100:
			n.t.Fatalf("Redis is never well: %v", n.Seen)
		}
	}
}
