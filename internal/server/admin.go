package server

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sort"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// Namespaces are the declared namespaces.
type Namespaces interface {
	// List returns them by name, as this node has applied them.
	List() ([]policy.Namespace, error)
	// Put answers once every write obeys it.
	Put(ctx context.Context, n policy.Namespace) (policy.Namespace, error)
	// Delete returns how many records were forgotten.
	Delete(ctx context.Context, name string, force bool) (int64, error)
}

// Cluster is what a node knows of its peers and of etcd.
type Cluster interface {
	// View is what this node has applied.
	View() (claim.View, error)
	// Standing tells the rest.
	Standing(ctx context.Context) Standing
}

// Standing is what a node knows of the cluster, for people.
type Standing struct {
	// Node is the id of the node that answers.
	Node    string
	Nodes   []Node
	Members []Member
	// Applied is the revision up to which this node follows etcd.
	Applied int64
	// TickAge is how long ago it saw the clock move.
	TickAge time.Duration
}

// Node is one running server.
type Node struct {
	ID, Version, GRPCAddr string
	StartedAt             time.Time
	Ticks                 bool
}

// Member is one etcd server. Sizes are in bytes; Err says why its status could not
// be had.
type Member struct {
	Endpoint, Version      string
	Leader                 bool
	DBSize, DBInUse, Quota int64
	Alarms                 []string
	Err                    string
}

// admin is AdminService. What is not served has no method here: the embedded type
// answers for it.
type admin struct {
	dualcheckv1.UnimplementedAdminServiceServer
	store      claim.Store
	namespaces Namespaces
	levers     Levers
	cluster    Cluster
	log        *slog.Logger
	plainKeys  bool
}

// act logs what an operator did, to a namespace unless it is ""; err is how it ended.
func (a *admin) act(ctx context.Context, act, namespace string, err error, more ...slog.Attr) {
	level := slog.LevelInfo
	fields := []slog.Attr{slog.String(telemetry.FieldAct, act)}
	if namespace != "" {
		fields = append(fields, slog.String(telemetry.FieldNamespace, namespace))
	}
	fields = append(fields, more...)
	if from := peerOf(ctx); from != "" {
		fields = append(fields, slog.String(telemetry.FieldPeer, from))
	}
	if err != nil {
		level = slog.LevelWarn
		fields = append(fields, slog.Any(telemetry.FieldError, err))
	}
	a.log.LogAttrs(ctx, level, "operator", fields...)
}

func (a *admin) PutNamespace(ctx context.Context, m *dualcheckv1.PutNamespaceRequest) (*dualcheckv1.PutNamespaceResponse, error) {
	n, err := namespaceOf(m.GetNamespace())
	if err != nil {
		return nil, err
	}
	put, err := a.namespaces.Put(ctx, n)
	a.act(ctx, "put namespace", n.Name, err)
	if err != nil {
		return nil, err
	}
	return &dualcheckv1.PutNamespaceResponse{Namespace: namespaceMessage(put), Effective: policyMessage(put.Policy.WithDefaults())}, nil
}

func (a *admin) GetNamespace(_ context.Context, m *dualcheckv1.GetNamespaceRequest) (*dualcheckv1.GetNamespaceResponse, error) {
	if err := validName(m.GetName(), "name"); err != nil {
		return nil, err
	}
	all, err := a.namespaces.List()
	if err != nil {
		return nil, err
	}
	i := sort.Search(len(all), func(i int) bool { return all[i].Name >= m.GetName() })
	if i == len(all) || all[i].Name != m.GetName() {
		return nil, claim.Errorf(claim.NamespaceNotFound, "nobody declared namespace %q, so it has the default policy: put it to declare it", m.GetName())
	}
	n := all[i]
	return &dualcheckv1.GetNamespaceResponse{Namespace: namespaceMessage(n), Effective: policyMessage(n.Policy.WithDefaults()), Deleting: n.Deleting}, nil
}

func (a *admin) ListNamespaces(_ context.Context, m *dualcheckv1.ListNamespacesRequest) (*dualcheckv1.ListNamespacesResponse, error) {
	size, err := pageSize(m.GetPageSize())
	if err != nil {
		return nil, err
	}
	after, err := base64.RawURLEncoding.DecodeString(m.GetPageToken())
	if err != nil {
		return nil, refuse(claim.RequestInvalid, "page_token", "this is no next_page_token: send that of the page before, or none for the first page")
	}
	all, err := a.namespaces.List()
	if err != nil {
		return nil, err
	}
	if len(after) > 0 {
		all = all[sort.Search(len(all), func(i int) bool { return all[i].Name > string(after) }):]
	}
	resp := &dualcheckv1.ListNamespacesResponse{}
	for _, n := range all[:min(size, len(all))] {
		resp.Namespaces = append(resp.Namespaces, namespaceMessage(n))
	}
	if len(all) > size {
		resp.NextPageToken = base64.RawURLEncoding.EncodeToString([]byte(all[size-1].Name))
	}
	return resp, nil
}

func (a *admin) DeleteNamespace(ctx context.Context, m *dualcheckv1.DeleteNamespaceRequest) (*dualcheckv1.DeleteNamespaceResponse, error) {
	if err := validName(m.GetName(), "name"); err != nil {
		return nil, err
	}
	forgotten, err := a.namespaces.Delete(ctx, m.GetName(), m.GetForce())
	a.act(ctx, "delete namespace", m.GetName(), err, slog.Bool("force", m.GetForce()), slog.Int64("forgotten", forgotten))
	if err != nil {
		return nil, err
	}
	return &dualcheckv1.DeleteNamespaceResponse{Forgotten: forgotten}, nil
}

func (a *admin) ListRecords(ctx context.Context, m *dualcheckv1.ListRecordsRequest) (*dualcheckv1.ListRecordsResponse, error) {
	if err := claim.ValidateNamespace(m.GetNamespace()); err != nil {
		return nil, err
	}
	size, err := pageSize(m.GetPageSize())
	if err != nil {
		return nil, err
	}
	if _, known := dualcheckv1.State_name[int32(m.GetState())]; !known {
		return nil, refuse(claim.RequestInvalid, "state", fmt.Sprintf("state %d is not known: send one of the contract's, or none for all", m.GetState()))
	}
	resp := &dualcheckv1.ListRecordsResponse{NextPageToken: m.GetPageToken()}
	for bytes, asks := 0, 0; asks <= size/listAtOnce && bytes < listBytes && len(resp.Records) < size; asks++ {
		page, err := a.store.List(ctx, &claim.ListRequest{
			Namespace: m.GetNamespace(),
			State:     claim.State(m.GetState()),
			Size:      min(size-len(resp.Records), listAtOnce),
			Page:      resp.NextPageToken,
		})
		if err != nil {
			return nil, err
		}
		wall := time.Now()
		for _, r := range page.Records {
			told := foundMessage(claim.Found{Record: r, Now: page.Now}, wall)
			if told.GetResult() != nil {
				told.Result.Body = nil
			}
			bytes += proto.Size(told)
			resp.Records = append(resp.Records, told)
		}
		if resp.NextPageToken = page.Next; page.Next == "" {
			break
		}
	}
	return resp, nil
}

// A page is gathered from the store in small pieces, so that it never grows over
// what fits a message: one piece is 2.5 MiB at most.
const (
	listAtOnce = 100
	listBytes  = 8 << 20
)

func (a *admin) ResolveRecord(ctx context.Context, m *dualcheckv1.ResolveRecordRequest) (*dualcheckv1.ResolveRecordResponse, error) {
	req, err := resolveRequest(m)
	if err != nil {
		return nil, err
	}
	found, err := a.store.Resolve(ctx, req)
	a.act(ctx, "resolve record", req.Namespace, err, telemetry.Key(req.Key, a.plainKeys),
		slog.String("state", req.State.String()), slog.String(telemetry.FieldWhy, req.Reason))
	if err != nil {
		return nil, err
	}
	return &dualcheckv1.ResolveRecordResponse{Record: foundMessage(found, time.Now())}, nil
}

func (a *admin) ForgetRecord(ctx context.Context, m *dualcheckv1.ForgetRecordRequest) (*dualcheckv1.ForgetRecordResponse, error) {
	req := &claim.ForgetRequest{Namespace: m.GetNamespace(), Key: m.GetKey(), Reason: m.GetReason(), Force: m.GetForce()}
	if err := req.Validate(); err != nil {
		return nil, err
	}
	revision, err := a.store.Forget(ctx, req)
	a.act(ctx, "forget record", req.Namespace, err, telemetry.Key(req.Key, a.plainKeys),
		slog.Bool("force", req.Force), slog.String(telemetry.FieldWhy, req.Reason))
	if err != nil {
		return nil, err
	}
	return &dualcheckv1.ForgetRecordResponse{Revision: revision}, nil
}

// GetCluster answers also while etcd does not: with what this node knows.
func (a *admin) GetCluster(ctx context.Context, _ *dualcheckv1.GetClusterRequest) (*dualcheckv1.GetClusterResponse, error) {
	at := a.cluster.Standing(ctx)
	resp := &dualcheckv1.GetClusterResponse{Node: at.Node, AppliedRevision: at.Applied}
	if v, err := a.cluster.View(); err == nil {
		resp.Clock = &dualcheckv1.Clock{Time: durationpb.New(time.Duration(v.Tick.Time)), TickVersion: v.Tick.Version, Age: durationpb.New(at.TickAge)}
		resp.GuardRevision, resp.Epoch, resp.FenceBase = v.Guard, hex.EncodeToString(v.Epoch[:]), v.FenceBase
	}
	for _, n := range at.Nodes {
		resp.Nodes = append(resp.Nodes, &dualcheckv1.Node{Id: n.ID, Version: n.Version, GrpcAddr: n.GRPCAddr, StartedAt: timestamp(n.StartedAt), Ticks: n.Ticks})
	}
	for _, e := range at.Members {
		resp.EtcdMembers = append(resp.EtcdMembers, &dualcheckv1.EtcdMember{
			Endpoint: e.Endpoint, Version: e.Version, Leader: e.Leader,
			DbSizeBytes: e.DBSize, DbInUseBytes: e.DBInUse, QuotaBytes: e.Quota, Alarms: e.Alarms, Error: e.Err,
		})
	}
	return resp, nil
}

// validName reports NAMESPACE_INVALID, of the field that the name came in.
func validName(name, field string) error {
	err := claim.ValidateNamespace(name)
	if e, ok := errors.AsType[*claim.Error](err); ok {
		blamed := *e
		blamed.Field = field
		return &blamed
	}
	return err
}

// pageSize is 100 unless asked for, and at most 1,000.
func pageSize(asked int32) (int, error) {
	switch {
	case asked < 0:
		return 0, refuse(claim.RequestInvalid, "page_size", fmt.Sprintf("a page has 1 to 1000 entries, or 0 for 100, not %d", asked))
	case asked == 0:
		return 100, nil
	}
	return min(int(asked), 1000), nil
}
