package layout

import (
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	storagev1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/storage/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// See adds to what was seen of the guard and the tick what is among these.
func See(seen claim.Seen, kvs []*mvccpb.KeyValue) (claim.Seen, error) {
	for _, kv := range kvs {
		switch string(kv.Key) {
		case Guard:
			seen.Guard = kv.ModRevision
		case Tick:
			var m storagev1.Tick
			if err := decode(kv.Value, &m); err != nil {
				return seen, err
			}
			seen.Tick = claim.Tick{Time: claim.Instant(m.GetTimeNs()), Version: kv.Version, Revision: kv.ModRevision}
		}
	}
	return seen, nil
}

// EncodeTick returns the value of a tick.
func EncodeTick(at claim.Instant) (string, error) {
	return encode(&storagev1.Tick{TimeNs: int64(at)})
}

// EncodeGuard returns a value of the guard; only its revision counts, the cause is
// for people.
func EncodeGuard(cause string) (string, error) { return encode(&storagev1.Guard{Cause: cause}) }

// EncodeEpoch returns the value of an epoch.
func EncodeEpoch(id claim.ID, fenceBase int64) (string, error) {
	return encode(&storagev1.Epoch{Id: id[:], FenceBase: fenceBase})
}

// DecodeEpoch reads an epoch.
func DecodeEpoch(value []byte) (id claim.ID, fenceBase int64, err error) {
	var m storagev1.Epoch
	if err := decode(value, &m); err != nil {
		return id, 0, err
	}
	if len(m.GetId()) != len(id) {
		return id, 0, fmt.Errorf("decode Epoch: an id of %d bytes, not %d", len(m.GetId()), len(id))
	}
	return claim.ID(m.GetId()), m.GetFenceBase(), nil
}

// EncodeSecret returns the value of the secret.
func EncodeSecret(key []byte) (string, error) { return encode(&storagev1.Secret{Key: key}) }

// DecodeSecret reads the secret.
func DecodeSecret(value []byte) ([]byte, error) {
	var m storagev1.Secret
	err := decode(value, &m)
	return m.GetKey(), err
}

// EncodeSwitch returns the value of a switch.
func EncodeSwitch(s policy.Switch) (string, error) {
	return encode(&storagev1.Switch{Format: Format, On: s.On, Reason: s.Reason, ChangedWallNs: wallNs(s.ChangedAt)})
}

// DecodeSwitch reads a switch that was found under its name. One that is on and that
// this version does not know is an error: this node could not obey it.
func DecodeSwitch(name string, value []byte) (policy.Switch, error) {
	var m storagev1.Switch
	if err := decode(value, &m); err != nil {
		return policy.Switch{}, err
	}
	if m.GetFormat() != Format {
		return policy.Switch{}, fmt.Errorf("decode Switch: format %d, this version reads %d", m.GetFormat(), Format)
	}
	if m.GetOn() && !policy.HasSwitch(name) {
		return policy.Switch{}, fmt.Errorf("decode Switch: %q is on, and this version does not have it", name)
	}
	return policy.Switch{Name: name, On: m.GetOn(), Reason: m.GetReason(), ChangedAt: wall(m.GetChangedWallNs())}, nil
}

// Node is a server's registration.
type Node struct {
	// ID is unique among the living.
	ID, Version, GRPCAddr string
	StartedAt             time.Time
}

// EncodeNode returns the value of a registration.
func EncodeNode(n Node) (string, error) {
	return encode(&storagev1.Node{Id: n.ID, Version: n.Version, GrpcAddr: n.GRPCAddr, StartedWallNs: wallNs(n.StartedAt)})
}

// DecodeNode reads a registration.
func DecodeNode(value []byte) (Node, error) {
	var m storagev1.Node
	err := decode(value, &m)
	return Node{ID: m.GetId(), Version: m.GetVersion(), GRPCAddr: m.GetGrpcAddr(), StartedAt: wall(m.GetStartedWallNs())}, err
}

func encode(m proto.Message) (string, error) {
	b, err := deterministic.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("encode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return string(b), nil
}

func decode(value []byte, m proto.Message) error {
	if err := proto.Unmarshal(value, m); err != nil {
		return fmt.Errorf("decode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	return nil
}
