package main

import (
	"context"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

// fakeServer is a server in memory, as far as the commands need one.
type fakeServer struct {
	dualcheckv1.UnimplementedAdminServiceServer
	dualcheckv1.UnimplementedWatchServiceServer
	*ingesttest.Service

	mu         sync.Mutex
	namespaces map[string]*dualcheckv1.Namespace
	revision   int64
	resolved   *dualcheckv1.ResolveRecordRequest
	forgotten  *dualcheckv1.ForgetRecordRequest
	// watch is what each stream of Watch does, in their order.
	watch []func(*dualcheckv1.WatchRequest, grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error
	// members are etcd's, if a test wants others.
	members []*dualcheckv1.EtcdMember
}

// startFake serves a fake on a free port until the test ends.
func startFake(t *testing.T, service *ingesttest.Service, options ...grpc.ServerOption) (server *fakeServer, addr string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server = &fakeServer{Service: service, namespaces: map[string]*dualcheckv1.Namespace{}}
	s := grpc.NewServer(append(options, grpc.MaxRecvMsgSize(claim.MaxMessage))...)
	dualcheckv1.RegisterDedupServiceServer(s, service)
	dualcheckv1.RegisterAdminServiceServer(s, server)
	dualcheckv1.RegisterWatchServiceServer(s, server)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := s.Serve(listener); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		s.Stop()
		serving.Wait()
	})
	return server, listener.Addr().String()
}

func (s *fakeServer) PutNamespace(_ context.Context, q *dualcheckv1.PutNamespaceRequest) (*dualcheckv1.PutNamespaceResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := proto.CloneOf(q.GetNamespace())
	if n.GetRevision() != 0 && n.GetRevision() != s.namespaces[n.GetName()].GetRevision() {
		return nil, ingesttest.Error(codes.Aborted, "POLICY_STALE", "the policy has another revision", nil)
	}
	s.revision++
	n.Revision = s.revision
	s.namespaces[n.GetName()] = n
	return &dualcheckv1.PutNamespaceResponse{Namespace: n, Effective: effective(n.GetPolicy())}, nil
}

// effective fills in two of the defaults.
func effective(p *dualcheckv1.Policy) *dualcheckv1.Policy {
	p = proto.CloneOf(p)
	if p.GetDefaultLease() == nil {
		p.DefaultLease = durationpb.New(30e9)
	}
	if p.GetTakeover() == dualcheckv1.Takeover_TAKEOVER_UNSPECIFIED {
		p.Takeover = dualcheckv1.Takeover_TAKEOVER_AUTO
	}
	return p
}

func (s *fakeServer) GetNamespace(_ context.Context, q *dualcheckv1.GetNamespaceRequest) (*dualcheckv1.GetNamespaceResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.namespaces[q.GetName()]
	if n == nil {
		return nil, ingesttest.Error(codes.NotFound, "NAMESPACE_NOT_FOUND", "nobody declared "+q.GetName(), nil)
	}
	return &dualcheckv1.GetNamespaceResponse{Namespace: n, Effective: effective(n.GetPolicy())}, nil
}

func (s *fakeServer) ListNamespaces(_ context.Context, q *dualcheckv1.ListNamespacesRequest) (*dualcheckv1.ListNamespacesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := slices.Sorted(maps.Keys(s.namespaces))
	page, next := pageOf(names, q.GetPageToken(), min(q.GetPageSize(), 2))
	answer := &dualcheckv1.ListNamespacesResponse{NextPageToken: next}
	for _, name := range page {
		answer.Namespaces = append(answer.Namespaces, s.namespaces[name])
	}
	return answer, nil
}

// pageOf is at most size of all, from where token says.
func pageOf[T any](all []T, token string, size int32) (page []T, next string) {
	from, _ := strconv.Atoi(token)
	to := min(from+int(size), len(all))
	if to < len(all) {
		next = strconv.Itoa(to)
	}
	return all[from:to], next
}

func (s *fakeServer) DeleteNamespace(_ context.Context, q *dualcheckv1.DeleteNamespaceRequest) (*dualcheckv1.DeleteNamespaceResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !q.GetForce() && len(s.Records()) > 0 {
		return nil, ingesttest.Error(codes.FailedPrecondition, "NAMESPACE_NOT_EMPTY", "it has records", nil)
	}
	delete(s.namespaces, q.GetName())
	return &dualcheckv1.DeleteNamespaceResponse{Forgotten: int64(len(s.Records()))}, nil
}

func (s *fakeServer) ListRecords(_ context.Context, q *dualcheckv1.ListRecordsRequest) (*dualcheckv1.ListRecordsResponse, error) {
	var all []*dualcheckv1.Record
	for _, r := range s.Records() {
		if r.GetNamespace() == q.GetNamespace() && (q.GetState() == 0 || r.GetState() == q.GetState()) {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b *dualcheckv1.Record) int { return strings.Compare(a.GetKey(), b.GetKey()) })
	page, next := pageOf(all, q.GetPageToken(), min(q.GetPageSize(), 2))
	return &dualcheckv1.ListRecordsResponse{Records: page, NextPageToken: next}, nil
}

func (s *fakeServer) ResolveRecord(_ context.Context, q *dualcheckv1.ResolveRecordRequest) (*dualcheckv1.ResolveRecordResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resolved = q
	return &dualcheckv1.ResolveRecordResponse{Record: &dualcheckv1.Record{
		Namespace: q.GetNamespace(), Key: q.GetKey(), State: q.GetState(), Result: q.GetResult(), Failure: q.GetFailure(),
	}}, nil
}

func (s *fakeServer) ForgetRecord(_ context.Context, q *dualcheckv1.ForgetRecordRequest) (*dualcheckv1.ForgetRecordResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgotten = q
	return &dualcheckv1.ForgetRecordResponse{Revision: 7}, nil
}

func (s *fakeServer) Watch(q *dualcheckv1.WatchRequest, stream grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error {
	s.mu.Lock()
	if len(s.watch) == 0 {
		s.mu.Unlock()
		return s.UnimplementedWatchServiceServer.Watch(q, stream)
	}
	next := s.watch[0]
	s.watch = s.watch[1:]
	s.mu.Unlock()
	return next(q, stream)
}

func (s *fakeServer) GetCluster(context.Context, *dualcheckv1.GetClusterRequest) (*dualcheckv1.GetClusterResponse, error) {
	answer := &dualcheckv1.GetClusterResponse{
		Node:  "node-1",
		Nodes: []*dualcheckv1.Node{{Id: "node-1", Version: "1.0", GrpcAddr: "10.0.0.1:7070", Ticks: true}, {Id: "node-2"}},
		Clock: &dualcheckv1.Clock{Time: durationpb.New(90e9), TickVersion: 180, Age: durationpb.New(2e8)},
		Epoch: "00ff",
		EtcdMembers: []*dualcheckv1.EtcdMember{
			{Endpoint: "http://a:2379", Version: "3.7.3", Leader: true, DbSizeBytes: 1 << 20, QuotaBytes: 8 << 30},
			{Endpoint: "http://b:2379", Error: "connection refused\n\x1b[2J"},
		},
	}
	if s.members != nil {
		answer.EtcdMembers = s.members
	}
	return answer, nil
}
