// Package redistest starts real Redis for tests: redis-server processes alone, as a
// cluster or watched by sentinels, and real faults. What it starts ends with the
// test, and with the test's process even when that is killed.
package redistest

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/dualcheck/dualcheck/internal/childproc"
)

const logName = "redis.log"

// Server is a redis-server process. It may be killed and started again.
type Server struct {
	t        testing.TB
	dir      string
	conf     conf
	port     int // where clients connect
	bus      int // where a cluster's nodes connect; 0 for servers alone
	nodeID   string
	password string

	mu     sync.Mutex
	proc   *childproc.Process // nil while killed
	paused bool
	admin  *redis.Client
}

// conf tells servers of different kinds apart.
type conf struct {
	args func(s *Server) ([]string, error) // asked before each start
	tls  *tls.Config
	bus  bool
	// ready is asked after each start until it returns no error.
	ready func(ctx context.Context, client *redis.Client) error
}

// Start starts a server on a free port, with nothing kept on disk. Arguments such as
// "--maxmemory", "2mb" are added to its own. A password in "--requirepass" is used by
// the clients made here as well.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return mustStart(t, conf{args: func(s *Server) ([]string, error) {
		return append(plain(s), args...), nil
	}})
}

// plain are the arguments of every data server.
func plain(s *Server) []string {
	return append([]string{"--port", strconv.Itoa(s.port)}, common...)
}

var common = []string{
	"--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
	// Replicas are copied to at once, and no copy stays on disk to be loaded when a
	// killed server is started again.
	"--repl-diskless-sync-delay", "0", "--rdb-del-sync-files", "yes",
}

func mustStart(t testing.TB, c conf) *Server {
	t.Helper()
	s, err := newServer(t, c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// newServer is mustStart for other goroutines than the test's.
func newServer(t testing.TB, c conf) (*Server, error) {
	// The directory's own cleanup is to run after the server's.
	s := &Server{t: t, dir: t.TempDir(), conf: c}
	t.Cleanup(s.close)
	for range 5 {
		var err error
		if s.port, err = childproc.FreePort(); err != nil {
			return nil, err
		}
		if c.bus {
			if s.bus, err = childproc.FreePort(); err != nil {
				return nil, err
			}
		}
		// Another process may have been faster; then there are other ports.
		if err = s.start(); err == nil || !strings.Contains(err.Error(), "Address already in use") {
			return s, err
		}
	}
	return nil, fmt.Errorf("start redis-server: every port was taken")
}

// startAll starts several servers at once.
func startAll(t testing.TB, confs ...conf) []*Server {
	t.Helper()
	servers, errs := make([]*Server, len(confs)), make([]error, len(confs))
	var starting sync.WaitGroup
	for i, c := range confs {
		starting.Go(func() { servers[i], errs[i] = newServer(t, c) })
	}
	starting.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return servers
}

func (s *Server) start() error {
	binary, err := exec.LookPath("redis-server")
	if err != nil {
		return errors.New("redis-server is needed: apt-get install redis-server")
	}
	args, err := s.conf.args(s)
	if err != nil {
		return err
	}
	// Written at the first start alone: others may read it at later ones.
	if i := slices.Index(args, "--requirepass"); i >= 0 && i+1 < len(args) && s.password != args[i+1] {
		s.password = args[i+1]
	}
	p, err := launch(binary, s.dir, args)
	if err != nil {
		return fmt.Errorf("start redis-server: %w", err)
	}
	admin := redis.NewClient(s.Options())
	err = eventually(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := admin.Ping(ctx).Err(); err != nil {
			return err
		}
		// Whoever answers may be another test's server on this very port.
		info, err := admin.Info(ctx, "server").Result()
		if err != nil {
			return err
		}
		if field(info, "process_id") != strconv.Itoa(p.Pid()) {
			return errors.New("another process answers")
		}
		if s.conf.ready != nil {
			return s.conf.ready(ctx, admin)
		}
		return nil
	}, p.Done())
	if err != nil {
		admin.Close() //nolint:errcheck // the server is given up
		p.Kill()
		return fmt.Errorf("start redis-server: %w\n%s", err, s.log())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc, s.paused, s.admin = p, false, admin
	return nil
}

// log is the end of what the server said.
func (s *Server) log() []byte {
	said, err := os.ReadFile(filepath.Join(s.dir, logName))
	if err != nil {
		return []byte(err.Error())
	}
	return said[max(0, len(said)-4000):]
}

// Options are those of the clients made here, anew: to be changed and used by others.
// Those of a client that exists would still dial the way it does.
func (s *Server) Options() *redis.Options {
	return &redis.Options{
		Addr: s.Addr(), Password: s.password, TLSConfig: s.conf.tls,
		// A test sees each error at once and as it is.
		MaxRetries: -1, DialerRetries: 1,
		DialTimeout: 2 * time.Second, ReadTimeout: 2 * time.Second, WriteTimeout: 2 * time.Second,
		ContextTimeoutEnabled: true, DisableIdentity: true, MaintNotificationsConfig: noNotifications(),
	}
}

func noNotifications() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// Addr is where clients connect.
func (s *Server) Addr() string { return loopback(s.port) }

// Dir is where the server keeps what it keeps.
func (s *Server) Dir() string { return s.dir }

// Client returns a new client, closed with the test. It repeats nothing and gives up
// after two seconds.
func (s *Server) Client() *redis.Client { return closing(s.t, redis.NewClient(s.Options())) }

// ClientAs is Client of a user other than the default one.
func (s *Server) ClientAs(user, password string) *redis.Client {
	o := s.Options()
	o.Username, o.Password = user, password
	return closing(s.t, redis.NewClient(o))
}

// closing closes a client with the test.
func closing[C interface{ Close() error }](t testing.TB, client C) C {
	t.Cleanup(func() {
		if err := client.Close(); err != nil && !errors.Is(err, redis.ErrClosed) {
			t.Logf("close redis client: %v", err)
		}
	})
	return client
}

// SetUser makes a user who may do what these rules say, such as "~app:*", "+@all".
func (s *Server) SetUser(user, password string, rules ...string) {
	s.t.Helper()
	args := []any{"ACL", "SETUSER", user, "reset", "on", ">" + password}
	for _, r := range rules {
		args = append(args, r)
	}
	s.Do(args...)
}

// Kill ends the process with nothing handed over, and waits for its end.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return
	}
	s.admin.Close() //nolint:errcheck // its server goes as well
	s.proc.Kill()
	s.proc, s.paused, s.admin = nil, false, nil
}

// Restart starts a server anew on its port and in its directory, and kills it before
// if it runs. What it was not told to persist is gone.
func (s *Server) Restart() {
	s.t.Helper()
	s.Kill()
	if err := s.start(); err != nil {
		s.t.Fatal(err)
	}
}

// Pause stops the process: connections stay, nothing is answered.
func (s *Server) Pause() {
	s.t.Helper()
	s.signal(true, suspend)
}

// Resume undoes Pause. The server does then what it was asked meanwhile.
func (s *Server) Resume() {
	s.t.Helper()
	s.signal(false, resume)
}

func (s *Server) signal(paused bool, send func(*childproc.Process) error) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		s.t.Fatalf("redis at %s was killed", s.Addr())
	}
	if err := send(s.proc); err != nil {
		s.t.Fatalf("redis at %s: %v", s.Addr(), err)
	}
	s.paused = paused
}

// Running tells whether the server is neither killed nor paused.
func (s *Server) Running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil && !s.paused
}

// alive tells whether the process is there, paused or not.
func (s *Server) alive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil
}

// ask sends a command as the administrator.
func (s *Server) ask(args ...any) *redis.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	s.mu.Lock()
	admin := s.admin
	s.mu.Unlock()
	if admin == nil {
		cmd := redis.NewCmd(ctx, args...)
		cmd.SetErr(fmt.Errorf("redis at %s was killed", s.Addr()))
		return cmd
	}
	return admin.Do(ctx, args...)
}

// Do sends a command and fails the test if it fails. An answer of nothing is nil.
func (s *Server) Do(args ...any) any {
	s.t.Helper()
	v, err := s.ask(args...).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		s.t.Fatalf("redis at %s: %v: %v", s.Addr(), args, err)
	}
	return v
}

// Flush deletes every key.
func (s *Server) Flush() {
	s.t.Helper()
	s.Do("FLUSHALL")
}

// Keys returns the keys that match a pattern, in order.
func (s *Server) Keys(pattern string) []string {
	s.t.Helper()
	var keys []string
	for cursor := "0"; ; {
		page, ok := s.Do("SCAN", cursor, "MATCH", pattern, "COUNT", 1000).([]any)
		if !ok || len(page) != 2 {
			s.t.Fatalf("redis at %s: SCAN: %v", s.Addr(), page)
		}
		for _, k := range page[1].([]any) {
			keys = append(keys, k.(string))
		}
		if cursor = page[0].(string); cursor == "0" {
			// A scan may return a key more than once.
			slices.Sort(keys)
			return slices.Compact(keys)
		}
	}
}

// NoTTL returns the keys that never expire, in order.
func (s *Server) NoTTL() []string {
	s.t.Helper()
	var forever []string
	for _, k := range s.Keys("*") {
		if s.Do("TTL", k) == int64(-1) {
			forever = append(forever, k)
		}
	}
	return forever
}

// reports returns no error once INFO on replication says so.
func (s *Server) reports(name, want string) error {
	info, err := s.ask("INFO", "replication").Text()
	if is := field(info, name); err == nil && is != want {
		err = fmt.Errorf("redis at %s: %s is %q and not %q", s.Addr(), name, is, want)
	}
	return err
}

func field(info, name string) string {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// copies returns no error once the server is a replica of that master, connected to
// it, and has all that was written there before the call.
func (s *Server) copies(master *Server) error {
	written, err := master.offset("master_repl_offset")
	if err != nil {
		return err
	}
	for name, want := range map[string]string{
		"role": "slave", "master_port": strconv.Itoa(master.port), "master_link_status": "up",
	} {
		if err := s.reports(name, want); err != nil {
			return err
		}
	}
	read, err := s.offset("slave_repl_offset")
	if err == nil && read < written {
		err = fmt.Errorf("redis at %s: read %d of %d bytes", s.Addr(), read, written)
	}
	return err
}

func (s *Server) offset(name string) (int64, error) {
	info, err := s.ask("INFO", "replication").Text()
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(field(info, name), 10, 64)
}

func (s *Server) close() {
	s.Kill()
	if s.t.Failed() {
		s.t.Logf("redis at %s said last:\n%s", s.Addr(), bytes.TrimSpace(s.log()))
	}
}
