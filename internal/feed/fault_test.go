package feed_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/feedtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/watch"
)

// state waits until the feed is in a state.
func (s *site) state(want watch.State, within time.Duration) {
	s.t.Helper()
	nodetest.Eventually(s.t, within, want.String(), func() error {
		if got := s.feed.Status(); got.State != want {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
}

// replayed checks G4 for keys that were finished: their results are told, the same
// whenever they are asked for.
func (s *site) replayed(keys ...string) {
	s.t.Helper()
	for _, key := range keys {
		a, err := s.node.Begin(within(20*time.Second), &claim.BeginRequest{Namespace: ns, Key: key})
		if err != nil || a.Verdict != claim.Replay || string(a.Record.Result.Body) != "result of "+key {
			s.t.Errorf("%s: %+v, %v", key, a, err)
		}
	}
}

// C69, G9: the watch is cut off again and again while etcd is compacted five times a
// second and keys are written and forgotten. Each reader is told of every change, or that
// it begins anew; there are no ghosts.
func TestC69CompactionWhileCutOff(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	p := etcdtest.NewProxy(t, etcd.Endpoint(0))
	s := startOn(t, etcd, p.Addr())
	s.done(keys("done", 10)...)
	readers := []*reading{s.read(feed.Request{}), s.read(feed.Request{Snapshot: true}), s.read(feed.Request{Prefix: "w-000"})}
	stopCompacting := s.compact(200 * time.Millisecond)
	defer stopCompacting()
	stop := s.work("w", 3, 30)
	defer stop()
	for i := range 6 {
		told := readers[0].told()
		p.SwallowAnswers()
		gone := fmt.Sprintf("done-%04d", i)
		if _, err := s.node.Forget(within(20*time.Second), &claim.ForgetRequest{Namespace: ns, Key: gone, Reason: "a test"}); err != nil {
			t.Fatal(err)
		}
		p.Heal()
		readers[0].until("more", func() bool { return readers[0].Events > told+20 && !readers[0].Amid() })
	}
	stop()
	stopCompacting()
	s.caughtUp(readers...)
	if readers[0].Resyncs == 0 {
		t.Error("compaction was never in the way: the test showed nothing")
	}
	for i := range 6 {
		if _, there := readers[0].Have[fmt.Sprintf("done-%04d", i)]; there {
			t.Errorf("done-%04d is a ghost", i)
		}
	}
	s.replayed("done-0006", "done-0009")
}

// C68: the watch's connection is a black hole: nothing comes, nothing is closed. The feed
// notices within seconds, says so, and goes on where it was once there is a way: nobody
// has to begin anew.
func TestC68BlackholedWatchIsNoticed(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	p := etcdtest.NewProxy(t, etcd.Endpoint(0))
	s := startOn(t, etcd, p.Addr())
	r := s.read(feed.Request{})
	changed, end := s.feed.Follow("another key")
	defer end()
	s.state(watch.Live, 20*time.Second)
	drain(changed)
	p.SwallowAnswers()
	cut := time.Now()
	s.done(keys("k", 30)...)
	nodetest.Eventually(t, 20*time.Second, "the loss to be noticed", func() error {
		if s.feed.Live() {
			return errors.New("it says that it is live")
		}
		return nil
	})
	if took := time.Since(cut); took > 8*time.Second {
		t.Errorf("noticed after %v", took)
	}
	// From then on nobody is told that he has all there is, and after a while he is sent on.
	before, _ := r.standing()
	nodetest.Eventually(t, 30*time.Second, "the stream to end", func() error {
		if _, broken := r.standing(); broken == 0 {
			return errors.New("it goes on")
		}
		return nil
	})
	if progress, _ := r.standing(); progress > before+1 { // one may have been on its way
		t.Errorf("told %d times that it has all there is, while its node was cut off", progress-before)
	}
	p.Heal()
	s.state(watch.Live, 30*time.Second)
	select {
	case <-changed: // its key may have changed meanwhile
	case <-time.After(20 * time.Second):
		t.Error("who waits was not told that changes may have been missed")
	}
	s.caughtUp(r)
	if r.Resyncs != 0 || r.Events != 60 {
		t.Errorf("%d resyncs, %d events", r.Resyncs, r.Events)
	}
	s.replayed("k-0000", "k-0029")
}

// The member that the feed watches is cut off from the others while thousands of changes
// are made, and comes back far behind: the feed goes to another member, or catches up; it
// is told to be live only when it is, and nothing is missing.
func TestMemberFarBehind(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 3)
	leader := etcd.Leader()
	behind := (leader + 1) % 3
	s := startOn(t, etcd, etcd.Endpoint(behind))
	r := s.read(feed.Request{})
	s.state(watch.Live, 20*time.Second)
	etcd.Cut(behind)
	nodetest.Eventually(t, 30*time.Second, "the loss to be noticed", func() error {
		if s.feed.Live() {
			return errors.New("it says that it is live")
		}
		return nil
	})
	ctx := within(60 * time.Second)
	for i := range 2000 { // what others write
		if _, err := etcd.Client(etcd.Endpoint(leader)).Put(ctx, "/elsewhere/"+strconv.Itoa(i%10), "x"); err != nil {
			t.Fatal(err)
		}
		if i%500 == 0 {
			s.done(fmt.Sprintf("k-%d", i))
		}
	}
	if s.feed.Live() {
		t.Error("live, and its member is cut off")
	}
	etcd.Mend(behind)
	s.state(watch.Live, 60*time.Second)
	s.caughtUp(r)
	if len(r.Have) != 4 {
		t.Errorf("%d of 4 keys", len(r.Have))
	}
	s.replayed("k-0", "k-1500")
}

// A permission that is taken away is told, and its return too; nothing is missed.
func TestPermissionLost(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	root := etcd.Client()
	ctx := within(60 * time.Second)
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(root.RoleAdd(ctx, "root"))
	must(root.UserAdd(ctx, "root", "r"))
	must(root.UserGrantRole(ctx, "root", "root"))
	must(root.RoleAdd(ctx, "reader"))
	grant := func() {
		must(etcdAs(t, etcd, "root", "r").RoleGrantPermission(ctx, "reader", "/", "0", clientv3.PermissionType(clientv3.PermRead)))
	}
	must(root.RoleGrantPermission(ctx, "reader", "/", "0", clientv3.PermissionType(clientv3.PermRead)))
	must(root.UserAdd(ctx, "feed", "f"))
	must(root.UserGrantRole(ctx, "feed", "reader"))
	must(root.AuthEnable(ctx))
	admin := etcdAs(t, etcd, "root", "r")
	s := &site{t: t, etcd: etcd, client: admin}
	p := etcdtest.NewProxy(t, etcd.Endpoint(0))
	s.node = nodetest.Start(t, nodetest.Options{Client: admin, Tell: etcdAs(t, etcd, "feed", "f", p.Addr()), Feed: tuned(nil)})
	s.history = feedtest.Record(t, admin, ns)
	s.feed = s.node.Feed
	r := s.read(feed.Request{})
	s.done("a")
	r.until("a", func() bool { return len(r.Have) == 1 })
	must(admin.RoleRevokePermission(ctx, "reader", "/", "0"))
	p.Heal() // the watch has to be made anew
	nodetest.Eventually(t, 30*time.Second, "the loss to be noticed", func() error {
		if s.feed.Live() {
			return errors.New("it says that it is live")
		}
		return nil
	})
	s.done("b")
	grant()
	s.state(watch.Live, 60*time.Second)
	s.caughtUp(r)
}

// H20: etcd is restored to before what a reader was told. Its stream begins anew, without
// what is no more; a token from before does not go on.
func TestH20TokenFromBeforeARestore(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	client := etcd.Client()
	node := nodetest.Start(t, nodetest.Options{Client: client, Tell: etcd.Client(), Feed: tuned(nil)})
	s := &site{t: t, etcd: etcd, client: client, node: node}
	s.done("kept")
	backup := etcd.Backup(0)
	nodetest.Eventually(t, 30*time.Second, "the node to be ready", node.Follower.Ready)
	s.feed = node.Feed
	sub, err := s.feed.Subscribe(context.Background(), feed.Request{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	s.next(sub)
	s.done(keys("lost", 20)...)
	token := ""
	for told := 0; told < 40; {
		b := s.next(sub)
		told, token = told+len(b.Events), b.Token
	}
	etcd.Restore(0, backup)
	snapshot := func(of *feed.Subscription) map[string]bool {
		t.Helper()
		b := s.next(of)
		for !b.Begin {
			b = s.next(of)
		}
		named := map[string]bool{}
		for ; !b.End; b = s.next(of) {
			for _, e := range b.Events {
				named[e.Record.Key] = true
			}
		}
		return named
	}
	if got := snapshot(sub); len(got) != 1 || !got["kept"] {
		t.Errorf("after the restore: %v", got)
	}
	var back *feed.Subscription
	nodetest.Eventually(t, 30*time.Second, "a stream", func() (err error) {
		back, err = s.feed.Subscribe(context.Background(), feed.Request{Namespace: ns, Token: token})
		return err
	})
	defer back.Close()
	if got := snapshot(back); len(got) != 1 || !got["kept"] {
		t.Errorf("by the old token: %v", got)
	}
}

// H20 at another node, which saw the restore, but whose feed was off then; by the time the
// reader comes, etcd has passed what his token names: he begins anew all the same.
func TestH20TokenOfAnotherNodeFromBeforeARestore(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	a := nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Feed: tuned(nil)})
	b := nodetest.Start(t, nodetest.Options{Client: etcd.Client(), Feed: tuned(nil)})
	s := &site{t: t, etcd: etcd, client: etcd.Client(), node: b, feed: b.Feed}
	s.done("kept")
	backup := etcd.Backup(0)
	nodetest.Eventually(t, 30*time.Second, "the node to be ready", b.Follower.Ready)
	sub, err := b.Feed.Subscribe(context.Background(), feed.Request{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	s.next(sub)
	s.done(keys("lost", 10)...)
	token := ""
	for told := 0; told < 20; {
		batch := s.next(sub)
		told, token = told+len(batch.Events), batch.Token
	}
	sub.Close()
	at := b.Feed.Status().Applied
	nodetest.Eventually(t, 30*time.Second, "the other node to be as far", func() error {
		if got := a.Follower.Status().Applied; got < at {
			return fmt.Errorf("it is at %d of %d", got, at)
		}
		return nil
	})
	etcd.Restore(0, backup)
	nodetest.Eventually(t, 60*time.Second, "the restore to be seen", func() error {
		if s := a.Follower.Status(); s.Restored == 0 {
			return fmt.Errorf("%+v", s)
		}
		return a.Follower.Ready()
	})
	s.node = a
	var hold *feed.Subscription // has the feed run
	nodetest.Eventually(t, 30*time.Second, "a stream", func() (err error) {
		hold, err = a.Feed.Subscribe(context.Background(), feed.Request{Namespace: ns})
		return err
	})
	defer hold.Close()
	s.next(hold)
	for i := 0; a.Feed.Status().Applied <= at; i++ {
		s.done(fmt.Sprint("new-", i))
	}
	back, err := a.Feed.Subscribe(context.Background(), feed.Request{Namespace: ns, Token: token})
	if err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	if batch := s.next(back); !batch.Begin || batch.Cause != "token-not-kept" {
		t.Errorf("it goes on with %+v", batch)
	}
}
