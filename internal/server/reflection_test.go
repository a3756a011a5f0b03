package server

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// learner knows of the server only what reflection tells.
type learner struct {
	t      *testing.T
	stream grpc.BidiStreamingClient[reflectionv1.ServerReflectionRequest, reflectionv1.ServerReflectionResponse]
	files  map[string]*descriptorpb.FileDescriptorProto
}

func learn(t *testing.T, conn *grpc.ClientConn) *learner {
	t.Helper()
	stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return &learner{t: t, stream: stream, files: map[string]*descriptorpb.FileDescriptorProto{}}
}

func (l *learner) ask(req *reflectionv1.ServerReflectionRequest) *reflectionv1.ServerReflectionResponse {
	l.t.Helper()
	if err := l.stream.Send(req); err != nil {
		l.t.Fatal(err)
	}
	resp, err := l.stream.Recv()
	if err != nil {
		l.t.Fatal(err)
	}
	if e := resp.GetErrorResponse(); e != nil {
		l.t.Fatalf("%v: %s", req, e.GetErrorMessage())
	}
	return resp
}

func (l *learner) services() (names []string) {
	l.t.Helper()
	resp := l.ask(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}})
	for _, s := range resp.GetListServicesResponse().GetService() {
		names = append(names, s.GetName())
	}
	return names
}

// file fetches the file of a symbol and all that it imports.
func (l *learner) file(symbol string) {
	l.t.Helper()
	l.take(l.ask(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: symbol}}))
}

func (l *learner) take(resp *reflectionv1.ServerReflectionResponse) {
	for _, b := range resp.GetFileDescriptorResponse().GetFileDescriptorProto() {
		fd := &descriptorpb.FileDescriptorProto{}
		if err := proto.Unmarshal(b, fd); err != nil {
			l.t.Fatal(err)
		}
		l.files[fd.GetName()] = fd
	}
	for _, fd := range l.files {
		for _, name := range fd.GetDependency() {
			if l.files[name] == nil {
				l.take(l.ask(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_FileByFilename{FileByFilename: name}}))
			}
		}
	}
}

func (l *learner) registry() *protoregistry.Files {
	l.t.Helper()
	set := &descriptorpb.FileDescriptorSet{}
	for _, fd := range l.files {
		set.File = append(set.File, fd)
	}
	files, err := protodesc.NewFiles(set)
	if err != nil {
		l.t.Fatal(err)
	}
	return files
}

func TestAClientMadeFromReflectionAlone(t *testing.T) {
	w := start(t)
	l := learn(t, w.conn)
	names := l.services()
	for _, name := range []string{"dualcheck.v1.DedupService", "dualcheck.v1.AdminService", "dualcheck.v1.StatusService", "dualcheck.v1.WatchService", "grpc.health.v1.Health"} {
		if !slices.Contains(names, name) {
			t.Fatalf("%s is not listed: %v", name, names)
		}
	}
	// The details of errors are described too, though no message names their types.
	for _, symbol := range append(names, "google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo") {
		l.file(symbol)
	}
	files := l.registry()
	for _, symbol := range []string{"google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo"} {
		if _, err := files.FindDescriptorByName(protoreflect.FullName(symbol)); err != nil {
			t.Errorf("%s: %v", symbol, err)
		}
	}
	called := 0
	for _, name := range names {
		if strings.HasPrefix(name, "grpc.") {
			continue
		}
		d, err := files.FindDescriptorByName(protoreflect.FullName(name))
		if err != nil {
			t.Fatal(err)
		}
		service := d.(protoreflect.ServiceDescriptor)
		for i := range service.Methods().Len() {
			call(t, w.conn, service.Methods().Get(i))
			called++
		}
	}
	if called != len(methods) {
		t.Errorf("%d methods called, %d are served", called, len(methods))
	}
}

// notServed lists what answers UNIMPLEMENTED in this version.
var notServed = strings.Fields(`
	dualcheck.v1.StatusService.Apply dualcheck.v1.StatusService.Get dualcheck.v1.StatusService.History dualcheck.v1.StatusService.BatchApply
	dualcheck.v1.AdminService.Calibrate dualcheck.v1.AdminService.ListRepairs dualcheck.v1.AdminService.ListAudit`)

// call calls a method with an empty request: it answers, or refuses with a reason.
func call(t *testing.T, conn *grpc.ClientConn, m protoreflect.MethodDescriptor) {
	t.Helper()
	method := "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
	req, resp := dynamicpb.NewMessage(m.Input()), dynamicpb.NewMessage(m.Output())
	var err error
	if m.IsStreamingServer() {
		err = callStream(t.Context(), conn, method, req, resp)
	} else {
		err = conn.Invoke(t.Context(), method, req, resp)
	}
	if !slices.Contains(notServed, string(m.FullName())) {
		if s := status.Convert(err); err != nil && (s.Code() != codes.InvalidArgument || infoOf(s) == nil) {
			t.Errorf("%s: %v", method, err)
		}
		return
	}
	s := want(t, err, claim.Unimplemented, codes.Unimplemented)
	if s.Message() != string(m.FullName())+" is not served by this version: do without it, or look for a newer one" {
		t.Errorf("%s: message %q", method, s.Message())
	}
}

func callStream(ctx context.Context, conn *grpc.ClientConn, method string, req, resp proto.Message) error {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(req); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if err := stream.RecvMsg(resp); err != io.EOF { // nothing was asked for
		return err
	}
	return nil
}

func TestReflectionCanBeOff(t *testing.T) {
	w := start(t, func(c *Config) { c.Reflection = false })
	stream, err := reflectionv1.NewServerReflectionClient(w.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = stream.Recv()
	want(t, err, claim.Unimplemented, codes.Unimplemented)
}

// A client that keeps a reflection stream open and quiet does not hold up a stop.
func TestAnOpenReflectionStreamDoesNotHoldUpAStop(t *testing.T) {
	w := start(t)
	stream, err := reflectionv1.NewServerReflectionClient(w.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	began := time.Now()
	w.server.Stop(ctx, 0)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
}
