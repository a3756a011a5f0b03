package server

import (
	"context"
	"encoding/hex"
	"log/slog"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// Levers are what an operator moves for the whole cluster.
type Levers interface {
	// Switches returns all by name, as this node has applied them.
	Switches() ([]policy.Switch, error)
	// PutSwitch answers once no node acts by what was before, with what is stored.
	PutSwitch(ctx context.Context, sw policy.Switch) (policy.Switch, error)
	// RaiseEpoch answers once no node acts by the epoch before, with the new one.
	RaiseEpoch(ctx context.Context, reason string) (claim.ID, error)
}

func (a *admin) PutSwitch(ctx context.Context, m *dualcheckv1.PutSwitchRequest) (*dualcheckv1.PutSwitchResponse, error) {
	asked := m.GetSwitch()
	sw := policy.Switch{Name: asked.GetName(), On: asked.GetOn(), Reason: asked.GetReason()}
	if err := sw.Validate(); err != nil {
		return nil, err
	}
	put, err := a.levers.PutSwitch(ctx, sw)
	a.act(ctx, "put switch", "", err, slog.String("switch", sw.Name), slog.Bool("on", sw.On), slog.String(telemetry.FieldWhy, sw.Reason))
	if err != nil {
		return nil, err
	}
	return &dualcheckv1.PutSwitchResponse{Switch: switchMessage(put)}, nil
}

func (a *admin) ListSwitches(context.Context, *dualcheckv1.ListSwitchesRequest) (*dualcheckv1.ListSwitchesResponse, error) {
	all, err := a.levers.Switches()
	if err != nil {
		return nil, err
	}
	resp := &dualcheckv1.ListSwitchesResponse{}
	for _, sw := range all {
		resp.Switches = append(resp.Switches, switchMessage(sw))
	}
	return resp, nil
}

func (a *admin) RaiseEpoch(ctx context.Context, m *dualcheckv1.RaiseEpochRequest) (*dualcheckv1.RaiseEpochResponse, error) {
	if err := claim.ValidateReason("reason", m.GetReason()); err != nil {
		return nil, err
	}
	id, err := a.levers.RaiseEpoch(ctx, m.GetReason())
	a.act(ctx, "raise epoch", "", err, slog.String(telemetry.FieldWhy, m.GetReason()))
	if err != nil {
		return nil, err
	}
	return &dualcheckv1.RaiseEpochResponse{Epoch: hex.EncodeToString(id[:])}, nil
}

func switchMessage(sw policy.Switch) *dualcheckv1.Switch {
	return &dualcheckv1.Switch{Name: sw.Name, On: sw.On, Reason: sw.Reason, ChangedAt: timestamp(sw.ChangedAt)}
}
