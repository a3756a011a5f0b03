package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/contractjson"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

const (
	// maxBody is what a message of the largest size can be as JSON, base64 and all.
	maxBody = 24 << 20
	// maxAnswer is what the gateway takes from the gRPC server.
	maxAnswer = 2 * claim.MaxMessage
)

// handler makes everything that is on the HTTP port.
func (s *Server) handler() (http.Handler, error) {
	conn, err := s.dialInner()
	if err != nil {
		return nil, err
	}
	s.gateway = conn
	if s.lines, err = s.dialInner(grpc.WithStaticStreamWindowSize(lineWindow), grpc.WithStaticConnWindowSize(linesWindow)); err != nil {
		return nil, err
	}
	gateway := runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, codec{}),
		runtime.WithIncomingHeaderMatcher(forwarded),
		runtime.WithOutgoingHeaderMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithOutgoingTrailerMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithErrorHandler(s.gatewayError),
		runtime.WithStreamErrorHandler(func(_ context.Context, err error) *status.Status { return complete(status.Convert(err)) }),
		runtime.WithRoutingErrorHandler(routingError),
		runtime.WithDisablePathLengthFallback(),
		runtime.WithDisableHTTPMethodOverride(),
	)
	ctx := context.Background()
	for _, register := range []func(context.Context, *runtime.ServeMux, *grpc.ClientConn) error{
		dualcheckv1.RegisterDedupServiceHandler,
		dualcheckv1.RegisterStatusServiceHandler,
		dualcheckv1.RegisterWatchServiceHandler,
		dualcheckv1.RegisterAdminServiceHandler,
	} {
		if err := register(ctx, gateway, conn); err != nil {
			return nil, fmt.Errorf("register with the gateway: %w", err)
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", index)
	mux.HandleFunc("GET /livez", live)
	mux.HandleFunc("GET /healthz", live)
	mux.HandleFunc("GET /readyz", s.readyz)
	mux.Handle("GET /metrics", s.cfg.Metrics.Handler())
	mux.HandleFunc("GET /openapi.json", openapi)
	mux.HandleFunc("POST /v1/watch", s.watchLines(gateway))
	mux.Handle("/", gateway)
	return s.outermost(mux), nil
}

// dialInner connects to the gRPC server that is in memory.
func (s *Server) dialInner(more ...grpc.DialOption) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("passthrough:///gateway", append(more,
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return s.local.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithDisableServiceConfig(),
	)...)
	if err != nil {
		return nil, fmt.Errorf("dial the gRPC server: %w", err)
	}
	return conn, nil
}

// outermost bounds bodies, keeps answers out of caches, and catches panics.
func (s *Server) outermost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		if part := s.degraded(); part != "" {
			w.Header().Set(degradedHeader, part)
		}
		if id := r.Header.Get("X-Request-Id"); id != "" && len(id) <= 128 {
			w.Header().Set("X-Request-Id", id)
		}
		if r.URL.Path == "/v1/admin/namespaces:delete" {
			// The one call that may take longer than the server's write timeout.
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(deleteMost + time.Minute))
		}
		r.Body = &body{ReadCloser: http.MaxBytesReader(w, r.Body, maxBody)}
		err := s.calls.guard(func() error { next.ServeHTTP(w, r); return nil })
		if err != nil {
			writeStatus(w, http.StatusInternalServerError, status.Convert(s.calls.fail(r.Context(), r.URL.Path, err)))
		}
	})
}

// forwarded are the headers that calls keep on their way to gRPC; the gateway adds
// authorization by itself.
func forwarded(name string) (string, bool) {
	switch name = strings.ToLower(name); name {
	case "traceparent", "tracestate", "baggage", "x-request-id", retriesHeader:
		return name, true
	}
	return "", false
}

// gatewayError writes an error: one that gRPC answered, or one of the gateway's own.
func (s *Server) gatewayError(ctx context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, err error) {
	said, ok := status.FromError(err)
	if !ok {
		said = status.Convert(s.calls.fail(ctx, r.URL.Path, err))
	}
	whole := complete(said)
	httpStatus := runtime.HTTPStatusFromCode(whole.Code())
	if refused := refusedBody(r); refused != nil {
		whole = faultOf(ctx, refused).status()
		if _, over := errors.AsType[*http.MaxBytesError](refused); over {
			httpStatus = http.StatusRequestEntityTooLarge
		}
	}
	if whole != said {
		said = whole
		s.cfg.Metrics.Error(reasonOf(said))
		s.cfg.Log.LogAttrs(ctx, slog.LevelDebug, said.Message(), slog.String(telemetry.FieldMethod, r.URL.Path), slog.String(telemetry.FieldReason, reasonOf(said)))
	}
	writeStatus(w, httpStatus, said)
}

// refusedBody is what was wrong with a request's body, if it was read and refused.
func refusedBody(r *http.Request) error {
	if b, ok := r.Body.(*body); ok {
		return b.err
	}
	return nil
}

// routingError answers for a path or a method that is not served.
func routingError(ctx context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, httpStatus int) {
	e := &claim.Error{Reason: claim.Unimplemented}
	switch httpStatus {
	case http.StatusNotFound:
		e.Message = "there is no method at this path; /openapi.json lists them all"
	case http.StatusMethodNotAllowed:
		e.Message = r.Method + " is not served here: every method is a POST"
		w.Header().Set("Allow", http.MethodPost)
	default:
		e.Reason, e.Message = claim.RequestInvalid, http.StatusText(httpStatus)
	}
	writeStatus(w, httpStatus, faultOf(ctx, e).status())
}

// writeStatus writes {code, message, details}.
func writeStatus(w http.ResponseWriter, httpStatus int, s *status.Status) {
	body, err := contractjson.Marshal(s.Proto())
	if err != nil { // a detail of ours that JSON cannot show; there is none
		body = []byte(`{"code":13,"message":"internal error"}`)
	}
	w.Header().Del("Trailer")
	w.Header().Del("Transfer-Encoding")
	w.Header().Set("Content-Type", "application/json")
	for _, d := range s.Details() {
		if retry, ok := d.(*errdetails.RetryInfo); ok {
			seconds := (retry.GetRetryDelay().AsDuration() + time.Second - 1) / time.Second
			w.Header().Set("Retry-After", strconv.FormatInt(int64(seconds), 10))
		}
	}
	if s.Code() == codes.Unauthenticated {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	w.WriteHeader(httpStatus)
	_, _ = w.Write(body) // the caller may have gone
}

func reasonOf(s *status.Status) string {
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

const help = `dualcheck: has this piece of work been done, and what came of it?

  POST /v1/dedup:begin       ask, and be given the claim if you are the first
  POST /v1/dedup:complete    report the result
  POST /v1/dedup:fail        report a failure
  POST /v1/watch             be told of changes as they happen, one JSON object a line
  GET  /openapi.json         every method, with its messages
  GET  /readyz?verbose       whether this node can serve, and if not why
  GET  /livez                whether it runs
  GET  /metrics              Prometheus metrics

The same methods are served as gRPC on the other port, with reflection.
`

func index(w http.ResponseWriter, _ *http.Request) { text(w, http.StatusOK, help) }

// live never asks etcd: a node that cannot serve is not helped by a restart.
func live(w http.ResponseWriter, _ *http.Request) { text(w, http.StatusOK, "ok\n") }

func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	checks := []struct {
		name string
		err  error
	}{
		{"serving", s.servingErr()},
		{"cluster", s.cfg.Ready()},
	}
	code, said := http.StatusOK, "ok\n"
	var verbose strings.Builder
	for _, c := range checks {
		if c.err == nil {
			fmt.Fprintf(&verbose, "[+] %s ok\n", c.name)
			continue
		}
		fmt.Fprintf(&verbose, "[-] %s: %v\n", c.name, c.err)
		if code == http.StatusOK {
			code, said = http.StatusServiceUnavailable, fmt.Sprintf("%s: %v\n", c.name, c.err)
		}
	}
	verdict := "ready"
	if code != http.StatusOK {
		verdict = "not ready"
	}
	if s.cfg.RedisAway == nil {
		verbose.WriteString("[ ] redis: this node has none, etcd answers what memory does not\n")
	} else if why := s.cfg.RedisAway(); why == nil {
		verbose.WriteString("[+] redis ok\n")
	} else { // no reason not to serve
		fmt.Fprintf(&verbose, "[!] redis: %v\n", why)
		verdict += " degraded=redis"
	}
	if r.URL.Query().Has("verbose") {
		said = verbose.String() + verdict + "\n"
	}
	text(w, code, said)
}

func openapi(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(openAPI()) // the caller may have gone
}

func text(w http.ResponseWriter, code int, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(body)) // the caller may have gone
}
