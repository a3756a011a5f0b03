package dualcheck

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/mem"
)

// ErrCopyTooLarge ends a Watch whose namespace has more than its copy may hold; see
// WithMaxKeys and WithMaxBytes.
const ErrCopyTooLarge Reason = "COPY_TOO_LARGE"

// Watch keeps a copy of a namespace's records in this process, as a front-end's cache.
// It connects, resumes and begins anew by itself until it is closed, its context or its
// Client ends, or it meets what trying again cannot mend.
//
// The copy comes to hold what etcd holds, and each key's changes are applied in their
// order; it is always a little behind, and Fresh says whether by too much. So it may
// spare a question, and never allows work to begin: only Begin decides that.
//
// All methods may be called by many at once. Get waits for no more than the change of
// one key, and Fresh for nothing.
type Watch struct {
	client *Client
	cfg    watchConfig
	ns     string
	cancel context.CancelFunc
	began  time.Time

	synced chan struct{} // closed: a first snapshot is complete
	done   chan struct{} // closed: nothing of this runs any more
	closed atomic.Bool   // by Close

	// fresh is when the copy was last known to have all that the server had, as
	// nanoseconds since began and 1 more; 0 while that means nothing.
	fresh atomic.Int64

	mu   sync.Mutex // of what follows, and of all that changes the copy
	copy localCopy
	// token is of the last message that was handled, "" for a snapshot. It is not set
	// within one: who is cut off in a snapshot needs all of it.
	token    string
	whole    bool // the copy: a first snapshot is complete, and no other was begun since
	status   WatchStatus
	end      *Error // why it ended
	quiet    bool   // it was told that nothing is heard
	watchers map[*changeQueue]struct{}
}

// WatchOption configures a Watch.
type WatchOption func(*watchConfig)

type watchConfig struct {
	prefix    string
	values    bool
	mostKeys  int
	mostBytes int64
	queue     int
}

// WithKeyPrefix watches the keys that begin so. Default: all of the namespace.
func WithKeyPrefix(prefix string) WatchOption { return func(c *watchConfig) { c.prefix = prefix } }

// WithValues keeps records whole, with results and failures: see Entry. Default: what
// Entry has fields for.
func WithValues() WatchOption { return func(c *watchConfig) { c.values = true } }

// WithMaxKeys sets how many keys the copy may hold; one more ends the Watch with
// ErrCopyTooLarge. Default: 1,000,000.
func WithMaxKeys(n int) WatchOption { return func(c *watchConfig) { c.mostKeys = n } }

// WithMaxBytes sets how much memory the copy may take, about; more ends the Watch with
// ErrCopyTooLarge. A key takes 200 bytes, its name, and with WithValues its record.
// Default: 1 GiB.
func WithMaxBytes(n int64) WatchOption { return func(c *watchConfig) { c.mostBytes = n } }

// WithQueueBytes sets how much may wait for one who ranges over Changes; with more, what
// waits is given up, and a ChangeResync told in its place. Default: 16 MiB.
func WithQueueBytes(n int) WatchOption { return func(c *watchConfig) { c.queue = n } }

const (
	// watchSilence is for how long nothing may be heard: the server has something to
	// say every few seconds at least.
	watchSilence = 15 * time.Second
	// expireEvery is how often what has expired is dropped.
	expireEvery = time.Second
)

var watchDesc = grpc.StreamDesc{StreamName: "Watch", ServerStreams: true}

// errSilent is why a stream was cut.
var errSilent = errors.New("dualcheck: nothing was heard")

// Watch begins a Watch, which goes on until ctx ends, so ctx is not that of a request.
// It returns at once; Synced waits for the copy.
func (c *Client) Watch(ctx context.Context, namespace string, opts ...WatchOption) (*Watch, error) {
	cfg := watchConfig{mostKeys: 1_000_000, mostBytes: 1 << 30, queue: 16 << 20}
	for _, opt := range opts {
		opt(&cfg)
	}
	if namespace == "" {
		return nil, invalid(ErrNamespaceInvalid, "namespace", "name a namespace")
	}
	if e := text(ErrNamespaceInvalid, "namespace", namespace); e != nil {
		return nil, e
	}
	if e := text(ErrKeyInvalid, "key_prefix", cfg.prefix); e != nil {
		return nil, e
	}
	if cfg.mostKeys < 1 || cfg.mostBytes < 1 || cfg.queue < 1 {
		return nil, invalid(ErrRequestInvalid, "", "a copy and a queue have room for something")
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &Watch{
		client: c, cfg: cfg, ns: namespace, cancel: cancel, began: time.Now(),
		synced: make(chan struct{}), done: make(chan struct{}),
		watchers: make(map[*changeQueue]struct{}),
	}
	w.copy.init(cfg.mostKeys, cfg.mostBytes, w.tell)
	// Under the lock: once Close has said that it waits, no goroutine may be added.
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle != nil {
		cancel()
		return nil, closedError()
	}
	c.working.Go(func() { w.run(ctx) })
	return w, nil
}

// Close ends the Watch and waits until nothing of it runs. What the copy holds can still
// be read; it is never Fresh again.
func (w *Watch) Close() error {
	w.closed.Store(true)
	w.cancel()
	<-w.done
	return nil
}

// Done is closed when the Watch has ended; Err then says why.
func (w *Watch) Done() <-chan struct{} { return w.done }

// Err is why the Watch has ended: ErrClosed if it or its Client was closed. It is nil
// while the Watch goes on, also while no server can be reached: see Status.
func (w *Watch) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.end == nil {
		return nil
	}
	return w.end
}

// Synced waits until a first snapshot is complete. It returns the error of ctx, joined
// with what was met last, or what Err does.
func (w *Watch) Synced(ctx context.Context) error {
	select {
	case <-w.done:
		return w.Err()
	case <-w.synced:
		if err := w.Err(); err != nil {
			return err // both came, and this counts
		}
		return nil
	case <-ctx.Done():
		w.mu.Lock()
		last, _ := errors.AsType[*Error](w.status.Err)
		w.mu.Unlock()
		return contextError(ctx, last)
	}
}

// Get is what the copy has of a key. Nothing: the key is not known, or has expired by
// this process's clock. It is as old as Age says.
func (w *Watch) Get(key string) (Entry, bool) {
	it := w.copy.get(key)
	if it == nil || it.until != 0 && time.Now().UnixNano() >= it.until {
		return Entry{}, false
	}
	return it.entry(), true
}

// Len is how many keys the copy holds, such as have just expired included.
func (w *Watch) Len() int { return int(w.copy.keys.Load()) }

// All ranges over what the copy has, in no order, each key at most once. The copy is
// not held still: a change meanwhile may be shown or not.
func (w *Watch) All() iter.Seq2[string, Entry] { return w.copy.all() }

// Age is for how long the copy may have missed what happened, but for some 3 s that a
// server may take to notice that it is cut off from etcd. It begins at 0 whenever the
// server says that it has told all that there was a moment ago. It is the largest Duration
// there is before that was so at first, while what is held is void and another snapshot
// comes, and once the Watch has ended.
func (w *Watch) Age() time.Duration {
	if at := w.fresh.Load(); at > 0 {
		return max(time.Since(w.began)-time.Duration(at-1), 0)
	}
	return math.MaxInt64
}

// Fresh says whether the copy has all that happened until d ago. The server says
// something every few seconds even if nothing happens, so d is 10 s or so.
func (w *Watch) Fresh(d time.Duration) bool {
	age := w.Age()
	return age <= d && age != math.MaxInt64
}

// WatchStatus is how a Watch is doing.
type WatchStatus struct {
	// Synced: the copy is whole. It is not before the first snapshot is complete, and
	// not while another one comes, during which what was held before is still served.
	Synced bool
	// Connected: something was heard on the stream that is open.
	Connected bool
	// Server is that of the stream, or of the last one.
	Server string
	// Heard is when something was last heard; zero: never yet.
	Heard time.Time
	// Resyncs is how often the server began a snapshot, the first not counted; Cause is
	// why it began the last.
	Resyncs int
	Cause   string
	// Err is what ended the last stream, nil while Connected.
	Err error
	// Keys and Bytes are what the copy holds.
	Keys  int
	Bytes int64
}

// Status is how the Watch is doing.
func (w *Watch) Status() WatchStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.status
	s.Synced, s.Keys, s.Bytes = w.whole, w.Len(), w.copy.bytes
	return s
}

// run follows one server after another.
func (w *Watch) run(ctx context.Context) {
	defer close(w.done)
	stop := context.AfterFunc(w.client.ctx, w.cancel)
	defer stop()
	var expiring sync.WaitGroup
	expiring.Go(func() { w.expire(ctx) })
	defer expiring.Wait()
	defer w.cancel()

	servers := w.client.servers
	without := make(map[*server]bool) // servers that have no Watch
	failures := 0
	// Any server is as good: at random, so that many Watches spread.
	for i := rand.IntN(len(servers)); ; i++ {
		s := servers[i%len(servers)]
		lived, e := w.follow(ctx, s)
		if ctx.Err() != nil {
			w.ended(ctx, nil)
			return
		}
		if e.Code == codes.Unimplemented {
			// While a cluster is being upgraded some servers have no Watch yet.
			without[s] = true
		} else if lived > 0 {
			clear(without)
		}
		if len(without) == len(servers) || !w.mendable(e) {
			w.ended(ctx, e)
			return
		}
		// Short streams do not count as success: a server that breaks off each snapshot
		// is not to be asked for one ten times a second.
		if lived > longestWait {
			failures = 0
		}
		// Each server is tried once before the pauses grow.
		wait := pause(1+failures/len(servers), e.RetryAfter)
		failures++
		w.client.log.Debug("watch will be resumed", slog.String("namespace", w.ns), slog.String("server", s.addr),
			slog.Duration("wait", wait), slog.String("error", e.Error()))
		w.warn(e)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			w.ended(ctx, nil)
			return
		}
	}
}

// warn tells once that the copy grows old, when nothing has been heard for a while.
func (w *Watch) warn(e *Error) {
	w.mu.Lock()
	heard := w.status.Heard
	if heard.IsZero() {
		heard = w.began
	}
	quiet := time.Since(heard)
	told := w.quiet
	w.quiet = told || quiet >= watchSilence
	now := w.quiet
	w.mu.Unlock()
	if now && !told {
		w.client.log.Warn("nothing is heard of what is watched: its copy grows old until a server answers", slog.String("namespace", w.ns),
			slog.Duration("since", quiet.Round(time.Second)), slog.String("error", e.Error()))
	}
}

// mendable says whether trying again, here or elsewhere, may help.
func (w *Watch) mendable(e *Error) bool {
	switch e.Code {
	case codes.InvalidArgument:
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.token != "" && (e.Reason == ErrTokenInvalid || e.Field == "resume_token") {
			w.token = "" // it is the token that is refused: a snapshot mends that
			return true
		}
		return false
	case codes.OutOfRange, codes.NotFound, codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated:
		return false
	case codes.ResourceExhausted:
		return e.Reason != ErrCopyTooLarge
	}
	return true // Unimplemented is counted by run
}

// ended notes why the Watch is over.
func (w *Watch) ended(ctx context.Context, e *Error) {
	switch {
	case e != nil:
		w.client.log.Warn("watch has ended", slog.String("namespace", w.ns), slog.String("error", e.Error()))
	case w.closed.Load():
		e = &Error{Reason: ErrClosed, Code: codes.Canceled, Message: "the watch was closed"}
	case w.client.ctx.Err() != nil:
		e = closedError()
	default:
		e = contextError(ctx, nil)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.end, w.status.Err, w.status.Connected, w.whole = e, e, false, false
	w.fresh.Store(0)
}

// follow opens a stream and applies what it brings until it ends, which it always does
// with an error. It returns for how long something was heard.
func (w *Watch) follow(ctx context.Context, s *server) (lived time.Duration, e *Error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(watchSilence, func() { cancel(errSilent) })
	defer silent.Stop()
	w.mu.Lock()
	w.status.Server = s.addr
	request := w.request()
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.status.Connected, w.status.Err = false, e
	}()

	if s.conn.GetState() == connectivity.TransientFailure {
		s.redial()
	}
	stream, err := s.conn.NewStream(ctx, &watchDesc, "/dualcheck.v1.WatchService/Watch",
		grpc.ForceCodecV2(packetCodec{}), grpc.MaxCallRecvMsgSize(mostReceived))
	if err == nil {
		err = stream.SendMsg(&packet{mem.SliceBuffer(request)})
	}
	if err == nil {
		err = stream.CloseSend()
	}
	if errors.Is(err, io.EOF) {
		err = nil // the stream is over already; receiving tells why
	}
	var first time.Time
	var in incoming
	for err == nil {
		var p packet
		if err = stream.RecvMsg(&p); err != nil {
			break
		}
		silent.Reset(watchSilence)
		if first.IsZero() {
			first = time.Now()
		}
		e := w.take(p.data.ReadOnlyData(), &in)
		p.data.Free()
		if e != nil {
			return time.Since(first), e
		}
	}
	if !first.IsZero() {
		lived = max(time.Since(first), 1)
	}
	switch {
	case errors.Is(context.Cause(ctx), errSilent):
		return lived, &Error{Reason: ErrConnectionLost, Code: codes.Unavailable, cause: errSilent,
			Message: fmt.Sprintf("nothing was heard of %s for %v", s.addr, watchSilence)}
	case errors.Is(err, io.EOF):
		return lived, &Error{Reason: ErrConnectionLost, Code: codes.Unavailable, Message: s.addr + " ended the stream"}
	}
	return lived, errorOf(err)
}

// take applies a message, all of it or nothing.
func (w *Watch) take(b []byte, in *incoming) *Error {
	now := time.Now()
	if !in.decode(b) {
		return unreadable("what a watch told")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.quiet {
		w.quiet = false
		w.client.log.Warn("what is watched is heard of again", slog.String("namespace", w.ns))
	}
	w.status.Heard, w.status.Connected, w.status.Err = now, true, nil
	if in.begin {
		if w.copy.generation > 0 {
			w.status.Resyncs++
		}
		w.status.Cause = in.cause
		w.copy.begin()
		w.token, w.whole = "", false
		in.begun = true
		w.fresh.Store(0)
	}
	for _, ev := range in.events {
		if ev.deleted {
			w.copy.remove(ev.key, ev.revision)
		} else {
			w.copy.put(ev.item)
		}
	}
	if w.copy.full() {
		return &Error{Reason: ErrCopyTooLarge, Code: codes.ResourceExhausted,
			Message: fmt.Sprintf("there is more to copy than WithMaxKeys (%d) or WithMaxBytes (%d) allow: watch a key prefix, or raise them",
				w.cfg.mostKeys, w.cfg.mostBytes)}
	}
	// An end that has no beginning on this stream ends nothing.
	if in.end && in.begun && w.copy.building {
		w.copy.end()
		w.whole = true
		select {
		case <-w.synced:
		default:
			close(w.synced)
		}
		for q := range w.watchers {
			q.void(w.status.Cause)
		}
	}
	if w.copy.building {
		return nil
	}
	if in.token != "" {
		w.token = in.token
	}
	// Any message says that the server is there; progress alone that it is in step with
	// etcd and has told all.
	if in.progress && w.whole {
		w.fresh.Store(int64(now.Sub(w.began)) + 1)
	}
	return nil
}

// expire drops what has expired, now and then.
func (w *Watch) expire(ctx context.Context) {
	ticker := time.NewTicker(expireEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			w.mu.Lock()
			w.copy.expire(time.Now())
			w.mu.Unlock()
		case <-ctx.Done():
			return
		}
	}
}
