// Package rig runs the servers that are measured: dualcheck's own and its rivals', on
// free ports of loopback, in a temporary directory, each only when it is asked for.
//
// What always holds: a server is a child process of its own that dies with this one, and
// each store is as durable as its name says. What cannot be run is an error that says
// why, the same each time it is asked for.
package rig

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dualcheck/dualcheck/internal/childproc"
)

const (
	startTimeout = 45 * time.Second
	stopTimeout  = 15 * time.Second
	pollEvery    = 20 * time.Millisecond
	portTries    = 3
)

// Config says what a rig is made of.
type Config struct {
	// Dir is where the directory of the servers' data is made; "": the system's place
	// for temporary files.
	Dir string
	// Self starts this program again as one of its own servers.
	Self []string
	// Dualcheck is the program that serves.
	Dualcheck string
	// Addr, of a node that is there already: it is measured instead of one of the rig's.
	Addr string
	// NodeArgs are further arguments of `dualcheck serve`.
	NodeArgs []string
	Log      *slog.Logger
}

// Rig is the servers that were asked for. Those of dualcheck's own are a site's; At has
// others.
type Rig struct {
	*core
	site Site
}

// core is what all sites share.
type core struct {
	cfg     Config
	dir     string
	run     string
	servers map[string]*server
	records int
	started []started // in the order of their starts
}

type started struct {
	name string
	stop func()
}

// server is one that was asked for: where it is, or why it is not.
type server struct {
	addr string
	err  error
}

// New makes a rig on which nothing runs yet.
func New(cfg Config) (*Rig, error) {
	dir, err := os.MkdirTemp(cfg.Dir, "dualcheck-bench-")
	if err != nil {
		return nil, fmt.Errorf("a directory for the servers: %w", err)
	}
	// Servers that run as another user pass through it.
	if err := os.Chmod(dir, 0o711); err != nil {
		return nil, err
	}
	return &Rig{core: &core{cfg: cfg, dir: dir, run: strings.ToLower(rand.Text()[:6]), servers: map[string]*server{}}}, nil
}

// Run is a name of this run, for keys that no other run has used.
func (r *Rig) Run() string { return r.run }

// Close stops all servers, the last first, and removes what they kept.
func (r *Rig) Close() {
	for i := len(r.started) - 1; i >= 0; i-- {
		r.started[i].stop()
	}
	r.started = nil
	_ = os.RemoveAll(r.dir) // it is a temporary directory
}

// lazily starts a server when it is first asked for.
func (r *Rig) lazily(name string, start func(dir string) (addr string, stop func(), err error)) (string, error) {
	if s, ok := r.servers[name]; ok {
		return s.addr, s.err
	}
	s := &server{}
	r.servers[name] = s
	dir := filepath.Join(r.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		s.err = err
		return "", err
	}
	var stop func()
	s.addr, stop, s.err = start(dir)
	if s.err != nil {
		s.err = fmt.Errorf("%s: %w", name, s.err)
		return "", s.err
	}
	r.cfg.Log.Debug("started", "server", name, "addr", s.addr)
	r.started = append(r.started, started{name, stop})
	return s.addr, nil
}

// command is a server to be started.
type command struct {
	bin  string
	args func(port string) []string
	env  []string
	// user runs it, if this process is root; "": this process's own.
	user string
	// ready asks whether it can be used; nil: it is once it accepts connections.
	ready func(ctx context.Context, addr string) error
	// ask is the signal that asks it to end.
	ask syscall.Signal
}

// child starts a server on a free port and waits until it can be used. It is tried on
// another port if it ended at once, for the port may have been taken meanwhile.
func child(ctx context.Context, dir string, c command) (addr string, stop func(), err error) {
	for try := 1; ; try++ {
		addr, stop, err = childOnce(ctx, dir, c)
		if err == nil || ctx.Err() != nil || try == portTries {
			return addr, stop, err
		}
	}
}

func childOnce(ctx context.Context, dir string, c command) (addr string, stop func(), err error) {
	port, err := childproc.FreePort()
	if err != nil {
		return "", nil, err
	}
	addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	out, err := os.Create(dir + ".log")
	if err != nil {
		return "", nil, err
	}
	bin, args, err := as(c.user, c.bin, c.args(strconv.Itoa(port)))
	if err != nil {
		return "", nil, errors.Join(err, out.Close())
	}
	cmd := exec.Command(bin, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, dir
	cmd.Env = append(environment(), c.env...)
	p, err := childproc.StartApart(cmd)
	if err != nil {
		return "", nil, errors.Join(err, out.Close())
	}
	err = noteProcess(dir, p.Pid())
	if err == nil {
		err = await(ctx, p, addr, c.ready)
	}
	if err != nil {
		p.Kill()
		if line := lastLine(out); line != "" {
			err = fmt.Errorf("%w: %s", err, line)
		}
		return "", nil, errors.Join(err, out.Close())
	}
	return addr, func() {
		defer out.Close()
		if p.Signal(c.ask) == nil {
			select {
			case <-p.Done():
				return
			case <-time.After(stopTimeout):
			}
		}
		p.Kill()
	}, nil
}

// environment is this process's without what would configure a server of ours.
func environment() []string {
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "DUALCHECK_") {
			env = append(env, v)
		}
	}
	return env
}

// await waits until a child can be used.
func await(ctx context.Context, p *childproc.Process, addr string, ready func(context.Context, string) error) error {
	if ready == nil {
		ready = accepts
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		err := ready(ctx, addr)
		if err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("it ended while it started (%s)", p.Status())
		case <-ctx.Done():
			return fmt.Errorf("it cannot be used after %v: %w", startTimeout, err)
		case <-poll.C:
		}
	}
}

func accepts(ctx context.Context, addr string) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	return conn.Close()
}

// lastLine is the last line that a server printed, or "".
func lastLine(out *os.File) string {
	info, err := out.Stat()
	if err != nil {
		return ""
	}
	from := max(0, info.Size()-4<<10)
	b, err := io.ReadAll(io.NewSectionReader(out, from, info.Size()-from))
	if err != nil {
		return ""
	}
	b = bytes.TrimSpace(b)
	return string(b[bytes.LastIndexByte(b, '\n')+1:])
}

// find finds a program in PATH or in one of the places where Debian has it.
func find(program, debian string, places ...string) (string, error) {
	if bin, err := exec.LookPath(program); err == nil {
		return bin, nil
	}
	for _, pattern := range places {
		found, err := filepath.Glob(filepath.Join(pattern, program))
		if err == nil && len(found) > 0 {
			return found[len(found)-1], nil
		}
	}
	return "", fmt.Errorf("%s is not installed (Debian: apt-get install --no-install-recommends %s)", program, debian)
}

// Records notes that etcd is to hold so many other records by now, and tells which of
// them are still to be made: from, up to but not including to.
func (r *Rig) Records(want int) (from, to int) {
	from = r.records
	r.records = max(r.records, want)
	return from, r.records
}
