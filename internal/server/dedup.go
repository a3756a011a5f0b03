package server

import (
	"context"
	"time"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/telemetry"
	"github.com/dualcheck/dualcheck/internal/waiting"
)

// dedup is DedupService over a Store.
type dedup struct {
	dualcheckv1.UnimplementedDedupServiceServer
	store   claim.Store
	waits   *waiting.Room
	calls   *calls
	metrics *telemetry.Metrics
	// draining is closed when no new work is to be taken on.
	draining <-chan struct{}
	sessions *sessions
}

func (d *dedup) Begin(ctx context.Context, m *dualcheckv1.BeginRequest) (*dualcheckv1.BeginResponse, error) {
	return d.beginFor(ctx, m, telemetry.TraceID(ctx), nil)
}

// beginFor is Begin; waiter may be nil.
func (d *dedup) beginFor(ctx context.Context, m *dualcheckv1.BeginRequest, traceID []byte, waiter *sessionCall) (*dualcheckv1.BeginResponse, error) {
	req, err := beginRequest(m, traceID)
	if err != nil {
		return nil, err
	}
	answer, err := d.begin(ctx, req)
	if err != nil {
		return nil, err
	}
	if answer.Verdict == claim.InProgress && req.Wait > 0 {
		var enough <-chan struct{}
		if waiter != nil {
			enough = waiter.waits()
		}
		if answer, err = d.wait(ctx, req, answer, enough); err != nil {
			return nil, err
		}
	}
	return d.begun(req, answer), nil
}

// begin asks once.
func (d *dedup) begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	if err := d.stopping(); err != nil {
		return claim.Answer{}, err
	}
	return d.store.Begin(ctx, req)
}

// beginTogether asks once for several of one key.
func (d *dedup) beginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	if err := d.stopping(); err != nil {
		return claim.NoneBegun(len(reqs), err)
	}
	return d.store.BeginTogether(ctx, reqs)
}

// stopping refuses new work.
func (d *dedup) stopping() error {
	select {
	case <-d.draining:
		return &claim.Error{Reason: claim.Draining, Message: "this node is stopping: send the same call to another", RetryAfter: 100 * time.Millisecond}
	default:
		return nil
	}
}

// begun counts an answer and tells it.
func (d *dedup) begun(req *claim.BeginRequest, a claim.Answer) *dualcheckv1.BeginResponse {
	m := beginResponse(&a, time.Now())
	d.metrics.Begin(req.Namespace, dualcheckv1.Verdict_name[int32(m.GetVerdict())], dualcheckv1.Source_name[int32(m.GetSource())])
	return m
}

// wait waits where all do until the key is no longer in progress, the caller's patience or
// deadline is near, or enough is closed.
func (d *dedup) wait(ctx context.Context, req *claim.BeginRequest, last claim.Answer, enough <-chan struct{}) (claim.Answer, error) {
	defer d.metrics.Waiting()()
	return d.waits.Wait(ctx, req, last, enough)
}

func (d *dedup) Complete(ctx context.Context, m *dualcheckv1.CompleteRequest) (*dualcheckv1.FinishResponse, error) {
	req, err := completeRequest(m)
	return d.finish(ctx, "complete", req, err)
}

func (d *dedup) Fail(ctx context.Context, m *dualcheckv1.FailRequest) (*dualcheckv1.FinishResponse, error) {
	req, err := failRequest(m)
	return d.finish(ctx, failKind(m.GetFailure().GetClass()), req, err)
}

// finish finishes by a request that may already be in error.
func (d *dedup) finish(ctx context.Context, kind string, req *claim.FinishRequest, err error) (*dualcheckv1.FinishResponse, error) {
	var found claim.Found
	if err == nil {
		found, err = d.store.Finish(ctx, req)
	}
	if err != nil {
		d.metrics.Finish(kind, string(faultOf(ctx, err).Reason))
		return nil, err
	}
	d.metrics.Finish(kind, "OK")
	return &dualcheckv1.FinishResponse{Record: foundMessage(found, time.Now())}, nil
}

// failKind names a failure's class in metrics.
func failKind(c dualcheckv1.FailureClass) string {
	switch c {
	case dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE:
		return "retryable"
	case dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL:
		return "terminal"
	case dualcheckv1.FailureClass_FAILURE_CLASS_UNKNOWN:
		return "unknown"
	}
	return "none"
}

func (d *dedup) Extend(ctx context.Context, m *dualcheckv1.ExtendRequest) (*dualcheckv1.ExtendResponse, error) {
	req, err := extendRequest(m)
	if err != nil {
		return nil, err
	}
	grant, err := d.store.Extend(ctx, req)
	if err != nil {
		return nil, err
	}
	return &dualcheckv1.ExtendResponse{Claim: grantMessage(grant, time.Now())}, nil
}

// Get is linearizable, unless cached is set: then it may be told that there is no such key,
// which was true within the last 3 s.
func (d *dedup) Get(ctx context.Context, m *dualcheckv1.GetRequest) (*dualcheckv1.GetResponse, error) {
	if err := claim.ValidateName(m.GetNamespace(), m.GetKey()); err != nil {
		return nil, err
	}
	found, err := d.store.Get(ctx, &claim.GetRequest{Namespace: m.GetNamespace(), Key: m.GetKey(), Cached: m.GetCached()})
	if err != nil {
		return nil, err
	}
	return &dualcheckv1.GetResponse{
		Record:   foundMessage(found, time.Now()),
		Source:   dualcheckv1.Source(found.Source),
		Revision: found.Revision,
		Stale:    found.Stale,
	}, nil
}
