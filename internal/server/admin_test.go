package server

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

func TestNamespaces(t *testing.T) {
	w := start(t)
	_, err := w.admin.GetNamespace(t.Context(), &dualcheckv1.GetNamespaceRequest{Name: "orders"})
	want(t, err, claim.NamespaceNotFound, codes.NotFound)
	declared := &dualcheckv1.Policy{
		DefaultLease: durationpb.New(10 * time.Second), RetentionClass: dualcheckv1.RetentionClass_RETENTION_LEDGER, KeyRetention: durationpb.New(1000 * time.Hour),
		MaxAttempts: 3, RequireFingerprint: true, MaxResultBytes: 1024, CacheTtlMin: durationpb.New(time.Minute), WithoutEtcd: dualcheckv1.WithoutEtcd_WITHOUT_ETCD_REPLAY_ONLY,
		Rollout: &dualcheckv1.Rollout{},
	}
	put, err := w.admin.PutNamespace(t.Context(), &dualcheckv1.PutNamespaceRequest{Namespace: &dualcheckv1.Namespace{Name: "orders", Policy: declared}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := w.admin.GetNamespace(t.Context(), &dualcheckv1.GetNamespaceRequest{Name: "orders"})
	if err != nil || !proto.Equal(got.GetNamespace(), put.GetNamespace()) || !proto.Equal(got.GetEffective(), put.GetEffective()) || got.GetDeleting() {
		t.Fatalf("%v %v", got, err)
	}
	declared.Rollout = nil // is the default
	if !proto.Equal(got.GetNamespace().GetPolicy(), declared) || got.GetNamespace().GetRevision() == 0 {
		t.Errorf("declared %v", got.GetNamespace())
	}
	e := got.GetEffective()
	if e.GetDefaultLease().AsDuration() != 10*time.Second || e.GetMaxLease().AsDuration() != time.Hour || e.GetTakeover() != dualcheckv1.Takeover_TAKEOVER_NEVER ||
		e.GetResultRetention().AsDuration() != 720*time.Hour || e.GetKeyRetention().AsDuration() != 1000*time.Hour || e.GetCacheTtlMax().AsDuration() != 2*time.Hour {
		t.Errorf("effective %v", e)
	}
	_, err = w.admin.DeleteNamespace(t.Context(), &dualcheckv1.DeleteNamespaceRequest{Name: "none"})
	want(t, err, claim.NamespaceNotFound, codes.NotFound)
	deleted, err := w.admin.DeleteNamespace(t.Context(), &dualcheckv1.DeleteNamespaceRequest{Name: "orders", Force: true})
	if err != nil || deleted.GetForgotten() != 7 {
		t.Errorf("%v %v", deleted, err)
	}
	w.namespaces.err = errors.New("not listed yet")
	_, err = w.admin.ListNamespaces(t.Context(), &dualcheckv1.ListNamespacesRequest{})
	want(t, err, claim.Internal, codes.Internal)
}

func TestAWrongNameIsBlamedOnItsField(t *testing.T) {
	w := start(t)
	_, get := w.admin.GetNamespace(t.Context(), &dualcheckv1.GetNamespaceRequest{Name: "A"})
	_, remove := w.admin.DeleteNamespace(t.Context(), &dualcheckv1.DeleteNamespaceRequest{Name: "A"})
	_, put := w.admin.PutNamespace(t.Context(), &dualcheckv1.PutNamespaceRequest{Namespace: &dualcheckv1.Namespace{Name: "A"}})
	_, list := w.admin.ListRecords(t.Context(), &dualcheckv1.ListRecordsRequest{Namespace: "A"})
	for _, c := range []struct {
		err   error
		field string
	}{{get, "name"}, {remove, "name"}, {put, "namespace.name"}, {list, "namespace"}} {
		if s := want(t, c.err, claim.NamespaceInvalid, codes.InvalidArgument); violated(s) != c.field {
			t.Errorf("%q is blamed, not %q", violated(s), c.field)
		}
	}
}

func TestNamespacesInPages(t *testing.T) {
	w := start(t)
	var names []string
	for i := range 7 {
		name := fmt.Sprintf("n%d", i)
		names = append(names, name)
		if _, err := w.admin.PutNamespace(t.Context(), &dualcheckv1.PutNamespaceRequest{Namespace: &dualcheckv1.Namespace{Name: name}}); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	req := &dualcheckv1.ListNamespacesRequest{PageSize: 3}
	for pages := 1; ; pages++ {
		resp, err := w.admin.ListNamespaces(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range resp.GetNamespaces() {
			got = append(got, n.GetName())
		}
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			if pages != 3 {
				t.Errorf("%d pages", pages)
			}
			break
		}
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		t.Errorf("got %v", got)
	}
	for _, bad := range []*dualcheckv1.ListNamespacesRequest{{PageSize: -1}, {PageToken: "!"}} {
		_, err := w.admin.ListNamespaces(t.Context(), bad)
		want(t, err, claim.RequestInvalid, codes.InvalidArgument)
	}
}

func TestPolicyRefusals(t *testing.T) {
	w := start(t)
	for field, p := range map[string]*dualcheckv1.Policy{
		"rollout.thousandths": {Rollout: &dualcheckv1.Rollout{Thousandths: proto.Int32(999)}},
		"rollout.by":          {Rollout: &dualcheckv1.Rollout{By: "tenant"}},
		"rollout.allow":       {Rollout: &dualcheckv1.Rollout{Thousandths: proto.Int32(1000), Allow: []string{"x"}}},
		"off":                 {Off: true},
		"rate_per_second":     {RatePerSecond: 1},
		"max_records":         {MaxRecords: -1},
		"state_machine":       {StateMachine: &dualcheckv1.StateMachine{}},
		"default_lease":       {DefaultLease: durationpb.New(0)},
		"max_lease":           {MaxLease: durationpb.New(-time.Second)},
		"result_retention":    {ResultRetention: &durationpb.Duration{Nanos: -1}},
		"key_retention":       {ResultRetention: durationpb.New(time.Hour), KeyRetention: durationpb.New(time.Minute)},
		"cache_ttl_min":       {CacheTtlMin: durationpb.New(time.Millisecond)},
		"cache_ttl_max":       {CacheTtlMax: &durationpb.Duration{Seconds: 1 << 60}},
		"max_attempts":        {MaxAttempts: -1},
		"max_result_bytes":    {MaxResultBytes: claim.MaxResult + 1},
		"retention_class":     {RetentionClass: 9},
		"takeover":            {Takeover: -1},
		"without_etcd":        {WithoutEtcd: 1 << 20},
	} {
		_, err := w.admin.PutNamespace(t.Context(), &dualcheckv1.PutNamespaceRequest{Namespace: &dualcheckv1.Namespace{Name: "a", Policy: p}})
		s := want(t, err, claim.PolicyInvalid, codes.InvalidArgument)
		if violated(s) != "namespace.policy."+field || !strings.Contains(s.Message(), field) {
			t.Errorf("%s: field %q, message %q", field, violated(s), s.Message())
		}
	}
	_, err := w.admin.PutNamespace(t.Context(), &dualcheckv1.PutNamespaceRequest{})
	want(t, err, claim.NamespaceInvalid, codes.InvalidArgument)
	if _, err := w.admin.PutNamespace(t.Context(), &dualcheckv1.PutNamespaceRequest{Namespace: &dualcheckv1.Namespace{Name: "a", Policy: &dualcheckv1.Policy{Rollout: &dualcheckv1.Rollout{Thousandths: proto.Int32(1000)}}}}); err != nil {
		t.Errorf("a rollout that enforces all: %v", err)
	}
}

func TestListRecordsGathersPagesThatFit(t *testing.T) {
	w := start(t)
	for i := range 250 {
		key := fmt.Sprintf("k%03d", i)
		token := w.first(key).GetToken()
		if i%2 == 0 {
			if _, err := w.Complete(t.Context(), completing(key, token, []byte("body")).GetComplete()); err != nil {
				t.Fatal(err)
			}
		}
	}
	got := map[string]bool{}
	req := &dualcheckv1.ListRecordsRequest{Namespace: "a", PageSize: 240}
	for pages := 1; ; pages++ {
		resp, err := w.admin.ListRecords(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range resp.GetRecords() {
			if got[r.GetKey()] || r.GetResult().GetBody() != nil {
				t.Fatalf("twice, or with its body: %v", r)
			}
			got[r.GetKey()] = true
		}
		if pages == 1 && len(resp.GetRecords()) != 240 {
			t.Errorf("a page of %d", len(resp.GetRecords()))
		}
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			break
		}
	}
	if len(got) != 250 {
		t.Errorf("%d records", len(got))
	}
	done, err := w.admin.ListRecords(t.Context(), &dualcheckv1.ListRecordsRequest{Namespace: "a", State: dualcheckv1.State_STATE_SUCCEEDED, PageSize: 1000})
	if err != nil || len(done.GetRecords()) != 125 {
		t.Errorf("%d succeeded, %v", len(done.GetRecords()), err)
	}
	_, err = w.admin.ListRecords(t.Context(), &dualcheckv1.ListRecordsRequest{Namespace: "a", State: 99})
	want(t, err, claim.RequestInvalid, codes.InvalidArgument)
	_, err = w.admin.ListRecords(t.Context(), &dualcheckv1.ListRecordsRequest{})
	want(t, err, claim.NamespaceInvalid, codes.InvalidArgument)
}

func TestResolveAndForget(t *testing.T) {
	w := start(t)
	resolve := func(key string, state dualcheckv1.State, tune func(*dualcheckv1.ResolveRecordRequest)) (*dualcheckv1.ResolveRecordResponse, error) {
		req := &dualcheckv1.ResolveRecordRequest{Namespace: "a", Key: key, State: state, Reason: "I called the bank"}
		if tune != nil {
			tune(req)
		}
		return w.admin.ResolveRecord(t.Context(), req)
	}
	_, err := resolve("none", dualcheckv1.State_STATE_RELEASED, nil)
	want(t, err, claim.RecordNotFound, codes.NotFound)
	token := w.first("k").GetToken()
	_, err = resolve("k", dualcheckv1.State_STATE_RELEASED, nil)
	want(t, err, claim.ClaimLive, codes.FailedPrecondition)
	for _, state := range []dualcheckv1.State{0, -1, dualcheckv1.State_STATE_PENDING, 260, 1 << 30} {
		_, err = resolve("k", state, nil)
		want(t, err, claim.RequestInvalid, codes.InvalidArgument)
	}
	_, err = resolve("k", dualcheckv1.State_STATE_RELEASED, func(r *dualcheckv1.ResolveRecordRequest) { r.Reason = "" })
	want(t, err, claim.RequestInvalid, codes.InvalidArgument)
	if _, err := w.Fail(t.Context(), &dualcheckv1.FailRequest{Namespace: "a", Key: "k", Token: token, Failure: &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_UNKNOWN}}); err != nil {
		t.Fatal(err)
	}
	_, err = w.admin.ForgetRecord(t.Context(), &dualcheckv1.ForgetRecordRequest{Namespace: "a", Key: "k", Reason: "test"})
	want(t, err, claim.ClaimLive, codes.FailedPrecondition)
	resp, err := resolve("k", dualcheckv1.State_STATE_SUCCEEDED, func(r *dualcheckv1.ResolveRecordRequest) {
		r.Outcome = &dualcheckv1.ResolveRecordRequest_Result{Result: &dualcheckv1.Result{Body: []byte("paid")}}
	})
	if err != nil || resp.GetRecord().GetState() != dualcheckv1.State_STATE_SUCCEEDED || string(resp.GetRecord().GetResult().GetBody()) != "paid" {
		t.Fatalf("%v %v", resp, err)
	}
	forgotten, err := w.admin.ForgetRecord(t.Context(), &dualcheckv1.ForgetRecordRequest{Namespace: "a", Key: "k", Reason: "test"})
	if err != nil || forgotten.GetRevision() == 0 {
		t.Fatalf("%v %v", forgotten, err)
	}
	log := w.logs.String()
	for _, part := range []string{"act=\"resolve record\"", "why=\"I called the bank\"", "key_hash=8254c329a928", "act=\"forget record\""} {
		if !strings.Contains(log, part) {
			t.Errorf("the log does not say %s", part)
		}
	}
	if strings.Contains(log, "key=k") {
		t.Error("the log shows a key")
	}
}

func TestPlainKeys(t *testing.T) {
	w := start(t, func(c *Config) { c.PlainKeys = true })
	w.first("k")
	_, err := w.admin.ForgetRecord(t.Context(), &dualcheckv1.ForgetRecordRequest{Namespace: "a", Key: "k", Reason: "test", Force: true})
	if err != nil || !strings.Contains(w.logs.String(), "key=k") {
		t.Errorf("%v\n%s", err, w.logs)
	}
}

func TestCluster(t *testing.T) {
	w := start(t)
	c, err := w.admin.GetCluster(t.Context(), &dualcheckv1.GetClusterRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if c.GetNode() != "n1" || c.GetNodes()[0].GetGrpcAddr() != "127.0.0.1:7070" || !c.GetNodes()[0].GetTicks() || c.GetClock().GetTime().AsDuration() != 90*time.Second ||
		c.GetClock().GetTickVersion() != 180 || c.GetClock().GetAge().AsDuration() != 200*time.Millisecond || c.GetGuardRevision() != 3 || c.GetFenceBase() != 1<<40 ||
		c.GetEpoch() != "01000000000000000000000000000000" || c.GetAppliedRevision() != 99 || !c.GetEtcdMembers()[0].GetLeader() ||
		c.GetEtcdMembers()[0].GetQuotaBytes() != 1<<30 || c.GetEtcdMembers()[0].GetAlarms()[0] != "NOSPACE" || c.GetEtcdMembers()[1].GetError() != "refused" {
		t.Errorf("got %v", c)
	}
}

// The numbers of the core's enums are those of the contract.
func TestEnumsAgree(t *testing.T) {
	for s := claim.Pending; s <= claim.Failed; s++ {
		if got := dualcheckv1.State(s).String(); got != s.String() {
			t.Errorf("state %d: %s, %s", s, s, got)
		}
	}
	for number, name := range map[int32]string{
		int32(claim.First): "VERDICT_FIRST", int32(claim.InProgress): "VERDICT_IN_PROGRESS", int32(claim.Replay): "VERDICT_REPLAY",
		int32(claim.ReplayFailure): "VERDICT_REPLAY_FAILURE", int32(claim.Conflict): "VERDICT_CONFLICT", int32(claim.Expired): "VERDICT_EXPIRED", int32(claim.OutcomeUnknown): "VERDICT_UNKNOWN_OUTCOME",
	} {
		if dualcheckv1.Verdict_name[number] != name {
			t.Errorf("verdict %d is %s, not %s", number, dualcheckv1.Verdict_name[number], name)
		}
	}
	for number, name := range map[int32]string{int32(claim.Proceed): "KEY_ACTION_PROCEED", int32(claim.Reuse): "KEY_ACTION_REUSE", int32(claim.Stop): "KEY_ACTION_STOP", int32(claim.Rotate): "KEY_ACTION_ROTATE"} {
		if dualcheckv1.KeyAction_name[number] != name {
			t.Errorf("key action %d is not %s", number, name)
		}
	}
	for number, name := range map[int32]string{int32(claim.SourceEtcd): "SOURCE_ETCD", int32(claim.SourceRedis): "SOURCE_REDIS", int32(claim.SourceMemory): "SOURCE_MEMORY"} {
		if dualcheckv1.Source_name[number] != name {
			t.Errorf("source %d is not %s", number, name)
		}
	}
	for number, name := range map[int32]string{int32(claim.PreviousNone): "PREVIOUS_NONE", int32(claim.PreviousReleased): "PREVIOUS_RELEASED", int32(claim.PreviousLapsed): "PREVIOUS_LAPSED"} {
		if dualcheckv1.Previous_name[number] != name {
			t.Errorf("previous %d is not %s", number, name)
		}
	}
	for number, name := range map[int32]string{int32(claim.Retryable): "FAILURE_CLASS_RETRYABLE", int32(claim.Terminal): "FAILURE_CLASS_TERMINAL", int32(claim.UnknownOutcome): "FAILURE_CLASS_UNKNOWN"} {
		if dualcheckv1.FailureClass_name[number] != name {
			t.Errorf("failure class %d is not %s", number, name)
		}
	}
}
