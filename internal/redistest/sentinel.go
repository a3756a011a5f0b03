package redistest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// MasterName is what sentinels call the master here.
const MasterName = "mymaster"

// Sentinel is a master and a replica, watched by three sentinels.
type Sentinel struct {
	t         testing.TB
	data      []*Server
	sentinels []*Server
}

// StartSentinel starts a master, its replica and three sentinels, of which two must
// find the master dead. That takes half a second, and its replacement one to three
// more. The arguments go to the master and the replica.
func StartSentinel(t testing.TB, args ...string) *Sentinel {
	t.Helper()
	// Who copies whom is not among the arguments: it changes.
	server := conf{args: func(s *Server) ([]string, error) { return append(plain(s), args...), nil }}
	s := &Sentinel{t: t, data: startAll(t, server, server)}
	master, replica := s.data[0], s.data[1]
	replica.Do("REPLICAOF", "127.0.0.1", master.port)
	until(t, "the replica has the master's data", func() error { return replica.copies(master) })
	sentinel := conf{ready: hurry, args: func(s *Server) ([]string, error) {
		file := filepath.Join(s.dir, fmt.Sprintf("sentinel-%d.conf", s.port))
		args := []string{file, "--sentinel"}
		// A sentinel that ran before keeps there what it knows.
		if _, err := os.Stat(file); err == nil {
			return args, nil
		}
		lines := []string{
			fmt.Sprintf("port %d", s.port),
			"bind 127.0.0.1",
			fmt.Sprintf("sentinel monitor %s 127.0.0.1 %d 2", MasterName, master.port),
			fmt.Sprintf("sentinel down-after-milliseconds %s 500", MasterName),
			// After twice this time a failover that did not work is tried again.
			fmt.Sprintf("sentinel failover-timeout %s 3000", MasterName),
			fmt.Sprintf("sentinel parallel-syncs %s 1", MasterName),
		}
		if master.password != "" {
			lines = append(lines, fmt.Sprintf("sentinel auth-pass %s %s", MasterName, master.password))
		}
		return args, os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600)
	}}
	s.sentinels = startAll(t, sentinel, sentinel, sentinel)
	s.WaitOK()
	return s
}

// hurry has a sentinel look around more often than every ten seconds, and not freeze
// for half a minute when the machine is busy for two seconds.
func hurry(ctx context.Context, client *redis.Client) error {
	return client.Do(ctx, "SENTINEL", "DEBUG",
		"INFO-PERIOD", 200, "PUBLISH-PERIOD", 200, "TILT-TRIGGER", 60_000).Err()
}

// Addrs returns the addresses of the sentinels.
func (s *Sentinel) Addrs() []string {
	var all []string
	for _, one := range s.sentinels {
		all = append(all, one.Addr())
	}
	return all
}

// Server returns one of the two data servers; 0 was the master first.
func (s *Sentinel) Server(i int) *Server { return s.data[i] }

// Sentinel returns one of the three sentinels.
func (s *Sentinel) Sentinel(i int) *Server { return s.sentinels[i] }

// Client returns a new client that asks the sentinels for the master, closed with the
// test. It repeats nothing and gives up after two seconds.
func (s *Sentinel) Client() *redis.Client {
	return closing(s.t, redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: MasterName, SentinelAddrs: s.Addrs(), Password: s.data[0].password,
		MaxRetries: -1, DialerRetries: 1,
		DialTimeout: 2 * time.Second, ReadTimeout: 2 * time.Second, WriteTimeout: 2 * time.Second,
		ContextTimeoutEnabled: true, DisableIdentity: true,
	}))
}

// Master returns the master as told by the sentinels. It waits until they agree.
func (s *Sentinel) Master() *Server {
	s.t.Helper()
	var master *Server
	until(s.t, "the sentinels agree on a master", func() (err error) {
		master, err = s.master()
		return err
	})
	return master
}

// Replica returns the server that is not the master as told by the sentinels.
func (s *Sentinel) Replica() *Server {
	s.t.Helper()
	return s.other(s.Master())
}

func (s *Sentinel) other(one *Server) *Server {
	if one == s.data[0] {
		return s.data[1]
	}
	return s.data[0]
}

// master returns what the running sentinels agree on.
func (s *Sentinel) master() (*Server, error) {
	var told string
	for _, one := range s.sentinels {
		if !one.Running() {
			continue
		}
		addr, err := one.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MasterName).StringSlice()
		if err != nil {
			return nil, err
		}
		if now := strings.Join(addr, ":"); told == "" {
			told = now
		} else if now != told {
			return nil, fmt.Errorf("%s and %s are masters", told, now)
		}
	}
	i := slices.IndexFunc(s.data, func(d *Server) bool { return d.Addr() == told })
	if i < 0 {
		return nil, fmt.Errorf("the master is %q", told)
	}
	return s.data[i], nil
}

// AwaitOther waits until another server than the old one is the master: all sentinels
// say so, and so does the server. It returns the new one.
func (s *Sentinel) AwaitOther(old *Server) *Server {
	s.t.Helper()
	next := s.other(old)
	until(s.t, "the replica is promoted", func() error { return s.promoted(next) })
	return next
}

func (s *Sentinel) promoted(next *Server) error {
	told, err := s.master()
	if err != nil {
		return err
	}
	if told != next {
		return fmt.Errorf("%s is the master still", told.Addr())
	}
	return next.reports("role", "master")
}

// Failover has the sentinels make the replica the master, with both alive, and waits
// until the old one follows it. It returns the new master. What the old one
// acknowledges while they do this is lost.
func (s *Sentinel) Failover() *Server {
	s.t.Helper()
	old := s.Master()
	next := s.other(old)
	until(s.t, "the replica is promoted", func() error {
		if told, err := s.master(); err != nil || told != old {
			return errors.Join(err, s.promoted(next))
		}
		// One sentinel alone is asked: two at once undo each other's work. It refuses
		// while it is at it, and is asked again in case it gave up.
		err := s.asked().ask("SENTINEL", "FAILOVER", MasterName).Err()
		return errors.Join(errors.New("not yet"), err)
	})
	s.WaitOK()
	return next
}

func (s *Sentinel) asked() *Server {
	for _, one := range s.sentinels {
		if one.Running() {
			return one
		}
	}
	s.t.Fatal("no sentinel is running")
	return nil
}

// LoseWrites has writes lost that were acknowledged: during runs while the master's
// writes reach no replica, then the master dies and the replica, which never heard of
// them, is promoted. What was written before is kept. It returns the dead master, for
// BringBack.
func (s *Sentinel) LoseWrites(during func()) (old *Server) {
	s.t.Helper()
	s.WaitOK()
	old = s.Master()
	replica := s.other(old)
	// A stopped replica alone would lose nothing: what is written waits in its socket,
	// to be read even after the master's death. So its connection ends first, and the
	// replica, being stopped, makes no other.
	replica.Pause()
	old.Do("CLIENT", "KILL", "TYPE", "replica")
	during()
	old.Kill()
	replica.Resume()
	s.AwaitOther(old)
	return old
}

// BringBack starts a killed server again, or resumes a paused one, and waits until it
// follows the master. Until the sentinels have found it, it takes itself for a master:
// started again, one without data.
func (s *Sentinel) BringBack(old *Server) {
	s.t.Helper()
	if old.alive() {
		old.Resume()
	} else {
		old.Restart()
	}
	s.WaitOK()
}

// WaitOK waits until the running sentinels agree, know each other and find the master
// well, and the other server, if it runs, has all that was written so far.
func (s *Sentinel) WaitOK() {
	s.t.Helper()
	until(s.t, "master, replica and sentinels are in order", s.ok)
}

func (s *Sentinel) ok() error {
	master, err := s.master()
	if err != nil {
		return err
	}
	if err := master.reports("role", "master"); err != nil {
		return err
	}
	replica := s.other(master)
	if replica.Running() {
		if err := replica.copies(master); err != nil {
			return err
		}
	}
	for _, one := range s.sentinels {
		if !one.Running() {
			continue
		}
		state, err := s.seen(one, "MASTER")
		if err != nil {
			return err
		}
		if m := state[0]; m["flags"] != "master" || m["num-other-sentinels"] != strconv.Itoa(len(s.sentinels)-1) {
			return fmt.Errorf("%s sees a master that is %s, and %s other sentinels", one.Addr(), m["flags"], m["num-other-sentinels"])
		}
		if state, err = s.seen(one, "REPLICAS"); err != nil {
			return err
		}
		if replica.Running() && !slices.ContainsFunc(state, func(r map[string]string) bool {
			return r["port"] == strconv.Itoa(replica.port) && r["flags"] == "slave" && r["master-link-status"] == "ok"
		}) {
			return fmt.Errorf("%s sees replicas %v", one.Addr(), state)
		}
	}
	return nil
}

// seen returns how a sentinel sees the master or the replicas.
func (s *Sentinel) seen(sentinel *Server, what string) ([]map[string]string, error) {
	v, err := sentinel.ask("SENTINEL", what, MasterName).Result()
	if err != nil {
		return nil, err
	}
	all, ok := v.([]any)
	if !ok {
		all = []any{v}
	}
	var states []map[string]string
	for _, one := range all {
		fields, ok := one.(map[any]any)
		if !ok {
			return nil, fmt.Errorf("SENTINEL %s says %v", what, one)
		}
		state := map[string]string{}
		for k, v := range fields {
			state[fmt.Sprint(k)] = fmt.Sprint(v)
		}
		states = append(states, state)
	}
	return states, nil
}
