package dualcheck

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// anyCodec is packetCodec for packets, and gRPC's own for the rest: health.
type anyCodec struct{ packetCodec }

func (a anyCodec) Marshal(v any) (mem.BufferSlice, error) {
	if _, ok := v.(*packet); ok {
		return a.packetCodec.Marshal(v)
	}
	return encoding.GetCodecV2("proto").Marshal(v)
}

func (a anyCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if _, ok := v.(*packet); ok {
		return a.packetCodec.Unmarshal(data, v)
	}
	return encoding.GetCodecV2("proto").Unmarshal(data, v)
}

// echo answers every call of a Session with the same bytes at once. It allocates next to
// nothing, so that what is counted is the client's.
func echo(tb testing.TB, field protowire.Number, message proto.Message) string {
	tb.Helper()
	body, err := proto.Marshal(message)
	if err != nil {
		tb.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	srv := grpc.NewServer(grpc.ForceServerCodecV2(anyCodec{}), grpc.InitialWindowSize(streamWindow), grpc.InitialConnWindowSize(connWindow),
		grpc.UnknownServiceHandler(func(_ any, ss grpc.ServerStream) error {
			if method, _ := grpc.MethodFromServerStream(ss); method != service+"Session" {
				return (dualcheckv1.UnimplementedDedupServiceServer{}).Session(nil)
			}
			for {
				var in packet
				if err := ss.RecvMsg(&in); err != nil {
					return err
				}
				frame := in.data.ReadOnlyData()
				buf := buffers.Get(len(frame)/100*(len(body)+32) + 2*len(body) + 64)
				b := (*buf)[:0]
				for f := walk(frame); f.next(); {
					c := walk(f.data)
					c.next()
					id := c.v
					size := 1 + protowire.SizeVarint(id) + 1 + protowire.SizeBytes(len(body))
					b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.BytesType), uint64(size))
					b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.VarintType), id)
					b = protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), body)
				}
				in.data.Free()
				*buf = b
				if err := ss.SendMsg(&packet{mem.NewBuffer(buf, buffers)}); err != nil {
					return err
				}
			}
		}))
	serveGRPC(tb, srv, l)
	return l.Addr().String()
}

func firstAnswer() *dualcheckv1.BeginResponse {
	return &dualcheckv1.BeginResponse{
		Verdict: dualcheckv1.Verdict_VERDICT_FIRST, KeyAction: dualcheckv1.KeyAction_KEY_ACTION_PROCEED, Enforced: true, Revision: 123456,
		Source: dualcheckv1.Source_SOURCE_ETCD,
		Claim:  &dualcheckv1.Claim{Token: "Zm9vYmFyZm9vYmFyZm9vYmFyZm9vYmFyZm9vYmFyZm9vYmFy", Attempt: 1, Fence: 123456, LeaseLeft: durationpb.New(29e9)},
	}
}

func replayAnswer() *dualcheckv1.BeginResponse {
	return &dualcheckv1.BeginResponse{
		Verdict: dualcheckv1.Verdict_VERDICT_REPLAY, KeyAction: dualcheckv1.KeyAction_KEY_ACTION_STOP, Enforced: true, Revision: 123456,
		Source: dualcheckv1.Source_SOURCE_MEMORY,
		Record: &dualcheckv1.Record{
			Namespace: "orders", Key: "po-123456", Operation: "order.accept", State: dualcheckv1.State_STATE_SUCCEEDED, Owner: "worker-1",
			Attempt: 1, Result: &dualcheckv1.Result{Code: 200, ContentType: "application/json", Body: make([]byte, 200)}, Digest: make([]byte, 32),
		},
	}
}

func newClient(tb testing.TB, servers []string, opts ...Option) *Client {
	tb.Helper()
	c, err := New(servers, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

// together makes n calls by so many callers.
func together(callers, n int, call func(i int) error) error {
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for i := int(next.Add(1)); i <= n; i = int(next.Add(1)) {
				err := call(i)
				if err != nil {
					kept := err
					failed.Store(&kept)
					return
				}
			}
		})
	}
	all.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// keys are made beforehand, so that they are not counted.
func keys(n int) []Key {
	all := make([]Key, n)
	for i := range all {
		all[i] = Key{Namespace: "orders", Key: "po-" + strconv.Itoa(i), Operation: "order.accept", Fingerprint: make([]byte, 32)}
	}
	return all
}

func BenchmarkBegin(b *testing.B) {
	for _, what := range []struct {
		name   string
		answer *dualcheckv1.BeginResponse
	}{{"first", firstAnswer()}, {"replay", replayAnswer()}} {
		addr := echo(b, answerBegin, what.answer)
		for _, callers := range []int{1, 64, 512, 4096} {
			for _, streams := range []int{1, 2} {
				b.Run(fmt.Sprintf("%s/callers=%d/streams=%d", what.name, callers, streams), func(b *testing.B) {
					c := newClient(b, []string{addr}, WithStreams(streams))
					ctx := context.Background()
					all := keys(1024)
					b.ReportAllocs()
					b.ResetTimer()
					if err := together(callers, b.N, func(i int) error {
						_, err := c.Begin(ctx, all[i%len(all)])
						return err
					}); err != nil {
						b.Fatal(err)
					}
				})
			}
		}
	}
}
