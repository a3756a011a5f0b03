package main

import (
	"strings"
	"testing"

	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// Whatever a server accepts can be shown, also of types that this program happens
// to hold.
func TestWhatAServerAcceptsIsShown(t *testing.T) {
	for name, detail := range map[string]*anypb.Any{
		"a status that does not parse":  {TypeUrl: "type.googleapis.com/google.rpc.Status", Value: []byte{0xff}},
		"an any around an unknown type": {TypeUrl: "type.googleapis.com/google.protobuf.Any", Value: mustMarshal(t, &anypb.Any{TypeUrl: "x/acme.Reason", Value: []byte("abc")})},
		"a status with an unknown type": {TypeUrl: "type.googleapis.com/google.rpc.Status", Value: mustMarshal(t, &rpcstatus.Status{Details: []*anypb.Any{{TypeUrl: "x/acme.Reason"}}})},
		"of the contract":               {TypeUrl: "type.googleapis.com/dualcheck.v1.Record", Value: []byte{0xff}},
	} {
		raw, err := messageJSON(&dualcheckv1.Record{Failure: &dualcheckv1.Failure{Details: []*anypb.Any{detail}}})
		if err != nil || !strings.Contains(string(raw), `"value":"`) {
			t.Errorf("%s: %s %v", name, raw, err)
		}
	}
}
