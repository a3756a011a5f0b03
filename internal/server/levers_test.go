package server

import (
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

func TestSwitches(t *testing.T) {
	w := start(t)
	list, err := w.admin.ListSwitches(t.Context(), &dualcheckv1.ListSwitchesRequest{})
	if err != nil || len(list.GetSwitches()) != 2 || list.GetSwitches()[0].GetName() != "bypass-memory" || list.GetSwitches()[1].GetName() != "bypass-redis" || list.GetSwitches()[1].GetOn() || list.GetSwitches()[1].GetChangedAt() != nil {
		t.Fatalf("before any put: %v %v", list, err)
	}
	put, err := w.admin.PutSwitch(t.Context(), &dualcheckv1.PutSwitchRequest{Switch: &dualcheckv1.Switch{Name: "bypass-redis", On: true, Reason: "Redis is moved"}})
	if sw := put.GetSwitch(); err != nil || !sw.GetOn() || sw.GetReason() != "Redis is moved" || sw.GetChangedAt().GetSeconds() != 1 {
		t.Fatalf("%v %v", put, err)
	}
	if list, err = w.admin.ListSwitches(t.Context(), &dualcheckv1.ListSwitchesRequest{}); err != nil || list.GetSwitches()[0].GetOn() || !list.GetSwitches()[1].GetOn() {
		t.Errorf("after a put: %v %v", list, err)
	}
	if log := w.logs.String(); !strings.Contains(log, `act="put switch" switch=bypass-redis on=true why="Redis is moved"`) {
		t.Errorf("the act is not logged:\n%s", log)
	}
}

func TestSwitchRefusals(t *testing.T) {
	w := start(t)
	for _, c := range []struct {
		sw             *dualcheckv1.Switch
		field, message string
	}{
		{nil, "switch.name", "it has bypass-memory, bypass-redis"},
		{&dualcheckv1.Switch{Name: "read-only", On: true, Reason: "r"}, "switch.name", `no switch "read-only"`},
		{&dualcheckv1.Switch{Name: "bypass-redis/", Reason: "r"}, "switch.name", "it has bypass-memory, bypass-redis"},
		{&dualcheckv1.Switch{Name: "bypass-redis", On: true}, "switch.reason", "say why"},
		{&dualcheckv1.Switch{Name: "bypass-redis", Reason: strings.Repeat("x", claim.MaxReason+1)}, "switch.reason", "at most 1024 bytes"},
	} {
		_, err := w.admin.PutSwitch(t.Context(), &dualcheckv1.PutSwitchRequest{Switch: c.sw})
		s := want(t, err, claim.RequestInvalid, codes.InvalidArgument)
		if violated(s) != c.field || !strings.Contains(s.Message(), c.message) {
			t.Errorf("%v: field %q, message %q", c.sw, violated(s), s.Message())
		}
	}
	if len(w.levers.switches) != 0 {
		t.Errorf("stored %v", w.levers.switches)
	}
}

func TestRaiseEpoch(t *testing.T) {
	w := start(t)
	_, err := w.admin.RaiseEpoch(t.Context(), &dualcheckv1.RaiseEpochRequest{})
	if s := want(t, err, claim.RequestInvalid, codes.InvalidArgument); violated(s) != "reason" {
		t.Errorf("%q is blamed", violated(s))
	}
	got, err := w.admin.RaiseEpoch(t.Context(), &dualcheckv1.RaiseEpochRequest{Reason: "after a restore"})
	if err != nil || got.GetEpoch() != "ab010000000000000000000000000000" || len(w.levers.raised) != 1 || w.levers.raised[0] != "after a restore" {
		t.Errorf("%v %v, raised %q", got, err, w.levers.raised)
	}
	if log := w.logs.String(); !strings.Contains(log, `act="raise epoch" why="after a restore"`) {
		t.Errorf("the act is not logged:\n%s", log)
	}
	w.levers.err = claim.Unavailable("the store is away", errTest)
	_, err = w.admin.RaiseEpoch(t.Context(), &dualcheckv1.RaiseEpochRequest{Reason: "again"})
	want(t, err, claim.StoreUnavailable, codes.Unavailable)
	_, err = w.admin.ListSwitches(t.Context(), &dualcheckv1.ListSwitchesRequest{})
	want(t, err, claim.StoreUnavailable, codes.Unavailable)
}

func TestLeversOverJSON(t *testing.T) {
	w := start(t)
	for _, c := range []struct{ path, body, want string }{
		{"/v1/admin/switches:put", `{"switch":{"name":"bypass-redis","on":true,"reason":"r"}}`, `{"switch":{"name":"bypass-redis","on":true,"reason":"r","changedAt":"1970-01-01T00:00:01Z"}}`},
		{"/v1/admin/switches:list", `{}`, `{"switches":[{"name":"bypass-memory"},{"name":"bypass-redis","on":true,"reason":"r","changedAt":"1970-01-01T00:00:01Z"}]}`},
		{"/v1/admin/epoch:raise", `{"reason":"r"}`, `{"epoch":"ab010000000000000000000000000000"}`},
	} {
		code, _, body := w.post(c.path, c.body)
		if plain := strings.Join(strings.Fields(body), ""); code != http.StatusOK || plain != c.want {
			t.Errorf("%s: %d %s", c.path, code, plain)
		}
	}
	code, _, body := w.post("/v1/admin/switches:put", `{"switch":{"name":"drain","on":true,"reason":"r"}}`)
	if e := parseError(t, body); code != http.StatusBadRequest || e.reason() != "REQUEST_INVALID" || !strings.Contains(e.Message, "it has bypass-memory, bypass-redis") {
		t.Errorf("%d %s", code, body)
	}
}
