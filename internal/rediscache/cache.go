package rediscache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

const (
	// askWithin is how long a call waits for Redis before it asks etcd.
	askWithin = 5 * time.Millisecond
	// slowAfter is when an answer counts against Redis: so late that it is of no use, and
	// that this node being busy is not taken for it.
	slowAfter = 4 * askWithin
	// markFor is how long a Begin says that a repeat is likely; stageFor how long a
	// stage may wait for its confirm, which is more than a finish may take.
	markFor  = 10 * time.Second
	stageFor = 40 * time.Second

	askers  = 4
	writers = 2
	// DefaultPoolSize has room for every pipeline, a probe and one to spare.
	DefaultPoolSize = askers + writers + 2

	// The breaker opens after so many failures in a row, or if half of at least so many
	// pipelines of the last seconds failed; it lets three through a second later.
	failuresInARow = 5
	fewestCalls    = 20
	breakerWindow  = 4 * time.Second
	breakerBucket  = time.Second
	breakerPause   = time.Second
	breakerProbes  = 3
	// probeEvery is how often Redis is asked though nobody calls, so that its end and
	// its return are noticed.
	probeEvery  = 500 * time.Millisecond
	visitWithin = 2 * time.Second
)

// Viewer tells what this node has applied; watch.Follower is one.
type Viewer interface {
	View() (claim.View, error)
}

// Observer is told what happens, for metrics.
type Observer interface {
	// Looked is a look for an answer.
	Looked(finding string)
	// Wrote is a write: stage, confirm, fill, discard; ok, kept (what is there is as
	// new), lost (its stage is gone), open, dropped (the queue is full), failed.
	Wrote(kind, outcome string)
	// Pipeline is one round trip of a lane, ask or write.
	Pipeline(lane string, commands int, took time.Duration, ok bool)
	// Breaker is where the breaker went: closed, half-open, open.
	Breaker(state string)
}

// Config is what a Cache is made of.
type Config struct {
	Server Server
	View   Viewer
	Log    *slog.Logger
	// Observe may be nil.
	Observe Observer
}

// Cache is what this node has to do with Redis. Run must run.
type Cache struct {
	cfg         Config
	client      redis.UniversalClient
	breaker     *gobreaker.CircuitBreaker[struct{}]
	asks, write *lane
	seldom      rate.Sometimes

	mu   sync.Mutex
	last error // why the breaker last counted a failure
}

// New makes a Cache; Run makes it work, and closes its connections at the end.
func New(cfg Config) *Cache {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Observe == nil {
		cfg.Observe = nobody{}
	}
	if cfg.Server.PoolSize == 0 {
		cfg.Server.PoolSize = DefaultPoolSize
	}
	c := &Cache{cfg: cfg, client: cfg.Server.client(), seldom: rate.Sometimes{Interval: 10 * time.Second}}
	c.breaker = gobreaker.NewCircuitBreaker[struct{}](gobreaker.Settings{
		Name:        "redis",
		MaxRequests: breakerProbes, Interval: breakerWindow, BucketPeriod: breakerBucket, Timeout: breakerPause,
		ReadyToTrip: func(n gobreaker.Counts) bool {
			return n.ConsecutiveFailures >= failuresInARow || n.Requests >= fewestCalls && 2*n.TotalFailures >= n.Requests
		},
		IsSuccessful:  func(err error) bool { c.note(err); return err == nil },
		OnStateChange: func(_ string, from, to gobreaker.State) { c.turned(from, to) },
	})
	c.asks, c.write = c.lane("ask", slowAfter), c.lane("write", 0)
	cfg.Observe.Breaker(gobreaker.StateClosed.String())
	return c
}

func (c *Cache) lane(name string, slowAfter time.Duration) *lane {
	return &lane{
		name: name, client: c.client, breaker: c.breaker, observe: c.cfg.Observe, slowAfter: slowAfter,
		queue: make(chan *command, mostQueued),
		panicked: func(value any, stack []byte) {
			c.cfg.Log.Error("a panic was caught", "error", fmt.Sprint(value), "stack", string(stack))
		},
	}
}

// Run carries out what is asked of Redis until ctx ends; then what is queued, and it
// closes the connections.
func (c *Cache) Run(ctx context.Context) error {
	var g errgroup.Group
	for range askers {
		g.Go(func() error { c.asks.work(ctx); return nil })
	}
	for range writers {
		g.Go(func() error { c.write.work(ctx); return nil })
	}
	g.Go(func() error { c.probe(ctx); return nil })
	err := g.Wait()
	if closed := c.client.Close(); closed != nil {
		c.cfg.Log.Debug("connections to Redis were not closed in order", "error", closed)
	}
	return err
}

// probe asks now and then, through the breaker as everyone, for a key of any slot: an
// idle node notices that Redis went away, and a breaker closes though nobody calls.
func (c *Cache) probe(ctx context.Context) {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for slot := 0; ; slot = (slot + 1) % claim.Slots {
		key := "dc:{" + strconv.Itoa(slot) + "}:probe"
		if c.breaker.State() != gobreaker.StateClosed {
			c.visit(ctx, key)
		}
		c.asks.submit(&command{key: key, args: []any{"GET", key}, done: func(string, error) {}})
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// visit asks with more patience than a call has, past the breaker: to learn why Redis
// is not well, and so that a connection that takes long to make is there for others.
func (c *Cache) visit(ctx context.Context, key string) {
	ctx, cancel := context.WithTimeout(ctx, visitWithin)
	defer cancel()
	_, err := c.client.Pipelined(ctx, func(p redis.Pipeliner) error { p.Get(ctx, key); return nil })
	if ofRedis(err) {
		c.note(err)
	}
}

// note keeps why Redis last failed.
func (c *Cache) note(err error) {
	if err == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = err
}

func (c *Cache) lastFault() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// turned tells of the breaker, loudly when Redis is lost and when it is back. The
// breaker is locked meanwhile.
func (c *Cache) turned(from, to gobreaker.State) {
	c.cfg.Observe.Breaker(to.String())
	switch {
	case to == gobreaker.StateOpen && from == gobreaker.StateClosed:
		c.cfg.Log.Warn("Redis is not used: etcd answers everything, correctly and more slowly, until Redis is well", "cause", c.lastFault())
	case to == gobreaker.StateClosed:
		c.cfg.Log.Warn("Redis is used again")
	}
}

// Degraded says why Redis is not used; nil: it is.
func (c *Cache) Degraded() error {
	if v, err := c.cfg.View.View(); err == nil && v.BypassRedis {
		return errors.New("bypassed by an operator's switch: etcd answers everything")
	}
	if c.breaker.State() == gobreaker.StateClosed {
		return nil
	}
	return fmt.Errorf("not used, etcd answers everything: %s", fault(c.lastFault()))
}

// Pool is what the client's connections are at, for metrics.
func (c *Cache) Pool() *redis.PoolStats { return c.client.PoolStats() }

// looked is what a look into Redis came to.
type looked struct {
	finding Finding
	view    claim.View
	// record is set with Hit; with Disbelieved it may be, and is then good only for who
	// wants what was true when etcd could last be asked.
	record *claim.Record
}

// look asks Redis for a record, and leaves a mark for who asks next if mark is set.
// It takes askWithin at most.
func (c *Cache) look(ctx context.Context, namespace, key string, mark bool) (found looked) {
	defer func() { c.cfg.Observe.Looked(string(found.finding)) }()
	v, err := c.cfg.View.View()
	if err != nil {
		return looked{finding: Disbelieved}
	}
	p, err := v.Policy(namespace)
	switch {
	case err != nil: // the Store behind says so
		return looked{finding: Undecided, view: v}
	case v.BypassRedis:
		return looked{finding: Bypassed, view: v}
	case !v.Believed && !p.ReplayWithoutEtcd:
		return looked{finding: Disbelieved, view: v}
	}
	name := layout.NameOf(namespace, key)
	at := keyOf(&v, name)
	entry, err := c.ask(ctx, at, mark)
	now, unknown := c.cfg.View.View()
	if unknown != nil {
		return looked{finding: Disbelieved}
	}
	found.view = now
	switch {
	case errors.Is(err, redis.Nil):
		found.finding = Absent
		return found
	case errors.Is(err, errOpen):
		found.finding = Open
		return found
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, errGone), errors.Is(err, errCrowded):
		found.finding = Slow
		return found
	case ofKey(err):
		found.finding = Garbage
	case err != nil:
		found.finding = Failed
		return found
	default:
		found.record, found.finding = read([]byte(entry), now.Sealer, at, namespace, key)
	}
	if found.finding.damaged() && !now.BypassRedis {
		c.discard(at, entry, found.finding)
	}
	switch {
	case found.finding != Hit:
	case now.BypassRedis:
		found.finding, found.record = Bypassed, nil
	case !sameEpochs(&v, &now, name.Slot):
		found.finding, found.record = Epoch, nil
	case !now.Believed:
		found.finding = Disbelieved
		if p, err := now.Policy(namespace); err != nil || !p.ReplayWithoutEtcd {
			found.record = nil
		}
	case now.Now >= until(found.record):
		found.finding, found.record = Expired, nil
	}
	return found
}

// ask reads an entry, with all who ask at the same time.
func (c *Cache) ask(ctx context.Context, key string, mark bool) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	type answer struct {
		entry string
		err   error
	}
	answered := make(chan answer, 1)
	cmd := &command{
		key: key, args: []any{"GET", key}, size: 256,
		gone: func() bool { return ctx.Err() != nil },
		done: func(entry string, err error) { answered <- answer{entry, err} },
	}
	if mark {
		cmd.args = []any{"SET", key, markKind, "NX", "GET", "PX", markFor.Milliseconds()}
	}
	c.asks.submit(cmd)
	select {
	case a := <-answered:
		return a.entry, a.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// Stage writes finished bytes that are about to be proposed to etcd. What it returns
// is to be called once they were committed, with their revision. Neither waits.
//
// The entry's name has the epochs that were known before the proposal: should the
// record be taken back before the confirm arrives, nobody looks under that name.
func (c *Cache) Stage(v *claim.View, rec *claim.Record, value []byte) func(revision int64) {
	ttl, key, ok := c.place(v, rec)
	if !ok {
		return func(int64) {}
	}
	entry := staged(value)
	s := &stage{cache: c, key: key, began: time.Now(), ttl: ttl, sealer: v.Sealer, header: bytes.Clone(entry[:headerSize])}
	c.submit("stage", key, stageScript, entry, min(stageFor, ttl), s.written)
	return s.committed
}

// stage is one on its way. Its confirm goes out once both Redis has it and etcd has
// committed it: sent earlier, it could arrive before.
type stage struct {
	cache  *Cache
	key    string
	began  time.Time
	ttl    time.Duration // from then on
	sealer claim.Sealer
	header []byte

	mu       sync.Mutex
	there    bool
	revision int64
}

func (s *stage) written(outcome string) {
	s.mu.Lock()
	s.there = outcome == "ok"
	due := s.there && s.revision != 0
	s.mu.Unlock()
	if due {
		s.confirm()
	}
}

func (s *stage) committed(revision int64) {
	s.mu.Lock()
	s.revision = revision
	due := s.there
	s.mu.Unlock()
	if due {
		s.confirm()
	}
}

func (s *stage) confirm() {
	left := s.ttl - time.Since(s.began)
	v, err := s.cache.cfg.View.View()
	if left <= 0 || err != nil || v.BypassRedis { // a finish may take longer than a switch
		return
	}
	confirm(s.header, s.sealer, s.key, s.revision)
	s.cache.submit("confirm", s.key, confirmScript, s.header, left, nil)
}

// Found writes a finished record that was read from etcd under this view.
func (c *Cache) Found(v *claim.View, rec *claim.Record, value []byte) {
	ttl, key, ok := c.place(v, rec)
	if !ok {
		return
	}
	entry := staged(value)
	confirm(entry[:headerSize], v.Sealer, key, rec.Revision)
	c.submit("fill", key, fillScript, entry, ttl, nil)
}

// place says where a record is cached and for how long; false if it is not.
func (c *Cache) place(v *claim.View, rec *claim.Record) (time.Duration, string, bool) {
	if v.BypassRedis || !v.Believed {
		return 0, "", false
	}
	p, err := v.Policy(rec.Namespace)
	left := until(rec).Sub(v.Now)
	if err != nil || left <= 0 {
		return 0, "", false
	}
	return min(p.CacheTTLMax, left), keyOf(v, layout.NameOf(rec.Namespace, rec.Key)), true
}

// discard removes an entry that should not be there, so that the next fill is not
// taken for older than it.
func (c *Cache) discard(key, entry string, why Finding) {
	c.seldom.Do(func() {
		c.cfg.Log.Warn("an entry in Redis is not what was written there: it is not believed, and removed", "redis_key", key, "finding", why)
	})
	header := entry[:min(len(entry), headerSize)]
	c.write.submit(&command{
		key: key, script: discardScript, args: []any{header}, size: int64(len(header)),
		done: func(answer string, err error) { c.cfg.Observe.Wrote("discard", outcomeOf(answer, err)) },
	})
}

// submit writes an entry or a header; then, if set, is told how that ended.
func (c *Cache) submit(kind, key string, script *redis.Script, entry []byte, ttl time.Duration, then func(outcome string)) {
	c.write.submit(&command{
		key: key, script: script, args: []any{entry, max(ttl.Milliseconds(), 1)}, size: int64(len(entry)) + 256,
		done: func(answer string, err error) {
			outcome := outcomeOf(answer, err)
			c.cfg.Observe.Wrote(kind, outcome)
			if then != nil {
				then(outcome)
			}
		},
	})
}

func outcomeOf(answer string, err error) string {
	switch {
	case err == nil:
		return answer
	case errors.Is(err, errOpen):
		return "open"
	case errors.Is(err, errCrowded):
		return "dropped"
	}
	return "failed"
}

type nobody struct{}

func (nobody) Looked(string)                             {}
func (nobody) Wrote(string, string)                      {}
func (nobody) Pipeline(string, int, time.Duration, bool) {}
func (nobody) Breaker(string)                            {}
