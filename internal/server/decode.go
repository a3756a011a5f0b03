package server

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// A request that cannot be decoded is the caller's mistake, and REQUEST_INVALID.
// gRPC would answer INTERNAL, before any interceptor is asked and as soon as its
// codec returns an error. So the codec returns none: it hands the error over in a
// lenient, and the method's handler gives it to the interceptor in place of an
// answer.

// lenient is a request to be decoded, its size in bytes, and what was wrong with it.
type lenient struct {
	into any
	size int
	err  error
}

// told is the error as the caller is told of it.
func (l *lenient) told() error {
	if told, ok := errors.AsType[*claim.Error](l.err); ok {
		return told
	}
	return &claim.Error{Reason: claim.RequestInvalid, Message: l.err.Error()}
}

// lenientCodec is gRPC's own, except for lenients, and for what is encoded already.
type lenientCodec struct{ encoding.CodecV2 }

func (c lenientCodec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*outFrame); ok {
		return f.chunks, nil
	}
	m, ok := v.(proto.Message)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	size := proto.Size(m)
	if size <= pooledFrom {
		return c.CodecV2.Marshal(v)
	}
	buf := largeBuffers.Get(size)
	// The size was taken a moment ago: it is not taken again.
	b, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend((*buf)[:0], m)
	if err != nil {
		largeBuffers.Put(buf)
		return nil, err
	}
	*buf = b
	return mem.BufferSlice{mem.NewBuffer(buf, largeBuffers)}, nil
}

// pooledFrom is from which size on gRPC's own buffers are far too large: after 32 KiB its
// next are of 1 MiB, which a message that nobody reads holds for as long as it waits.
const pooledFrom = 32 << 10

var largeBuffers = mem.NewTieredBufferPool(64<<10, 128<<10, 256<<10, 512<<10, 1<<20, 4<<20)

func (c lenientCodec) Unmarshal(data mem.BufferSlice, v any) error {
	l, ok := v.(*lenient)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	l.size = data.Len()
	if n := l.size; n > claim.MaxMessage {
		l.err = fmt.Errorf("a message has at most %s, this has %d bytes: send less at once, or store a large result elsewhere and send its digest and size (omitted)", size(claim.MaxMessage), n)
	} else if m, ok := l.into.(proto.Message); ok && n >= crowdFrom && crowd(m.ProtoReflect().Descriptor(), data.Materialize()) {
		l.err = crowded()
	} else if err := c.CodecV2.Unmarshal(data, l.into); err != nil {
		l.err = errors.New("the request is not this message: " + tidy(err))
	}
	return nil
}

// decoded returns the service with its requests decoded leniently.
func decoded(d *grpc.ServiceDesc) *grpc.ServiceDesc {
	own := *d
	own.Methods = make([]grpc.MethodDesc, len(d.Methods))
	for i, m := range d.Methods {
		own.Methods[i] = grpc.MethodDesc{MethodName: m.MethodName, Handler: decodedMethod(m.Handler)}
	}
	own.Streams = make([]grpc.StreamDesc, len(d.Streams))
	for i, m := range d.Streams {
		own.Streams[i] = m
		if !m.ClientStreams { // else it decodes each of its frames itself
			own.Streams[i].Handler = func(srv any, ss grpc.ServerStream) error { return m.Handler(srv, lenientStream{ss}) }
		}
	}
	return &own
}

// lenientStream is a stream whose one request is decoded leniently.
type lenientStream struct{ grpc.ServerStream }

func (s lenientStream) RecvMsg(m any) error {
	request := lenient{into: m}
	if err := s.ServerStream.RecvMsg(&request); err != nil {
		return err
	}
	if request.err != nil {
		return request.told()
	}
	return nil
}

func decodedMethod(next grpc.MethodHandler) grpc.MethodHandler {
	return func(srv any, ctx context.Context, dec func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		var request lenient
		return next(srv, ctx,
			func(m any) error { request.into = m; return dec(&request) },
			func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
				if request.err != nil {
					handler = func(context.Context, any) (any, error) { return nil, request.told() }
				}
				return interceptor(ctx, req, info, handler)
			})
	}
}
