// Package embedetcd runs etcd within the process: one member, durable, on loopback.
// It is for `dualcheck dev`; clusters that matter have an etcd of their own.
//
// What always holds: what was acknowledged is on disk, and a Start on the same
// directory finds it, also after the process was killed. Close it after its clients:
// an open watch would hold it up for seconds.
package embedetcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/dualcheck/dualcheck/internal/telemetry"
)

const (
	name  = "dev"
	quota = 8 << 30 // bytes
	// compactEvery is how long old revisions are kept.
	compactEvery = "10m"
	startTimeout = time.Minute
	// portTries is how often another port is tried when one was taken meanwhile.
	portTries = 5
)

// Server is a running etcd.
type Server struct {
	etcd     *embed.Etcd
	endpoint string
	level    zap.AtomicLevel // of etcd's log
}

// Start starts etcd with its data in dir, which is made if it is not there. The
// client port is that of the last start if it is free. ctx bounds the start only.
func Start(ctx context.Context, dir string, log *slog.Logger) (*Server, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("etcd's directory: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	endpoint := lastEndpoint(dir)
	for try := 1; ; try++ {
		if endpoint == "" {
			var err error
			if endpoint, err = freeEndpoint(); err != nil {
				return nil, fmt.Errorf("a port for etcd: %w", err)
			}
		}
		s, err := start(ctx, dir, endpoint, log)
		switch {
		case err == nil:
			if err := remember(dir, endpoint); err != nil {
				s.Close()
				return nil, err
			}
			return s, nil
		case errors.Is(err, syscall.EADDRINUSE) && try < portTries:
			endpoint = ""
		default:
			return nil, fmt.Errorf("start etcd in %s: %w", dir, err)
		}
	}
}

func start(ctx context.Context, dir, endpoint string, log *slog.Logger) (*Server, error) {
	// While it starts, etcd warns of what is meant to be so here.
	level := zap.NewAtomicLevelAt(zapcore.ErrorLevel)
	conf := embed.NewConfig()
	conf.Name = name
	conf.Dir = filepath.Join(dir, "data")
	// Nobody peers with one member: any port will do.
	conf.ListenPeerUrls, conf.AdvertisePeerUrls = urls("127.0.0.1:0"), urls("127.0.0.1:0")
	conf.ListenClientUrls, conf.AdvertiseClientUrls = urls(endpoint), urls(endpoint)
	conf.InitialCluster = conf.InitialClusterFromName(name)
	conf.InitialClusterToken = "dualcheck-dev"
	conf.AutoCompactionMode, conf.AutoCompactionRetention = embed.CompactorModePeriodic, compactEvery
	conf.QuotaBackendBytes = quota
	conf.ZapLoggerBuilder = embed.NewZapLoggerBuilder(telemetry.Zap(log, level))
	etcd, err := embed.StartEtcd(conf)
	if err != nil {
		return nil, err
	}
	select {
	case <-etcd.Server.ReadyNotify():
		level.SetLevel(zapcore.WarnLevel)
		return &Server{etcd: etcd, endpoint: endpoint, level: level}, nil
	case err = <-etcd.Err():
	case <-ctx.Done():
		err = fmt.Errorf("not ready: %w", ctx.Err())
	}
	etcd.Close()
	return nil, err
}

// Endpoint is the host and port that clients connect to.
func (s *Server) Endpoint() string { return s.endpoint }

// Failed tells when etcd ends by itself, and why.
func (s *Server) Failed() <-chan error { return s.etcd.Err() }

// Close stops etcd; its clients have been closed before.
func (s *Server) Close() {
	s.level.SetLevel(zapcore.FatalLevel) // it calls the end of its listeners errors
	s.etcd.Close()
}

func urls(host string) []url.URL { return []url.URL{{Scheme: "http", Host: host}} }

func freeEndpoint() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// endpointFile holds the endpoint of the last start, so that tools that were shown
// it once find it again.
const endpointFile = "endpoint"

func lastEndpoint(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, endpointFile))
	if err != nil {
		return ""
	}
	endpoint := strings.TrimSpace(string(b))
	if host, _, err := net.SplitHostPort(endpoint); err != nil || host != "127.0.0.1" {
		return ""
	}
	return endpoint
}

func remember(dir, endpoint string) error {
	return os.WriteFile(filepath.Join(dir, endpointFile), []byte(endpoint+"\n"), 0o600)
}
