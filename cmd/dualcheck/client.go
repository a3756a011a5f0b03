package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// defaultAddr is where the service is unless a flag or the environment says so.
const defaultAddr = "127.0.0.1:7070"

// addrVariable is the environment's variable for --addr.
const addrVariable = "DUALCHECK_ADDR"

// retryConfig sends a call again that got UNAVAILABLE: 4 tries in all, the very
// same message, so the same request_id.
const retryConfig = `{"methodConfig": [{
	"name": [{"service": "dualcheck.v1.DedupService"}, {"service": "dualcheck.v1.AdminService"}],
	"retryPolicy": {
		"maxAttempts": 4,
		"initialBackoff": "0.1s",
		"maxBackoff": "1s",
		"backoffMultiplier": 2,
		"retryableStatusCodes": ["UNAVAILABLE"]
	}
}]}`

// clientFlags say which server to call, and how.
type clientFlags struct {
	addr     string
	timeout  time.Duration
	tls      bool
	caFile   string
	certFile string
	keyFile  string
	// requestID is the call's own id, if it has one: with it the very call can be
	// repeated.
	requestID string
}

// addClientFlags gives a command the flags of every client command.
func addClientFlags(cmd *cobra.Command) *clientFlags {
	c := &clientFlags{}
	f := cmd.Flags()
	f.StringVar(&c.addr, "addr", defaultAddr, "the server's host or host:port, also after http:// or, for TLS, https:// (or "+addrVariable+")")
	f.DurationVar(&c.timeout, "timeout", 10*time.Second, "how long one call may take")
	f.BoolVar(&c.tls, "tls", false, "use TLS, trusting the system's authorities unless --ca-file is given")
	f.StringVar(&c.caFile, "ca-file", "", "trust the authorities in this PEM file alone; implies --tls")
	f.StringVar(&c.certFile, "cert-file", "", "show this certificate (PEM); implies --tls, needs --key-file")
	f.StringVar(&c.keyFile, "key-file", "", "the certificate's key (PEM)")
	cmd.MarkFlagsRequiredTogether("cert-file", "key-file")
	for _, name := range []string{"ca-file", "cert-file", "key-file"} {
		fileFlag(cmd, name)
	}
	return c
}

// target is the address to call.
func (c *clientFlags) target(cmd *cobra.Command) string {
	if !cmd.Flags().Changed("addr") {
		if addr := os.Getenv(addrVariable); addr != "" {
			return addr
		}
	}
	return c.addr
}

// given repeats the flags that say which server it was, for a command line that
// is to be pasted.
func (c *clientFlags) given(cmd *cobra.Command) []string {
	var words []string
	for _, name := range []string{"addr", "tls", "ca-file", "cert-file", "key-file"} {
		if flag := cmd.Flags().Lookup(name); flag != nil && flag.Changed {
			words = append(words, "--"+name+"="+flag.Value.String())
		}
	}
	return words
}

// credentials are the connection's, for an address; encrypted says whether they
// are TLS.
func (c *clientFlags) credentials(at address) (transport credentials.TransportCredentials, encrypted bool, err error) {
	encrypted = c.tls || c.caFile != "" || c.certFile != ""
	if encrypted && at.plain {
		return nil, false, usageErrorf("--addr begins with http://, which is without TLS: write https://, or leave --tls, --ca-file and --cert-file out")
	}
	if !encrypted && !at.tls {
		return insecure.NewCredentials(), false, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.caFile != "" {
		pem, err := os.ReadFile(c.caFile)
		if err != nil {
			return nil, false, inputErrorf("read --ca-file: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, false, inputErrorf("--ca-file %s has no certificate in it", c.caFile)
		}
	}
	if c.certFile != "" {
		pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
		if err != nil {
			return nil, false, inputErrorf("read --cert-file and --key-file: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), true, nil
}

// client is a connection to a server and the services on it.
type client struct {
	dedup   dualcheckv1.DedupServiceClient
	admin   dualcheckv1.AdminServiceClient
	watch   dualcheckv1.WatchServiceClient
	explain explainer
	conn    *grpc.ClientConn
	timeout time.Duration
}

// connect prepares a connection; the first call makes it.
func (c *clientFlags) connect(cmd *cobra.Command) (*client, error) {
	if c.timeout <= 0 {
		return nil, usageErrorf("--timeout is %v, it must be above zero", c.timeout)
	}
	at, err := parseAddress(c.target(cmd))
	if err != nil {
		return nil, err
	}
	transport, encrypted, err := c.credentials(at)
	if err != nil {
		return nil, err
	}
	explain := explainer{at: at, tls: encrypted}
	conn, err := grpc.NewClient(at.target,
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(retryConfig),
		grpc.WithUserAgent("dualcheck/"+buildInfo().Version),
		// An answer may be a little longer with what is around it.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(claim.MaxMessage+1<<20)),
		grpc.WithUnaryInterceptor(explain.intercept),
	)
	if err != nil {
		return nil, usageErrorf("--addr %q cannot be used: %w", at.target, err)
	}
	return &client{
		dedup:   dualcheckv1.NewDedupServiceClient(conn),
		admin:   dualcheckv1.NewAdminServiceClient(conn),
		watch:   dualcheckv1.NewWatchServiceClient(conn),
		explain: explain,
		conn:    conn,
		timeout: c.timeout,
	}, nil
}

// with connects, runs do with a context that bounds one call (extra on top of
// --timeout), and closes the connection.
func (c *clientFlags) with(cmd *cobra.Command, extra time.Duration, do func(context.Context, *client) error) error {
	return c.connected(cmd, func(to *client) error { return c.call(cmd, to, extra, do) })
}

// connected connects, runs do, which makes its calls by call, and closes the
// connection.
func (c *clientFlags) connected(cmd *cobra.Command, do func(*client) error) (err error) {
	to, err := c.connect(cmd)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.conn.Close()) }()
	return do(to)
}

// call runs do with a context that bounds one call (extra on top of --timeout).
func (c *clientFlags) call(cmd *cobra.Command, to *client, extra time.Duration, do func(context.Context, *client) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), to.timeout+extra)
	defer cancel()
	err := do(ctx, to)
	if cmd.Context().Err() != nil && status.Code(err) == codes.Canceled {
		err = context.Canceled
	}
	if err == nil {
		return nil
	}
	return &callError{err: err, command: cmd.Name(), names: cmd.Flags().Args(), given: c.given(cmd), requestID: c.requestID}
}

// callError is an error of a command that called the server, with what its advice
// needs.
type callError struct {
	err error
	// command is the command's name, names its arguments, given the flags that
	// say which server it was.
	command   string
	names     []string
	given     []string
	requestID string
}

func (e *callError) Error() string { return e.err.Error() }
func (e *callError) Unwrap() error { return e.err }
