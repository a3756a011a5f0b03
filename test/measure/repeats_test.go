// Package measure takes the figures of docs/performance.md, as ratios of slices that
// alternate in one run, so that a noisy machine hurts both alike.
package measure

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

var (
	slice   = flag.Duration("measure.slice", time.Second, "how long each slice lasts")
	rounds  = flag.Int("measure.rounds", 1, "how many slices of each kind")
	callers = flag.Int("measure.callers", 64, "calls in flight")
	least   = flag.Float64("measure.least", 0.25, "the least ratio that passes; 0.5 is promised, on a quiet machine and without -race")
)

// durable has etcd wait for the disk, as in production.
func durable(c *embed.Config) { c.UnsafeNoFsync = false }

// TestRepeatsWithoutRedis: with Redis gone, 90 % repeats are served at no less than
// half of the rate with Redis; with Redis back, hits return without a restart.
func TestRepeatsWithoutRedis(t *testing.T) {
	etcd, redis := etcdtest.Start(t, 1, durable), redistest.Start(t)
	at := rediscache.Server{Mode: rediscache.Standalone, Addrs: []string{redis.Addr()}}
	n := nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: at})
	const known = 5000
	load := workload{node: n, known: known, result: make([]byte, 200)}
	load.prepare(t)
	hits := func() int { return n.Seen.Of("look hit") }
	var with, without float64
	for range *rounds {
		// A Redis that is back is empty: it is filled by use.
		nodetest.Eventually(t, 30*time.Second, "hits to return", func() error {
			before := hits()
			load.replay(t)
			if share := float64(hits()-before) / known; share < 0.95 {
				return fmt.Errorf("a share of %.2f", share)
			}
			return nil
		})
		with += load.run(t, *slice)
		redis.Kill()
		nodetest.Eventually(t, 20*time.Second, "Redis to be given up", func() error {
			if n.Cache.Degraded() == nil {
				return fmt.Errorf("it is not")
			}
			return nil
		})
		without += load.run(t, *slice)
		redis.Restart()
	}
	with, without = with/float64(*rounds), without/float64(*rounds)
	t.Logf("%d callers, 90 %% repeats of %d keys, 200 B results, %d slices of %v each: %.0f calls/s with Redis, %.0f without, ratio %.2f", *callers, known, *rounds, *slice, with, without, without/with)
	t.Log(n.Seen)
	if without < *least*with {
		t.Errorf("without Redis the rate is %.2f of that with it, less than %.2f", without/with, *least)
	}
}

type workload struct {
	node   *nodetest.Node
	known  int
	result []byte
	fresh  atomic.Int64
}

func (w *workload) prepare(t *testing.T) {
	t.Helper()
	var group sync.WaitGroup
	for c := range *callers {
		group.Go(func() {
			for i := c; i < w.known; i += *callers {
				w.life(t, fmt.Sprint("known-", i))
			}
		})
	}
	group.Wait()
}

// replay asks for each known key once.
func (w *workload) replay(t *testing.T) {
	t.Helper()
	var group sync.WaitGroup
	for c := range *callers {
		group.Go(func() {
			for i := c; i < w.known; i += *callers {
				w.again(t, i)
			}
		})
	}
	group.Wait()
}

// again asks for a known key.
func (w *workload) again(t *testing.T, i int) {
	a, err := w.node.Begin(context.Background(), &claim.BeginRequest{Namespace: "ns", Key: fmt.Sprint("known-", i)})
	if err != nil || a.Verdict != claim.Replay {
		t.Errorf("replay: %v %v", a.Verdict, err)
	}
}

// life begins a new key and completes it.
func (w *workload) life(t *testing.T, key string) {
	ctx := context.Background()
	a, err := w.node.Begin(ctx, &claim.BeginRequest{Namespace: "ns", Key: key})
	if err != nil || a.Verdict != claim.First {
		t.Errorf("begin %s: %v %v", key, a.Verdict, err)
		return
	}
	if _, err := w.node.Finish(ctx, &claim.FinishRequest{Namespace: "ns", Key: key, Token: a.Claim.Token, Result: &claim.Result{Body: w.result}}); err != nil {
		t.Errorf("complete %s: %v", key, err)
	}
}

// run returns Begins and Completes a second.
func (w *workload) run(t *testing.T, d time.Duration) float64 {
	t.Helper()
	var calls atomic.Int64
	var group sync.WaitGroup
	began := time.Now()
	for range *callers {
		group.Go(func() {
			for time.Since(began) < d {
				if rand.IntN(10) == 0 {
					w.life(t, fmt.Sprint("fresh-", w.fresh.Add(1)))
					calls.Add(2)
					continue
				}
				w.again(t, rand.IntN(w.known))
				calls.Add(1)
			}
		})
	}
	group.Wait()
	return float64(calls.Load()) / time.Since(began).Seconds()
}
