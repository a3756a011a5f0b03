package etcdtxn_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// lockedBuffer is a log that a test reads while it is written.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Two living nodes with one id: it is told, and when the other goes the first is
// listed again.
func TestTwoNodesWithOneID(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	client := c.Client()
	n := startNode(t, client, options{keeps: true})
	var log lockedBuffer
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	keep := func(ctx context.Context) {
		k := etcdtxn.NewKeeper(etcdtxn.KeeperConfig{Client: client, Follower: n.follower, Node: layout.Node{ID: "twin"}, Log: slog.New(slog.NewTextHandler(&log, nil))})
		running.Go(func() { report(t, k.Run(ctx)) })
	}
	defer running.Wait()
	defer cancel()
	key := layout.NodeOf("twin")
	leaseOf := func() clientv3.LeaseID {
		resp, err := client.Get(within(t, 5*time.Second), key)
		if err != nil || len(resp.Kvs) == 0 {
			return 0
		}
		return clientv3.LeaseID(resp.Kvs[0].Lease)
	}
	listed := func(other clientv3.LeaseID) clientv3.LeaseID {
		var lease clientv3.LeaseID
		eventually(t, 20*time.Second, "a registration", func() error {
			if lease = leaseOf(); lease == 0 || lease == other {
				return fmt.Errorf("lease %x", lease)
			}
			return nil
		})
		return lease
	}
	keep(ctx)
	first := listed(0)
	second, stopSecond := context.WithCancel(ctx)
	keep(second)
	other := listed(first)
	eventually(t, 20*time.Second, "the twin to be told", func() error {
		if !strings.Contains(log.String(), "ids must be unique") {
			return fmt.Errorf("log %q", log.String())
		}
		return nil
	})
	stopSecond()
	listed(other)
}

// emptyFollower has listed an etcd without a clock.
type emptyFollower struct{ looks atomic.Int64 }

func (f *emptyFollower) Tick() (claim.Tick, time.Duration, <-chan struct{}) {
	f.looks.Add(1)
	return claim.Tick{}, time.Hour, make(chan struct{})
}

func (f *emptyFollower) FirstNode() string { return "" }

// An etcd that was wiped under a running node has no clock: the keeper waits, and
// does not spin.
func TestKeeperWaitsForAClock(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	f := &emptyFollower{}
	k := etcdtxn.NewKeeper(etcdtxn.KeeperConfig{Client: c.Client(), Follower: f, Node: layout.Node{ID: "n"}})
	if err := k.Run(within(t, 2*time.Second)); err != nil {
		t.Fatal(err)
	}
	if looks := f.looks.Load(); looks > 20 {
		t.Errorf("%d looks in 2s", looks)
	}
}
