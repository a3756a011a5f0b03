// Package sdktest puts everything that is between a caller and a Store around one: the
// server on ports of its own, and the Go SDK or the generated clients that ask it. What
// comes out is a claim.Store again, so that what every Store must do can be asked of
// the whole way.
//
// What the contract does not carry is not made up: an answer that cannot be told as
// claim tells it is an error.
package sdktest

import (
	"context"
	"crypto/rand"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dualcheck/dualcheck"
	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// Store asks through the SDK. What the SDK has no word for goes through the contract:
// Begins that are asked together, a lease of nothing, an operator's acts.
type Store struct {
	contract
	t     testing.TB
	addrs []string
	opts  []dualcheck.Option

	mu sync.Mutex
	// clients are by owner, which is a Client's and not a call's.
	clients map[string]*dualcheck.Client
	// claims are those that were given, by token, as their holders have them.
	claims map[string]*dualcheck.Claim
}

var _ claim.Store = (*Store)(nil)

// Open makes a Store over servers of one cluster. It ends with the test.
func Open(t testing.TB, addrs []string, opts ...dualcheck.Option) *Store {
	t.Helper()
	return &Store{
		contract: dial(t, addrs), t: t, addrs: addrs, opts: opts,
		clients: map[string]*dualcheck.Client{}, claims: map[string]*dualcheck.Claim{},
	}
}

// Connect makes a Client, which ends with the test.
func Connect(t testing.TB, addrs []string, opts ...dualcheck.Option) *dualcheck.Client {
	t.Helper()
	client, err := dualcheck.New(addrs, append([]dualcheck.Option{dualcheck.WithLogger(slog.New(counting{}))}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	return client
}

// client is that of an owner. One who is not named has the SDK's own name.
func (s *Store) client(owner string) *dualcheck.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.clients[owner]; c != nil {
		return c
	}
	opts := s.opts
	if owner != "" {
		opts = append([]dualcheck.Option{dualcheck.WithOwner(owner)}, opts...)
	}
	c := Connect(s.t, s.addrs, opts...)
	s.clients[owner] = c
	return c
}

// anyone is a client of whoever was the first to ask.
func (s *Store) anyone() *dualcheck.Client {
	s.mu.Lock()
	for _, c := range s.clients {
		s.mu.Unlock()
		return c
	}
	s.mu.Unlock()
	return s.client("")
}

// holder is the claim of a token: as it was given or, if it was not given here, as one
// who has kept its token.
func (s *Store) holder(namespace, key, token string) *dualcheck.Claim {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.claims[token]; c != nil && c.Key.Namespace == namespace && c.Key.Key == key {
		return c
	}
	return &dualcheck.Claim{Key: dualcheck.Key{Namespace: namespace, Key: key}, Token: token}
}

// Until is until when the SDK says that a claim that was given here is held; zero if
// none was.
func (s *Store) Until(token string) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.claims[token]; c != nil {
		return c.Until()
	}
	return time.Time{}
}

// Begin implements claim.Store. Unlike others it waits, if it is asked to.
func (s *Store) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	opts := []dualcheck.CallOption{dualcheck.RequestID(req.RequestID), dualcheck.Labels(req.Labels)}
	if req.Lease != nil {
		opts = append(opts, dualcheck.Lease(*req.Lease))
	}
	if req.Wait != 0 {
		opts = append(opts, dualcheck.Wait(req.Wait))
	}
	key := dualcheck.Key{Namespace: req.Namespace, Key: req.Key, Operation: req.Operation, Fingerprint: req.Fingerprint}
	out, err := s.client(req.Owner).Begin(traced(ctx, req.TraceID), key, opts...)
	if err != nil {
		return claim.Answer{}, errorOf(err)
	}
	if out.Claim != nil {
		s.keep(out.Claim)
	}
	return outcomeOf(out)
}

// keep takes note of a claim. One that is told again is the same claim.
func (s *Store) keep(c *dualcheck.Claim) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims[c.Token] = c
}

// traced is a context with a span of this trace.
func traced(ctx context.Context, traceID []byte) context.Context {
	if len(traceID) == 0 {
		return ctx
	}
	config := trace.SpanContextConfig{TraceID: trace.TraceID(traceID), TraceFlags: trace.FlagsSampled}
	rand.Read(config.SpanID[:])
	return trace.ContextWithSpanContext(ctx, trace.NewSpanContext(config))
}

// Finish implements claim.Store.
func (s *Store) Finish(ctx context.Context, req *claim.FinishRequest) (claim.Found, error) {
	client, held := s.anyone(), s.holder(req.Namespace, req.Key, req.Token)
	var stored *dualcheck.Stored
	var err error
	switch {
	case req.Failure != nil:
		stored, err = client.Fail(ctx, held, dualcheck.Failure{
			Class: dualcheck.Class(req.Failure.Class), Code: req.Failure.Code, Message: req.Failure.Message, Details: detailMessages(req.Failure.Details),
		})
	case req.Omitted != nil:
		stored, err = client.Complete(ctx, held, dualcheck.Result{Omitted: true, Digest: req.Omitted.Digest, Size: req.Omitted.Size})
	default:
		var r dualcheck.Result
		if req.Result != nil {
			r = dualcheck.Result{Code: req.Result.Code, ContentType: req.Result.ContentType, Body: req.Result.Body, Metadata: req.Result.Metadata}
		}
		stored, err = client.Complete(ctx, held, r)
	}
	if err != nil {
		return claim.Found{}, errorOf(err)
	}
	return storedOf(stored)
}

func storedOf(stored *dualcheck.Stored) (claim.Found, error) {
	m, err := stored.Record()
	if err != nil {
		return claim.Found{}, err
	}
	f, err := foundOf(m)
	f.Revision, f.Source, f.Stale = stored.Revision, claim.Source(stored.Source), stored.Stale
	return f, err
}

// Extend implements claim.Store. The SDK tells of the claim only until when it is held;
// the rest is what its holder was told when it was given.
func (s *Store) Extend(ctx context.Context, req *claim.ExtendRequest) (*claim.Grant, error) {
	if req.Lease != nil && *req.Lease == 0 { // to the SDK this is the namespace's default
		return s.contract.Extend(ctx, req)
	}
	var lease time.Duration
	if req.Lease != nil {
		lease = *req.Lease
	}
	held := s.holder(req.Namespace, req.Key, req.Token)
	if err := s.anyone().Extend(ctx, held, lease); err != nil {
		return nil, errorOf(err)
	}
	return grantOf(held), nil
}

// Get implements claim.Store.
func (s *Store) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	var opts []dualcheck.CallOption
	if req.Cached {
		opts = append(opts, dualcheck.Cached())
	}
	stored, err := s.anyone().Get(ctx, dualcheck.Key{Namespace: req.Namespace, Key: req.Key}, opts...)
	if err != nil {
		return claim.Found{}, errorOf(err)
	}
	return storedOf(stored)
}

// CountRetries returns a context whose calls count there how often the SDK sent them
// again by itself.
func CountRetries(ctx context.Context) (context.Context, *atomic.Int32) {
	n := new(atomic.Int32)
	return context.WithValue(ctx, countKey{}, n), n
}

type countKey struct{}

// counting is the log of the SDK, which tells of retries in the context of their calls
// and of nothing else.
type counting struct{}

func (counting) Enabled(ctx context.Context, _ slog.Level) bool { return ctx.Value(countKey{}) != nil }

func (counting) Handle(ctx context.Context, _ slog.Record) error {
	if n, ok := ctx.Value(countKey{}).(*atomic.Int32); ok {
		n.Add(1)
	}
	return nil
}

func (c counting) WithAttrs([]slog.Attr) slog.Handler { return c }

func (c counting) WithGroup(string) slog.Handler { return c }

// leaseMessage is nil for a lease that is left out.
func leaseMessage(d *time.Duration) *durationpb.Duration {
	if d == nil {
		return nil
	}
	return durationpb.New(*d)
}

func beginMessage(req *claim.BeginRequest) *dualcheckv1.BeginRequest {
	return &dualcheckv1.BeginRequest{
		Namespace: req.Namespace, Key: req.Key, Operation: req.Operation, Fingerprint: req.Fingerprint,
		RequestId: req.RequestID, Owner: req.Owner, Lease: leaseMessage(req.Lease), Labels: req.Labels,
	}
}
