package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// How long a call may take.
const (
	// callMost is for calls that wait for nothing; what Begin waits comes on top.
	callMost = 30 * time.Second
	// deleteMost is for a forced delete, which forgets a namespace's records.
	deleteMost = 10 * time.Minute
)

// calls is what every call goes through.
type calls struct {
	metrics *telemetry.Metrics
	log     *slog.Logger
	// outages and broken keep calls that meet an outage, or a record that cannot be
	// read, from filling the log; each on its own, so that neither hides the other.
	outages, broken seldom
	// running are calls and streams whose handlers have not returned.
	running atomic.Int64
	// degraded names the part that this node does without, "" if none; may be nil.
	degraded func() string
}

// seldom lets a line into the log now and then; leftOut counts what it kept out.
type seldom struct {
	limiter *rate.Limiter
	leftOut atomic.Int64
}

// allow reports whether the line may be written, and how many were left out before.
func (s *seldom) allow() (leftOut int64, ok bool) {
	if !s.limiter.Allow() {
		s.leftOut.Add(1)
		return 0, false
	}
	return s.leftOut.Swap(0), true
}

// warnEvery is how often calls that met the same kind of trouble are told of in the log.
const warnEvery = 5 * time.Second

func newCalls(metrics *telemetry.Metrics, log *slog.Logger) *calls {
	c := &calls{metrics: metrics, log: log}
	c.outages.limiter = rate.NewLimiter(rate.Every(warnEvery), 1)
	c.broken.limiter = rate.NewLimiter(rate.Every(warnEvery), 1)
	return c
}

// unary observes a call, keeps its deadline, and turns its error into a status.
func (c *calls) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	c.running.Add(1)
	defer c.running.Add(-1)
	began := time.Now()
	if retries(ctx) > 0 {
		c.metrics.Retried(methodLabel(info.FullMethod))
	}
	done := c.metrics.InFlight()
	err = c.guard(func() error {
		limited, cancel := context.WithTimeout(context.WithValue(ctx, callerKey{}, ctx), limit(req))
		defer cancel()
		resp, err = handler(limited, req)
		return err
	})
	done()
	c.tellDegraded(ctx)
	if err != nil {
		resp = nil
		err = c.fail(ctx, info.FullMethod, err)
	}
	c.observe(ctx, info.FullMethod, err, time.Since(began))
	return resp, err
}

// lasting are the streams that go on for as long as their clients want.
var lasting = map[string]bool{
	dualcheckv1.DedupService_Session_FullMethodName: true,
	dualcheckv1.WatchService_Watch_FullMethodName:   true,
}

// stream does the same for a stream, which has the deadline it brought. A session's
// calls are observed each on its own (session.go), and what a Watch sends is counted
// (watch.go): how long they lasted says nothing.
func (c *calls) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	c.running.Add(1)
	defer c.running.Add(-1)
	if lasting[info.FullMethod] {
		err := c.guard(func() error { return handler(srv, ss) })
		c.tellDegraded(ss.Context())
		if err != nil {
			err = c.fail(ss.Context(), info.FullMethod, err)
		}
		return err
	}
	began := time.Now()
	done := c.metrics.InFlight()
	err := c.guard(func() error { return handler(srv, ss) })
	done()
	c.tellDegraded(ss.Context())
	if err != nil {
		err = c.fail(ss.Context(), info.FullMethod, err)
	}
	c.observe(ss.Context(), info.FullMethod, err, time.Since(began))
	return err
}

// retriesHeader tells how often a call was sent before.
const retriesHeader = "dualcheck-retry-count"

// retries is how often a unary call says that it was sent before; 0 if it does not say
// so in a number of at most three digits.
func retries(ctx context.Context) uint32 {
	v := metadata.ValueFromIncomingContext(ctx, retriesHeader)
	if len(v) == 0 || len(v[0]) > 3 {
		return 0
	}
	n, err := strconv.ParseUint(v[0], 10, 32)
	if err != nil {
		return 0
	}
	return uint32(n)
}

// degradedHeader tells, in answers' trailers and in headers over HTTP, which part this
// node does without.
const degradedHeader = "dualcheck-degraded"

// tellDegraded puts into a call's trailer what this node does without.
func (c *calls) tellDegraded(ctx context.Context) {
	if c.degraded == nil {
		return
	}
	if part := c.degraded(); part != "" {
		_ = grpc.SetTrailer(ctx, metadata.Pairs(degradedHeader, part)) // fails only where no call is
	}
}

type callerKey struct{}

// callerOf returns the call's context as it came from the wire, without the
// server's own deadline.
func callerOf(ctx context.Context) context.Context {
	if caller, ok := ctx.Value(callerKey{}).(context.Context); ok {
		return caller
	}
	return ctx
}

// limit is how long a call may take at most.
func limit(req any) time.Duration {
	switch r := req.(type) {
	case *dualcheckv1.BeginRequest:
		return callMost + wait(r)
	case *dualcheckv1.DeleteNamespaceRequest:
		return deleteMost
	}
	return callMost
}

// wait is how long a Begin may wait for a key in progress.
func wait(r *dualcheckv1.BeginRequest) time.Duration {
	return min(max(r.GetWait().AsDuration(), 0), claim.MaxWait)
}

// panicked is a panic that was caught.
type panicked struct {
	value any
	stack []byte
}

func (p *panicked) Error() string { return fmt.Sprintf("panic: %v", p.value) }

// guard calls f and makes an error of its panic.
func (c *calls) guard(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			c.metrics.Panic()
			err = &panicked{v, debug.Stack()}
		}
	}()
	return f()
}

// fail puts an error through the table, logs it, and returns what gRPC sends.
func (c *calls) fail(ctx context.Context, method string, err error) error {
	// Only what generated code and gRPC return as it is, never what is wrapped.
	if s, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		if !methods[method] {
			return s.GRPCStatus().Err() // of health and reflection, which have a contract of their own
		}
		switch s.GRPCStatus().Code() {
		case codes.Unimplemented:
			err = claim.Errorf(claim.Unimplemented, "%s is not served by this version: do without it, or look for a newer one", strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
		case codes.Canceled:
			err = context.Canceled
		case codes.DeadlineExceeded:
			err = context.DeadlineExceeded
		}
	}
	f := faultOf(ctx, err)
	c.report(ctx, method, f)
	if f.RetryAfter > 0 {
		// Tells gRPC's own retries to wait, see gRFC A6. It fails only where no call is.
		_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", strconv.FormatInt(f.RetryAfter.Milliseconds(), 10)))
	}
	return f.status().Err()
}

// report counts an error and logs it as loudly as it deserves. A line with an
// incident is always written: whoever was told of it will look for it.
func (c *calls) report(ctx context.Context, method string, f fault) {
	c.metrics.Error(string(f.Reason))
	level, leftOut := slog.LevelDebug, int64(0)
	switch {
	case f.incident != "":
		level = slog.LevelError
	case f.code == codes.Internal:
		if n, ok := c.broken.allow(); ok {
			level, leftOut = slog.LevelError, n
		}
	case f.Err == nil || f.code == codes.Canceled || f.code == codes.DeadlineExceeded:
	default:
		if n, ok := c.outages.allow(); ok {
			level, leftOut = slog.LevelWarn, n
		}
	}
	if !c.log.Enabled(ctx, level) {
		return
	}
	fields := append(c.about(ctx, method), slog.String(telemetry.FieldReason, string(f.Reason)), slog.String(telemetry.FieldCode, f.code.String()))
	if leftOut > 0 {
		fields = append(fields, slog.Int64(telemetry.FieldLeftOut, leftOut))
	}
	if f.incident != "" {
		fields = append(fields, slog.String(telemetry.FieldIncident, f.incident))
	}
	if f.Err != nil {
		fields = append(fields, slog.Any(telemetry.FieldError, f.Err))
	}
	if p, ok := errors.AsType[*panicked](f.Err); ok {
		fields = append(fields, slog.String(telemetry.FieldStack, string(p.stack)))
	}
	c.log.LogAttrs(ctx, level, f.Message, fields...)
}

func (c *calls) observe(ctx context.Context, method string, err error, took time.Duration) {
	code := status.Code(err)
	c.metrics.Request(methodLabel(method), code.String(), took)
	if c.log.Enabled(ctx, slog.LevelDebug) {
		c.line(ctx, method, code, retries(ctx), took)
	}
}

// line writes a call into the log.
func (c *calls) line(ctx context.Context, method string, code codes.Code, retries uint32, took time.Duration) {
	fields := append(c.about(ctx, method), slog.String(telemetry.FieldCode, code.String()), slog.Duration(telemetry.FieldDuration, took))
	if retries > 0 {
		fields = append(fields, slog.Uint64(telemetry.FieldRetries, uint64(retries)))
	}
	c.log.LogAttrs(ctx, slog.LevelDebug, "call", fields...)
}

// mostLogged is how many bytes of what a caller says of itself are logged.
const mostLogged = 128

// about tells which call a log line is of.
func (c *calls) about(ctx context.Context, method string) []slog.Attr {
	fields := []slog.Attr{slog.String(telemetry.FieldMethod, cutTo(mostLogged, strings.TrimPrefix(method, "/")))}
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		if v := md.Get("x-request-id"); len(v) > 0 {
			fields = append(fields, slog.String(telemetry.FieldRequestID, cutTo(mostLogged, v[0])))
		}
	}
	if from := peerOf(ctx); from != "" {
		fields = append(fields, slog.String(telemetry.FieldPeer, from))
	}
	if id := telemetry.TraceID(ctx); id != nil {
		fields = append(fields, slog.String(telemetry.FieldTraceID, trace.TraceID(id).String()))
	}
	return fields
}

// peerOf is the address of who calls; "" if it is not known.
func peerOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	// Only the gateway is believed; it puts whom it sees at the end.
	if p.Addr.Network() == "bufconn" {
		if v := metadata.ValueFromIncomingContext(ctx, "x-forwarded-for"); len(v) > 0 {
			return strings.ToValidUTF8(v[0][max(len(v[0])-mostLogged, 0):], "\ufffd")
		}
	}
	return p.Addr.String()
}

// methodLabel is the method as metrics have it: one of those that exist.
func methodLabel(method string) string {
	if methods[method] || strings.HasPrefix(method, "/grpc.health.v1.Health/") || strings.HasPrefix(method, "/grpc.reflection.") {
		return strings.TrimPrefix(method, "/")
	}
	return "unknown"
}

// methods holds the full names of all that is served.
var methods = func() map[string]bool {
	all := make(map[string]bool)
	for _, d := range services {
		for _, m := range d.Methods {
			all["/"+d.ServiceName+"/"+m.MethodName] = true
		}
		for _, m := range d.Streams {
			all["/"+d.ServiceName+"/"+m.StreamName] = true
		}
	}
	return all
}()

// services are those of the contract.
var services = []*grpc.ServiceDesc{
	&dualcheckv1.DedupService_ServiceDesc,
	&dualcheckv1.StatusService_ServiceDesc,
	&dualcheckv1.WatchService_ServiceDesc,
	&dualcheckv1.AdminService_ServiceDesc,
}
