package rediscache_test

import (
	"os"
	"sync"
	"testing"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/claimtest"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

func TestMain(m *testing.M) { os.Exit(etcdtest.Main(m)) }

// standalone says where a test's server is.
func standalone(addr string) rediscache.Server {
	return rediscache.Server{Mode: rediscache.Standalone, Addrs: []string{addr}}
}

// TestSuite: what every Store must do, done with Redis in front, over two nodes that
// take turns.
func TestSuite(t *testing.T) {
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	all := []*nodetest.Node{
		nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr())}),
		nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Idle: true}),
	}
	var mu sync.Mutex
	next := 0
	t.Cleanup(func() {
		for _, n := range all {
			t.Log(n.Seen)
		}
		if all[0].Seen.Of("look hit")+all[1].Seen.Of("look hit") == 0 {
			t.Error("Redis never answered: nothing was tested")
		}
		if left := redis.NoTTL(); len(left) > 0 {
			t.Errorf("C66: entries without an expiry: %q", left)
		}
	})
	claimtest.Suite(t, func(*testing.T) claimtest.Harness {
		mu.Lock()
		defer mu.Unlock()
		next++
		n := all[next%len(all)]
		return claimtest.Harness{Store: n, Clock: nodetest.Clock{Node: n}, PutPolicy: func(t *testing.T, namespace string, p claim.Policy) { nodetest.Declare(t, n, namespace, p) }}
	})
}
