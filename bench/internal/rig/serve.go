package rig

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/dualcheck/dualcheck/internal/embedetcd"
)

// The arguments with which this program is started again as one of its own servers.
const (
	ServeEtcd  = "serve-etcd"  // and a directory
	ServeEmpty = "serve-empty" // nothing else
)

// Serve runs such a server until ctx ends. It prints its address once it can be used.
func Serve(ctx context.Context, args []string, out io.Writer, log *slog.Logger) error {
	switch {
	case len(args) == 2 && args[0] == ServeEtcd:
		return serveEtcd(ctx, args[1], out, log)
	case len(args) == 1 && args[0] == ServeEmpty:
		return serveEmpty(ctx, out)
	}
	return fmt.Errorf("no server of this program: %q", args)
}

func serveEtcd(ctx context.Context, dir string, out io.Writer, log *slog.Logger) error {
	s, err := embedetcd.Start(ctx, dir, log)
	if err != nil {
		return err
	}
	defer s.Close()
	fmt.Fprintln(out, s.Endpoint())
	select {
	case <-ctx.Done():
		return nil
	case err := <-s.Failed():
		return err
	}
}

// Methods of the empty server.
const (
	EmptyCall   = "/dualcheck.bench.Empty/Call"
	EmptyStream = "/dualcheck.bench.Empty/Stream"
)

// EmptyStreams describes the stream, whose server answers each frame with an empty one.
var EmptyStreams = grpc.StreamDesc{StreamName: "Stream", Handler: echo, ServerStreams: true, ClientStreams: true}

func serveEmpty(ctx context.Context, out io.Writer) error {
	l, err := listenLoopback()
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: "dualcheck.bench.Empty",
		Methods:     []grpc.MethodDesc{{MethodName: "Call", Handler: call}},
		Streams:     []grpc.StreamDesc{EmptyStreams},
	}, nil)
	defer context.AfterFunc(ctx, s.Stop)()
	fmt.Fprintln(out, l.Addr())
	return s.Serve(l)
}

func call(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	var in emptypb.Empty
	return &emptypb.Empty{}, decode(&in)
}

func echo(_ any, stream grpc.ServerStream) error {
	var frame emptypb.Empty
	for {
		if err := stream.RecvMsg(&frame); err != nil {
			if err == io.EOF { //nolint:errorlint // RecvMsg returns it unwrapped
				return nil
			}
			return err
		}
		if err := stream.SendMsg(&frame); err != nil {
			return err
		}
	}
}
