package feed_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/policy"
	"github.com/dualcheck/dualcheck/internal/watch"
)

// G9: subscribers that came early, late, with a prefix, with a snapshot, all get each
// key's changes in order and none twice, and end with what etcd has.
func TestG9EachChangeInOrderNoneMissing(t *testing.T) {
	s := start(t, 1, "")
	early := []*reading{s.read(feed.Request{}), s.read(feed.Request{Prefix: "a-003"}), s.read(feed.Request{Prefix: "none"})}
	stop := s.work("a", 6, 40)
	defer stop()
	early[0].until("some changes", func() bool { return early[0].Events > 200 })
	late := []*reading{s.read(feed.Request{Snapshot: true}), s.read(feed.Request{Snapshot: true, Prefix: "a-001"})}
	late[0].until("a snapshot and more", func() bool { return late[0].Resyncs == 1 && late[0].Events > 200 })
	stop()
	s.caughtUp(append(early, late...)...)
	if early[0].Resyncs != 0 || early[1].Events == 0 || early[1].Events >= early[0].Events {
		t.Errorf("resyncs %d, events %d of %d", early[0].Resyncs, early[1].Events, early[0].Events)
	}
}

// H18: a forget is one DELETE; an expiry, an opened mark and a physical removal are no
// event, for a subscriber with a filter too.
func TestH18OneDeleteForAForgetAndNoneElse(t *testing.T) {
	s := start(t, 1, "")
	r := s.read(feed.Request{Prefix: "order-"})
	s.done("order-1", "order-2", "other-1")
	revision, err := s.node.Forget(within(20*time.Second), &claim.ForgetRequest{Namespace: ns, Key: "order-1", Reason: "a test"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.node.Forget(within(20*time.Second), &claim.ForgetRequest{Namespace: ns, Key: "other-1", Reason: "a test"}); err != nil {
		t.Fatal(err)
	}
	// What the walk over expired keys does: a plain delete.
	for _, key := range []string{"order-1", "order-2"} {
		if _, err := s.client.Delete(context.Background(), layout.NameOf(ns, key).Key); err != nil {
			t.Fatal(err)
		}
	}
	s.done("order-3")
	r.until("the last change", func() bool { _, ok := r.Have["order-3"]; return ok })
	r.close()
	if r.Deletes != 1 || r.Newest() < revision {
		t.Errorf("%d deletes, want 1", r.Deletes)
	}
	if len(r.Errors) > 0 {
		t.Error(r.Errors)
	}
}

// A forced delete of a namespace forgets each record: one DELETE each, and since the
// epoch was raised for it, subscribers begin anew.
func TestForcedDeleteOfANamespaceIsTold(t *testing.T) {
	s := start(t, 1, "")
	if _, err := s.node.Behind.PutNamespace(within(20*time.Second), policy.Namespace{Name: ns}); err != nil {
		t.Fatal(err)
	}
	r := s.read(feed.Request{})
	s.done(keys("k", 5)...)
	r.until("all", func() bool { return len(r.Have) == 5 })
	if _, err := s.node.Behind.DeleteNamespace(within(60*time.Second), ns, true); err != nil {
		t.Fatal(err)
	}
	r.until("none", func() bool { return r.Resyncs > 0 && len(r.Have) == 0 })
	r.close()
	if len(r.Errors) > 0 {
		t.Error(r.Errors)
	}
}

// G11: nothing of another namespace is told, whatever its keys.
func TestG11NothingOfAnotherNamespace(t *testing.T) {
	s := start(t, 1, "")
	other := s.read(feed.Request{Namespace: "pay2", Snapshot: true})
	mine := s.read(feed.Request{})
	s.done(keys("k", 20)...)
	mine.until("all", func() bool { return len(mine.Have) == 20 })
	other.close()
	if other.Events != 0 {
		t.Errorf("told of %d events", other.Events)
	}
	s.caughtUp(mine)
}

// A reader goes on by its token, on this node and on another, and misses nothing.
func TestResumeOnAnotherNode(t *testing.T) {
	s := start(t, 1, "")
	two := nodetest.Start(t, nodetest.Options{Client: s.client})
	other := two.Feed
	keep, err := other.Subscribe(context.Background(), feed.Request{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer keep.Close()
	if _, err := keep.Next(within(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	r := s.read(feed.Request{})
	stop := s.work("k", 4, 30)
	defer stop()
	for i := range 10 {
		events := r.told()
		r.until("changes", func() bool { return r.Events > events+20 })
		r.close()
		r.open([]*feed.Feed{other, s.feed}[i%2])
	}
	stop()
	s.caughtUp(r)
	if r.Resyncs != 0 {
		t.Errorf("%d resyncs", r.Resyncs)
	}
}

// A token that the ring no longer reaches, one of another epoch, one from amid a snapshot:
// the reader begins anew. What is no token is refused.
func TestTokensThatCannotBeGoneOnFrom(t *testing.T) {
	s := start(t, 1, "", func(c *feed.Config) { c.RingChanges = 50 })
	r := s.read(feed.Request{})
	s.done(keys("a", 5)...)
	r.until("all", func() bool { return len(r.Have) == 5 })
	r.close()
	old := r.token
	s.done(keys("b", 60)...)
	r.open(s.feed)
	r.until("a snapshot", func() bool { return r.Resyncs == 1 })
	s.caughtUp(r)

	if _, err := s.node.Behind.RaiseEpoch(within(20*time.Second), "a test"); err != nil {
		t.Fatal(err)
	}
	for what, token := range map[string]string{"an old one": old, "one of an epoch ago": r.token} {
		again := s.read(feed.Request{Token: token})
		again.until(what, func() bool { return again.Resyncs == 1 && len(again.Have) == 65 })
	}
	for _, token := range []string{"x", "!", strings.Repeat("A", 35), old + "A", old[:10]} {
		if _, err := s.feed.Subscribe(context.Background(), feed.Request{Namespace: ns, Token: token}); claim.ReasonOf(err) != claim.RequestInvalid {
			t.Errorf("%q: %v", token, err)
		}
	}
}

// A reader that does not read loses its place in the ring and begins anew once it does;
// another one does not notice.
func TestSlowReaderBeginsAnew(t *testing.T) {
	s := start(t, 1, "", func(c *feed.Config) { c.RingChanges = 100 })
	slow, err := s.feed.Subscribe(context.Background(), feed.Request{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	if b, err := slow.Next(within(20 * time.Second)); err != nil || !b.Progress || b.Token == "" {
		t.Fatalf("%+v, %v", b, err)
	}
	r := s.read(feed.Request{})
	s.done(keys("k", 100)...)
	r.until("all", func() bool { return len(r.Have) == 100 })
	s.caughtUp(r)
	if r.Resyncs != 0 {
		t.Error("the quick one began anew")
	}
	b, err := slow.Next(within(20 * time.Second))
	if err != nil || !b.Begin || b.Cause != "reader-too-slow" {
		t.Fatalf("%+v, %v", b, err)
	}
	named := map[string]bool{}
	for !b.End {
		if b, err = slow.Next(within(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		for _, e := range b.Events {
			named[e.Record.Key] = true
		}
	}
	if len(named) != 100 {
		t.Errorf("%d of 100", len(named))
	}
}

// A thousand who begin anew at once share one look at what is there.
func TestH19OneScanForAThousand(t *testing.T) {
	s := start(t, 1, "")
	s.done(keys("k", 50)...)
	stop := s.compact(200 * time.Millisecond)
	defer stop()
	var all []*reading
	for range 1000 {
		all = append(all, s.read(feed.Request{}))
	}
	before := s.feed.Status().Scans
	if _, err := s.node.Behind.RaiseEpoch(within(20*time.Second), "a test"); err != nil {
		t.Fatal(err)
	}
	s.done(keys("meanwhile", 20)...)
	for _, r := range all {
		r.until("a snapshot", func() bool { return r.Resyncs == 1 && len(r.Have) > 0 })
	}
	s.caughtUp(all...)
	if scans := s.feed.Status().Scans - before; scans != 1 {
		t.Errorf("%d scans", scans)
	}
}

// compact compacts etcd over and over.
func (s *site) compact(every time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		ticks := time.NewTicker(every)
		defer ticks.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticks.C:
			}
			if got, err := s.client.Get(ctx, "x"); err == nil {
				_, _ = s.client.Compact(ctx, got.Header.Revision) // somebody else may have
			}
		}
	})
	return sync.OnceFunc(func() { cancel(); running.Wait() })
}

// Etcd is watched only while there is somebody, and for a while after.
func TestNoWatchWithoutDemand(t *testing.T) {
	s := start(t, 1, "", func(c *feed.Config) { c.Linger = 1500 * time.Millisecond })
	if state := s.feed.Status().State; state != watch.Off {
		t.Fatalf("at the start: %v", state)
	}
	for i := range 2 {
		key := fmt.Sprintf("k-%d", i)
		changed, end := s.feed.Follow(layout.NameOf(ns, key).Key)
		nodetest.Eventually(t, 20*time.Second, "life", s.live)
		drain(changed)
		other := s.read(feed.Request{})
		s.done(fmt.Sprintf("other-%d", i))
		other.until("the other change", func() bool { return other.Events == 2 })
		other.close()
		select {
		case <-changed:
			t.Error("woken by a change of another key")
		default:
		}
		s.done(key)
		select {
		case <-changed:
		case <-time.After(20 * time.Second):
			t.Fatal("nobody told of the change")
		}
		end()
		end()
		if !s.feed.Live() {
			t.Error("the watch ended at once")
		}
		nodetest.Eventually(t, 20*time.Second, "the end of the watch", func() error {
			if state := s.feed.Status().State; state != watch.Off {
				return fmt.Errorf("it is %v", state)
			}
			return nil
		})
	}
}

func drain(c <-chan struct{}) {
	select {
	case <-c:
	default:
	}
}

func (s *site) live() error {
	if !s.feed.Live() {
		return fmt.Errorf("%+v", s.feed.Status())
	}
	return nil
}

// A look at what is there, whose readers have gone before its end, is not kept.
func TestLeftScansAreDropped(t *testing.T) {
	s := start(t, 1, "")
	s.done(keys("k", 100)...)
	for i := range 20 {
		sub, err := s.feed.Subscribe(context.Background(), feed.Request{Namespace: []string{ns, fmt.Sprint("other-", i)}[i%2], Snapshot: true})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 - i%2 { // of another namespace, which has nothing, its beginning alone
			if b, err := sub.Next(within(20 * time.Second)); err != nil || b.End {
				t.Fatalf("%+v, %v", b, err)
			}
		}
		sub.Close()
	}
	if scans, records := s.feed.Kept(); scans == 0 || records == 0 {
		t.Fatal("nothing was left")
	}
	nodetest.Eventually(t, 20*time.Second, "them to be dropped", func() error {
		if scans, records := s.feed.Kept(); scans != 0 || records != 0 {
			return fmt.Errorf("%d scans with %d records", scans, records)
		}
		return nil
	})
}
