// Package etcdtest starts real etcd for tests: members in this process, real
// clients over loopback, real faults. What it starts ends with the test; clients
// are closed before their servers.
package etcdtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
)

// Cluster is a running etcd.
type Cluster struct {
	t     testing.TB
	confs []*embed.Config

	mu      sync.Mutex
	members []*embed.Etcd // nil while stopped
	clients []*clientv3.Client
}

// Start starts n members; tune may change each member's configuration.
func Start(t testing.TB, n int, tune ...func(*embed.Config)) *Cluster {
	t.Helper()
	c := &Cluster{t: t, members: make([]*embed.Etcd, n)}
	ports := freePorts(t, 2*n)
	var initial []string
	for i := range n {
		initial = append(initial, fmt.Sprintf("m%d=http://127.0.0.1:%d", i, ports[2*i]))
	}
	for i := range n {
		conf := embed.NewConfig()
		conf.Name = fmt.Sprintf("m%d", i)
		conf.Dir = t.TempDir()
		peer, client := loopback(ports[2*i]), loopback(ports[2*i+1])
		conf.ListenPeerUrls, conf.AdvertisePeerUrls = peer, peer
		conf.ListenClientUrls, conf.AdvertiseClientUrls = client, client
		conf.InitialCluster, conf.InitialClusterToken = strings.Join(initial, ","), t.Name()
		conf.UnsafeNoFsync = true // killed processes keep their page cache
		conf.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
		for _, f := range tune {
			f(conf)
		}
		c.confs = append(c.confs, conf)
	}
	t.Cleanup(c.close)
	var g errgroup.Group
	for i := range n {
		g.Go(func() error { return c.start(i) })
	}
	if err := g.Wait(); err != nil {
		t.Fatalf("start etcd: %v", err)
	}
	return c
}

func (c *Cluster) start(i int) error {
	e, err := embed.StartEtcd(c.confs[i])
	if err != nil {
		return fmt.Errorf("member %d: %w", i, err)
	}
	select {
	case <-e.Server.ReadyNotify():
	case err := <-e.Err():
		e.Close()
		return fmt.Errorf("member %d: %w", i, err)
	case <-time.After(time.Minute):
		e.Close()
		return fmt.Errorf("member %d: not ready after a minute", i)
	}
	c.mu.Lock()
	c.members[i] = e
	c.mu.Unlock()
	return nil
}

// Endpoints returns the client addresses of all members.
func (c *Cluster) Endpoints() []string {
	var all []string
	for i := range c.confs {
		all = append(all, c.Endpoint(i))
	}
	return all
}

// Endpoint returns the client address of one member.
func (c *Cluster) Endpoint(i int) string { return c.confs[i].ListenClientUrls[0].Host }

// Client returns a client of these endpoints, or of all members.
func (c *Cluster) Client(endpoints ...string) *clientv3.Client {
	c.t.Helper()
	if len(endpoints) == 0 {
		endpoints = c.Endpoints()
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		c.t.Fatalf("etcd client: %v", err)
	}
	c.mu.Lock()
	c.clients = append(c.clients, client)
	c.mu.Unlock()
	return client
}

// Member returns a running member.
func (c *Cluster) Member(i int) *embed.Etcd {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.members[i]
}

// Leader returns the leader's number.
func (c *Cluster) Leader() int {
	c.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for time.Now().Before(deadline) {
		for i := range c.confs {
			if m := c.Member(i); m != nil && m.Server.Leader() == m.Server.MemberID() {
				return i
			}
		}
		<-time.After(10 * time.Millisecond)
	}
	c.t.Fatal("no leader for 30s")
	return -1
}

// Kill ends a member as if its process had died: nothing is handed over.
func (c *Cluster) Kill(i int) {
	c.mu.Lock()
	m := c.members[i]
	c.members[i] = nil
	c.mu.Unlock()
	if m != nil {
		m.Server.HardStop()
		m.Close()
	}
}

// Restart starts a killed member on its own directory.
func (c *Cluster) Restart(i int) {
	c.t.Helper()
	if err := c.start(i); err != nil {
		c.t.Fatalf("restart etcd: %v", err)
	}
}

// Cut separates a member from its peers; clients still reach it.
func (c *Cluster) Cut(i int) { c.partition(i, true) }

// Mend undoes Cut.
func (c *Cluster) Mend(i int) { c.partition(i, false) }

func (c *Cluster) partition(i int, cut bool) {
	one := c.Member(i)
	for j := range c.confs {
		other := c.Member(j)
		if j == i || other == nil || one == nil {
			continue
		}
		if cut {
			one.Server.CutPeer(other.Server.MemberID())
			other.Server.CutPeer(one.Server.MemberID())
		} else {
			one.Server.MendPeer(other.Server.MemberID())
			other.Server.MendPeer(one.Server.MemberID())
		}
	}
}

// Backup copies a member's data as it is on disk; the member is killed for it and
// restarted.
func (c *Cluster) Backup(i int) (dir string) {
	c.t.Helper()
	dir = filepath.Join(c.t.TempDir(), "backup")
	c.Kill(i)
	if err := os.CopyFS(dir, os.DirFS(c.Dir(i))); err != nil {
		c.t.Fatalf("back etcd up: %v", err)
	}
	c.Restart(i)
	return dir
}

// Restore kills a member, puts a backup in the place of its data, and restarts it.
func (c *Cluster) Restore(i int, dir string) {
	c.t.Helper()
	c.Kill(i)
	if err := os.RemoveAll(c.Dir(i)); err != nil {
		c.t.Fatalf("restore etcd: %v", err)
	}
	if err := os.CopyFS(c.Dir(i), os.DirFS(dir)); err != nil {
		c.t.Fatalf("restore etcd: %v", err)
	}
	c.Restart(i)
}

// Dir is a member's data directory.
func (c *Cluster) Dir(i int) string { return c.confs[i].Dir }

func (c *Cluster) close() {
	c.mu.Lock()
	clients, members := c.clients, c.members
	c.clients, c.members = nil, make([]*embed.Etcd, len(c.confs))
	c.mu.Unlock()
	for _, client := range clients {
		if err := client.Close(); err != nil && !errors.Is(err, context.Canceled) {
			c.t.Logf("close etcd client: %v", err)
		}
	}
	var g errgroup.Group
	for _, m := range members {
		if m != nil {
			g.Go(func() error {
				m.Server.HardStop() // no handing over of leadership: all end at once
				m.Close()
				return nil
			})
		}
	}
	g.Wait() //nolint:errcheck // always nil
}

func loopback(port int) []url.URL {
	return []url.URL{{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", port)}}
}

// freePorts finds ports that are free now and not handed out twice.
func freePorts(t testing.TB, n int) []int {
	t.Helper()
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatalf("find a free port: %v", err)
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports
}
