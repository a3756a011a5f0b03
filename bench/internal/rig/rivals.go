package rig

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// MaxConnections is how many a rival's database takes at once: those of all its targets.
const MaxConnections = 2200

// AppendOnly is a Redis with every write in its append-only file, synced as fsync says:
// "always", before it is answered; "everysec", up to a second later.
func (r *Rig) AppendOnly(ctx context.Context, fsync string) (string, error) {
	return r.redis(ctx, "redis-"+fsync, "--appendonly", "yes", "--appendfsync", fsync)
}

// Plain is a Redis with nothing on disk and no limit to its memory, as the rivals' cache.
func (r *Rig) Plain(ctx context.Context) (string, error) {
	return r.redis(ctx, "redis-plain", "--appendonly", "no")
}

func (r *Rig) redis(ctx context.Context, name string, args ...string) (string, error) {
	return r.lazily(name, func(dir string) (string, func(), error) {
		bin, err := find("redis-server", "redis-server")
		if err != nil {
			return "", nil, err
		}
		return child(ctx, dir, command{
			bin: bin,
			args: func(port string) []string {
				return append([]string{"--port", port, "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--daemonize", "no"}, args...)
			},
			ask: syscall.SIGTERM,
		})
	})
}

// Postgres is a PostgreSQL with its own settings but for size: a commit is on disk
// before it is answered.
func (r *Rig) Postgres(ctx context.Context) (string, error) {
	return r.lazily("postgresql", func(dir string) (string, func(), error) {
		const debian = "/usr/lib/postgresql/*/bin"
		initdb, err := find("initdb", "postgresql", debian)
		if err != nil {
			return "", nil, err
		}
		bin, err := find("postgres", "postgresql", debian)
		if err != nil {
			return "", nil, err
		}
		user, err := unprivileged("postgres")
		if err != nil {
			return "", nil, err
		}
		if err := give(dir, user); err != nil {
			return "", nil, err
		}
		data := filepath.Join(dir, "data")
		if err := once(ctx, dir, user, initdb, "--pgdata", data, "--username", "bench", "--auth", "trust", "--encoding", "UTF8", "--no-locale"); err != nil {
			return "", nil, err
		}
		return child(ctx, dir, command{
			bin:  bin,
			user: user,
			args: func(port string) []string {
				return []string{"-D", data, "-p", port, "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
					"-c", "fsync=on", "-c", "synchronous_commit=on", "-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB",
					"-c", fmt.Sprintf("max_connections=%d", MaxConnections)}
			},
			ask: syscall.SIGINT,
		})
	})
}

// MariaDB is a MariaDB with its own settings but for size: a commit is on disk before it
// is answered. There is no binary log, which would cost it a second sync.
func (r *Rig) MariaDB(ctx context.Context) (string, error) {
	return r.lazily("mariadb", func(dir string) (string, func(), error) {
		install, err := find("mariadb-install-db", "mariadb-server")
		if err != nil {
			return "", nil, err
		}
		bin, err := find("mariadbd", "mariadb-server", "/usr/sbin", "/usr/libexec")
		if err != nil {
			return "", nil, err
		}
		user, err := unprivileged("mysql")
		if err != nil {
			return "", nil, err
		}
		if err := give(dir, user); err != nil {
			return "", nil, err
		}
		data := filepath.Join(dir, "data")
		if err := once(ctx, dir, user, install, "--no-defaults", "--datadir="+data, "--auth-root-authentication-method=normal", "--skip-test-db"); err != nil {
			return "", nil, err
		}
		return child(ctx, dir, command{
			bin:  bin,
			user: user,
			args: func(port string) []string {
				return []string{"--no-defaults", "--datadir=" + data, "--port=" + port, "--bind-address=127.0.0.1",
					"--socket=" + filepath.Join(dir, "sock"), "--pid-file=" + filepath.Join(dir, "pid"),
					"--innodb-flush-log-at-trx-commit=1", "--innodb-buffer-pool-size=512M", "--innodb-log-file-size=512M", "--skip-log-bin",
					fmt.Sprintf("--max-connections=%d", MaxConnections), "--open-files-limit=8192"}
			},
			ask: syscall.SIGTERM,
		})
	})
}

// once runs a command to its end.
func once(ctx context.Context, dir, user, bin string, args ...string) error {
	as, rest, err := as(user, bin, args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*startTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, as, rest...)
	cmd.Dir, cmd.Env = dir, environment()
	if out, err := cmd.CombinedOutput(); err != nil {
		text := strings.TrimSpace(string(out))
		return fmt.Errorf("%s: %w: %s", filepath.Base(bin), err, text[strings.LastIndexByte(text, '\n')+1:])
	}
	return nil
}
