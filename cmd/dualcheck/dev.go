package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/client/pkg/v3/fileutil"

	"github.com/dualcheck/dualcheck/internal/childredis"
	"github.com/dualcheck/dualcheck/internal/embedetcd"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

func newDevCommand() *cobra.Command {
	s := defaultSettings()
	s.GRPCAddr, s.HTTPAddr = "127.0.0.1:7070", "127.0.0.1:7071"
	// One name for all starts: the clock need not wait for one that was killed.
	s.NodeID = "dev"
	s.MaxConnectionAge, s.DrainTimeout = 0, 15*time.Second
	stateDir, withRedis := "", true
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run everything on this machine, from nothing",
		Long: `Runs a whole dualcheck: etcd within its process, and a redis-server as its child
if one is installed. What etcd keeps is in --state-dir and is there again at the
next start, also after a crash; Redis starts empty, and without it everything is
as right, and slower. A port 0 is a free one: once dev can serve, ` + devFile + ` in
--state-dir says where.

It logs warnings and, whatever the level, what operators did and why: namespaces
put and deleted, records resolved and forgotten, switches turned, epochs raised.

Its flags are all its settings: it reads no DUALCHECK_* variables.`,
		Example: `  dualcheck dev
  dualcheck dev --state-dir dc --grpc-addr 127.0.0.1:0 --http-addr 127.0.0.1:0`,
		Args: arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := telemetry.NewTerseLogger(cmd.ErrOrStderr(), telemetry.LogFormat(s.LogFormat), s.LogLevel)
			if err != nil {
				return usageErrorf("%w", err)
			}
			return runDev(cmd.Context(), s, stateDir, withRedis, log, cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringVar(&stateDir, "state-dir", ".dualcheck", "where everything is kept")
	f.StringVar(&s.GRPCAddr, "grpc-addr", s.GRPCAddr, "where gRPC listens")
	f.StringVar(&s.HTTPAddr, "http-addr", s.HTTPAddr, "JSON, health and metrics")
	f.BoolVar(&withRedis, "redis", true, "run redis-server, if it is installed")
	f.StringVar(&s.DebugAddr, "debug-addr", "", "where pprof listens; empty: nowhere")
	s.LogLevel = "warn"
	logFlags(cmd, &s)
	return cmd
}

// devFile is where a running dev says where it listens.
const devFile = "dev.json"

// devAddrs are the addresses of a running dev.
type devAddrs struct {
	GRPC  string `json:"grpc"`
	HTTP  string `json:"http"`
	Etcd  string `json:"etcd"`
	Redis string `json:"redis"`
}

// runDev runs a server, its etcd and its Redis on one directory until ctx ends.
func runDev(ctx context.Context, s settings, stateDir string, withRedis bool, log *slog.Logger, talk io.Writer) error {
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return fmt.Errorf("--state-dir: %w", err)
	}
	lock, err := lockState(stateDir)
	if err != nil {
		return err
	}
	defer lock.release()
	file := filepath.Join(stateDir, devFile)
	if err := remove(file); err != nil { // of one that was killed
		return err
	}
	e, err := s.listen()
	if err != nil {
		return err
	}
	addrs := devAddrs{GRPC: e.grpc.Addr().String(), HTTP: e.http.Addr().String()}
	if err := lock.say(addrs); err != nil {
		e.close()
		return err
	}
	etcd, err := embedetcd.Start(ctx, filepath.Join(stateDir, "etcd"), log.With("part", "etcd"))
	if err != nil {
		e.close()
		if ctx.Err() != nil {
			return nil // it was stopped while it started
		}
		return err
	}
	defer etcd.Close()
	addrs.Etcd = etcd.Endpoint()
	s.EtcdEndpoints = []string{etcd.Endpoint()}
	if withRedis {
		switch redis, err := childredis.Start(ctx, filepath.Join(stateDir, "redis"), log.With("part", "redis")); {
		case err == nil:
			defer redis.Close()
			addrs.Redis = redis.Addr()
			s.RedisAddrs = []string{redis.Addr()}
		case ctx.Err() == nil:
			hint := ""
			if errors.Is(err, childredis.ErrNotInstalled) {
				hint = " (Debian: apt-get install redis-server)"
			}
			fmt.Fprintf(talk, "dualcheck runs without Redis, which is correct and slower: %v%s\n", err, hint)
		}
	}
	ready := func() error {
		if err := writeAtomically(file, addrs); err != nil {
			return err
		}
		fmt.Fprint(talk, devHello(stateDir, addrs))
		return nil
	}
	etcdEnds := func(ctx context.Context) error {
		select {
		case err := <-etcd.Failed():
			return fmt.Errorf("etcd ended: %w", err)
		case <-ctx.Done():
			return nil
		}
	}
	return errors.Join(runServer(ctx, s, e, log, ready, etcdEnds), remove(file))
}

// devHello is what dev says once it can serve: what to paste next.
func devHello(stateDir string, at devAddrs) string {
	addr := ""
	if at.GRPC != defaultAddr {
		addr = " --addr " + at.GRPC
	}
	redis := ""
	if at.Redis != "" {
		redis = ", Redis " + at.Redis
	}
	return fmt.Sprintf(`dualcheck is ready: gRPC %[1]s, JSON http://%[2]s, etcd %[3]s%[7]s; kept in %[4]s

  %[6]s begin demo order-1%[5]s
  curl -s http://%[2]s/v1/dedup:begin -d '{"namespace": "demo", "key": "order-2"}'
  grpcurl -plaintext -d '{"namespace": "demo", "key": "order-3"}' %[1]s dualcheck.v1.DedupService/Begin

The first of each key is FIRST, with a claim; the next is IN_PROGRESS. Ctrl-C stops it.
`, at.GRPC, at.HTTP, at.Etcd, stateDir, addr, program(), redis)
}

// stateLock keeps a second dev off the directory; the system gives it back if the
// process dies.
type stateLock struct{ file *fileutil.LockedFile }

// holder is who has the lock, as the lock file says.
type holder struct {
	PID  int    `json:"pid"`
	GRPC string `json:"grpc,omitempty"`
	HTTP string `json:"http,omitempty"`
}

func lockState(dir string) (stateLock, error) {
	path := filepath.Join(dir, "lock")
	f, err := fileutil.TryLockFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fileutil.ErrLocked) {
		return stateLock{}, fmt.Errorf("dualcheck dev runs on %s already%s: stop it, or choose another --state-dir", dir, heldBy(path))
	}
	if err != nil {
		return stateLock{}, fmt.Errorf("lock %s: %w", dir, err)
	}
	l := stateLock{f}
	if err := l.say(devAddrs{}); err != nil {
		l.release()
		return stateLock{}, err
	}
	return l, nil
}

// heldBy tells who has the lock, as far as its file says.
func heldBy(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	var h holder
	if json.Unmarshal(b, &h) != nil || h.PID == 0 {
		return ""
	}
	if h.GRPC == "" {
		return fmt.Sprintf(" (pid %d, starting)", h.PID)
	}
	return fmt.Sprintf(" (pid %d, gRPC %s, JSON %s)", h.PID, h.GRPC, h.HTTP)
}

// say writes who has the lock.
func (l stateLock) say(at devAddrs) error {
	b, err := json.Marshal(holder{PID: os.Getpid(), GRPC: at.GRPC, HTTP: at.HTTP})
	if err != nil {
		return err
	}
	if err := l.file.Truncate(0); err != nil {
		return fmt.Errorf("write the lock: %w", err)
	}
	if _, err := l.file.WriteAt(append(b, '\n'), 0); err != nil {
		return fmt.Errorf("write the lock: %w", err)
	}
	return nil
}

// release gives the lock back. The file stays: to remove it would let two in.
func (l stateLock) release() { _ = l.file.Close() }

// writeAtomically writes JSON so that a reader sees all of it or nothing.
func writeAtomically(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// remove removes a file that need not be there.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
