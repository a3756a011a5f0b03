package redistest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/redistest"
	"github.com/redis/go-redis/v9"
)

func TestKilledServerForgets(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	client := s.Client()
	s.Do("SET", "k", "v")
	if got, err := client.Get(t.Context(), "k").Result(); err != nil || got != "v" {
		t.Fatalf("before: %q, %v", got, err)
	}
	s.Kill()
	if s.Running() {
		t.Fatal("a killed server is said to run")
	}
	if err := client.Get(t.Context(), "k").Err(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("while killed: %v", err)
	}
	s.Restart()
	if err := client.Get(t.Context(), "k").Err(); !errors.Is(err, redis.Nil) {
		t.Fatalf("after: %v, and it was to be forgotten", err)
	}
}

func TestPersistentServerRemembers(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always", "--requirepass", "secret")
	s.Do("SET", "k", "v")
	s.Restart()
	if got, err := s.Client().Get(t.Context(), "k").Result(); err != nil || got != "v" {
		t.Fatalf("after: %q, %v", got, err)
	}
	if err := s.ClientAs("", "wrong").Ping(t.Context()).Err(); err == nil || !strings.Contains(err.Error(), "WRONGPASS") {
		t.Fatalf("with a wrong password: %v", err)
	}
}

func TestPausedServerAnswersLater(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	client := s.Client()
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	s.Pause()
	var done atomic.Bool
	answered := make(chan error, 1)
	go func() {
		err := client.Incr(context.Background(), "n").Err()
		done.Store(true)
		answered <- err
	}()
	await(t, 200*time.Millisecond)
	if done.Load() {
		t.Fatal("a paused server answered")
	}
	s.Resume()
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	if got := s.Do("GET", "n"); got != "1" {
		t.Fatalf("n is %v", got)
	}
	s.Pause() // the end of the test copes with it
}

func TestKeysAndMemory(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction")
	for i := range 1500 {
		s.Do("SET", fmt.Sprintf("a:%04d", i), "", "EX", 100)
	}
	s.Do("SET", "forever:1", "")
	s.Do("SADD", "forever:2", "x")
	if got := s.NoTTL(); !slices.Equal(got, []string{"forever:1", "forever:2"}) {
		t.Fatalf("keys without end: %q", got)
	}
	if got := s.Keys("a:*"); len(got) != 1500 || got[7] != "a:0007" {
		t.Fatalf("%d keys", len(got))
	}
	client := s.Client()
	var err error
	for i := 0; i < 100 && err == nil; i++ {
		err = client.Set(t.Context(), fmt.Sprintf("big:%d", i), strings.Repeat("x", 100_000), 0).Err()
	}
	if !redis.IsOOMError(err) {
		t.Fatalf("with no memory left: %v", err)
	}
	s.Flush()
	if got := s.Keys("*"); len(got) != 0 {
		t.Fatalf("after a flush: %q", got)
	}
	if got := s.Do("GET", "big:0"); got != nil {
		t.Fatalf("nothing is %v", got)
	}
}

func TestTLSAndUsers(t *testing.T) {
	t.Parallel()
	s, caFile := redistest.StartTLS(t)
	if err := s.Client().Set(t.Context(), "app:1", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if pem, err := os.ReadFile(caFile); err != nil || !strings.Contains(string(pem), "BEGIN CERTIFICATE") {
		t.Fatalf("the authority's file: %v", err)
	}
	strange := s.Options()
	strange.TLSConfig = strange.TLSConfig.Clone()
	strange.TLSConfig.RootCAs = nil
	for name, o := range map[string]*redis.Options{
		"no TLS":               {Addr: s.Addr(), MaxRetries: -1, DialerRetries: 1},
		"an unknown authority": strange,
	} {
		client := redis.NewClient(o)
		if err := client.Ping(t.Context()).Err(); err == nil {
			t.Errorf("%s: a server that speaks TLS answered", name)
		}
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	}

	s.SetUser("app", "secret", "~app:*", "+get")
	app := s.ClientAs("app", "secret")
	if got, err := app.Get(t.Context(), "app:1").Result(); err != nil || got != "v" {
		t.Fatalf("as a user: %q, %v", got, err)
	}
	for _, err := range []error{app.Get(t.Context(), "other").Err(), app.Set(t.Context(), "app:1", "", 0).Err()} {
		if err == nil || !strings.HasPrefix(err.Error(), "NOPERM") {
			t.Fatalf("as a user who may not: %v", err)
		}
	}
	s.Restart()
	if err := s.Client().Ping(t.Context()).Err(); err != nil {
		t.Fatalf("after a restart: %v", err)
	}
}

func TestProxy(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr())
	through := s.Options()
	through.Addr, through.ReadTimeout = p.Addr(), 300*time.Millisecond
	client := redis.NewClient(through)
	defer client.Close()
	ctx := t.Context()
	set := func(k string) error { return client.Set(ctx, k, "v", 0).Err() }
	if err := set("open"); err != nil {
		t.Fatal(err)
	}

	p.SetDelay(100 * time.Millisecond)
	start := time.Now()
	if err := set("delayed"); err != nil || time.Since(start) < 100*time.Millisecond {
		t.Fatalf("delayed: %v after %s", err, time.Since(start))
	}
	p.SetDelay(0)

	p.Hold()
	if err := set("held"); !timedOut(err) {
		t.Fatalf("held: %v", err)
	}
	p.AwaitHeld("held")
	if s.Do("GET", "held") != nil {
		t.Fatal("a request that is held arrived")
	}
	p.Release()
	await(t, 0, func() bool { return s.Do("GET", "held") == "v" }) // its client is long gone
	if err := set("after"); err != nil {
		t.Fatal(err)
	}

	p.HoldAnswers()
	if err := set("done"); !timedOut(err) {
		t.Fatalf("answer held: %v", err)
	}
	p.AwaitHeld("+OK")
	if s.Do("GET", "done") != "v" {
		t.Fatal("holding answers held a request")
	}
	p.Release()
	if err := set("after"); err != nil {
		t.Fatal(err)
	}

	p.Cut()
	if err := set("cut"); err == nil {
		t.Fatal("answered through a cut proxy")
	}
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("connect while cut: %v", err)
	}
	p.Mend()
	if err := set("mended"); err != nil {
		t.Fatal(err)
	}
	s.Kill()
	if err := set("killed"); err == nil {
		t.Fatal("answered with the server dead")
	}
	s.Restart()
	if err := set("restarted"); err != nil {
		t.Fatal(err)
	}
}

func timedOut(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func TestClusterMovesSlotUnderLoad(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, true)
	if len(c.Addrs()) != 6 || len(c.Masters()) != 3 {
		t.Fatalf("%d servers, %d masters", len(c.Addrs()), len(c.Masters()))
	}
	client := c.Client()
	ctx := t.Context()
	slot := c.Slot("{moved}")
	from := c.MasterOf(slot)
	for i := range 500 {
		from.Do("SET", fmt.Sprintf("{moved}:old:%d", i), "v")
	}

	// Clients write to the slot all the while; each write that was acknowledged counts.
	var written atomic.Int64
	stop := make(chan struct{})
	var load sync.WaitGroup
	for w := range 2 {
		load.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if err := client.Set(ctx, fmt.Sprintf("{moved}:new:%d:%d", w, i), "v", 0).Err(); err != nil {
					t.Errorf("write while the slot moves: %v", err)
					return
				}
				written.Add(1)
			}
		})
	}
	loaded := func(n int64) { await(t, 0, func() bool { return t.Failed() || written.Load() >= n }) }
	loaded(10)
	to := c.Masters()[0]
	if to == from {
		to = c.Masters()[1]
	}
	var asked, both error
	c.MoveSlot(slot, to, func() {
		loaded(written.Load() + 50)
		asked = from.Client().Get(ctx, "{moved}:nowhere").Err()
		here, there := from.Keys("{moved}:old:*"), to.Keys("{moved}:old:*")
		if len(here) == 0 || len(there) == 0 {
			t.Fatalf("halfway %d keys are here and %d there", len(here), len(there))
		}
		both = from.Client().MGet(ctx, here[0], there[0]).Err()
	})
	loaded(written.Load() + 50)
	close(stop)
	load.Wait()
	if asked == nil || !strings.HasPrefix(asked.Error(), "ASK ") {
		t.Errorf("halfway the old master said %v", asked)
	}
	if both == nil || !strings.HasPrefix(both.Error(), "TRYAGAIN ") {
		t.Errorf("of keys on both sides the old master said %v", both)
	}
	if got := c.MasterOf(slot); got != to {
		t.Errorf("the slot is at %s", got.Addr())
	}
	if got := len(to.Keys("{moved}*")); int64(got) != 500+written.Load() {
		t.Errorf("%d keys arrived of %d", got, 500+written.Load())
	}
	if got := from.Keys("{moved}*"); len(got) != 0 {
		t.Errorf("%d keys stayed", len(got))
	}
	c.WaitOK()

	// Its master dies, and the replica has the slot and its keys.
	to.Kill()
	start := time.Now()
	next := c.MasterOf(slot)
	t.Logf("a replica took over after %s", time.Since(start))
	if next == to || next == from {
		t.Fatalf("%s took over", next.Addr())
	}
	if got := len(next.Keys("{moved}*")); int64(got) != 500+written.Load() {
		t.Errorf("the replica has %d keys of %d", got, 500+written.Load())
	}
	await(t, 0, func() bool { return client.Set(ctx, "{moved}:later", "v", 0).Err() == nil })
	to.Restart()
	c.WaitOK()
	if got := c.MasterOf(slot); got != next {
		t.Errorf("the old master took its slot back: %s", got.Addr())
	}
	if len(to.Keys("{moved}:later")) != 1 {
		t.Error("the old master does not follow")
	}
}

func TestSentinelLosesWrites(t *testing.T) {
	t.Parallel()
	s := redistest.StartSentinel(t)
	client := s.Client()
	ctx := t.Context()
	if err := client.Set(ctx, "kept", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	first := s.Master()
	start := time.Now()
	old := s.LoseWrites(func() {
		for i := range 100 {
			if err := client.Set(ctx, fmt.Sprintf("lost:%d", i), "v", 0).Err(); err != nil {
				t.Fatalf("a write that was to be acknowledged: %v", err)
			}
		}
	})
	t.Logf("lost writes within %s", time.Since(start))
	if old != first || s.Master() == old {
		t.Fatalf("%s died, %s is the master", old.Addr(), s.Master().Addr())
	}
	if s.Master().Do("GET", "kept") != "v" {
		t.Error("a write that had been copied is lost")
	}
	if got := s.Master().Keys("lost:*"); len(got) != 0 {
		t.Errorf("%d writes were not lost", len(got))
	}
	// Clients find the new master by themselves.
	await(t, 0, func() bool { return client.Set(ctx, "later", "v", 0).Err() == nil })

	start = time.Now()
	s.BringBack(old)
	t.Logf("the old master is back after %s", time.Since(start))
	if s.Replica() != old || old.Do("GET", "later") != "v" {
		t.Error("the old master does not follow")
	}
	start = time.Now()
	if next := s.Failover(); next != first || s.Master() != first {
		t.Errorf("after a failover %s is the master", next.Addr())
	}
	t.Logf("failed over within %s", time.Since(start))
	if got := len(first.Keys("*")); got != 2 {
		t.Errorf("%d keys", got)
	}
	// A sentinel may die as well: two suffice, and it remembers.
	s.Sentinel(0).Kill()
	s.Master().Pause()
	start = time.Now()
	next := s.AwaitOther(first)
	t.Logf("a paused master was replaced within %s", time.Since(start))
	s.Sentinel(0).Restart()
	s.BringBack(first)
	if s.Master() != next {
		t.Error("the paused master took over again")
	}
}

// await waits for so long, or until each condition holds.
func await(t *testing.T, d time.Duration, conditions ...func() bool) {
	t.Helper()
	<-time.After(d)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(20 * time.Second)
	for _, holds := range conditions {
		for ; !holds(); <-tick.C {
			if time.Now().After(deadline) {
				t.Fatal("what was waited for did not come")
			}
		}
	}
}
