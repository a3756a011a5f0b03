package target

import (
	"context"
	"fmt"

	"github.com/dualcheck/dualcheck"
	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// sdk is dualcheck by its Go SDK, as its users call it.
type sdk struct{ *dualcheck.Client }

// maxStreams is as many as the SDK takes.
const maxStreams = 16

func newSDK(n rig.Node, s Spec) (caller, error) {
	opts := []dualcheck.Option{dualcheck.WithOwner(owner)}
	if s.Connections > maxStreams {
		return nil, fmt.Errorf("the SDK has %d streams at most, not %d", maxStreams, s.Connections)
	}
	if s.Connections > 0 {
		opts = append(opts, dualcheck.WithStreams(s.Connections))
	}
	c, err := dualcheck.New([]string{n.GRPC}, opts...)
	return sdk{c}, err
}

func sdkKey(key string) dualcheck.Key {
	return dualcheck.Key{Namespace: namespace, Key: key, Operation: operation, Fingerprint: fingerprint}
}

func (c sdk) begin(ctx context.Context, key string) (answer, error) {
	o, err := c.Begin(ctx, sdkKey(key))
	if err != nil {
		return answer{}, err
	}
	a := answer{verdict: dualcheckv1.Verdict(o.Verdict)}
	if o.Claim != nil {
		a.token = o.Claim.Token
	}
	if o.Verdict == dualcheck.Replay {
		result, err := o.Result()
		if err != nil {
			return answer{}, err
		}
		a.size = len(result.Body)
	}
	return a, nil
}

func (c sdk) complete(ctx context.Context, key, token string, body []byte) error {
	_, err := c.Complete(ctx, &dualcheck.Claim{Key: sdkKey(key), Token: token}, dualcheck.Result{Code: 200, ContentType: contentType, Body: body})
	return err
}
