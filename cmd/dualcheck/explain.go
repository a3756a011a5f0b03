package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// trouble is an error of a call that no dualcheck server answered.
type trouble struct {
	code    codes.Code
	reason  string
	message string
	// advice says what to do about it.
	advice string
	exit   int
}

func (t *trouble) Error() string { return t.message }

// GRPCStatus is the error as gRPC carries it.
func (t *trouble) GRPCStatus() *status.Status {
	s := status.New(t.code, t.message)
	detailed, err := s.WithDetails(&errdetails.ErrorInfo{Reason: t.reason})
	if err != nil {
		return s
	}
	return detailed
}

// isMistake says whether an error is one of how the server was called: the same
// call will never be answered.
func isMistake(err error) bool {
	t, ok := errors.AsType[*trouble](err)
	return ok && t.exit == exitUsage
}

// explainer makes what gRPC says of a call that was not answered into what people
// can act on.
type explainer struct {
	at address
	// tls: the call was made with TLS.
	tls bool
}

// intercept explains the errors of every call of a connection.
func (e explainer) intercept(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	var limit time.Duration
	if deadline, ok := ctx.Deadline(); ok {
		limit = time.Until(deadline)
	}
	err := invoke(ctx, method, request, answer, conn, options...)
	if err == nil {
		return nil
	}
	return e.explain(ctx, err, limit)
}

// explain says what an error of a call means that had limit to be answered. What a
// dualcheck server says itself is left as it is.
func (e explainer) explain(ctx context.Context, err error, limit time.Duration) error {
	s, ok := statusOf(err)
	if !ok {
		return err
	}
	told := len(s.Details()) > 0
	if !told {
		if mistake := e.mistake(ctx, s.Message()); mistake != nil {
			return mistake
		}
	}
	cutOff := s.Code() == codes.Canceled && !errors.Is(ctx.Err(), context.Canceled)
	switch {
	case s.Code() == codes.DeadlineExceeded, cutOff:
		return &trouble{
			code:    codes.DeadlineExceeded,
			reason:  "STORE_UNAVAILABLE",
			message: "no answer within " + shortDuration(limit),
			advice:  "the same call may be repeated, or be given more --timeout",
			exit:    exitUnavailable,
		}
	case told:
		return err
	case strings.Contains(s.Message(), "unexpected HTTP status code received from server"),
		strings.Contains(s.Message(), "malformed header: missing HTTP content-type"):
		return &trouble{
			code:    s.Code(),
			reason:  "USAGE",
			message: fmt.Sprintf("what answers at %s does not speak gRPC", e.at.target),
			advice:  fmt.Sprintf("gRPC is on %s unless told otherwise", defaultPort),
			exit:    exitUsage,
		}
	case s.Code() == codes.Unavailable:
		return e.nobody(s.Message())
	}
	return err
}

// nobody is the error for a server that cannot be reached.
func (e explainer) nobody(said string) error {
	cause := causeOf(said)
	advice := fmt.Sprintf("name another with --addr or %s", addrVariable)
	if strings.Contains(cause, "connection refused") && e.at.isLoopback() {
		advice = fmt.Sprintf("start one with %s dev, or %s", program(), advice)
	}
	return &trouble{
		code:    codes.Unavailable,
		reason:  "STORE_UNAVAILABLE",
		message: fmt.Sprintf("no server answers at %s (%s)", e.at.target, cause),
		advice:  advice,
		exit:    exitUnavailable,
	}
}

// causeOf is the innermost cause in what gRPC says of a connection.
func causeOf(said string) string {
	if _, inner, found := strings.Cut(said, `desc = "`); found {
		said = strings.TrimSuffix(inner, `"`)
	}
	for _, around := range []string{"transport: ", "Error while dialing: ", "error reading server preface: ", "authentication handshake failed: "} {
		said = strings.TrimPrefix(said, around)
	}
	return said
}

// mistake is the error of a call that was made the wrong way: to another port, or
// with or without TLS; nil if said is none.
func (e explainer) mistake(ctx context.Context, said string) error {
	has := func(word string) bool { return strings.Contains(said, word) }
	at := e.at.target
	wrong := func(advice, format string, args ...any) error {
		return &trouble{code: codes.InvalidArgument, reason: "USAGE", message: fmt.Sprintf(format, args...), advice: advice, exit: exitUsage}
	}
	switch {
	case has("looked like an HTTP/1.1 header"):
		return wrong("name that with --addr", "this looks like the JSON port: %s does not speak gRPC, which is on %s unless told otherwise", at, defaultPort)
	case has("first record does not look like a TLS handshake"):
		return wrong("leave --tls out", "the server at %s does not speak TLS on this port", at)
	case has("tls: certificate required"), e.tls && has("remote error: tls: bad certificate"):
		return wrong("show one with --cert-file and --key-file", "the server at %s wants a certificate that it trusts", at)
	case has("x509: certificate signed by unknown authority"), has("x509: certificate is not trusted"), has("x509: “"):
		return wrong("name the authority that vouches for it with --ca-file", "the certificate of %s cannot be verified (%s)", at, causeOf(said))
	case has("x509: "):
		return wrong("--addr must name a host that the certificate is for, and --ca-file an authority that vouches for it",
			"the certificate of %s cannot be verified (%s)", at, causeOf(said))
	case !e.tls && has("error reading server preface") && e.speaksTLS(ctx):
		return wrong("try --tls (and --ca-file)", "the server at %s speaks TLS alone", at)
	}
	return nil
}

// probeTimeout bounds how long a server may take to begin TLS.
const probeTimeout = 2 * time.Second

// speaksTLS looks whether what listens there begins TLS; nothing is sent to it.
func (e explainer) speaksTLS(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTimeout)
	defer cancel()
	dialer := tls.Dialer{Config: &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true, NextProtos: []string{"h2"}}}
	conn, err := dialer.DialContext(ctx, "tcp", e.at.target)
	if err == nil {
		_ = conn.Close()
		return true
	}
	_, alert := errors.AsType[tls.AlertError](err)
	return alert
}
