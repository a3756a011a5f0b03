package rediscache

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/recency"
)

const (
	// askWithin is how long a call waits for Redis before it asks etcd.
	askWithin = 5 * time.Millisecond
	// slowAfter is when the answer to a probe, for which nobody waits, counts against
	// Redis.
	slowAfter = 2 * askWithin
	// markFor is how long a Begin says that a repeat is likely; stageFor how long a
	// stage may wait for its confirm, which is more than a finish may take.
	markFor  = 10 * time.Second
	stageFor = 40 * time.Second
)

// Viewer tells what this node has applied; watch.Follower is one.
type Viewer interface {
	View() (claim.View, error)
}

// Observer is told what happens, for metrics.
type Observer interface {
	// Looked is a look for an answer.
	Looked(finding string)
	// Wrote is a write, by kind and outcome: see write.go.
	Wrote(kind, outcome string)
	// Pipeline is one round trip of a lane, ask or write.
	Pipeline(lane string, commands int, took time.Duration, ok bool)
	// Breaker is where one of the breakers went: closed, half-open, open; at the start
	// each goes from "" to closed.
	Breaker(from, to string)
}

// Config is what a Cache is made of.
type Config struct {
	Server Server
	View   Viewer
	Log    *slog.Logger
	// Observe may be nil.
	Observe Observer
	// Habits say for how long entries live; nil: as long as the policy allows.
	Habits *recency.Habits
	// Told, if set, is shown each record that answered, under a view whose epochs are those
	// from before it was read.
	Told func(v *claim.View, rec *claim.Record)
}

// Cache is what this node has to do with Redis. Run must run.
type Cache struct {
	cfg    Config
	client redis.UniversalClient
	shards []*shard
	of     [claim.Slots]*shard
	away   atomic.Int32 // shards whose breakers are not closed
	// bypassed is what the switch was last seen to say.
	bypassed atomic.Bool
	greeted  sync.Once

	seldom  rate.Sometimes
	damaged atomic.Int64 // entries met since that was last told
}

// New makes a Cache; Run makes it work, and closes its connections at the end.
func New(cfg Config) *Cache {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Observe == nil {
		cfg.Observe = nobody{}
	}
	c := &Cache{cfg: cfg, client: cfg.Server.client(), seldom: rate.Sometimes{Interval: 10 * time.Second}}
	c.shards, c.of = shardsOf(c)
	return c
}

// Run carries out what is asked of Redis until ctx ends; then what is queued, and it
// closes the connections.
func (c *Cache) Run(ctx context.Context) error {
	var g errgroup.Group
	for _, s := range c.shards {
		g.Go(func() error { return s.run(ctx) })
	}
	err := g.Wait()
	if closed := c.client.Close(); closed != nil {
		c.cfg.Log.Debug("connections to Redis were not closed in order", "error", closed)
	}
	return err
}

// Pool is what the client's connections are at, for metrics.
func (c *Cache) Pool() *redis.PoolStats { return c.client.PoolStats() }

type nobody struct{}

func (nobody) Looked(string)                             {}
func (nobody) Wrote(string, string)                      {}
func (nobody) Pipeline(string, int, time.Duration, bool) {}
func (nobody) Breaker(string, string)                    {}
