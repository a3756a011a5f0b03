package etcdtxn

import (
	"context"
	"errors"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// fault is what an error from etcd says about the write that met it.
type fault string

const (
	// ambiguous: applied, or not, or yet to be. Send the same again.
	ambiguous fault = "ambiguous"
	// full: the database is; applied or not, but not yet to be.
	full fault = "full"
	// busy: not applied; etcd asks for a pause.
	busy fault = "busy"
	// denied: not applied, and sending it again is no use.
	denied fault = "denied"
)

// classOf reads an error of a write. Two of etcd's errors share a code and mean
// opposite things, so messages are compared where the code is not enough.
// Source: etcd api/v3rpc/rpctypes/error.go, server etcdserver/apply/quota.go.
func classOf(err error) fault {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return ambiguous
	}
	if errors.Is(err, errUnsent) {
		return busy
	}
	err = rpctypes.Error(err)
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace):
		return full
	case errors.Is(err, rpctypes.ErrTooManyRequests), errors.Is(err, rpctypes.ErrTooManyOps): // the next try has fewer
		return busy
	}
	code := codes.Unknown
	var known rpctypes.EtcdError
	if errors.As(err, &known) {
		code = known.Code()
	} else if s, ok := status.FromError(err); ok {
		code = s.Code()
	}
	switch code {
	case codes.InvalidArgument, codes.NotFound, codes.OutOfRange, codes.FailedPrecondition,
		codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented:
		return denied
	case codes.ResourceExhausted:
		// gRPC's own. Only what its client would not send is surely not applied; a
		// connection that was cut for its load has the same code.
		if strings.Contains(err.Error(), "trying to send message larger than max") {
			return denied
		}
	case codes.Unavailable:
		text := err.Error()
		if strings.Contains(text, "there is no address available") || strings.Contains(text, "there is no connection available") {
			return busy
		}
	}
	return ambiguous
}
