package dualcheck

import (
	"context"
	"encoding/hex"
	"log/slog"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// call is one logical call: encoded once, and sent as often as need be. It is used
// again for another once it was answered; one that its caller left is not.
type call struct {
	kind kind
	// body is the request.
	body []byte
	key  Key
	hash uint64
	// deadline is the caller's, zero if it has none.
	deadline time.Time
	retries  uint32
	avoid    *server
	trace    [55]byte // traceparent
	traced   bool
	// alone: sent by itself, as the stream that it shared was refused.
	alone bool
	// doubt: an earlier try may have been carried out.
	doubt bool

	// Under the session's lock while it is in one.
	id    uint64
	state callState
	sent  time.Time
	// answer is what came, as the field of that number in SessionAnswer; or err is.
	field  protowire.Number
	answer []byte
	err    *Error

	// done has one signal for each try that ended while its caller waited.
	done chan struct{}
}

type callState uint8

const (
	queued callState = iota
	flying
	settled
)

// mostKept is how large a buffer may be to be used again.
const mostKept = 64 << 10

func (c *Client) newCall(ctx context.Context, k kind, key *Key) *call {
	cl, ok := c.calls.Get().(*call)
	if !ok {
		cl = &call{done: make(chan struct{}, 1)}
	}
	cl.kind, cl.key, cl.hash = k, *key, hashOf(key.Namespace, key.Key)
	cl.deadline, _ = ctx.Deadline()
	cl.traced = cl.takeTrace(trace.SpanContextFromContext(ctx))
	return cl
}

// free gives a call that is over back.
func (c *Client) free(cl *call) {
	body, done := cl.body[:0], cl.done
	if cap(body) > mostKept {
		body = nil
	}
	*cl = call{body: body, done: done}
	c.calls.Put(cl)
}

// takeTrace writes the traceparent of a span, if it is one.
func (cl *call) takeTrace(s trace.SpanContext) bool {
	if !s.IsValid() {
		return false
	}
	t, id := s.TraceID(), s.SpanID()
	b := append(cl.trace[:0], "00-"...)
	b = append(hex.AppendEncode(b, t[:]), '-')
	b = append(hex.AppendEncode(b, id[:]), '-')
	hex.AppendEncode(b, []byte{byte(s.TraceFlags())})
	return true
}

// enter waits for room; Complete, Fail and Extend never do.
func (c *Client) enter(ctx context.Context) *Error {
	if c.closing.Load() {
		return closedError()
	}
	if err := c.room.Acquire(ctx, 1); err != nil {
		e := contextError(ctx, nil)
		e.Message += ", waiting for room among the calls under way"
		return e
	}
	return nil
}

// Begin asks whether a piece of work has been done and may give the claim to do it. Its
// request id is made anew for each Begin and kept through its retries, so that a claim
// whose answer was lost is the same claim again, marked as a repeat.
func (c *Client) Begin(ctx context.Context, key Key, opts ...CallOption) (*Outcome, error) {
	o := gather(opts)
	out, e := c.ask(ctx, &key, &o)
	if e != nil {
		return nil, e
	}
	return out, nil
}

func (c *Client) ask(ctx context.Context, key *Key, o *callOptions) (*Outcome, *Error) {
	e := checkName(key)
	if e == nil {
		e = text(ErrOperationInvalid, "operation", key.Operation)
	}
	if e == nil {
		e = text(ErrRequestIDInvalid, "request_id", o.requestID)
	}
	if e == nil {
		e = texts(ErrLabelsInvalid, "labels", o.labels)
	}
	if e == nil {
		e = c.enter(ctx)
	}
	if e != nil {
		return nil, e
	}
	defer c.room.Release(1)
	cl := c.newCall(ctx, kindBegin, key)
	cl.body = appendBegin(cl.body, key, c.owner, o)
	if e := c.send(ctx, cl, c.tries); e != nil {
		return nil, e
	}
	out, e := decodeBegin(cl.answer, key, cl.sent)
	c.free(cl)
	return out, e
}

// Complete stores the result: the key is finished for good. It is tried until its
// context ends or, without a deadline, for WithFinishPatience: the work is done, and
// what came of it must be stored. Repeating the same Complete is right.
func (c *Client) Complete(ctx context.Context, claim *Claim, result Result) (*Stored, error) {
	e := checkClaim(claim)
	if e == nil {
		e = text(ErrResultInvalid, "result.content_type", result.ContentType)
	}
	if e == nil {
		e = texts(ErrResultInvalid, "result.metadata", result.Metadata)
	}
	if e != nil {
		return nil, e
	}
	if !result.Omitted && result.wireSize() > mostResult {
		result = Result{Omitted: true, Size: int64(len(result.Body)), Digest: result.digest()}
	}
	cl := c.newCall(ctx, kindComplete, &claim.Key)
	cl.body = appendComplete(cl.body, claim, &result)
	return c.end(ctx, cl)
}

// Fail ends the claim by the failure's class: it frees the key, stores the failure, or
// holds the key. It is tried as Complete is. Message and details over what the contract
// allows are cut.
func (c *Client) Fail(ctx context.Context, claim *Claim, failure Failure) (*Stored, error) {
	if e := checkClaim(claim); e != nil {
		return nil, e
	}
	cl := c.newCall(ctx, kindFail, &claim.Key)
	var err error
	// Failures are rare: the generated code writes them.
	cl.body, err = proto.MarshalOptions{}.MarshalAppend(cl.body, &dualcheckv1.FailRequest{
		Namespace: claim.Key.Namespace, Key: claim.Key.Key, Token: claim.Token,
		Failure: &dualcheckv1.Failure{
			Class: dualcheckv1.FailureClass(failure.Class), Code: failure.Code,
			Message: cut(failure.Message), Details: fitting(failure.Details),
		},
	})
	if err != nil {
		c.free(cl)
		return nil, invalid(ErrFailureInvalid, "failure", "%v", err)
	}
	return c.end(ctx, cl)
}

// end sends a finish until it is answered.
func (c *Client) end(ctx context.Context, cl *call) (*Stored, error) {
	if e := c.finish(); e != nil {
		return nil, e
	}
	defer c.finished()
	if e := c.send(ctx, cl, untilDeadline); e != nil {
		return nil, e
	}
	stored, e := decodeStored(cl.answer)
	c.free(cl)
	if e != nil {
		return nil, e
	}
	return stored, nil
}

// Extend moves the claim's deadline to now and lease, never back; a lease of 0 is the
// namespace's default. The claim is changed.
func (c *Client) Extend(ctx context.Context, claim *Claim, lease time.Duration) error {
	return c.extend(ctx, claim, lease, c.tries)
}

func (c *Client) extend(ctx context.Context, claim *Claim, lease time.Duration, tries int) error {
	if e := checkClaim(claim); e != nil {
		return e
	}
	cl := c.newCall(ctx, kindExtend, &claim.Key)
	cl.body = appendExtend(cl.body, claim, lease)
	if e := c.send(ctx, cl, tries); e != nil {
		return e
	}
	left, e := decodeExtend(cl.answer)
	sent := cl.sent
	c.free(cl)
	if e != nil {
		return e
	}
	claim.extended(sent.Add(left))
	return nil
}

// Get reads a record as it is now. With Cached, that there is no such key may have been
// true up to 3 s ago.
func (c *Client) Get(ctx context.Context, key Key, opts ...CallOption) (*Stored, error) {
	o := gather(opts)
	e := checkName(&key)
	if e == nil {
		e = c.enter(ctx)
	}
	if e != nil {
		return nil, e
	}
	defer c.room.Release(1)
	cl := c.newCall(ctx, kindGet, &key)
	cl.body = appendGet(cl.body, &key, o.cached)
	if e := c.send(ctx, cl, c.tries); e != nil {
		return nil, e
	}
	stored, e := decodeStored(cl.answer)
	c.free(cl)
	if e != nil {
		return nil, e
	}
	return stored, nil
}

// unreachableWait is how long is waited at most before a server is dialled again.
const unreachableWait = 500 * time.Millisecond

// untilDeadline is a number of tries without end: the deadline ends them.
const untilDeadline = 1 << 30

// send tries a call until it is answered. A call that ends otherwise is never used
// again: a frame may be in the making that it is in.
func (c *Client) send(ctx context.Context, cl *call, tries int) *Error {
	end := cl.deadline
	if end.IsZero() && tries == untilDeadline {
		end = time.Now().Add(c.patience)
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, end)
		defer cancel()
	}
	for n := 1; ; n++ {
		e := c.try(ctx, cl)
		if e == nil {
			return nil
		}
		if e.local == refusedTogether {
			cl.alone = true
		}
		cl.doubt = cl.doubt || e.MaybeAccepted || e.Reason == ErrStoreUnavailable
		next, wait := again(e), pause(n, e.RetryAfter)
		// Where nothing could be sent there was no try: it goes on for as long as the
		// caller has said that it waits.
		unsent := e.Reason == ErrUnreachable && !end.IsZero()
		if unsent {
			wait = min(wait, unreachableWait)
		}
		if next != never && ctx.Err() != nil {
			next, e = never, contextError(ctx, e)
		}
		if next == never || n >= tries && !unsent || !end.IsZero() && time.Until(end) <= wait {
			e.Tries, e.MaybeAccepted = n, cl.doubt
			return e
		}
		c.retrying(ctx, cl, n, wait, e)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			e = contextError(ctx, e)
			e.Tries, e.MaybeAccepted = n, cl.doubt
			return e
		case <-c.closed:
			timer.Stop()
			e = closedError()
			e.Tries, e.MaybeAccepted = n, cl.doubt
			return e
		}
		cl.retries++
		if next == here {
			cl.avoid = nil
		}
	}
}

// retrying tells of a retry.
func (c *Client) retrying(ctx context.Context, cl *call, n int, wait time.Duration, e *Error) {
	level := slog.LevelDebug
	if n > 1 {
		level = slog.LevelWarn
	}
	if c.log.Enabled(ctx, level) {
		c.log.LogAttrs(ctx, level, "dualcheck call is sent again", slog.String("method", methods[cl.kind].name),
			slog.String("namespace", cl.key.Namespace), slog.Int("retry_count", n), slog.Duration("wait", wait),
			slog.String("reason", string(e.Reason)), slog.String("error", e.Message))
	}
	if c.observer != nil {
		c.observer.Retrying(Retry{Method: methods[cl.kind].name, Key: cl.key, Tries: n, Wait: wait, Err: e})
	}
}

// try sends a call once and waits for the answer. What never left goes elsewhere at
// once: that is no try.
func (c *Client) try(ctx context.Context, cl *call) *Error {
	for {
		if ctx.Err() != nil {
			return contextError(ctx, nil)
		}
		to, in := c.pick(cl)
		if to == nil {
			changes := c.changes()
			if to, in = c.pick(cl); to == nil {
				if e := c.await(ctx, changes); e != nil {
					return e
				}
				continue
			}
		}
		cl.avoid = to // should it come back
		if in == nil || cl.alone {
			return c.unaryCall(ctx, to, cl)
		}
		if !in.enqueue(cl) {
			continue
		}
		select {
		case <-cl.done:
		case <-ctx.Done():
			if left, was := in.leave(cl); left {
				e := contextError(ctx, nil)
				e.MaybeAccepted = was == flying
				return e
			}
			<-cl.done // it was answered meanwhile
		}
		if e := cl.err; e != nil {
			cl.err = nil
			if e.local == notSent {
				continue
			}
			return e
		}
		switch cl.field {
		case methods[cl.kind].answer:
			return nil
		case answerError:
			return decodeError(cl.answer)
		}
		return unreadable("the answer")
	}
}

// unaryCall sends a call by itself.
func (c *Client) unaryCall(ctx context.Context, to *server, cl *call) *Error {
	if c.ctx.Err() != nil {
		return closedError()
	}
	pairs := []string{"dualcheck-retry-count", strconv.FormatUint(uint64(cl.retries), 10)}
	if cl.traced {
		pairs = append(pairs, "traceparent", string(cl.trace[:]))
	}
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(ctx, pairs...))
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	var in packet
	out := packet{mem.SliceBuffer(append([]byte(nil), cl.body...))} // gRPC may keep it
	cl.sent = time.Now()
	err := to.conn.Invoke(ctx, service+methods[cl.kind].name, &out, &in,
		grpc.ForceCodecV2(packetCodec{}), grpc.MaxCallRecvMsgSize(mostReceived))
	if err != nil {
		e := errorOf(err)
		if c.ctx.Err() != nil {
			e = closedError()
		} else if ctx.Err() != nil {
			e = contextError(ctx, nil)
		}
		switch e.Reason {
		case ErrCanceled, ErrDeadline, ErrConnectionLost, ErrClosed:
			e.MaybeAccepted = true
		}
		return e
	}
	cl.field, cl.answer = methods[cl.kind].answer, append([]byte(nil), in.data.ReadOnlyData()...)
	in.data.Free()
	return nil
}

func checkName(key *Key) *Error {
	if e := text(ErrNamespaceInvalid, "namespace", key.Namespace); e != nil {
		return e
	}
	return text(ErrKeyInvalid, "key", key.Key)
}

func checkClaim(claim *Claim) *Error {
	if claim == nil {
		return invalid(ErrTokenInvalid, "token", "there is no claim: only First brings one")
	}
	if e := checkName(&claim.Key); e != nil {
		return e
	}
	return text(ErrTokenInvalid, "token", claim.Token)
}

const (
	mostFailureMessage = 4 << 10
	mostFailureDetails = 8 << 10
)

// fitting returns the details that the contract has room for.
func fitting(details []*anypb.Any) []*anypb.Any {
	total := 0
	for i, d := range details {
		if total += len(d.GetTypeUrl()) + len(d.GetValue()); total > mostFailureDetails {
			return details[:i]
		}
	}
	return details
}

func grpcCode(v uint64) codes.Code {
	if v > uint64(codes.Unauthenticated) {
		return codes.Unknown
	}
	return codes.Code(v)
}
