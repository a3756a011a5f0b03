package redistest

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// slots is how many hash slots a cluster has.
const slots = 16384

// Cluster is a Redis cluster.
type Cluster struct {
	t       testing.TB
	servers []*Server
}

// StartCluster starts a cluster of that many masters and, if asked, as many replicas:
// servers 0 to masters-1 are masters first, server masters+i copies server i. Dead
// masters are replaced after about two seconds, by a vote of most masters: it takes
// three of them. The start takes more than two seconds, for new masters wait so long
// before they answer. The arguments go to every server.
func StartCluster(t testing.TB, masters int, replicas bool, args ...string) *Cluster {
	t.Helper()
	n := masters
	if replicas {
		n *= 2
	}
	c := &Cluster{t: t, servers: startAll(t, slices.Repeat([]conf{{bus: true, args: func(s *Server) ([]string, error) {
		own := append(plain(s),
			"--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(s.bus), "--cluster-announce-ip", "127.0.0.1",
			"--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no",
			// Replicas stay with their masters, and none is too old to take over.
			"--cluster-allow-replica-migration", "no", "--cluster-replica-validity-factor", "0")
		return append(own, args...), nil
	}}}, n)...)}
	for i, s := range c.servers {
		s.nodeID = s.Do("CLUSTER", "MYID").(string)
		// Epochs that differ from the start need not be sorted out later.
		s.Do("CLUSTER", "SET-CONFIG-EPOCH", i+1)
		if i < masters {
			s.Do("CLUSTER", "ADDSLOTSRANGE", slots*i/masters, slots*(i+1)/masters-1)
		}
		// Everyone meets everyone: gossip alone would take its time.
		for _, other := range c.servers[:i] {
			s.Do("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
		}
	}
	until(t, "the nodes know each other", c.met)
	for i, s := range c.servers[masters:] {
		s.Do("CLUSTER", "REPLICATE", c.servers[i].nodeID)
	}
	c.WaitOK()
	return c
}

// Addrs returns the addresses of all servers.
func (c *Cluster) Addrs() []string {
	var all []string
	for _, s := range c.servers {
		all = append(all, s.Addr())
	}
	return all
}

// Server returns one server, by its number.
func (c *Cluster) Server(i int) *Server { return c.servers[i] }

// Client returns a new client of the cluster, closed with the test. It follows
// redirections and gives up on a server after two seconds. It looks at the cluster
// anew twice a second: by itself go-redis would go on asking a dead master for a minute.
func (c *Cluster) Client() *redis.ClusterClient {
	return closing(c.t, redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: c.Addrs(), Password: c.servers[0].password, DialerRetries: 1,
		ClusterStateReloadInterval: 500 * time.Millisecond,
		DialTimeout:                2 * time.Second, ReadTimeout: 2 * time.Second, WriteTimeout: 2 * time.Second,
		ContextTimeoutEnabled: true, DisableIdentity: true, MaintNotificationsConfig: noNotifications(),
	}))
}

// running returns the servers that are neither killed nor paused.
func (c *Cluster) running() []*Server {
	var all []*Server
	for _, s := range c.servers {
		if s.Running() {
			all = append(all, s)
		}
	}
	return all
}

// Masters returns the running servers that hold slots.
func (c *Cluster) Masters() []*Server {
	c.t.Helper()
	var all []*Server
	for _, s := range c.running() {
		nodes, err := s.nodes()
		if err != nil {
			c.t.Fatal(err)
		}
		if self := nodes[s.nodeID]; self.is("master") && len(self.ranges) > 0 {
			all = append(all, s)
		}
	}
	return all
}

// MasterOf returns the running server that says that a slot is its own. It waits for
// one while there is none.
func (c *Cluster) MasterOf(slot int) *Server {
	c.t.Helper()
	var master *Server
	until(c.t, fmt.Sprintf("slot %d has a master", slot), func() error {
		epoch := -1
		for _, s := range c.running() {
			nodes, err := s.nodes()
			if err != nil {
				return err
			}
			// A deposed master may not know yet: the younger claim counts.
			if self := nodes[s.nodeID]; self.is("master") && self.holds(slot) && self.epoch > epoch {
				master, epoch = s, self.epoch
			}
		}
		if master == nil {
			return errors.New("nobody holds it")
		}
		return nil
	})
	return master
}

// Slot returns a key's slot.
func (c *Cluster) Slot(key string) int {
	c.t.Helper()
	return int(c.running()[0].Do("CLUSTER", "KEYSLOT", key).(int64))
}

// MoveSlot moves a slot and its keys to another master while clients go on. What is
// to happen halfway runs when about half of the keys are there: clients are sent from
// one server to the other then, and commands on keys of both are told to try again.
func (c *Cluster) MoveSlot(slot int, to *Server, halfway ...func()) {
	c.t.Helper()
	from := c.MasterOf(slot)
	if from == to {
		return
	}
	to.Do("CLUSTER", "SETSLOT", slot, "IMPORTING", from.nodeID)
	from.Do("CLUSTER", "SETSLOT", slot, "MIGRATING", to.nodeID)
	half := from.Do("CLUSTER", "COUNTKEYSINSLOT", slot).(int64) / 2
	if half > 0 {
		c.moveKeys(slot, from, to, half)
	}
	for _, f := range halfway {
		f()
	}
	// The old master takes no new keys now: it runs out of them.
	for c.moveKeys(slot, from, to, 100) {
	}
	// The new one first: at no time is the slot nobody's.
	to.Do("CLUSTER", "SETSLOT", slot, "NODE", to.nodeID)
	from.Do("CLUSTER", "SETSLOT", slot, "NODE", to.nodeID)
	for _, s := range c.Masters() {
		s.Do("CLUSTER", "SETSLOT", slot, "NODE", to.nodeID)
	}
}

// moveKeys moves up to n keys of a slot and tells whether there were any.
func (c *Cluster) moveKeys(slot int, from, to *Server, n int64) bool {
	c.t.Helper()
	keys := from.Do("CLUSTER", "GETKEYSINSLOT", slot, n).([]any)
	if len(keys) == 0 {
		return false
	}
	args := []any{"MIGRATE", "127.0.0.1", to.port, "", 0, 5000}
	if to.password != "" {
		args = append(args, "AUTH", to.password)
	}
	from.Do(append(append(args, "KEYS"), keys...)...)
	return true
}

// WaitOK waits until every running server finds the cluster in order, all agree on
// who holds what, and replicas have all that was written so far. A cluster that lost
// a master without a replica does not get there.
func (c *Cluster) WaitOK() {
	c.t.Helper()
	until(c.t, "the cluster is in order", c.ok)
}

func (c *Cluster) ok() error {
	if err := c.met(); err != nil {
		return err
	}
	var first string
	for _, s := range c.running() {
		info, err := s.ask("CLUSTER", "INFO").Text()
		if err != nil {
			return err
		}
		if state, ok := field(info, "cluster_state"), field(info, "cluster_slots_ok"); state != "ok" || ok != strconv.Itoa(slots) {
			return fmt.Errorf("%s: state %s, %s slots in order", s.Addr(), state, ok)
		}
		nodes, err := s.nodes()
		if err != nil {
			return err
		}
		for _, master := range c.running() {
			if master.nodeID != nodes[s.nodeID].master {
				continue
			}
			if err := s.copies(master); err != nil {
				return err
			}
		}
		if view := c.view(nodes); first == "" {
			first = view
		} else if view != first {
			return fmt.Errorf("%s sees\n%s\nand not\n%s", s.Addr(), view, first)
		}
	}
	return nil
}

// view is who follows whom and holds what, of the running servers.
func (c *Cluster) view(nodes map[string]node) string {
	var view strings.Builder
	for _, s := range c.running() {
		n := nodes[s.nodeID]
		fmt.Fprintf(&view, "%s %s %v\n", s.Addr(), n.master, n.ranges)
	}
	return view.String()
}

// met returns no error once the running servers know each other as healthy.
func (c *Cluster) met() error {
	for _, s := range c.running() {
		nodes, err := s.nodes()
		if err != nil {
			return err
		}
		for _, other := range c.running() {
			n, ok := nodes[other.nodeID]
			if !ok || n.is("handshake") || n.is("fail") || n.is("fail?") || n.is("noaddr") {
				return fmt.Errorf("%s sees %s as %v", s.Addr(), other.Addr(), n.flags)
			}
		}
	}
	return nil
}

// node is what a server says about one node of its cluster.
type node struct {
	flags  []string
	master string // "-" for masters
	epoch  int
	ranges [][2]int
}

func (n node) is(flag string) bool { return slices.Contains(n.flags, flag) }

func (n node) holds(slot int) bool {
	return slices.ContainsFunc(n.ranges, func(r [2]int) bool { return r[0] <= slot && slot <= r[1] })
}

// nodes returns what a server knows of the cluster, by the nodes' names.
func (s *Server) nodes() (map[string]node, error) {
	text, err := s.ask("CLUSTER", "NODES").Text()
	if err != nil {
		return nil, err
	}
	all := map[string]node{}
	for line := range strings.Lines(text) {
		// name address flags master ping pong epoch link slots...
		f := strings.Fields(line)
		if len(f) < 8 {
			return nil, fmt.Errorf("CLUSTER NODES says %q", line)
		}
		n := node{flags: strings.Split(f[2], ","), master: f[3]}
		if n.epoch, err = strconv.Atoi(f[6]); err != nil {
			return nil, err
		}
		for _, r := range f[8:] {
			if strings.HasPrefix(r, "[") { // a slot on its way
				continue
			}
			first, last, more := strings.Cut(r, "-")
			if !more {
				last = first
			}
			var both [2]int
			for i, v := range []string{first, last} {
				if both[i], err = strconv.Atoi(v); err != nil {
					return nil, err
				}
			}
			n.ranges = append(n.ranges, both)
		}
		all[f[0]] = n
	}
	return all, nil
}
