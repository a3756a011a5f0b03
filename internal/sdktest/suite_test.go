package sdktest_test

import (
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
	"github.com/dualcheck/dualcheck/internal/sdktest"
	"github.com/dualcheck/dualcheck/internal/server"
)

func TestMain(m *testing.M) { os.Exit(etcdtest.Main(m)) }

// ways are how a cluster is asked.
var ways = []struct {
	name string
	open func(t *testing.T, addrs []string) claim.Store
}{
	{"Stream", func(t *testing.T, addrs []string) claim.Store { return sdktest.Open(t, addrs) }},
	{"Batches", func(t *testing.T, addrs []string) claim.Store { return sdktest.OpenBatches(t, addrs) }},
}

func ready() error { return nil }

// What every Store must do holds over a Store in memory, through the SDK's stream and
// through batches: nothing on the way changes it.
func TestSuiteOverMemory(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			claimtest.Suite(t, func(t *testing.T) claimtest.Harness {
				m := claimtest.NewMemory()
				h := m.Harness()
				h.Store = way.open(t, []string{sdktest.Serve(t, m, ready).Addr()})
				return h
			})
		})
	}
}

// What every Store must do holds over whole nodes, memory, Redis and etcd, through the
// SDK's stream and through batches, whichever node a key's calls go to. The first node has
// no memory, so that Redis answers too.
func TestSuite(t *testing.T) {
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	var all []*nodetest.Node
	var addrs []string
	for i := range 3 {
		n := nodetest.Start(t, nodetest.Options{
			Client: etcd.Client(), Idle: i > 0, Memory: int64(i) << 20, Encode: server.EncodeRecord,
			Redis: rediscache.Server{Mode: rediscache.Standalone, Addrs: []string{redis.Addr()}},
		})
		all, addrs = append(all, n), append(addrs, sdktest.ServeNode(t, n).Addr())
	}
	t.Cleanup(func() {
		hits, remembered := 0, 0
		for _, n := range all {
			t.Log(n.Seen)
			hits += n.Seen.Of("look hit")
			remembered += n.Seen.Of("remembered hit")
			if n.Seen.Of("etcd begin ok") == 0 {
				t.Errorf("node %s gave no claim: nothing was tested there", n.ID)
			}
		}
		if hits == 0 {
			t.Error("Redis never answered: nothing was tested")
		}
		if remembered == 0 {
			t.Error("memory never answered: nothing was tested")
		}
	})
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			var next atomic.Int64
			claimtest.Suite(t, func(t *testing.T) claimtest.Harness {
				n := all[next.Add(1)%int64(len(all))]
				return claimtest.Harness{
					Store: way.open(t, addrs),
					Clock: nodetest.Clock{Node: n},
					PutPolicy: func(t *testing.T, namespace string, p claim.Policy) {
						t.Helper()
						put(t, n, all, namespace, p)
					},
				}
			})
		})
	}
}

// put declares the policy that comes to this, and returns once all nodes follow it.
func put(t testing.TB, n *nodetest.Node, all []*nodetest.Node, namespace string, p claim.Policy) {
	t.Helper()
	put := nodetest.Declare(t, n, namespace, p)
	for _, n := range all {
		nodetest.Eventually(t, 20*time.Second, "the policy to be followed", func() error {
			v, err := n.Follower.View()
			if err == nil && v.Guard < put.Revision {
				err = fmt.Errorf("its guard is %d of %d", v.Guard, put.Revision)
			}
			return err
		})
	}
}
