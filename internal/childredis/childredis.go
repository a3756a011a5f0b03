// Package childredis runs redis-server as a child process: on loopback, without a
// password, with nothing on disk but its log. It is for `dualcheck dev`; clusters that
// matter have a Redis of their own.
//
// What always holds: it listens on one address for its whole life. Until Close, a child
// that died is started again there, as soon as the port can be had. A child never outlives
// Close; on Linux it does not outlive this process either, however that ends. Nothing
// survives a restart of it: it holds only what may be lost.
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
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/dualcheck/dualcheck/internal/childproc"
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
	port     int
	out      *os.File // what the children print
	log      *slog.Logger
	stop     context.CancelFunc
	done     chan struct{} // supervise has returned
}

// Start starts redis-server on a free port of loopback and keeps it running until
// Close. Its log is in dir, which is made if it is not there. ctx bounds the start only.
func Start(ctx context.Context, dir string, log *slog.Logger) (*Server, error) {
	return start(ctx, dir, log, childproc.FreePort)
}

func start(ctx context.Context, dir string, log *slog.Logger, freePort func() (int, error)) (_ *Server, err error) {
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
	s := &Server{bin: bin, dir: dir, out: out, log: log, done: make(chan struct{})}
	c, err := s.first(ctx, freePort)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start redis-server in %s: %w", dir, err), out.Close())
	}
	run, stop := context.WithCancel(context.Background())
	s.stop = stop
	go s.supervise(run, c)
	return s, nil
}

// Addr is the host and port that it listens on.
func (s *Server) Addr() string { return net.JoinHostPort(host, strconv.Itoa(s.port)) }

// Close ends redis-server and waits for its end. It may be called more than once.
func (s *Server) Close() {
	s.stop()
	<-s.done
}

// first chooses the port and starts the first child, on another one if that was taken
// meanwhile.
func (s *Server) first(ctx context.Context, freePort func() (int, error)) (*child, error) {
	for try := 1; ; try++ {
		var err error
		if s.port, err = freePort(); err != nil {
			return nil, fmt.Errorf("a port: %w", err)
		}
		c, err := s.launch(ctx)
		if err == nil || ctx.Err() != nil || try == portTries || free(s.Addr()) {
			return c, err
		}
	}
}

// supervise keeps a child running until ctx ends, and ends the last.
func (s *Server) supervise(ctx context.Context, c *child) {
	defer close(s.done)
	defer s.out.Close()
	wait := &backoff.ExponentialBackOff{InitialInterval: firstBackOff, MaxInterval: lastWait, Multiplier: 2}
	for {
		up := time.Now()
		select {
		case <-ctx.Done():
			c.end()
			return
		case <-c.Done():
		}
		s.log.Warn("redis-server died; it is started again", "status", c.Status(), "log", s.out.Name())
		// One that dies young over and over is started ever less often.
		if time.Since(up) >= lastWait {
			wait.Reset()
		}
		for failed := 0; ; {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait.NextBackOff()):
			}
			var err error
			if c, err = s.launch(ctx); err == nil {
				break
			}
			if failed++; failed == complainAfter && ctx.Err() == nil {
				s.log.Warn("redis-server does not start; it is tried again", "addr", s.Addr(), "cause", err)
			}
		}
		s.log.Info("redis-server is back", "addr", s.Addr())
	}
}

// launch starts a child and waits until it answers; if it does not, none is left.
func (s *Server) launch(ctx context.Context) (*child, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	before, err := s.out.Stat()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(s.bin, "--port", strconv.Itoa(s.port), "--bind", host, "--dir", s.dir,
		"--save", "", "--appendonly", "no", "--daemonize", "no",
		"--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
	cmd.Stdout, cmd.Stderr = s.out, s.out
	p, err := childproc.StartApart(cmd)
	if err != nil {
		return nil, err
	}
	c := &child{p}
	if err := c.ready(ctx, s.Addr()); err != nil {
		c.Kill()
		if line := lastLine(s.out, before.Size()); line != "" {
			err = fmt.Errorf("%w: %s", err, line)
		}
		return nil, err
	}
	return c, nil
}

// child is one redis-server process.
type child struct{ *childproc.Process }

// ready waits until it answers on addr.
func (c *child) ready(ctx context.Context, addr string) error {
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		// If somebody else took the port, it may be a Redis too, and it would answer.
		pid, err := ping(ctx, addr)
		if err == nil && pid == c.Pid() {
			return nil
		}
		select {
		case <-c.Done():
			return fmt.Errorf("it ended (%s)", c.Status())
		case <-ctx.Done():
			return fmt.Errorf("it does not answer: %w", ctx.Err())
		case <-poll.C:
		}
	}
}

// end asks it to end, and kills it if it does not.
func (c *child) end() {
	if c.Signal(syscall.SIGTERM) == nil {
		select {
		case <-c.Done():
			return
		case <-time.After(stopTimeout):
		}
	}
	c.Kill()
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
