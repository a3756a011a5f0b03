package watch

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// Node is a registered server.
type Node struct {
	layout.Node
	// Ticks: it is the node that others leave the tick to.
	Ticks bool
	// registered orders nodes; the first one ticks.
	registered int64
}

// state is what one revision left behind. It is never changed once published;
// next makes the next one.
type state struct {
	applied   int64
	guard     int64
	tick      claim.Tick
	epoch     claim.ID
	fenceBase int64
	secret    []byte
	sealer    claim.Sealer // of the secret
	// slots is shared by states between which no slot epoch has moved.
	slots *[claim.Slots]int64
	// declared holds the policies by etcd key; effective by name.
	declared   map[string]policy.Namespace
	effective  map[string]claim.Policy
	nodes      map[string]Node
	switches   map[string]policy.Switch // by name; those that were put
	unreadable map[string]error
}

func newState() *state {
	return &state{
		slots:      new([claim.Slots]int64),
		declared:   map[string]policy.Namespace{},
		effective:  map[string]claim.Policy{},
		nodes:      map[string]Node{},
		switches:   map[string]policy.Switch{},
		unreadable: map[string]error{},
	}
}

// next returns the state after these changes, all of them up to this revision.
func (s *state) next(revision int64, changes []*mvccpb.Event) *state {
	n := *s
	n.applied = revision
	n.unreadable = maps.Clone(s.unreadable)
	policies, nodes, slots, switches := false, false, false, false
	for _, e := range changes {
		key := string(e.Kv.Key)
		policies = policies || strings.HasPrefix(key, layout.Policies)
		nodes = nodes || strings.HasPrefix(key, layout.Nodes)
		slots = slots || strings.HasPrefix(key, layout.SlotEpochs)
		switches = switches || strings.HasPrefix(key, layout.Switches)
	}
	if slots {
		copied := *s.slots
		n.slots = &copied
	}
	if policies {
		n.declared = maps.Clone(s.declared)
	}
	if nodes {
		n.nodes = maps.Clone(s.nodes)
	}
	if switches {
		n.switches = maps.Clone(s.switches)
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
			case strings.HasPrefix(key, layout.Switches):
				delete(n.switches, strings.TrimPrefix(key, layout.Switches))
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
		id, fenceBase, err := layout.DecodeEpoch(kv.Value)
		if err != nil {
			return err
		}
		s.epoch, s.fenceBase = id, fenceBase
	case key == layout.Secret:
		secret, err := layout.DecodeSecret(kv.Value)
		if err != nil {
			return err
		}
		s.secret, s.sealer = secret, claim.NewSealer(secret)
	case strings.HasPrefix(key, layout.SlotEpochs):
		slot, ok := layout.SlotOf(key)
		if ok { // else it governs nothing
			s.slots[slot] = kv.ModRevision
		}
	case strings.HasPrefix(key, layout.Nodes):
		n, err := layout.DecodeNode(kv.Value)
		if err != nil {
			// It governs nothing: a registration that cannot be read is one that is not there.
			delete(s.nodes, key)
			return nil //nolint:nilerr // see above
		}
		s.nodes[key] = Node{Node: n, registered: kv.CreateRevision}
	case strings.HasPrefix(key, layout.Switches):
		name := strings.TrimPrefix(key, layout.Switches)
		sw, err := layout.DecodeSwitch(name, kv.Value)
		if err != nil {
			return err
		}
		s.switches[name] = sw
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
		return claim.Unavailable("this etcd holds no dualcheck cluster yet, or only part of one", nil)
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

// allSwitches returns the switches that this version obeys by name; one that was
// never put is off.
func (s *state) allSwitches() []policy.Switch {
	var all []policy.Switch
	for _, name := range policy.SwitchNames() {
		sw := s.switches[name]
		sw.Name = name
		all = append(all, sw)
	}
	return all
}

// namespaces returns the declared namespaces by name.
func (s *state) namespaces() []policy.Namespace {
	return slices.SortedFunc(maps.Values(s.declared), func(a, b policy.Namespace) int { return strings.Compare(a.Name, b.Name) })
}
