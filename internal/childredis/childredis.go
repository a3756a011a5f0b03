// Package childredis runs redis-server as a child process: on loopback, without a
// password, with nothing on disk but its log. It is for `dualcheck dev`; clusters that
// matter have a Redis of their own.
//
// What always holds: until Close, a child that died is started again, and Dial finds it
// where it listens then. A child never outlives Close; on Linux it does not outlive this
// process either, however that ends. Nothing survives a restart of it: it holds only what
// may be lost.
package childredis

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"
)

const (
	program = "redis-server"
	host    = "127.0.0.1"
	logFile = "redis.log"
	// oldest is the first major version that will do.
	oldest = 7
	// startTimeout is how long a child may take until it answers.
	startTimeout = 15 * time.Second
	// stopTimeout is how long a child may take to end before it is killed.
	stopTimeout = 2 * time.Second
	pollEvery   = 20 * time.Millisecond
	pingTimeout = time.Second
	// portTries is how often Start tries another port when one was taken meanwhile.
	portTries = 5
	// brief is a run so short that the port may be to blame.
	brief = time.Second
	// briefRuns in a row, and another port is tried.
	briefRuns = 2
	// complainAfter so many failed restarts in a row, the log is told why.
	complainAfter          = 5
	firstBackOff, lastWait = 100 * time.Millisecond, 5 * time.Second
)

var (
	// ErrNotInstalled: there is no redis-server in PATH.
	ErrNotInstalled = errors.New("redis-server is not installed")
	// ErrTooOld: the redis-server in PATH is of a version that will not do.
	ErrTooOld = fmt.Errorf("too old: %d.0 or later is needed", oldest)
)

// Server is a redis-server that is kept running.
type Server struct {
	bin, dir string
	out      *os.File // what the children print
	log      *slog.Logger
	hooks    hooks
	stop     context.CancelFunc
	done     chan struct{} // supervise has returned

	mu   sync.Mutex
	addr string
}

// hooks let a test step in; each may be nil.
type hooks struct {
	died   func(addr string) // the child on this port ended; the next has no port yet
	chosen func(addr string) // a child is about to be started on this port
}

// Start starts redis-server on a free port of loopback and keeps it running until
// Close. Its log is in dir, which is made if it is not there. ctx bounds the start only.
func Start(ctx context.Context, dir string, log *slog.Logger) (*Server, error) {
	return start(ctx, dir, log, hooks{})
}

func start(ctx context.Context, dir string, log *slog.Logger, hooks hooks) (_ *Server, err error) {
	bin, err := find(ctx)
	if err != nil {
		return nil, err
	}
	// Absolute, so that redis-server cannot take it for an option.
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, fmt.Errorf("redis-server's directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("redis-server's directory: %w", err)
	}
	// Children append, so that the log of one that died is still there.
	out, err := os.OpenFile(filepath.Join(dir, logFile), os.O_RDWR|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("redis-server's log: %w", err)
	}
	s := &Server{bin: bin, dir: dir, out: out, log: log, hooks: hooks, done: make(chan struct{})}
	c, err := s.first(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start redis-server in %s: %w", dir, err), out.Close())
	}
	run, stop := context.WithCancel(context.Background())
	s.stop = stop
	go s.supervise(run, c)
	return s, nil
}

// Addr is the host and port that it listens on now, or did last.
func (s *Server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// Dial connects to it where it listens now. It fails while a child that died has not
// been replaced.
func (s *Server) Dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", s.Addr())
}

// Close ends redis-server and waits for its end. It may be called more than once.
func (s *Server) Close() {
	s.stop()
	<-s.done
}

// first starts the first child, on another port if one was taken meanwhile.
func (s *Server) first(ctx context.Context) (*child, error) {
	for try := 1; ; try++ {
		addr, err := freeAddr()
		if err != nil {
			return nil, err
		}
		c, err := s.launch(ctx, addr)
		if err == nil || ctx.Err() != nil || try == portTries || free(addr) {
			return c, err
		}
	}
}

// supervise keeps a child running until ctx ends, and ends the last.
func (s *Server) supervise(ctx context.Context, c *child) {
	defer close(s.done)
	defer s.out.Close()
	wait := &backoff.ExponentialBackOff{InitialInterval: firstBackOff, MaxInterval: lastWait, Multiplier: 2}
	short := 0 // runs in a row that were brief or did not begin
	for {
		select {
		case <-ctx.Done():
			c.end()
			return
		case <-c.exited:
		}
		s.log.Warn("redis-server died; it is started again", "status", c.status(), "log", s.out.Name())
		if c.ran >= brief {
			short = 0
		} else {
			short++
		}
		if c.ran >= lastWait {
			wait.Reset()
		}
		for failed := 0; ; {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait.NextBackOff()):
			}
			if s.hooks.died != nil {
				s.hooks.died(s.Addr())
			}
			var err error
			if c, err = s.again(ctx, short < briefRuns); err == nil {
				break
			}
			short++
			if failed++; failed == complainAfter && ctx.Err() == nil {
				s.log.Warn("redis-server does not start; it is tried again", "cause", err)
			}
		}
		s.log.Info("redis-server is back", "addr", s.Addr())
	}
}

// again starts the next child: on the port of the last if that is to be kept and is
// free.
func (s *Server) again(ctx context.Context, keep bool) (*child, error) {
	addr := s.Addr()
	if !keep || !free(addr) {
		var err error
		if addr, err = freeAddr(); err != nil {
			return nil, err
		}
	}
	return s.launch(ctx, addr)
}

// launch starts a child and waits until it answers; if it does not, none is left.
func (s *Server) launch(ctx context.Context, addr string) (*child, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if s.hooks.chosen != nil {
		s.hooks.chosen(addr)
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	before, err := s.out.Stat()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(s.bin, "--port", port, "--bind", host, "--dir", s.dir,
		"--save", "", "--appendonly", "no", "--daemonize", "no")
	cmd.Stdout, cmd.Stderr = s.out, s.out
	bind(cmd)
	c, err := spawn(cmd)
	if err != nil {
		return nil, err
	}
	if err := c.ready(ctx, addr); err != nil {
		c.kill()
		if line := lastLine(s.out, before.Size()); line != "" {
			err = fmt.Errorf("%w: %s", err, line)
		}
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addr = addr
	return c, nil
}

// child is one redis-server process.
type child struct {
	cmd    *exec.Cmd
	exited chan struct{}
	ran    time.Duration // set once it has exited
}

// spawn starts cmd and waits for its end in a goroutine that ends with it.
func spawn(cmd *exec.Cmd) (*child, error) {
	c := &child{cmd: cmd, exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		defer close(c.exited)
		// Linux kills the child when the thread that started it ends, not only when the
		// process does: so the thread stays until the child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		began := time.Now()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // how it ended is asked of its state
		c.ran = time.Since(began)
	}()
	if err := <-started; err != nil {
		<-c.exited
		return nil, err
	}
	return c, nil
}

// ready waits until it answers on addr.
func (c *child) ready(ctx context.Context, addr string) error {
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		// If somebody else took the port, it may be a Redis too, and it would answer.
		pid, err := ping(ctx, addr)
		if err == nil && pid == c.cmd.Process.Pid {
			return nil
		}
		select {
		case <-c.exited:
			return fmt.Errorf("it ended (%s)", c.status())
		case <-ctx.Done():
			return fmt.Errorf("it does not answer: %w", ctx.Err())
		case <-poll.C:
		}
	}
}

// status is how it ended; it has exited.
func (c *child) status() string { return c.cmd.ProcessState.String() }

// end asks it to end, and kills it if it does not.
func (c *child) end() {
	if c.cmd.Process.Signal(syscall.SIGTERM) == nil {
		select {
		case <-c.exited:
			return
		case <-time.After(stopTimeout):
		}
	}
	c.kill()
}

// kill kills it and waits for its end.
func (c *child) kill() {
	_ = c.cmd.Process.Kill() // fails if it has ended already
	<-c.exited
}

// ping asks whoever listens on addr whether it is a Redis that answers, and for its
// process ID.
func ping(ctx context.Context, addr string) (pid int, err error) {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	if _, err := io.WriteString(conn, "*1\r\n$4\r\nPING\r\n*2\r\n$4\r\nINFO\r\n$6\r\nserver\r\n"); err != nil {
		return 0, err
	}
	lines := bufio.NewScanner(io.LimitReader(conn, 64<<10))
	for first := true; lines.Scan(); first = false {
		if first && lines.Text() != "+PONG" {
			return 0, fmt.Errorf("PING: %q", lines.Text())
		}
		if id, ok := strings.CutPrefix(lines.Text(), "process_id:"); ok {
			return strconv.Atoi(id)
		}
	}
	return 0, errors.Join(io.ErrUnexpectedEOF, lines.Err())
}

var version = regexp.MustCompile(`\bv=(\d+)\.(\d+)`)

// find finds a redis-server that is new enough.
func find(ctx context.Context) (bin string, err error) {
	bin, err = exec.LookPath(program)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrNotInstalled, err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, "--version")
	cmd.WaitDelay = time.Second // whatever it started may keep its output open
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", bin, errors.Join(err, ctx.Err()))
	}
	v := version.FindSubmatch(out)
	if v == nil {
		return "", fmt.Errorf("%s --version names no version: %q", bin, out)
	}
	major, err := strconv.Atoi(string(v[1]))
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", bin, err)
	}
	if major < oldest {
		return "", fmt.Errorf("redis-server %s.%s is %w", v[1], v[2], ErrTooOld)
	}
	return bin, nil
}

// lastLine is the last line that was printed after offset from, or "".
func lastLine(out *os.File, from int64) string {
	info, err := out.Stat()
	if err != nil {
		return ""
	}
	from = max(from, info.Size()-4<<10)
	b, err := io.ReadAll(io.NewSectionReader(out, from, info.Size()-from))
	if err != nil {
		return ""
	}
	b = bytes.TrimSpace(b)
	return string(b[bytes.LastIndexByte(b, '\n')+1:])
}

func free(addr string) bool {
	l, err := net.Listen("tcp", addr)
	return err == nil && l.Close() == nil
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return "", fmt.Errorf("a port for redis-server: %w", err)
	}
	return l.Addr().String(), l.Close()
}
