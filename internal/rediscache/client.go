package rediscache

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Mode is how Redis is run. It is said and never guessed: one address of a Cluster
// looks like a standalone server.
type Mode string

// The modes.
const (
	Standalone Mode = "standalone"
	Sentinel   Mode = "sentinel"
	Cluster    Mode = "cluster"
)

// Server says where Redis is and how to reach it.
type Server struct {
	Mode Mode
	// Addrs are the server (one), the sentinels, or some nodes of the Cluster.
	Addrs []string
	// MasterName is what the sentinels call it.
	MasterName                     string
	User, Password                 string
	SentinelUser, SentinelPassword string
	TLS                            *tls.Config
	// PoolSize bounds the connections to each server; 0: room for every pipeline.
	PoolSize int
}

// String tells where Redis is, without what is secret.
func (s Server) String() string {
	where := string(s.Mode) + " " + strings.Join(s.Addrs, ",")
	if s.MasterName != "" {
		where += " master " + s.MasterName
	}
	if s.User != "" {
		where += " user " + s.User
	}
	if s.TLS != nil {
		where += " TLS"
	}
	return where
}

// LogValue keeps what is secret out of every log.
func (s Server) LogValue() slog.Value { return slog.StringValue(s.String()) }

const (
	dialWithin = 500 * time.Millisecond
	// The client sends a command again once, over a new connection: pooled ones do not
	// outlive a restart. All commands can stand that.
	tries         = 1
	clusterReload = time.Second
	// bufferSize holds a pipeline of usual results.
	bufferSize = 64 << 10
	// oldest is the first Redis with SET … NX GET.
	oldest = 7
)

// quiet keeps the client from writing to stderr: what goes wrong comes as errors, and
// the breaker tells of it.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// The client's logger is one for the process.
var silence = sync.OnceFunc(func() { redis.SetLogger(quiet{}) })

// client makes a client; it connects with its first command. Masters only: a replica
// may not have heard of a confirm yet, and cannot be written.
func (s Server) client() redis.UniversalClient {
	silence()
	if s.PoolSize == 0 {
		s.PoolSize = askers + writers + 2 // a visit, and one to spare
		if s.Mode == Cluster {
			s.PoolSize = clusterShards * (clusterAskers + clusterWriters) / 2 // of two masters or more
		}
	}
	o := &redis.UniversalOptions{
		Addrs: s.Addrs, MasterName: s.MasterName,
		Username: s.User, Password: s.Password,
		SentinelUsername: s.SentinelUser, SentinelPassword: s.SentinelPassword,
		TLSConfig:       s.TLS,
		ClientName:      "dualcheck",
		DisableIdentity: true,
		OnConnect:       checkVersion,

		// A deadline ends the command, not only the wait for a connection.
		ContextTimeoutEnabled: true,
		DialTimeout:           dialWithin,
		DialerRetries:         1,
		ReadTimeout:           callWithin,
		WriteTimeout:          callWithin,
		PoolTimeout:           callWithin / 2,
		PoolSize:              s.PoolSize,
		MaxActiveConns:        s.PoolSize,
		PipelinePoolSize:      -1, // pipelines are all there is: they have the one pool
		ReadBufferSize:        bufferSize,
		WriteBufferSize:       bufferSize,
		MaxRetries:            tries,
		MinRetryBackoff:       time.Millisecond,
		MaxRetryBackoff:       8 * time.Millisecond,
		MaxRedirects:          2,
		ConnMaxIdleTime:       5 * time.Minute,

		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	switch s.Mode {
	case Sentinel:
		client := redis.NewFailoverClient(o.Failover())
		client.AddHook(knownMaster(s.MasterName))
		return client
	case Cluster:
		c := o.Cluster()
		// A master that does not answer has nobody say that another took over.
		c.ClusterStateReloadInterval = clusterReload
		return redis.NewClusterClient(c)
	default:
		return redis.NewClient(o.Simple())
	}
}

// knownMaster makes an error of its own of what sentinels answer for a master that they
// do not know: nothing, which is what Redis answers for a key that is not there.
type knownMaster string

func (m knownMaster) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := next(ctx, network, addr)
		if errors.Is(err, redis.Nil) {
			err = fmt.Errorf("the sentinels know no master %q (redis-master-name)", string(m))
		}
		return conn, err
	}
}

func (knownMaster) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (knownMaster) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// checkVersion refuses a connection to a server that is too old.
func checkVersion(ctx context.Context, conn *redis.Conn) error {
	hello, err := conn.Hello(ctx, 3, "", "", "").Result()
	if err != nil {
		return fmt.Errorf("ask for the version: %w", err)
	}
	version, _ := hello["version"].(string)
	major, _, _ := strings.Cut(version, ".")
	if n, err := strconv.Atoi(major); err == nil && n < oldest {
		return fmt.Errorf("this is Redis %s, and %d.0 or later is needed", version, oldest)
	}
	return nil
}
