package dualcheck

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// Option configures a Client.
type Option func(*config)

type config struct {
	owner    string
	creds    credentials.TransportCredentials
	dial     []grpc.DialOption
	unary    bool
	streams  int
	most     int
	tries    int
	patience time.Duration
	closing  time.Duration
	log      *slog.Logger
	observer Observer
	classify func(error) Class
}

func defaults() config {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	host = host[:min(len(host), 100)]
	return config{
		owner:    fmt.Sprintf("%s-%08x", host, rand.Uint32()),
		creds:    insecure.NewCredentials(),
		streams:  1,
		most:     16384,
		tries:    4,
		patience: time.Minute,
		closing:  10 * time.Second,
		log:      slog.New(slog.DiscardHandler),
		classify: func(error) Class { return ClassUnknown },
	}
}

// validate says what is wrong in a sentence.
func (c *config) validate(servers []string) error {
	switch {
	case len(servers) == 0:
		return fmt.Errorf("dualcheck: name at least one server")
	case c.owner == "" || len(c.owner) > 128 || !utf8.ValidString(c.owner):
		return fmt.Errorf("dualcheck: an owner has 1-128 bytes of UTF-8")
	case c.streams < 1 || c.streams > 16:
		return fmt.Errorf("dualcheck: 1-16 streams a server, not %d", c.streams)
	case c.most < 1:
		return fmt.Errorf("dualcheck: at least one call must be allowed, not %d", c.most)
	case c.tries < 1:
		return fmt.Errorf("dualcheck: at least one try, not %d", c.tries)
	case c.patience <= 0 || c.closing <= 0:
		return fmt.Errorf("dualcheck: a patience and a time to close are more than nothing")
	case c.creds == nil || c.log == nil || c.classify == nil:
		return fmt.Errorf("dualcheck: credentials, logger and classifier must not be nil")
	}
	seen := make(map[string]bool, len(servers))
	for _, s := range servers {
		if s == "" || seen[s] {
			return fmt.Errorf("dualcheck: server %q is named twice or not at all", s)
		}
		if err := address(s); err != nil {
			return err
		}
		seen[s] = true
	}
	return nil
}

// address refuses what cannot be dialled: gRPC would say so with the first call, or take
// port 443.
func address(s string) error {
	if scheme, _, named := strings.Cut(s, "://"); named && scheme != "http" && scheme != "https" || strings.HasPrefix(s, "unix:") {
		return nil // a resolver of gRPC's, such as dns:///dualcheck:7070
	}
	host, port, err := net.SplitHostPort(s)
	n, bad := strconv.ParseUint(port, 10, 16)
	if err != nil || bad != nil || n == 0 || host == "" || strings.ContainsAny(host, " ,/") {
		return fmt.Errorf("dualcheck: %q is no address of a server: write host:port, 7070 unless you have chosen another", s)
	}
	return nil
}

// WithOwner says who asks, for people, and for telling equal request ids apart. It
// must differ between processes. Default: the host's name and a random number.
func WithOwner(owner string) Option { return func(c *config) { c.owner = owner } }

// WithTransportCredentials sets TLS or what else secures the connection. Default: none.
func WithTransportCredentials(creds credentials.TransportCredentials) Option {
	return func(c *config) { c.creds = creds }
}

// WithDialOptions adds gRPC dial options; they win over what this package sets.
func WithDialOptions(opts ...grpc.DialOption) Option {
	return func(c *config) { c.dial = append(c.dial, opts...) }
}

// WithUnary sends each call by itself instead of over a stream. A server without
// Session is found out by itself; this is for what stands between.
func WithUnary() Option { return func(c *config) { c.unary = true } }

// WithStreams sets how many streams are open to each server, 1-16. One is the fastest
// while it keeps up: the more calls share a frame, the less each costs. Default: 1.
func WithStreams(n int) Option { return func(c *config) { c.streams = n } }

// WithMaxCalls sets how many Begins and Gets may be under way; one more waits for room
// within its context. Complete, Fail and Extend never wait. Default: 16,384.
func WithMaxCalls(n int) Option { return func(c *config) { c.most = n } }

// WithTries sets how often a Begin, Extend or Get is tried in all, 3-5 for most.
// Default: 4.
func WithTries(n int) Option { return func(c *config) { c.tries = n } }

// WithFinishPatience sets for how long Complete and Fail are tried when their context
// has no deadline. Default: 1 min.
func WithFinishPatience(d time.Duration) Option { return func(c *config) { c.patience = d } }

// WithCloseTimeout sets how long Close waits for what must not be lost. Default: 10 s.
func WithCloseTimeout(d time.Duration) Option { return func(c *config) { c.closing = d } }

// WithLogger logs retries and connections. Default: nothing is logged.
func WithLogger(l *slog.Logger) Option { return func(c *config) { c.log = l } }

// WithObserver is told of retries.
func WithObserver(o Observer) Option { return func(c *config) { c.observer = o } }

// WithClassifier says what an error of Do's work means for its key, where Retryable,
// Terminal or Unknown have not said it. Default: ClassUnknown, see Do.
func WithClassifier(f func(error) Class) Option { return func(c *config) { c.classify = f } }

// CallOption says more about one call. Options are values: making one costs nothing.
type CallOption struct {
	kind   optionKind
	d      time.Duration
	s      string
	labels map[string]string
}

type optionKind uint8

const (
	optLease optionKind = iota + 1
	optWait
	optRequestID
	optLabels
	optCached
)

// Lease is how long the claim is to be held without being extended: of Begin and Do.
// Left out: the namespace's default.
func Lease(d time.Duration) CallOption { return CallOption{kind: optLease, d: d} }

// Wait is how long to wait for a key that is in progress: Begin answers at once
// without it, and waits 30 s at most with it; Do waits until its context ends without
// it, and Wait(0) does not wait.
func Wait(d time.Duration) CallOption { return CallOption{kind: optWait, d: d} }

// RequestID replaces the random id of this one Begin, for callers who keep it so that
// the very call can be sent again by another process with the same WithOwner.
func RequestID(id string) CallOption { return CallOption{kind: optRequestID, s: id} }

// Labels are kept with the claim: of Begin and Do, at most 16.
func Labels(labels map[string]string) CallOption { return CallOption{kind: optLabels, labels: labels} }

// Cached lets Get be told that there is no such key, ErrRecordNotFound, by what was so up
// to 3 s ago. Whatever it is told of a key is as true as what any Get is told.
func Cached() CallOption { return CallOption{kind: optCached} }

// callOptions are the options of one call together.
type callOptions struct {
	lease     time.Duration
	leased    bool
	wait      time.Duration
	waits     bool
	requestID string
	labels    map[string]string
	cached    bool
}

func gather(opts []CallOption) (o callOptions) {
	for i := range opts {
		switch opt := &opts[i]; opt.kind {
		case optLease:
			o.lease, o.leased = opt.d, true
		case optWait:
			o.wait, o.waits = opt.d, true
		case optRequestID:
			o.requestID = opt.s
		case optLabels:
			o.labels = opt.labels
		case optCached:
			o.cached = true
		}
	}
	return o
}
