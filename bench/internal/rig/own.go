package rig

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dualcheck/dualcheck/internal/childproc"
	"github.com/dualcheck/dualcheck/internal/childredis"
)

// Etcd is one durable member with the settings of `dualcheck dev`, in a process of its
// own: dualcheck's, and that of the rivals which use etcd directly.
func (r *Rig) Etcd(ctx context.Context) (string, error) {
	return r.lazily(r.own("etcd"), func(dir string) (string, func(), error) { return r.self(ctx, dir, ServeEtcd, dir) })
}

// Empty is a gRPC server whose methods do nothing.
func (r *Rig) Empty(ctx context.Context) (string, error) {
	return r.lazily("empty gRPC server", func(dir string) (string, func(), error) { return r.self(ctx, dir, ServeEmpty) })
}

// self starts this program again as a server that prints its address.
func (r *Rig) self(ctx context.Context, dir string, args ...string) (string, func(), error) {
	out, err := os.Create(dir + ".log")
	if err != nil {
		return "", nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return "", nil, errors.Join(err, out.Close())
	}
	cmd := exec.Command(r.cfg.Self[0], append(r.cfg.Self[1:len(r.cfg.Self):len(r.cfg.Self)], args...)...)
	cmd.Stdout, cmd.Stderr, cmd.Env = write, out, environment()
	p, err := childproc.StartApart(cmd)
	_ = write.Close() // the child has its own
	if err != nil {
		return "", nil, errors.Join(err, read.Close(), out.Close())
	}
	if err := noteProcess(dir, p.Pid()); err != nil {
		p.Kill()
		return "", nil, errors.Join(err, read.Close(), out.Close())
	}
	line := make(chan string, 1)
	go func() {
		s, _ := bufio.NewReader(read).ReadString('\n') // without a line it has ended
		line <- strings.TrimSpace(s)
	}()
	stop := func() {
		defer out.Close()
		defer read.Close()
		if p.Signal(syscall.SIGTERM) == nil {
			select {
			case <-p.Done():
				return
			case <-time.After(stopTimeout):
			}
		}
		p.Kill()
	}
	select {
	case addr := <-line:
		if addr != "" {
			return addr, stop, nil
		}
		<-p.Done()
		err = fmt.Errorf("it ended while it started (%s): %s", p.Status(), lastLine(out))
	case <-time.After(startTimeout):
		err = fmt.Errorf("it does not answer after %v: %s", startTimeout, lastLine(out))
	case <-ctx.Done():
		err = ctx.Err()
	}
	stop()
	return "", nil, err
}

// Cache is the Redis that dualcheck runs in front of etcd: nothing of it is on disk.
func (r *Rig) Cache(ctx context.Context) (string, error) {
	return r.lazily(r.own("redis"), func(dir string) (string, func(), error) {
		s, err := childredis.Start(ctx, dir, r.cfg.Log.With("part", "redis"))
		if err != nil {
			return "", nil, err
		}
		return s.Addr(), s.Close, nil
	})
}

// Node is a running dualcheck.
type Node struct {
	GRPC string
	HTTP string // "" if it is not the rig's
}

// Node is `dualcheck serve` on its site's etcd and, unless that is bare, Redis.
func (r *Rig) Node(ctx context.Context) (Node, error) {
	if r.cfg.Addr != "" {
		return Node{GRPC: r.cfg.Addr}, nil
	}
	etcd, err := r.Etcd(ctx)
	if err != nil {
		return Node{}, err
	}
	redis := ""
	if !r.site.Bare {
		if redis, err = r.Cache(ctx); err != nil {
			return Node{}, err
		}
	}
	name := r.own("dualcheck")
	addr, err := r.lazily(name, func(dir string) (string, func(), error) {
		if r.cfg.Dualcheck == "" {
			return "", nil, errors.New("there is no dualcheck beside this program nor in PATH: make build, or say --dualcheck")
		}
		grpc, err := childproc.FreePort()
		if err != nil {
			return "", nil, err
		}
		at := fmt.Sprintf("127.0.0.1:%d", grpc)
		http, stop, err := child(ctx, dir, command{
			bin: r.cfg.Dualcheck,
			args: func(port string) []string {
				args := []string{"serve", "--etcd-endpoints", etcd, "--grpc-addr", at, "--http-addr", "127.0.0.1:" + port,
					"--node-id", name, "--log-level", "warn", "--max-connection-age", "0", "--drain-timeout", "5s"}
				if redis != "" {
					args = append(args, "--redis-addrs", redis)
				}
				return append(append(args, r.cfg.NodeArgs...), r.site.Args...)
			},
			ready: ready,
			ask:   syscall.SIGTERM,
		})
		return at + " " + http, stop, err
	})
	if err != nil {
		return Node{}, err
	}
	grpc, http, _ := strings.Cut(addr, " ")
	return Node{GRPC: grpc, HTTP: http}, nil
}

// ready asks a node whether it can serve.
func ready(ctx context.Context, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("/readyz: %s", resp.Status)
	}
	return nil
}

// Beside finds a program of ours beside this one, or in PATH; "" if it is not there.
func Beside(name string) string {
	if self, err := os.Executable(); err == nil {
		if bin := filepath.Join(filepath.Dir(self), name); isFile(bin) {
			return bin
		}
	}
	if bin, err := exec.LookPath(name); err == nil {
		return bin
	}
	return ""
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// listenLoopback takes a free port.
func listenLoopback() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") }
