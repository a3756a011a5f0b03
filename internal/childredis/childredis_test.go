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
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// childEnv makes the test binary run as a process that only keeps a redis-server.
const childEnv = "CHILDREDIS_TEST_DIR"

// patience bounds every wait for something that must come.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		s, err := Start(context.Background(), dir, slog.New(slog.DiscardHandler))
		if err != nil {
			panic(err)
		}
		os.Stdout.WriteString(s.Addr() + "\n")
		select {} // until it is killed
	}
	os.Exit(m.Run())
}

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

func mustStart(t *testing.T, dir string, hooks hooks) (*Server, *logLines) {
	t.Helper()
	lines := &logLines{more: make(chan struct{})}
	s, err := start(t.Context(), dir, slog.New(slog.NewTextHandler(lines, nil)), hooks)
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
	s, lines := mustStart(t, dir, hooks{})
	pid := answers(t, s)
	conn, err := s.Dial(t.Context())
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
	s, lines := mustStart(t, t.TempDir(), hooks{})
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

func TestPortTakenMeanwhile(t *testing.T) {
	var taken net.Listener
	hook := hooks{died: func(addr string) {
		if taken != nil {
			return
		}
		var err error
		if taken, err = net.Listen("tcp", addr); err != nil {
			t.Error(err)
		}
	}, chosen: func(addr string) {
		if taken != nil && addr == taken.Addr().String() {
			t.Error("a port that was seen to be taken is tried")
		}
	}}
	s, lines := mustStart(t, t.TempDir(), hook)
	addr := s.Addr()
	kill(t, answers(t, s))
	lines.wait(t, back, 1)
	if taken != nil {
		defer taken.Close()
	}
	if s.Addr() == addr {
		t.Error("it says that it listens on a port of somebody else's")
	}
	answers(t, s)
}

// impostor is a listener that answers as a Redis would.
func impostor(t *testing.T, addr string) (stop func()) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Error(err)
		return func() {}
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

// The port is free when it is looked at, and taken when redis-server wants it.
func TestPortTakenAtTheLastMoment(t *testing.T) {
	var mu sync.Mutex
	var stops []func()
	taken := map[string]bool{}
	hook := hooks{chosen: func(addr string) {
		mu.Lock()
		defer mu.Unlock()
		// The first start, and the first restart.
		if len(stops) == 0 || len(stops) == 2 {
			stops, taken[addr] = append(stops, impostor(t, addr)), true
		} else {
			stops = append(stops, func() {})
		}
	}}
	s, lines := mustStart(t, t.TempDir(), hook)
	defer func() {
		for _, stop := range stops {
			stop()
		}
	}()
	kill(t, answers(t, s))
	lines.wait(t, back, 1)
	mu.Lock()
	defer mu.Unlock()
	if len(taken) != 2 || taken[s.Addr()] {
		t.Errorf("it listens on %s; taken were %v", s.Addr(), taken)
	}
	if lines.count(died) != 1 {
		t.Errorf("an impostor was believed:\n%s", lines)
	}
	answers(t, s)
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

// It does not listen on a port for a reason that only it knows.
func TestPortThatKillsItIsLeft(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad")
	t.Setenv("BAD", bad)
	script(t, `[ -f "$BAD" ] && read -r port <"$BAD" && [ "$2" = "$port" ] && exit 3
exec "$REAL" "$@"
`)
	s, lines := mustStart(t, t.TempDir(), hooks{})
	addr := s.Addr()
	_, port, _ := net.SplitHostPort(addr)
	if err := os.WriteFile(bad, []byte(port+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	kill(t, answers(t, s))
	lines.wait(t, back, 1)
	if s.Addr() == addr {
		t.Error("it listens on a port that kills it")
	}
	answers(t, s)
}

func TestRestartThatFailsIsToldAndCanBeClosed(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "broken")
	t.Setenv("BROKEN", broken)
	script(t, `[ -f "$BROKEN" ] && echo no luck today && exit 3
exec "$REAL" "$@"
`)
	s, lines := mustStart(t, t.TempDir(), hooks{})
	if err := os.WriteFile(broken, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	kill(t, answers(t, s))
	lines.wait(t, "no luck today", 1)
	if lines.count("level=WARN") != 2 || lines.count("exit status 3") != 1 {
		t.Errorf("not one warning that it died and one that it does not start:\n%s", lines)
	}
	s.Close()
}

func TestCloseWhileItIsDown(t *testing.T) {
	down := make(chan struct{}, 1)
	s, _ := mustStart(t, t.TempDir(), hooks{died: func(string) {
		select {
		case down <- struct{}{}:
		default:
		}
	}})
	pid := answers(t, s)
	kill(t, pid)
	select {
	case <-down:
	case <-time.After(patience):
		t.Fatal("nobody saw that it died")
	}
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
	elsewhere, err := freeAddr()
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(elsewhere)
	t.Setenv("ELSEWHERE", port)
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

func TestKilledTakesItsChildWithIt(t *testing.T) {
	dir := t.TempDir()
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), childEnv+"="+dir)
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = parent.Process.Kill() })
	line, _, err := bufio.NewReader(out).ReadLine()
	if err != nil {
		t.Fatal(err)
	}
	addr := string(line)
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	pid, err := ping(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // it was killed
	// A start on the same directory works at once.
	s, _ := mustStart(t, dir, hooks{})
	answers(t, s)
	if runtime.GOOS == "linux" {
		closedSoon(t, conn)
	} else {
		kill(t, pid)
	}
}
