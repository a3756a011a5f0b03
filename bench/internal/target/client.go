package target

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

const (
	namespace   = "bench"
	operation   = "order.accept"
	owner       = "bench-1"
	contentType = "application/json"
)

var fingerprint = func() []byte { sum := sha256.Sum256([]byte("the same request")); return sum[:] }()

// answer is what a caller is told of a key.
type answer struct {
	verdict dualcheckv1.Verdict
	token   string
	size    int // bytes of the result's body
}

// caller is dualcheck as one kind of client sees it.
type caller interface {
	begin(ctx context.Context, key string) (answer, error)
	complete(ctx context.Context, key, token string, body []byte) error
	Close() error
}

// callers makes each kind of client.
var callers = map[string]func(rig.Node, Spec) (caller, error){
	"sdk":    newSDK,
	"unary":  newUnary,
	"stream": newStream,
	"json":   newJSON,
}

// Clients are the names of the kinds of client.
func Clients() []string { return []string{"sdk", "unary", "stream", "json"} }

func newCaller(n rig.Node, s Spec) (caller, error) {
	make, ok := callers[s.Client]
	if !ok {
		return nil, fmt.Errorf("no client %q; there are %v", s.Client, Clients())
	}
	return make(n, s)
}

func dial(addr string, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+addr, append(opts,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))...)
}

// unary is one gRPC call a question, by the generated client.
type unary struct{ conns connections }

// connections are used in turn, by key.
type connections []*grpc.ClientConn

const (
	// many connections are opened before anything is measured, and have small buffers.
	many       = 64
	manyBuffer = 4 << 10
	// fromOne address of loopback so many connections can be had to one port.
	fromOne     = 20_000
	openTimeout = 2 * time.Minute
)

func dialAll(addr string, n int) (connections, error) {
	n = max(n, 1)
	var c connections
	for i := range n {
		var opts []grpc.DialOption
		if n > many {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(1+i/fromOne))}}
			opts = append(opts, grpc.WithReadBufferSize(manyBuffer), grpc.WithWriteBufferSize(manyBuffer),
				grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }))
		}
		conn, err := dial(addr, opts...)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c = append(c, conn)
	}
	if n > many {
		if err := c.open(); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	return c, nil
}

// open connects all.
func (c connections) open() error {
	ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
	defer cancel()
	return each(ctx, len(c), many, func(ctx context.Context, i int) error {
		c[i].Connect()
		for {
			state := c[i].GetState()
			if state == connectivity.Ready {
				return nil
			}
			if !c[i].WaitForStateChange(ctx, state) {
				return fmt.Errorf("connection %d of %d is not there after %v: %v", i+1, len(c), openTimeout, state)
			}
		}
	})
}

func (c connections) of(key string) *grpc.ClientConn {
	if len(c) == 1 {
		return c[0]
	}
	h := uint32(2166136261) // FNV-1a
	for i := range len(key) {
		h = (h ^ uint32(key[i])) * 16777619
	}
	return c[h%uint32(len(c))]
}

func (c connections) Close() error {
	var errs []error
	for _, conn := range c {
		errs = append(errs, conn.Close())
	}
	return errors.Join(errs...)
}

func newUnary(n rig.Node, s Spec) (caller, error) {
	conns, err := dialAll(n.GRPC, s.Connections)
	return unary{conns}, err
}

func beginRequest(key string) *dualcheckv1.BeginRequest {
	return &dualcheckv1.BeginRequest{Namespace: namespace, Key: key, Operation: operation, Fingerprint: fingerprint, RequestId: key, Owner: owner}
}

func completeRequest(key, token string, body []byte) *dualcheckv1.CompleteRequest {
	return &dualcheckv1.CompleteRequest{Namespace: namespace, Key: key, Token: token,
		Outcome: &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{Code: 200, ContentType: contentType, Body: body}}}
}

func answerOf(r *dualcheckv1.BeginResponse) answer {
	return answer{r.GetVerdict(), r.GetClaim().GetToken(), len(r.GetRecord().GetResult().GetBody())}
}

func (u unary) begin(ctx context.Context, key string) (answer, error) {
	r, err := dualcheckv1.NewDedupServiceClient(u.conns.of(key)).Begin(ctx, beginRequest(key))
	if err != nil {
		return answer{}, err
	}
	return answerOf(r), nil
}

func (u unary) complete(ctx context.Context, key, token string, body []byte) error {
	_, err := dualcheckv1.NewDedupServiceClient(u.conns.of(key)).Complete(ctx, completeRequest(key, token, body))
	return err
}

func (u unary) Close() error { return u.conns.Close() }
