package watch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	storagev1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/storage/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

func put(t *testing.T, key string, m proto.Message, version, revision int64) *mvccpb.Event {
	t.Helper()
	value, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte(key), Value: value, Version: version, CreateRevision: revision, ModRevision: revision}}
}

func policyValue(t *testing.T, name string, attempts int32) string {
	t.Helper()
	b, err := layout.EncodePolicy(policy.Namespace{Name: name, Policy: policy.Policy{MaxAttempts: attempts}})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func base(t *testing.T) *state {
	t.Helper()
	return newState().next(10, []*mvccpb.Event{
		put(t, layout.Guard, &storagev1.Guard{}, 1, 7),
		put(t, layout.Tick, &storagev1.Tick{TimeNs: 5}, 3, 9),
		put(t, layout.Epoch, &storagev1.Epoch{Id: []byte("0123456789abcdef")}, 1, 7),
		put(t, layout.Secret, &storagev1.Secret{Key: []byte("s")}, 1, 7),
	})
}

func TestStateNeverChangesOncePublished(t *testing.T) {
	old := base(t)
	next := old.next(12, []*mvccpb.Event{
		put(t, layout.NodeOf("b"), &storagev1.Node{Id: "b"}, 1, 12),
		put(t, layout.NodeOf("a"), &storagev1.Node{Id: "a"}, 1, 11),
		{Kv: &mvccpb.KeyValue{Key: []byte(layout.PolicyOf("ns")), Value: []byte(policyValue(t, "ns", 3)), ModRevision: 12}},
	})
	if len(old.nodes) != 0 || len(old.declared) != 0 || len(old.effective) != 0 {
		t.Errorf("the old state changed: %+v", old)
	}
	if nodes := next.sortedNodes(); len(nodes) != 2 || nodes[0].ID != "a" || !nodes[0].Ticks || nodes[1].Ticks {
		t.Errorf("nodes %+v: the one registered first ticks", nodes)
	}
	if next.effective["ns"].MaxAttempts != 3 {
		t.Errorf("policies %+v", next.effective)
	}
	gone := next.next(13, []*mvccpb.Event{
		{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte(layout.PolicyOf("ns")), ModRevision: 13}},
		{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte(layout.NodeOf("a")), ModRevision: 13}},
	})
	if len(gone.effective) != 0 || len(gone.nodes) != 1 || len(next.effective) != 1 {
		t.Errorf("after deletes: %+v", gone)
	}
}

// A policy of a newer format stops this node rather than being half obeyed.
func TestUnreadablePolicyIsNotServed(t *testing.T) {
	newer, err := proto.Marshal(&storagev1.Policy{Format: layout.Format + 1, Namespace: "ns"})
	if err != nil {
		t.Fatal(err)
	}
	s := base(t)
	if err := s.check(); err != nil {
		t.Fatal(err)
	}
	bad := s.next(11, []*mvccpb.Event{{Kv: &mvccpb.KeyValue{Key: []byte(layout.PolicyOf("ns")), Value: newer, ModRevision: 11}}})
	if got := claim.ReasonOf(bad.check()); got != claim.RecordUnreadable {
		t.Errorf("reason %s", got)
	}
	good := bad.next(12, []*mvccpb.Event{{Kv: &mvccpb.KeyValue{Key: []byte(layout.PolicyOf("ns")), Value: []byte(policyValue(t, "ns", 1)), ModRevision: 12}}})
	if err := good.check(); err != nil {
		t.Errorf("once it is readable: %v", err)
	}
}

// A switch holds from its revision on, in no state before; one that was never put is
// off, and one that this version cannot obey stops the node until it is off or gone.
func TestSwitchesInTheState(t *testing.T) {
	at := func(revision int64, name string, m *storagev1.Switch) *mvccpb.Event {
		return put(t, layout.SwitchOf(name), m, 1, revision)
	}
	old := base(t)
	on := old.next(11, []*mvccpb.Event{at(11, policy.BypassRedis, &storagev1.Switch{Format: layout.Format, On: true, Reason: "r"})})
	if all := on.allSwitches(); len(all) != 2 || all[0].On || all[1].Name != policy.BypassRedis || !all[1].On || all[1].Reason != "r" {
		t.Errorf("put: %+v", all)
	}
	if all := old.allSwitches(); len(all) != 2 || all[0] != (policy.Switch{Name: policy.BypassMemory}) || all[1] != (policy.Switch{Name: policy.BypassRedis}) {
		t.Errorf("never put: %+v", all)
	}
	off := on.next(12, []*mvccpb.Event{at(12, policy.BypassRedis, &storagev1.Switch{Format: layout.Format})})
	gone := on.next(12, []*mvccpb.Event{{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte(layout.SwitchOf(policy.BypassRedis)), ModRevision: 12}}})
	if off.allSwitches()[1].On || gone.allSwitches()[1].On || !on.allSwitches()[1].On {
		t.Errorf("off %+v, gone %+v, before %+v", off.allSwitches(), gone.allSwitches(), on.allSwitches())
	}
	newer := on.next(12, []*mvccpb.Event{at(12, "read-only", &storagev1.Switch{Format: layout.Format, On: true})})
	if got := claim.ReasonOf(newer.check()); got != claim.RecordUnreadable {
		t.Errorf("a switch that this version does not have: %q", got)
	}
	if err := newer.next(13, []*mvccpb.Event{at(13, "read-only", &storagev1.Switch{Format: layout.Format})}).check(); err != nil {
		t.Errorf("once it is off: %v", err)
	}
	f := New(Config{})
	if all := f.Switches(); all != nil {
		t.Errorf("before the first list: %+v", all)
	}
	f.publish(on, true)
	bring(f, put(t, layout.Tick, &storagev1.Tick{TimeNs: 9}, 4, 13))
	if v, err := f.View(); err != nil || !v.BypassRedis || v.BypassMemory {
		t.Errorf("the view has it %v, %v", v.BypassRedis, err)
	}
	bring(f, put(t, layout.SwitchOf(policy.BypassMemory), &storagev1.Switch{Format: layout.Format, On: true}, 1, 14))
	if v, err := f.View(); err != nil || !v.BypassMemory || !f.Status().BypassMemory || !f.Status().BypassRedis {
		t.Errorf("the view has the other %v, %v", v.BypassMemory, err)
	}
}

// bring has a follower take what its watch brings.
func bring(f *Follower, events ...*clientv3.Event) {
	f.source.applied = f.current().applied
	f.source.take(clientv3.WatchResponse{Events: events})
}

func TestWatchThatGoesBackInTimeIsIgnored(t *testing.T) {
	f := New(Config{})
	f.publish(base(t), true)
	bring(f, put(t, layout.Tick, &storagev1.Tick{TimeNs: 1}, 2, 8))
	if tick, _, _ := f.Tick(); tick.Version != 3 || tick.Time != 5 {
		t.Errorf("tick %+v", tick)
	}
	bring(f, put(t, layout.Tick, &storagev1.Tick{TimeNs: 9}, 4, 11))
	if tick, _, _ := f.Tick(); tick.Version != 4 || f.Status().Applied != 11 {
		t.Errorf("tick %+v, applied %d", tick, f.Status().Applied)
	}
}

// What is remembered is void when the node was away for a while.
func TestGenerationAfterAGap(t *testing.T) {
	now := time.Duration(0)
	f := New(Config{Monotonic: func() time.Duration { return now }})
	s := base(t)
	f.publish(s, true)
	tick := func(version int64) claim.View {
		bring(f, put(t, layout.Tick, &storagev1.Tick{TimeNs: version}, version, 10+version))
		v, err := f.View()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	first := tick(4)
	now += claim.TickEvery
	if second := tick(5); second.Generation != first.Generation || first.Generation == 0 {
		t.Errorf("generation %d, then %d", first.Generation, second.Generation)
	}
	now += claim.TickTakeover + time.Millisecond
	if away, err := f.View(); err != nil || away.Generation != 0 {
		t.Errorf("away: generation %d, %v", away.Generation, err)
	}
	if back := tick(6); back.Generation == 0 || back.Generation == first.Generation {
		t.Errorf("back: generation %d, was %d", back.Generation, first.Generation)
	}
}

// A View never has a guard without the policy that moved it: 300 changes, looked at
// all the while. A watch cut off by compaction and a deleted policy are caught up
// with (C69).
func TestPolicyAndGuardAreSeenTogether(t *testing.T) {
	c := etcdtest.Start(t, 1)
	client := c.Client()
	f := New(Config{Client: client})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer running.Wait()
	defer cancel()
	looking := make(chan struct{})
	var torn, looks int
	running.Go(func() {
		defer close(looking)
		for ctx.Err() == nil {
			s := f.current()
			if s == nil || len(s.declared) == 0 {
				continue
			}
			looks++
			if ns := s.declared[layout.PolicyOf("ns")]; ns.Revision != s.guard {
				torn++
			}
			if s.applied >= s.guard && ns300(s) {
				return
			}
		}
	})
	key := layout.PolicyOf("ns")
	for i := range int32(300) {
		if _, err := client.Txn(ctx).Then(clientv3.OpPut(key, policyValue(t, "ns", i+1)), clientv3.OpPut(layout.Guard, "")).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	<-looking
	if torn > 0 || looks == 0 {
		t.Errorf("%d of %d looks saw half of a change", torn, looks)
	}
	del, err := client.Delete(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Compact(ctx, del.Header.Revision); err != nil {
		t.Fatal(err)
	}
	f.source.Again(errAsked)
	deadline := time.After(10 * time.Second)
	for {
		_, _, changed := f.Tick()
		if s := f.current(); s.applied >= del.Header.Revision && len(s.declared) == 0 {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatal(errors.New("the deletion was not seen"), fmt.Sprint(f.Status()))
		}
	}
}

func ns300(s *state) bool { return s.effective["ns"].MaxAttempts == 300 }

// etcd answers reads and never the watch: the node lives on lists, follows within a
// few seconds, and does not wedge (C68).
func TestC68WatchThatIsNeverCreated(t *testing.T) {
	c := etcdtest.Start(t, 1)
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	client := c.Client()
	watching := c.Client(p.Addr())
	if _, err := watching.Get(context.Background(), "x"); err != nil { // connected
		t.Fatal(err)
	}
	p.SwallowAnswers()
	f := New(Config{Client: client, WatchClient: watching})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer running.Wait()
	defer cancel()
	for i := range int32(3) {
		put, err := client.Txn(ctx).Then(clientv3.OpPut(layout.PolicyOf("ns"), policyValue(t, "ns", i+1)), clientv3.OpPut(layout.Guard, "")).Commit()
		if err != nil {
			t.Fatal(err)
		}
		deadline := time.After(8 * time.Second)
		for seen := false; !seen; {
			_, _, changed := f.Tick()
			if s := f.current(); s != nil && s.applied >= put.Header.Revision {
				seen = true
				continue
			}
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("change %d was not seen: %+v", i, f.Status())
			}
		}
	}
}

func TestMain(m *testing.M) { os.Exit(etcdtest.Main(m)) }
