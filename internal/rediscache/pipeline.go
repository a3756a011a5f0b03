package rediscache

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"
)

// command is one thing to be done to one key.
type command struct {
	key string
	// script is run with args; nil: args are a whole command.
	script *redis.Script
	args   []any
	size   int64 // bytes, roughly
	// gone reports that nobody waits for the answer any more; nil: somebody does.
	gone func() bool
	// done is told the answer, once, by a worker of the lane or by who submits; it does
	// not block.
	done func(answer string, err error)

	answer string
	err    error
}

// overhead is what a command takes besides its entry, roughly, in bytes.
const overhead = 256

// A command that was not carried out ended with one of these, or with what Redis or
// the way to it said.
var (
	errOpen = errors.New("the breaker is open")
	errGone = errors.New("nobody waits for it")
	// errCrowded: as much waits for Redis as may.
	errCrowded = errors.New("the queue is full")
	errPanic   = errors.New("panic")
	// errSlow counts against Redis although it answered.
	errSlow = errors.New("an answer came late")
)

const (
	// mostTogether and mostBytes bound a pipeline; mostQueued and mostQueuedBytes what
	// waits for one, in each lane.
	mostTogether    = 128
	mostBytes       = 1 << 20
	mostQueued      = 8192
	mostQueuedBytes = 64 << 20
	// callWithin bounds a pipeline. It is well over what a caller waits: to give up a
	// connection costs more than a late answer.
	callWithin = 100 * time.Millisecond
	// largeAnswers take their time, and large entries: a pipeline with so many bytes of
	// them is never late.
	largeAnswers = 128 << 10
	// drainWithin bounds what is still sent at the end.
	drainWithin = time.Second
)

// lane has commands of many calls share pipelines: what arrives while its workers
// wait for Redis goes out with the next one; on an idle lane a command goes at once.
type lane struct {
	name     string
	client   redis.UniversalClient
	breaker  *gobreaker.CircuitBreaker[struct{}]
	observe  Observer
	panicked func(value any, stack []byte)
	// late is told of commands that were answered late or not at all, in a lane in which
	// somebody waits; nil: nobody does, and no answer is late.
	late func([]*command)

	queue  chan *command
	queued atomic.Int64 // bytes
	// usual is how large an answer is, in bytes, as a moving average: a question counts as
	// its answer, which is what a pipeline of questions takes its time for.
	usual atomic.Int64
}

// question makes the command of a caller that waits for the answer.
func (l *lane) question(c *command) *command {
	c.size = overhead + l.usual.Load()
	return c
}

// submit queues a command; its done is told whatever happens.
func (l *lane) submit(c *command) {
	if l.breaker.State() == gobreaker.StateOpen {
		c.done("", errOpen)
		return
	}
	if l.queued.Add(c.size) > mostQueuedBytes {
		l.queued.Add(-c.size)
		c.done("", errCrowded)
		return
	}
	select {
	case l.queue <- c:
	default:
		l.queued.Add(-c.size)
		c.done("", errCrowded)
	}
}

// work sends pipelines until ctx ends, and then what is queued.
func (l *lane) work(ctx context.Context) {
	calls := context.WithoutCancel(ctx)
	for ctx.Err() == nil {
		select {
		case c := <-l.queue:
			runtime.Gosched() // who asks at the same time goes with it
			l.send(calls, l.gather(c))
		case <-ctx.Done():
		}
	}
	calls, cancel := context.WithTimeout(calls, drainWithin)
	defer cancel()
	for {
		select {
		case c := <-l.queue:
			l.send(calls, l.gather(c))
		default:
			return
		}
	}
}

// gather takes what waits, first first.
func (l *lane) gather(first *command) []*command {
	batch, size := []*command{first}, first.size
	for len(batch) < mostTogether && size < mostBytes {
		select {
		case c := <-l.queue:
			batch = append(batch, c)
			size += c.size
		default:
			l.queued.Add(-size)
			return batch
		}
	}
	l.queued.Add(-size)
	return batch
}

// send carries out a batch and tells each member.
func (l *lane) send(ctx context.Context, batch []*command) {
	wanted := batch[:0]
	for _, c := range batch {
		if c.gone != nil && c.gone() {
			c.err = errGone
			l.tell(c)
			continue
		}
		wanted = append(wanted, c)
	}
	if len(wanted) == 0 {
		return
	}
	_, err := l.breaker.Execute(func() (struct{}, error) { return struct{}{}, l.exec(ctx, wanted) })
	refused := errors.Is(err, gobreaker.ErrOpenState) || errors.Is(err, gobreaker.ErrTooManyRequests)
	for _, c := range wanted {
		if refused {
			c.err = errOpen
		}
		l.tell(c)
	}
}

// tell tells a command how it ended. Whatever comes of that must not end the worker.
func (l *lane) tell(c *command) {
	defer func() {
		if p := recover(); p != nil {
			l.panicked(p, debug.Stack())
		}
	}()
	c.done(c.answer, c.err)
}

// exec sends one pipeline and returns what it says of Redis, nil if that is well.
func (l *lane) exec(ctx context.Context, batch []*command) (health error) {
	defer func() {
		if p := recover(); p != nil {
			l.panicked(p, debug.Stack())
			health = errPanic
			for _, c := range batch {
				c.answer, c.err = "", errPanic
			}
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	began := time.Now()
	l.pipe(ctx, batch, false)
	// A server that restarted, or a new master, knows no scripts: those go whole.
	var unknown []*command
	for _, c := range batch {
		if redis.HasErrorPrefix(c.err, "NOSCRIPT") {
			unknown = append(unknown, c)
		}
	}
	if len(unknown) > 0 {
		l.pipe(ctx, unknown, true)
	}
	took := time.Since(began)
	waited, left, bytes, sent := 0, 0, int64(0), int64(0)
	for _, c := range batch {
		if ofRedis(c.err) {
			health = c.err
		}
		if c.gone != nil {
			waited++
			if c.gone() {
				left++
			}
		}
		bytes += int64(len(c.answer))
		sent += c.size
	}
	l.usual.Add((bytes/int64(len(batch)) - l.usual.Load()) / 8)
	// A write that is late says as much as an ask: were it to count as well, a slow Redis
	// would be asked for as long as it is written to as often.
	if health == nil && bytes+sent < largeAnswers && tooLate(took, waited, left) {
		health = fmt.Errorf("%w: after %v", errSlow, took.Round(time.Millisecond))
	}
	if l.late != nil && (ailsInTime(health) || bytes > mostEntry) {
		l.late(batch)
	}
	l.observe.Pipeline(l.name, len(batch), took, health == nil)
	return health
}

// ailsInTime reports whether what ails Redis is the time it takes.
func ailsInTime(health error) bool {
	timeout, ok := errors.AsType[net.Error](health)
	return errors.Is(health, errSlow) || errors.Is(health, context.DeadlineExceeded) || ok && timeout.Timeout()
}

// tooLate reports whether a pipeline that was answered was of no use: all who waited
// have left, or, where nobody waited, somebody would have.
func tooLate(took time.Duration, waited, left int) bool {
	if waited > 0 {
		return left == waited && took > askWithin
	}
	return took > slowAfter
}

// pipe sends these commands together; whole sends scripts with their text. What several
// ask of one key goes once.
func (l *lane) pipe(ctx context.Context, batch []*command, whole bool) {
	pipe := l.client.Pipeline()
	sent := make([]*redis.Cmd, len(batch))
	type question struct{ verb, key any }
	asked := map[question]*redis.Cmd{}
	for i, c := range batch {
		switch {
		case c.script == nil:
			q := question{c.args[0], c.key}
			if asked[q] == nil {
				asked[q] = pipe.Do(ctx, c.args...)
			}
			sent[i] = asked[q]
		case whole:
			sent[i] = c.script.Eval(ctx, pipe, []string{c.key}, c.args...)
		default:
			sent[i] = c.script.EvalSha(ctx, pipe, []string{c.key}, c.args...)
		}
	}
	_, failed := pipe.Exec(ctx)
	for i, c := range batch {
		if failed != nil && sent[i].Err() == nil && sent[i].Val() == nil {
			c.err = failed // it was never sent: there was no connection
			continue
		}
		c.answer, c.err = sent[i].Text()
	}
}

// ofRedis reports whether an error speaks of Redis or the way to it, and not of the
// key that was asked for.
func ofRedis(err error) bool {
	return err != nil && !errors.Is(err, redis.Nil) && !ofKey(err)
}

// ofKey reports whether the key holds another type than a string.
func ofKey(err error) bool { return redis.HasErrorPrefix(err, "WRONGTYPE") }
