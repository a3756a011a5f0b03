package rediscache

import (
	"context"
	"crypto/tls"
	"fmt"
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
		return redis.NewFailoverClient(o.Failover())
	case Cluster:
		c := o.Cluster()
		// A master that does not answer has nobody say that another took over.
		c.ClusterStateReloadInterval = clusterReload
		return redis.NewClusterClient(c)
	default:
		return redis.NewClient(o.Simple())
	}
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
