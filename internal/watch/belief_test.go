package watch

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// A read counts once the watch has reached its revision, from when it was sent; the
// newest such read counts, in whatever order they are reached.
func TestBeliefIsOfTheNewestReadThatWasReached(t *testing.T) {
	var b belief
	b.Reached(100)
	if b.known {
		t.Fatal("nothing was asked")
	}
	b.Asked(1*time.Second, 10)
	b.Asked(2*time.Second, 20)
	b.Asked(3*time.Second, 20)
	b.Asked(4*time.Second, 30)
	b.Reached(9)
	if b.known {
		t.Fatal("no read was reached")
	}
	for _, c := range []struct {
		applied int64
		since   time.Duration
	}{{10, time.Second}, {19, time.Second}, {20, 3 * time.Second}, {29, 3 * time.Second}, {99, 4 * time.Second}} {
		if b.Reached(c.applied); !b.known || b.since != c.since {
			t.Errorf("at %d: since %v, want %v", c.applied, b.since, c.since)
		}
	}
	b.Asked(5*time.Second, 99)
	b.Asked(4500*time.Millisecond, 50) // answered later than one sent after it
	if b.Reached(99); b.since != 5*time.Second || len(b.waiting) != 0 {
		t.Errorf("since %v, %d waiting", b.since, len(b.waiting))
	}
}

// A watch that never gets anywhere costs nothing, and is believed again when it does.
func TestBeliefIsBounded(t *testing.T) {
	var b belief
	for i := range 1000 {
		b.Asked(time.Duration(i), int64(i))
	}
	if len(b.waiting) != mostWaiting {
		t.Fatalf("%d waiting", len(b.waiting))
	}
	if b.Reached(2000); b.since != mostWaiting-1 {
		t.Errorf("since %d", b.since)
	}
	b.Asked(5000, 3000)
	if b.Reached(3000); b.since != 5000 {
		t.Errorf("since %d", b.since)
	}
}

// What a follower believes: for BelievedFor and not longer, never before it has
// listed, and nothing of an epoch in which etcd went back, until that is raised.
func TestBeliefEnds(t *testing.T) {
	now := 10 * time.Second
	f := New(Config{Monotonic: func() time.Duration { return now }})
	believes := func(want bool, when string) {
		t.Helper()
		if f.believed(now) != want {
			t.Errorf("%s: believes %v", when, !want)
		}
	}
	believes(false, "before the first list")
	s := base(t)
	f.publish(s, true)
	f.belief.Asked(9*time.Second, s.applied)
	f.belief.Reached(s.applied)
	believes(true, "listed")
	now = 12 * time.Second
	believes(true, "3 s after the read was sent")
	now++
	believes(false, "later than that")
	f.belief.Asked(now, s.applied+5)
	reader{f}.Progressed(s.applied + 4)
	believes(false, "the watch is one revision behind")
	reader{f}.Progressed(s.applied + 5)
	believes(true, "the watch has told that it is so far")

	back := base(t)
	back.tick.Version--
	f.publish(back, true)
	f.belief.Asked(now, back.applied)
	f.belief.Reached(back.applied)
	believes(false, "etcd went back")
	raised := *back
	raised.epoch, raised.applied = claim.NewID(), back.applied+1
	f.publish(&raised, false)
	believes(true, "its epoch was raised")
}

// follows starts a follower, and ticks once so that it is ready.
func follows(t *testing.T, client, watching *clientv3.Client) *Follower {
	t.Helper()
	f := New(Config{Client: client, WatchClient: watching})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
	return f
}

// govern writes all that a follower needs to have a View.
func govern(t *testing.T, client *clientv3.Client) {
	t.Helper()
	epoch, err := layout.EncodeEpoch(claim.NewID(), 0)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := layout.EncodeSecret(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	for key, value := range map[string]string{layout.Guard: "", layout.Epoch: epoch, layout.Secret: secret} {
		if _, err := client.Put(context.Background(), key, value); err != nil {
			t.Fatal(err)
		}
	}
	tick(t, client, 1)
}

func tick(t *testing.T, client *clientv3.Client, at claim.Instant) {
	t.Helper()
	value, err := layout.EncodeTick(at)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Put(context.Background(), layout.Tick, value); err != nil {
		t.Fatal(err)
	}
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline, again := time.After(20*time.Second), time.NewTicker(5*time.Millisecond)
	defer again.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatal("waited for ", what)
		case <-again.C:
		}
	}
}

// While records are written and nothing that governs is, the watch has nothing to
// bring; asked how far it is, it says so, and what is cached stays believed.
func TestBeliefLastsWhileOnlyRecordsAreWritten(t *testing.T) {
	client := etcdtest.Start(t, 1).Client()
	govern(t, client)
	f := follows(t, client, nil)
	await(t, "the list", func() bool { return f.current() != nil })
	tick(t, client, 2)
	await(t, "belief", func() bool { v, err := f.View(); return err == nil && v.Believed })
	writing := time.NewTicker(2 * time.Millisecond)
	defer writing.Stop()
	lost := 0
	for i, end := 0, time.After(2*claim.BelievedFor); ; i++ {
		if _, err := client.Put(context.Background(), "/elsewhere", strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
		if v, err := f.View(); err != nil || !v.Believed {
			lost++
		}
		select {
		case <-writing.C:
			continue
		case <-end:
		}
		break
	}
	if lost > 0 {
		t.Errorf("%d times it did not believe", lost)
	}
}

// H34: a watch that is cut off is believed for BelievedFor at most; and nothing is
// believed by a node that has not heard of a slot's epoch committed longer ago.
func TestH34NobodyBelievesPastTheBound(t *testing.T) {
	c := etcdtest.Start(t, 1)
	p := etcdtest.NewProxy(t, c.Endpoint(0))
	client, cut := c.Client(), c.Client(p.Addr())
	govern(t, client)
	f := follows(t, cut, nil)
	await(t, "the list", func() bool { return f.current() != nil })
	tick(t, client, 2)
	await(t, "belief", func() bool { v, err := f.View(); return err == nil && v.Believed })

	p.SwallowAnswers()
	put, err := client.Put(context.Background(), layout.SlotEpoch("00a"), "")
	if err != nil {
		t.Fatal(err)
	}
	answered := time.Now()
	await(t, "doubt", func() bool {
		after := time.Since(answered) // before the view is taken: it is older than that
		v, err := f.View()
		if err != nil {
			t.Fatal(err)
		}
		if v.Believed && v.SlotEpoch(10) == 0 && after > claim.BelievedFor {
			t.Fatalf("believed %v after the commit was answered", after)
		}
		return !v.Believed
	})
	p.Heal()
	await(t, "belief with the slot's epoch", func() bool {
		v, err := f.View()
		if err == nil && v.Believed && v.SlotEpoch(10) != put.Header.Revision {
			t.Fatal("it believes, and does not know of the slot's epoch")
		}
		return err == nil && v.Believed
	})
	if v, _ := f.View(); v.SlotEpoch(9) != 0 || v.SlotEpoch(11) != 0 {
		t.Error("other slots' epochs moved")
	}
}

// H07: what tells that etcd went back is seen once; by the time of the list etcd may
// have passed all that was seen. The epoch is disowned all the same.
func TestEvidenceThatEtcdWentBackIsKept(t *testing.T) {
	now := 10 * time.Second
	f := New(Config{Monotonic: func() time.Duration { return now }})
	s := base(t)
	f.publish(s, true)
	f.belief.Asked(now, s.applied)
	f.belief.Reached(s.applied)
	later := *s
	later.tick.Version, later.tick.Revision, later.applied = s.tick.Version+1, s.tick.Revision+1, s.applied+1
	f.publish(&later, false)
	v, err := f.View()
	if err != nil || !v.Believed {
		t.Fatalf("%+v, %v", v, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // it waits for a list, which nobody makes here
	if err := f.CatchUp(ctx, v, claim.Seen{Guard: v.Guard, Tick: claim.Tick{Version: v.Tick.Version - 1}}); err == nil {
		t.Error("it has caught up")
	}
	if f.believed(now) || f.Status().Restored != 1 || f.moved {
		t.Errorf("believes %v, restored %d, moved %v", f.believed(now), f.Status().Restored, f.moved)
	}
	passed := later
	passed.tick.Version, passed.applied = later.tick.Version+5, later.applied+50
	f.publish(&passed, true)
	f.belief.Asked(now, passed.applied)
	f.belief.Reached(passed.applied)
	if f.believed(now) || f.Status().Restored != 1 {
		t.Errorf("after the list: believes %v, restored %d", f.believed(now), f.Status().Restored)
	}
	f.publish(&passed, true)
	if f.believed(now) || f.Status().Restored != 1 {
		t.Errorf("after another list: believes %v, restored %d", f.believed(now), f.Status().Restored)
	}
	raised := passed
	raised.epoch, raised.applied = claim.NewID(), passed.applied+1
	f.publish(&raised, false)
	if !f.believed(now) {
		t.Error("its epoch was raised, and it does not believe")
	}
}
