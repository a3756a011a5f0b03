package robustness

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/feedtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/sdktest"
)

// G9 through the SDK: three nodes, whose servers stop and come back, keys that are begun,
// finished and forgotten; copies with and without values and with a prefix come to hold
// what etcd has, and each key's changes are told in their order.
func TestG9CopiesOfTheSDK(t *testing.T) {
	etcd := etcdtest.Start(t, 1)
	var all []*nodetest.Node
	var servers []*sdktest.Server
	var addrs []string
	for range nodes {
		n := nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Watch: etcd.Client(), Tell: etcd.Client(), Memory: 1 << 20})
		s := sdktest.ServeNode(t, n)
		all, servers, addrs = append(all, n), append(servers, s), append(addrs, s.Addr())
	}
	truth := feedtest.Record(t, etcd.Client(), namespace)
	client := sdktest.Connect(t, addrs)
	var copies []*dualcheck.Watch
	prefixes := []string{"", "k-1", ""}
	for i, prefix := range prefixes {
		opts := []dualcheck.WatchOption{dualcheck.WithKeyPrefix(prefix)}
		if i == 2 {
			opts = append(opts, dualcheck.WithValues())
		}
		w, err := client.Watch(context.Background(), namespace, opts...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := w.Close(); err != nil {
				t.Error(err)
			}
		})
		if err := w.Synced(nodetest.Within(t, 30*time.Second)); err != nil {
			t.Fatal(err)
		}
		copies = append(copies, w)
	}
	telling, enough := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { inOrder(telling, t, copies[0]) })
	working, stop := context.WithTimeout(context.Background(), 12*time.Second)
	defer stop()
	var work sync.WaitGroup
	for i := range 6 {
		work.Go(func() {
			for working.Err() == nil {
				n, key := all[rand.IntN(nodes)], fmt.Sprintf("k-%d", rand.IntN(60))
				if i == 0 {
					_, _ = n.Forget(working, &claim.ForgetRequest{Namespace: namespace, Key: key, Reason: "a test"})
					continue
				}
				a, err := n.Begin(working, &claim.BeginRequest{Namespace: namespace, Key: key})
				if err == nil && a.Verdict == claim.First {
					_, _ = n.Finish(working, &claim.FinishRequest{Namespace: namespace, Key: key, Token: a.Claim.Token, Result: &claim.Result{Body: []byte(key)}})
				}
				pause(working, 2*time.Millisecond)
			}
		})
	}
	for pause(working, time.Second) {
		s := servers[rand.IntN(nodes)]
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := s.Stop(ctx); err != nil {
			t.Error(err)
		}
		cancel()
		if err := s.Start(); err != nil {
			t.Fatal(err)
		}
	}
	work.Wait()
	truth.Await(t, etcd.Client())
	for i, w := range copies {
		nodetest.Eventually(t, 60*time.Second, "the copy to hold what etcd has", func() error { return same(w, truth, prefixes[i], i == 2) })
		if status := w.Status(); w.Err() != nil {
			t.Errorf("copy %d ended: %v, %+v", i, w.Err(), status)
		}
	}
	enough()
	running.Wait()
}

// inOrder reads changes until ctx ends: a key's revisions only grow, but for what begins
// anew.
func inOrder(ctx context.Context, t *testing.T, w *dualcheck.Watch) {
	newest := map[string]int64{}
	for change := range w.Changes(ctx) {
		if change.Kind == dualcheck.ChangeResync {
			clear(newest)
			continue
		}
		if change.Entry.Revision < newest[change.Key] { // the same may be told once more
			t.Errorf("%s at %d after %d", change.Key, change.Entry.Revision, newest[change.Key])
		}
		newest[change.Key] = change.Entry.Revision
	}
}

// same reports where a copy is not what was written.
func same(w *dualcheck.Watch, truth *feedtest.History, prefix string, values bool) error {
	want := truth.Last(prefix)
	if w.Len() != len(want) {
		return fmt.Errorf("%d keys, want %d: %+v", w.Len(), len(want), w.Status())
	}
	for key, e := range want {
		got, ok := w.Get(key)
		if !ok || got.Revision != e.Revision {
			return fmt.Errorf("%s at %d, %v, want %d", key, got.Revision, ok, e.Revision)
		}
		if !values || got.State != dualcheck.StateSucceeded {
			continue
		}
		if result, err := got.Result(); err != nil || string(result.Body) != key {
			return fmt.Errorf("%s: %v, %w", key, result, err)
		}
	}
	return nil
}
