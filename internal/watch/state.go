package watch

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	storagev1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/storage/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// Node is a registered server.
type Node struct {
	ID, Version, GRPCAddr string
	StartedAt             time.Time
	// Ticks: it is the node that others leave the tick to.
	Ticks bool
	// registered orders nodes; the first one ticks.
	registered int64
}

// state is what one revision left behind. It is never changed once published;
// apply makes the next one.
type state struct {
	applied   int64
	guard     int64
	tick      claim.Tick
	epoch     claim.ID
	fenceBase int64
	secret    []byte
	// declared holds the policies by etcd key; effective by name.
	declared   map[string]policy.Namespace
	effective  map[string]claim.Policy
	nodes      map[string]Node
	unreadable map[string]error
}

func newState() *state {
	return &state{
		declared:   map[string]policy.Namespace{},
		effective:  map[string]claim.Policy{},
		nodes:      map[string]Node{},
		unreadable: map[string]error{},
	}
}

// next returns the state after these changes, all of them up to this revision.
func (s *state) next(revision int64, changes []*mvccpb.Event) *state {
	n := *s
	n.applied = revision
	n.unreadable = maps.Clone(s.unreadable)
	policies, nodes := false, false
	for _, e := range changes {
		key := string(e.Kv.Key)
		policies = policies || strings.HasPrefix(key, layout.Policies)
		nodes = nodes || strings.HasPrefix(key, layout.Nodes)
	}
	if policies {
		n.declared = maps.Clone(s.declared)
	}
	if nodes {
		n.nodes = maps.Clone(s.nodes)
	}
	for _, e := range changes {
		key := string(e.Kv.Key)
		delete(n.unreadable, key)
		if e.Type == mvccpb.Event_DELETE {
			// Only from the map that was cloned: the other is the published state's own.
			switch {
			case strings.HasPrefix(key, layout.Policies):
				delete(n.declared, key)
			case strings.HasPrefix(key, layout.Nodes):
				delete(n.nodes, key)
			}
			continue
		}
		if err := n.put(key, e.Kv); err != nil {
			n.unreadable[key] = err
		}
	}
	if policies {
		n.effective = make(map[string]claim.Policy, len(n.declared))
		for _, ns := range n.declared {
			n.effective[ns.Name] = ns.Claim()
		}
	}
	return &n
}

func (s *state) put(key string, kv *mvccpb.KeyValue) error {
	switch {
	case key == layout.Tick, key == layout.Guard:
		seen, err := layout.See(claim.Seen{Guard: s.guard, Tick: s.tick}, []*mvccpb.KeyValue{kv})
		if err != nil {
			return err
		}
		s.guard, s.tick = seen.Guard, seen.Tick
	case key == layout.Epoch:
		var m storagev1.Epoch
		if err := layout.DecodeMeta(kv.Value, &m); err != nil {
			return err
		}
		copy(s.epoch[:], m.GetId())
		s.fenceBase = m.GetFenceBase()
	case key == layout.Secret:
		var m storagev1.Secret
		if err := layout.DecodeMeta(kv.Value, &m); err != nil {
			return err
		}
		s.secret = m.GetKey()
	case strings.HasPrefix(key, layout.Nodes):
		var m storagev1.Node
		if err := layout.DecodeMeta(kv.Value, &m); err != nil {
			return err
		}
		s.nodes[key] = Node{ID: m.GetId(), Version: m.GetVersion(), GRPCAddr: m.GetGrpcAddr(), StartedAt: time.Unix(0, m.GetStartedWallNs()), registered: kv.CreateRevision}
	case strings.HasPrefix(key, layout.Policies):
		ns, err := layout.DecodePolicy(kv.Value, kv.ModRevision)
		if err != nil {
			return err
		}
		s.declared[key] = ns
	}
	return nil
}

// check reports what is missing for this state to govern anything.
func (s *state) check() error {
	for key, err := range s.unreadable {
		return &claim.Error{Reason: claim.RecordUnreadable, Message: "what governs this cluster cannot be read by this version: upgrade this node", Err: fmt.Errorf("%s: %w", key, err)}
	}
	if s.guard == 0 || s.tick.Version == 0 || s.epoch == (claim.ID{}) || len(s.secret) == 0 {
		return unavailable("this etcd holds no dualcheck cluster yet, or only part of one", nil)
	}
	return nil
}

// sortedNodes returns the nodes, the one that ticks first.
func (s *state) sortedNodes() []Node {
	nodes := slices.SortedFunc(maps.Values(s.nodes), func(a, b Node) int { return int(a.registered - b.registered) })
	for i := range nodes {
		nodes[i].Ticks = i == 0
	}
	return nodes
}

// namespaces returns the declared namespaces by name.
func (s *state) namespaces() []policy.Namespace {
	return slices.SortedFunc(maps.Values(s.declared), func(a, b policy.Namespace) int { return strings.Compare(a.Name, b.Name) })
}

func unavailable(message string, err error) error {
	return &claim.Error{Reason: claim.StoreUnavailable, Message: message, RetryAfter: time.Second, Err: err}
}
