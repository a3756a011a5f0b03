package robustness

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/feedtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

var trials = flag.Int("robustness.trials", 1000, "how many keys are forgotten")

// forgotten is one key that was finished, is kept everywhere, and is to be forgotten.
type forgotten struct {
	key string
	// answered is set once its forget has been answered: who asks from then on must not be
	// told the old result.
	answered atomic.Bool
}

// H05, H34, G4: a key is finished, and warm in the memory of three nodes and in Redis,
// and asked for all the time. Once its forget has been answered by one node, no node
// tells the old result any more; and on each node a subscriber is told of it, once.
func TestH05ForgetIsForEveryNode(t *testing.T) {
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	var all []*nodetest.Node
	for range nodes {
		all = append(all, nodetest.Start(t, nodetest.Options{
			Client: etcd.Client(), Watch: etcd.Client(), Tell: etcd.Client(), Memory: 64 << 20,
			Redis: rediscache.Server{Mode: rediscache.Standalone, Addrs: []string{redis.Addr()}},
		}))
	}
	truth := feedtest.Record(t, etcd.Client(), namespace)
	var streams []*stream
	for _, n := range all {
		streams = append(streams, follow(t, n, truth))
	}
	keys := make([]*forgotten, *trials)
	for i := range keys {
		keys[i] = &forgotten{key: fmt.Sprintf("order-%05d", i)}
	}
	crowd(50, keys, func(k *forgotten) { finishes(t, all[0], k.key, "old") })
	crowd(50, keys, func(k *forgotten) {
		for _, n := range all {
			nodetest.Eventually(t, 30*time.Second, "a replay from memory", func() error {
				a, err := beginOn(n, k.key)
				if err == nil && (a.Verdict != claim.Replay || a.Source != claim.SourceMemory) {
					err = fmt.Errorf("%s: verdict %d from %d", k.key, a.Verdict, a.Source)
				}
				return err
			})
		}
	})

	// Who asks all the time, of any node.
	asking, enough := context.WithCancel(context.Background())
	var askers sync.WaitGroup
	var asked, old, claims atomic.Int64
	for range 16 {
		askers.Go(func() {
			for asking.Err() == nil {
				k, n := keys[rand.IntN(len(keys))], all[rand.IntN(len(all))]
				answered := k.answered.Load()
				a, err := beginOn(n, k.key)
				if err != nil {
					continue // it proves nothing
				}
				asked.Add(1)
				switch {
				case a.Verdict == claim.Replay && string(a.Record.Result.Body) == "old":
					if old.Add(1); answered {
						t.Errorf("%s was forgotten, and %s tells of it", k.key, n.ID)
					}
				case a.Verdict == claim.First:
					if claims.Add(1); !answered && !freed(k) {
						t.Errorf("%s: FIRST before its forget was answered", k.key)
					}
					if _, err := n.Finish(nodetest.Within(t, 20*time.Second), &claim.FinishRequest{Namespace: namespace, Key: k.key, Token: a.Claim.Token, Result: &claim.Result{Body: []byte("new")}}); err != nil {
						t.Errorf("finish %s: %v", k.key, err)
					}
				}
			}
		})
	}
	crowd(250, keys, func(k *forgotten) {
		n := all[rand.IntN(len(all))]
		if _, err := n.Forget(nodetest.Within(t, 30*time.Second), &claim.ForgetRequest{Namespace: namespace, Key: k.key, Reason: "a test"}); err != nil {
			t.Errorf("forget %s: %v", k.key, err)
			return
		}
		k.answered.Store(true)
	})
	for _, k := range keys {
		for _, n := range all {
			if a, err := beginOn(n, k.key); err == nil && a.Verdict == claim.Replay && string(a.Record.Result.Body) == "old" {
				t.Errorf("%s was forgotten, and %s tells of it in the end", k.key, n.ID)
			}
		}
	}
	enough()
	askers.Wait()
	t.Logf("%d forgets, %d answers meanwhile: %d of the old result before its forget was answered, %d new claims", len(keys), asked.Load(), old.Load(), claims.Load())
	if old.Load() == 0 || claims.Load() == 0 {
		t.Error("nothing was tested: nobody asked in between")
	}
	truth.Await(t, etcd.Client())
	for i, s := range streams {
		s.end(t)
		if s.Deletes != len(keys) {
			t.Errorf("stream %d: %d deletes, want %d", i, s.Deletes, len(keys))
		}
		for _, err := range s.Finish("") {
			t.Errorf("stream %d: %v", i, err)
		}
	}
}

// freed reports whether a key's forget has got as far as to free it: it is answered in the
// moment after.
func freed(k *forgotten) bool {
	deadline := time.After(5 * time.Second)
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for !k.answered.Load() {
		select {
		case <-deadline:
			return false
		case <-again.C:
		}
	}
	return true
}

func beginOn(s claim.Store, key string) (claim.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return s.Begin(ctx, &claim.BeginRequest{Namespace: namespace, Key: key})
}

// finishes begins and finishes a key.
func finishes(t testing.TB, s claim.Store, key, body string) {
	a, err := beginOn(s, key)
	if err == nil && a.Verdict == claim.First {
		_, err = s.Finish(nodetest.Within(t, 20*time.Second), &claim.FinishRequest{Namespace: namespace, Key: key, Token: a.Claim.Token, Result: &claim.Result{Body: []byte(body)}})
	}
	if err != nil || a.Verdict != claim.First {
		t.Errorf("%s: verdict %d, %v", key, a.Verdict, err)
	}
}

// crowd does something with each of all, so many at a time.
func crowd[T any](at int, all []T, do func(T)) {
	next := make(chan T)
	var running sync.WaitGroup
	for range at {
		running.Go(func() {
			for one := range next {
				do(one)
			}
		})
	}
	for _, one := range all {
		next <- one
	}
	close(next)
	running.Wait()
}

// stream is a subscriber that reads until it is ended, and comes back when its stream
// breaks.
type stream struct {
	*feedtest.Stream
	stop    context.CancelFunc
	running sync.WaitGroup
	mu      sync.Mutex
}

// follow has a subscriber read a node's feed.
func follow(t testing.TB, n *nodetest.Node, truth *feedtest.History) *stream {
	t.Helper()
	s := &stream{Stream: feedtest.NewStream(truth)}
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	first := make(chan struct{})
	opened := sync.OnceFunc(func() { close(first) })
	s.running.Go(func() {
		req := feed.Request{Namespace: namespace, Snapshot: true}
		for ctx.Err() == nil {
			if sub, err := n.Feed.Subscribe(ctx, req); err == nil {
				req.Token = s.read(ctx, t, sub, req.Token, opened)
				sub.Close()
			}
			pause(ctx, 50*time.Millisecond)
		}
	})
	t.Cleanup(func() { s.stop(); s.running.Wait() })
	<-first
	return s
}

// read reads until the stream breaks, and returns the last token.
func (s *stream) read(ctx context.Context, t testing.TB, sub *feed.Subscription, token string, opened func()) string {
	for {
		b, err := sub.Next(ctx)
		if err != nil {
			if !errors.Is(err, context.Canceled) && claim.ReasonOf(err) != claim.StoreUnavailable {
				t.Errorf("the stream broke: %v", err)
			}
			return token
		}
		m := feedtest.Message{Token: b.Token, Progress: b.Progress, Begin: b.Begin, End: b.End, Cause: b.Cause}
		for _, e := range b.Events {
			told := feedtest.EventOf(e.Record)
			told.Deleted = e.Deleted
			m.Events = append(m.Events, told)
		}
		s.mu.Lock()
		s.Take(m)
		s.mu.Unlock()
		if token = b.Token; b.Progress || b.End {
			opened()
		}
	}
}

// end waits until the reader has everything, and ends it.
func (s *stream) end(t testing.TB) {
	t.Helper()
	nodetest.Eventually(t, 60*time.Second, "the stream to have everything", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.Complete("") {
			return fmt.Errorf("%d keys, %d events, %d resyncs: %v", len(s.Have), s.Events, s.Resyncs, s.Errors)
		}
		return nil
	})
	s.stop()
	s.running.Wait()
}
