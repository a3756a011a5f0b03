package childredis

import (
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
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/childproc"
)

// patience bounds every wait for something that must come.
const patience = 20 * time.Second

// logLines keeps what was logged, and lets a test wait for it.
type logLines struct {
	mu   sync.Mutex
	all  bytes.Buffer
	more chan struct{}
}

func (l *logLines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all.Write(b)
	close(l.more)
	l.more = make(chan struct{})
	return len(b), nil
}

func (l *logLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.String()
}

func (l *logLines) count(s string) int { return strings.Count(l.String(), s) }

// wait waits until s has been logged n times.
func (l *logLines) wait(t *testing.T, s string, n int) {
	t.Helper()
	late := time.After(patience)
	for {
		l.mu.Lock()
		more, have := l.more, strings.Count(l.all.String(), s)
		l.mu.Unlock()
		if have >= n {
			return
		}
		select {
		case <-more:
		case <-late:
			t.Fatalf("%q was logged %d times of %d:\n%s", s, have, n, l)
		}
	}
}

const (
	died = "redis-server died"
	back = "redis-server is back"
)

func mustStart(t *testing.T, dir string) (*Server, *logLines) {
	t.Helper()
	return mustStartOn(t, dir, childproc.FreePort)
}

func mustStartOn(t *testing.T, dir string, freePort func() (int, error)) (*Server, *logLines) {
	t.Helper()
	lines := &logLines{more: make(chan struct{})}
	s, err := start(t.Context(), dir, slog.New(slog.NewTextHandler(lines, nil)), freePort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s, lines
}

// answers fails the test if it does not answer; it returns the child's process ID.
func answers(t *testing.T, s *Server) int {
	t.Helper()
	pid, err := ping(t.Context(), s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func kill(t *testing.T, pid int) {
	t.Helper()
	p, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
}

// gone fails the test unless the process has ended and its parent, this process, has
// waited for it.
func gone(t *testing.T, pid int) {
	t.Helper()
	if p, err := os.FindProcess(pid); err == nil && !errors.Is(p.Kill(), os.ErrProcessDone) {
		t.Errorf("process %d is left", pid)
	}
}

// closedSoon waits until the other side of a connection has gone.
func closedSoon(t *testing.T, conn net.Conn) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the other side is still there: %v", err)
	}
}

func TestStartsAnswersAndIsClosed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), `a "quoted" name`, "redis")
	s, lines := mustStart(t, dir)
	pid := answers(t, s)
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", info, err)
	}
	s.Close()
	s.Close() // again is no harm
	closedSoon(t, conn)
	gone(t, pid)
	if lines.String() != "" {
		t.Errorf("logged, though all went well: %s", lines)
	}
	if !free(s.Addr()) {
		t.Error("its port is still taken")
	}
	if b, err := os.ReadFile(filepath.Join(dir, logFile)); err != nil || !bytes.Contains(b, []byte("Ready to accept connections")) {
		t.Errorf("log: %q, %v", b, err)
	}
	// Nothing of it is to be kept.
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("in its directory: %v, %v", files, err)
	}
}

func TestKilledIsBackOnItsPort(t *testing.T) {
	s, lines := mustStart(t, t.TempDir())
	addr, pid := s.Addr(), answers(t, s)
	kill(t, pid)
	lines.wait(t, back, 1)
	if s.Addr() != addr {
		t.Errorf("it listens on %s, and did on %s", s.Addr(), addr)
	}
	if now := answers(t, s); now == pid {
		t.Error("the same process answers")
	}
	gone(t, pid)
	if n := lines.count(died); n != 1 || lines.count("level=WARN") != 1 || lines.count(`status="signal: killed"`) != 1 {
		t.Errorf("not one warning with the exit status:\n%s", lines)
	}
}

// impostor listens on a port of redis-server's and answers as a Redis would.
func impostor(t *testing.T, addr string) (stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(conn, "+PONG\r\n$14\r\nprocess_id:1\r\n\r\n")
			conn.Close()
		}
	}()
	return func() {
		l.Close()
		<-done
	}
}

// The port is free when it is chosen, and taken when redis-server wants it.
func TestPortTakenAtTheLastMoment(t *testing.T) {
	var taken []int
	s, lines := mustStartOn(t, t.TempDir(), func() (int, error) {
		port, err := childproc.FreePort()
		if err == nil && len(taken) < 2 {
			taken = append(taken, port)
			t.Cleanup(impostor(t, net.JoinHostPort(host, strconv.Itoa(port))))
		}
		return port, err
	})
	if len(taken) != 2 || slices.Contains(taken, s.port) {
		t.Errorf("it listens on %s; taken were %v", s.Addr(), taken)
	}
	answers(t, s)
	if lines.String() != "" {
		t.Errorf("logged, though it started: %s", lines)
	}
}

func TestEveryPortTaken(t *testing.T) {
	port, err := childproc.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	defer impostor(t, net.JoinHostPort(host, strconv.Itoa(port)))()
	tries := 0
	_, err = start(t.Context(), t.TempDir(), slog.New(slog.DiscardHandler), func() (int, error) {
		tries++
		return port, nil
	})
	if err == nil || tries != portTries {
		t.Errorf("%d tries, then %v", tries, err)
	}
}

// While it is down somebody else takes its port: it waits for that one.
func TestPortTakenMeanwhile(t *testing.T) {
	fail := breakable(t)
	s, lines := mustStart(t, t.TempDir())
	addr := s.Addr()
	mend := fail()
	kill(t, answers(t, s))
	lines.wait(t, died, 1)
	stop := impostor(t, addr)
	defer stop()
	mend()
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for late := time.Now().Add(patience); ; <-poll.C {
		b, err := os.ReadFile(s.out.Name())
		if err != nil || time.Now().After(late) {
			t.Fatalf("it did not try to listen: %q, %v", b, err)
		}
		if bytes.Contains(b, []byte("Address already in use")) {
			break
		}
	}
	if lines.count(back) != 0 {
		t.Errorf("an impostor was believed:\n%s", lines)
	}
	stop()
	lines.wait(t, back, 1)
	if s.Addr() != addr {
		t.Errorf("it listens on %s, and did on %s", s.Addr(), addr)
	}
	answers(t, s)
	if lines.count(died) != 1 {
		t.Errorf("it died more than once:\n%s", lines)
	}
}

// script puts a redis-server into PATH that is a shell script, and nothing else. In it,
// $REAL is the real one.
func script(t *testing.T, body string) {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, program), []byte("#!/bin/sh\n"+body), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("REAL", path)
	t.Setenv("PATH", dir)
}

// breakable puts a redis-server into PATH that does not start from fail to mend.
func breakable(t *testing.T) (fail func() (mend func())) {
	broken := filepath.Join(t.TempDir(), "broken")
	t.Setenv("BROKEN", broken)
	script(t, `[ -f "$BROKEN" ] && echo no luck today && exit 3
exec "$REAL" "$@"
`)
	return func() func() {
		if err := os.WriteFile(broken, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := os.Remove(broken); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestRestartThatFailsIsToldAndCanBeClosed(t *testing.T) {
	fail := breakable(t)
	s, lines := mustStart(t, t.TempDir())
	fail()
	pid := answers(t, s)
	kill(t, pid)
	lines.wait(t, "no luck today", 1)
	if lines.count("level=WARN") != 2 || lines.count("exit status 3") != 1 {
		t.Errorf("not one warning that it died and one that it does not start:\n%s", lines)
	}
	s.Close()
	gone(t, pid)
}

func TestCloseWhileItComesBack(t *testing.T) {
	s, lines := mustStart(t, t.TempDir())
	pid := answers(t, s)
	kill(t, pid)
	lines.wait(t, died, 1)
	s.Close()
	gone(t, pid)
	if !free(s.Addr()) {
		t.Error("a child was started and is left")
	}
}

func TestNotInstalled(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := Start(t.Context(), t.TempDir(), slog.New(slog.DiscardHandler)); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("%v, want %v", err, ErrNotInstalled)
	}
}

func TestVersions(t *testing.T) {
	for _, c := range []struct{ prints, want string }{
		{"Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64 build=a3fdef44459b3ad6", "redis-server 6.0 is too old: 7.0 or later is needed"},
		{"Redis server v=6.2.14 sha=00000000:0", "redis-server 6.2 is too old: 7.0 or later is needed"},
		{"Redis server v=7.0.0 sha=00000000:0", ""},
		{"Valkey server v=8.1.3 sha=00000000:0", ""},
		{"Redis server v=10.2.0 sha=00000000:0", ""},
		{"what?", "names no version"},
	} {
		t.Run(c.prints, func(t *testing.T) {
			script(t, fmt.Sprintf("echo '%s'", c.prints))
			_, err := find(t.Context())
			switch {
			case c.want == "" && err != nil:
				t.Error(err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%v, want: %s", err, c.want)
			case strings.Contains(c.want, "too old"):
				if _, err := Start(t.Context(), t.TempDir(), slog.New(slog.DiscardHandler)); !errors.Is(err, ErrTooOld) {
					t.Errorf("Start: %v, want %v", err, ErrTooOld)
				}
			}
		})
	}
}

func TestStartThatFailsSaysWhy(t *testing.T) {
	script(t, `[ "$1" = --version ] && exec "$REAL" "$@"
echo first; echo the cause of it; exit 3
`)
	_, err := Start(t.Context(), t.TempDir(), slog.New(slog.DiscardHandler))
	if err == nil || !strings.HasSuffix(err.Error(), "it ended (exit status 3): the cause of it") {
		t.Errorf("%v", err)
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	// It runs, and listens elsewhere.
	port, err := childproc.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := net.JoinHostPort(host, strconv.Itoa(port))
	t.Setenv("ELSEWHERE", strconv.Itoa(port))
	script(t, `[ "$1" = --version ] && exec "$REAL" "$@"
exec "$REAL" --port "$ELSEWHERE" --bind 127.0.0.1 --dir "$6" --save ""
`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	running := make(chan int, 1)
	go func() {
		defer cancel()
		poll := time.NewTicker(pollEvery)
		defer poll.Stop()
		for ctx.Err() == nil {
			if pid, err := ping(ctx, elsewhere); err == nil {
				running <- pid
				return
			}
			<-poll.C
		}
		running <- 0
	}()
	_, err = Start(ctx, t.TempDir(), slog.New(slog.DiscardHandler))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
	if pid := <-running; pid == 0 {
		t.Error("the child never ran")
	} else {
		gone(t, pid)
	}
}
