package rediscache_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

const (
	callers   = 16
	keysAtOne = 20 // keys that are worked on at a time
	// breath is what a caller waits between calls: the tests are about order, not load.
	breath = 60 * time.Millisecond
	// soon is when a node has noticed that Redis went or came; on a busy machine answers
	// are late, and a breaker needs three in time.
	soon = 30 * time.Second
)

// crowd is callers who begin, finish, release and repeat the same few keys through
// all nodes, all the time. It remembers what each was told, and notices every answer
// that G1-G6 forbid. While etcd is well there is no excuse for an error.
type crowd struct {
	t     testing.TB
	nodes []*nodetest.Node
	// size is how long results are.
	size int

	quit    chan struct{}
	once    sync.Once
	running sync.WaitGroup
	calls   atomic.Int64

	mu    sync.Mutex
	jobs  []*job
	wrong []string
}

// job is what is known of one key.
type job struct {
	key   string
	given map[int32]string // by attempt: the call that was told FIRST
	// final is the finish that was sent last, set before it is sent; done: it was
	// answered.
	final    *claim.FinishRequest
	done     bool
	told     int   // repeats after the end
	finished int64 // revision
}

// stillRight has a crowd at work until the test ends, or quits; then there must be no
// wrong answer, and no entry without an expiry (C66).
func stillRight(t testing.TB, size int, nodes []*nodetest.Node, servers ...*redistest.Server) *crowd {
	t.Helper()
	c := &crowd{t: t, nodes: nodes, size: size, quit: make(chan struct{})}
	for range keysAtOne {
		c.add()
	}
	for i := range callers {
		c.running.Go(func() { c.caller(i) })
	}
	t.Cleanup(func() {
		c.stop()
		for _, s := range servers {
			if !s.Running() || s.Do("ROLE").([]any)[0] != "master" {
				continue
			}
			if left := s.NoTTL(); len(left) > 0 {
				t.Errorf("C66: %d entries without an expiry: %.3q", len(left), left)
			}
		}
		for _, n := range nodes {
			t.Log(n.Seen)
		}
	})
	c.more(10 * callers)
	return c
}

func (c *crowd) add() {
	c.jobs = append(c.jobs, &job{key: fmt.Sprintf("job-%d", len(c.jobs)), given: map[int32]string{}})
}

func (c *crowd) caller(i int) {
	pause := time.NewTicker(breath)
	defer pause.Stop()
	for step := 0; ; step++ {
		select {
		case <-c.quit:
			return
		case <-pause.C:
		}
		c.mu.Lock()
		recent := c.jobs[max(0, len(c.jobs)-keysAtOne):]
		if rand.IntN(3) == 0 {
			recent = c.jobs
		}
		j := recent[rand.IntN(len(recent))]
		c.mu.Unlock()
		c.call(j, c.nodes[rand.IntN(len(c.nodes))], fmt.Sprintf("%d-%d", i, step))
		c.calls.Add(1)
	}
}

func (c *crowd) errorf(format string, args ...any) {
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

// call begins a job, and works on it if it was given.
func (c *crowd) call(j *job, n claim.Store, id string) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c.mu.Lock()
	over := j.done
	c.mu.Unlock()
	a, err := n.Begin(ctx, &claim.BeginRequest{Namespace: "crowd", Key: j.key, RequestID: id, Owner: "crowd", Lease: new(10 * time.Minute)})
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err != nil:
		c.errorf("G6: %s: begin: %v", j.key, err)
	case a.Verdict == claim.First:
		if over {
			c.errorf("G4: %s was finished, and then given as attempt %d", j.key, a.Claim.Attempt)
		}
		if other, given := j.given[a.Claim.Attempt]; given {
			c.errorf("G1: attempt %d of %s was given to %s and to %s", a.Claim.Attempt, j.key, other, id)
		}
		j.given[a.Claim.Attempt] = id
		c.finish(ctx, j, a.Claim)
	case a.Verdict == claim.Replay || a.Verdict == claim.ReplayFailure:
		c.ended(j, a.Record, fmt.Sprintf("replayed by %d", a.Source))
	case over || a.Verdict != claim.InProgress:
		c.errorf("G4: %s was finished: %v, and then told as %d", j.key, over, a.Verdict)
	}
}

// finish ends a claim in one way or another, through any node. The lock is held, but
// not while it is sent.
func (c *crowd) finish(ctx context.Context, j *job, g *claim.Grant) {
	req := &claim.FinishRequest{Namespace: "crowd", Key: j.key, Token: g.Token}
	body := bytes.Repeat([]byte(fmt.Sprintf("%s %d %x|", j.key, g.Attempt, rand.Uint64())), 1+c.size/20)
	switch rand.IntN(5) {
	case 0:
		req.Failure = &claim.Failure{Class: claim.Retryable, Message: "later"}
	case 1:
		req.Failure = &claim.Failure{Class: claim.Terminal, Message: string(body[:min(len(body), 1000)])}
	default:
		req.Result = &claim.Result{Code: 200, ContentType: "text/plain", Body: body}
	}
	for range 1 + rand.IntN(2) { // a finish may be repeated
		last := req.Failure == nil || req.Failure.Class == claim.Terminal
		if last {
			j.final = req
		}
		n := c.nodes[rand.IntN(len(c.nodes))]
		c.mu.Unlock()
		f, err := n.Finish(ctx, req)
		c.mu.Lock()
		switch {
		case err != nil:
			c.errorf("G6: %s: finish: %v", j.key, err)
		case last:
			j.done = true
			c.ended(j, f.Record, "finished")
		}
	}
}

// ended compares what is told of a job with what was sent. The lock is held.
func (c *crowd) ended(j *job, rec *claim.Record, how string) {
	switch {
	case j.final == nil:
		c.errorf("G2: %s: %s, and nobody finished it", j.key, how)
		return
	case j.final.Failure != nil:
		if rec.Failure == nil || rec.Failure.Message != j.final.Failure.Message {
			c.errorf("G4: %s: %s as %.60v, and it was %.60q", j.key, how, rec.Failure, j.final.Failure.Message)
		}
	case rec.Result == nil || rec.Result.Code != 200 || !bytes.Equal(rec.Result.Body, j.final.Result.Body):
		c.errorf("G4: %s: %s as %.60v, and it was %.60q", j.key, how, rec.Result, j.final.Result.Body)
	}
	if j.finished == 0 {
		j.finished = rec.FinishRevision
	}
	if rec.FinishRevision != j.finished {
		c.errorf("G2: %s: %s at %d, and it was at %d", j.key, how, rec.FinishRevision, j.finished)
	}
	if j.told++; j.told == 3 {
		c.add()
	}
}

// more waits until so many more calls were answered.
func (c *crowd) more(n int64) {
	c.t.Helper()
	from := c.calls.Load()
	nodetest.Eventually(c.t, 2*time.Minute, "the crowd", func() error {
		if done := c.calls.Load() - from; done < n {
			return fmt.Errorf("%d of %d calls", done, n)
		}
		return nil
	})
}

// during runs f again and again, while the crowd makes n calls.
func (c *crowd) during(n int64, f func()) {
	for end := c.calls.Load() + n; c.calls.Load() < end; {
		f()
		c.more(callers)
	}
}

// old returns the key of something that was finished long ago, as far as a crowd goes.
func (c *crowd) old() string {
	c.t.Helper()
	var key string
	nodetest.Eventually(c.t, soon, "a finished job", func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		i := slices.IndexFunc(c.jobs, func(j *job) bool { return j.done })
		if i < 0 {
			return errors.New("none")
		}
		key = c.jobs[i].key
		return nil
	})
	return key
}

// stop ends the work and reads everything once more: through each node, and in etcd.
func (c *crowd) stop() {
	c.once.Do(func() {
		c.t.Helper()
		close(c.quit)
		c.running.Wait()
		for _, j := range c.jobs {
			if !j.done {
				continue
			}
			for i, n := range c.nodes {
				c.call(j, n, fmt.Sprintf("audit-%d", i))
				c.call(j, n.Behind, fmt.Sprintf("behind-%d", i))
			}
		}
		if len(c.wrong) > 0 {
			c.t.Errorf("%d wrong answers:\n%s", len(c.wrong), strings.Join(c.wrong[:min(len(c.wrong), 10)], "\n"))
		}
	})
}

// nodes starts two nodes with Redis in front.
func nodes(t testing.TB, at rediscache.Server) []*nodetest.Node {
	t.Helper()
	etcd := etcdtest.Start(t, 1)
	return []*nodetest.Node{
		nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: at}),
		nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: at, Idle: true}),
	}
}

var calls atomic.Int64

// begins is one more call for a key.
func begins(t testing.TB, n claim.Store, key string) claim.Answer {
	t.Helper()
	a, err := n.Begin(nodetest.Within(t, 20*time.Second), &claim.BeginRequest{
		Namespace: "crowd", Key: key, RequestID: fmt.Sprintf("call-%d", calls.Add(1)), Owner: "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// completes begins and finishes a key.
func completes(t testing.TB, n claim.Store, key, body string) {
	t.Helper()
	a := begins(t, n, key)
	if a.Verdict != claim.First {
		t.Fatalf("%s: verdict %d", key, a.Verdict)
	}
	if _, err := n.Finish(nodetest.Within(t, 20*time.Second), &claim.FinishRequest{
		Namespace: "crowd", Key: key, Token: a.Claim.Token, Result: &claim.Result{Body: []byte(body)},
	}); err != nil {
		t.Fatal(err)
	}
}

// hit waits until a repeat of a key is answered from Redis.
func hit(t testing.TB, n *nodetest.Node, key string) claim.Answer {
	t.Helper()
	var a claim.Answer
	nodetest.Eventually(t, soon, "a hit for "+key, func() error {
		a = begins(t, n, key)
		if a.Source != claim.SourceRedis {
			return fmt.Errorf("verdict %d from %d; %v; degraded: %v", a.Verdict, a.Source, n.Seen, n.Cache.Degraded())
		}
		return nil
	})
	if f, err := n.Get(nodetest.Within(t, soon), &claim.GetRequest{Namespace: "crowd", Key: key}); err != nil || f.Record.Revision != a.Record.Revision {
		t.Errorf("get %s: %+v, %v; begin was told %+v", key, f.Record, err, a.Record)
	}
	return a
}

// degrades waits until each node says, in one of these ways, that Redis is not used.
func degrades(t testing.TB, all []*nodetest.Node, ways ...string) {
	t.Helper()
	for _, n := range all {
		nodetest.Eventually(t, soon, "the node to say that Redis is not used", func() error {
			err := n.Cache.Degraded()
			if err == nil {
				return errors.New("it says nothing")
			}
			if !slices.ContainsFunc(ways, func(w string) bool { return strings.Contains(err.Error(), w) }) {
				return fmt.Errorf("it says: %w", err)
			}
			return nil
		})
	}
}

// hitsReturn waits until each node answers from Redis what is finished from now on,
// and says that Redis is used.
func hitsReturn(t testing.TB, all []*nodetest.Node) {
	t.Helper()
	start := time.Now()
	key := fmt.Sprintf("new-%d", calls.Add(1))
	completes(t, all[0], key, "new")
	for _, n := range all {
		hit(t, n, key)
		nodetest.Eventually(t, soon, "the node to say that Redis is used", n.Cache.Degraded)
	}
	t.Logf("hits after %v", time.Since(start).Round(time.Millisecond))
}

// price compares what a repeat takes through a node and behind it, in turns, so that
// a busy machine slows both down: medians.
func price(t testing.TB, n *nodetest.Node, key string) (through, behind time.Duration) {
	t.Helper()
	const turns = 41
	var took [2][]time.Duration
	for range turns {
		for i, s := range []claim.Store{n, n.Behind} {
			start := time.Now()
			begins(t, s, key)
			took[i] = append(took[i], time.Since(start))
		}
	}
	for i := range took {
		slices.Sort(took[i])
	}
	through, behind = took[0][turns/2], took[1][turns/2]
	t.Logf("a repeat takes %v, %v behind; at most %v, %v", through, behind, took[0][turns-1], took[1][turns-1])
	return through, behind
}

// H31: with Redis away, be it that there is none or that it is dead, a node that never
// met the keys serves repeats by reads, not by raft writes: it goes by the namespace's
// own share of repeats.
func TestH31RepeatsAreReadWithoutRedis(t *testing.T) {
	t.Parallel()
	etcd, redis := etcdtest.Start(t, 1), redistest.Start(t)
	worker := nodetest.Start(t, nodetest.Options{Client: etcd.Client()})
	const repeats = 360
	var working sync.WaitGroup
	for part := range 8 {
		working.Go(func() {
			for i := part; i < repeats; i += 8 {
				completes(t, worker, fmt.Sprintf("done-%d", i), "done")
			}
		})
	}
	working.Wait()
	ask := func(t *testing.T, n *nodetest.Node, from string) {
		for i := range repeats {
			if a := begins(t, n, fmt.Sprintf("done-%d", i)); a.Verdict != claim.Replay {
				t.Fatalf("verdict %d", a.Verdict)
			}
			if i%9 == 0 {
				if a := begins(t, n, fmt.Sprintf("%s-%d", from, i)); a.Verdict != claim.First {
					t.Fatalf("verdict %d", a.Verdict)
				}
			}
		}
		lost, read := n.Seen.Of("etcd begin lost"), n.Seen.Of("etcd read ok")
		t.Logf("%d repeats lost a raft write, %d reads", lost, read)
		if lost > repeats/10 || read < repeats*8/10 {
			t.Errorf("%d of %d repeats cost a raft write: %v", lost, repeats, n.Seen)
		}
	}
	t.Run("none", func(t *testing.T) {
		ask(t, nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Idle: true}), "none")
	})
	t.Run("dead", func(t *testing.T) {
		n := nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Redis: standalone(redis.Addr()), Idle: true})
		redis.Kill()
		ask(t, n, "dead")
	})
}

// Section 6: what Redis knows decides what is tried first in etcd. A mark has the key
// read; nothing at all has it written, also where most calls are repeats.
func TestRedisSaysWhatIsTriedFirst(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	all := nodes(t, standalone(redis.Addr()))
	const some = 30
	for i := range some {
		begins(t, all[0], fmt.Sprintf("held-%d", i))
	}
	for i := range some {
		if a := begins(t, all[1], fmt.Sprintf("held-%d", i)); a.Verdict != claim.InProgress {
			t.Fatalf("verdict %d", a.Verdict)
		}
	}
	if lost, read := all[1].Seen.Of("etcd begin lost"), all[1].Seen.Of("etcd read ok"); lost > some/10 || read < some*9/10 {
		t.Errorf("marked: %d writes lost, %d reads", lost, read)
	}
	before := all[1].Seen.Of("etcd read ok")
	for i := range some {
		begins(t, all[1], fmt.Sprintf("new-%d", i))
	}
	if read := all[1].Seen.Of("etcd read ok") - before; read > some/10 {
		t.Errorf("%d of %d new keys were read first: %v", read, some, all[1].Seen)
	}
}
