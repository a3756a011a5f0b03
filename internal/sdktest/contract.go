package sdktest

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// contract asks by the generated clients, one server after another.
type contract struct {
	next  *atomic.Uint64
	conns []*grpc.ClientConn
}

func dial(t testing.TB, addrs []string) contract {
	t.Helper()
	c := contract{next: new(atomic.Uint64)}
	for _, addr := range addrs {
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(2*claim.MaxMessage)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() }) //nolint:errcheck // it was open
		c.conns = append(c.conns, conn)
	}
	return c
}

func (c contract) conn() *grpc.ClientConn { return c.conns[c.next.Add(1)%uint64(len(c.conns))] }

func (c contract) dedup() dualcheckv1.DedupServiceClient {
	return dualcheckv1.NewDedupServiceClient(c.conn())
}

func (c contract) admin() dualcheckv1.AdminServiceClient {
	return dualcheckv1.NewAdminServiceClient(c.conn())
}

// BeginTogether is a batch.
func (c contract) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	m := &dualcheckv1.BatchBeginRequest{}
	for _, req := range reqs {
		m.Requests = append(m.Requests, beginMessage(req))
	}
	// A batch has one trace.
	if i := slices.IndexFunc(reqs, func(r *claim.BeginRequest) bool { return len(r.TraceID) > 0 }); i >= 0 {
		ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", "00-"+hex.EncodeToString(reqs[i].TraceID)+"-0102030405060708-01")
	}
	told, err := c.dedup().BatchBegin(ctx, m)
	if err != nil {
		return claim.NoneBegun(len(reqs), statusOf(err))
	}
	if n := len(told.GetResponses()); n != len(reqs) {
		return claim.NoneBegun(len(reqs), fmt.Errorf("%d answers to %d members", n, len(reqs)))
	}
	begun := make([]claim.Begun, len(reqs))
	for i, r := range told.GetResponses() {
		switch {
		case r.GetError() != nil:
			begun[i].Err = memberOf(r.GetError())
		case r.GetBegin() != nil:
			begun[i].Answer, begun[i].Err = answerOf(r.GetBegin())
		default:
			begun[i].Err = errors.New("a member without an answer")
		}
	}
	return begun
}

func finishMessage(req *claim.FinishRequest) *dualcheckv1.FinishRequest {
	if req.Failure != nil {
		return &dualcheckv1.FinishRequest{Finish: &dualcheckv1.FinishRequest_Fail{Fail: &dualcheckv1.FailRequest{
			Namespace: req.Namespace, Key: req.Key, Token: req.Token, Failure: failureMessage(req.Failure),
		}}}
	}
	complete := &dualcheckv1.CompleteRequest{Namespace: req.Namespace, Key: req.Key, Token: req.Token}
	switch {
	case req.Omitted != nil:
		complete.Outcome = &dualcheckv1.CompleteRequest_Omitted{Omitted: &dualcheckv1.Omitted{Digest: req.Omitted.Digest, Size: req.Omitted.Size}}
	case req.Result != nil:
		complete.Outcome = &dualcheckv1.CompleteRequest_Result{Result: resultMessage(req.Result)}
	}
	return &dualcheckv1.FinishRequest{Finish: &dualcheckv1.FinishRequest_Complete{Complete: complete}}
}

// finishTogether is a batch of finishes.
func (c contract) finishTogether(ctx context.Context, reqs []*claim.FinishRequest) []finished {
	m := &dualcheckv1.BatchFinishRequest{}
	for _, req := range reqs {
		m.Requests = append(m.Requests, finishMessage(req))
	}
	all := make([]finished, len(reqs))
	told, err := c.dedup().BatchFinish(ctx, m)
	if err == nil && len(told.GetResponses()) != len(reqs) {
		err = fmt.Errorf("%d answers to %d members", len(told.GetResponses()), len(reqs))
	}
	for i := range all {
		if err != nil {
			all[i].err = statusOf(err)
			continue
		}
		if e := told.GetResponses()[i].GetError(); e != nil {
			all[i].err = memberOf(e)
			continue
		}
		all[i].found, all[i].err = foundOf(told.GetResponses()[i].GetFinish().GetRecord())
	}
	return all
}

// finished is what became of one of several finishes.
type finished struct {
	found claim.Found
	err   error
}

func (c contract) Extend(ctx context.Context, req *claim.ExtendRequest) (*claim.Grant, error) {
	told, err := c.dedup().Extend(ctx, &dualcheckv1.ExtendRequest{Namespace: req.Namespace, Key: req.Key, Token: req.Token, Lease: leaseMessage(req.Lease)})
	if err != nil {
		return nil, statusOf(err)
	}
	m := told.GetClaim()
	return &claim.Grant{Token: m.GetToken(), Attempt: m.GetAttempt(), Fence: m.GetFence(), Left: m.GetLeaseLeft().AsDuration(), Previous: claim.Previous(m.GetPrevious())}, nil
}

func (c contract) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	told, err := c.dedup().Get(ctx, &dualcheckv1.GetRequest{Namespace: req.Namespace, Key: req.Key, Cached: req.Cached})
	if err != nil {
		return claim.Found{}, statusOf(err)
	}
	f, err := foundOf(told.GetRecord())
	f.Revision, f.Source, f.Stale = told.GetRevision(), claim.Source(told.GetSource()), told.GetStale()
	return f, err
}

// Resolve implements claim.Store.
func (c contract) Resolve(ctx context.Context, req *claim.ResolveRequest) (claim.Found, error) {
	m := &dualcheckv1.ResolveRecordRequest{Namespace: req.Namespace, Key: req.Key, State: dualcheckv1.State(req.State), Reason: req.Reason}
	switch {
	case req.Failure != nil:
		m.Outcome = &dualcheckv1.ResolveRecordRequest_Failure{Failure: failureMessage(req.Failure)}
	case req.Result != nil:
		m.Outcome = &dualcheckv1.ResolveRecordRequest_Result{Result: resultMessage(req.Result)}
	}
	told, err := c.admin().ResolveRecord(ctx, m)
	if err != nil {
		return claim.Found{}, statusOf(err)
	}
	return foundOf(told.GetRecord())
}

// Forget implements claim.Store.
func (c contract) Forget(ctx context.Context, req *claim.ForgetRequest) (int64, error) {
	told, err := c.admin().ForgetRecord(ctx, &dualcheckv1.ForgetRecordRequest{Namespace: req.Namespace, Key: req.Key, Reason: req.Reason, Force: req.Force})
	if err != nil {
		return 0, statusOf(err)
	}
	return told.GetRevision(), nil
}

// List implements claim.Store.
func (c contract) List(ctx context.Context, req *claim.ListRequest) (claim.Page, error) {
	told, err := c.admin().ListRecords(ctx, &dualcheckv1.ListRecordsRequest{Namespace: req.Namespace, State: dualcheckv1.State(req.State), PageSize: int32(req.Size), PageToken: req.Page})
	if err != nil {
		return claim.Page{}, statusOf(err)
	}
	page := claim.Page{Now: now(), Next: told.GetNextPageToken()}
	for _, m := range told.GetRecords() {
		r, err := recordOf(m)
		if err != nil {
			return page, err
		}
		page.Records = append(page.Records, r)
	}
	return page, nil
}
