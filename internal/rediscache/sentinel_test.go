package rediscache_test

import (
	"slices"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// sentinelRights are what a user of the sentinels must have; one of the data servers
// has the least rights, as everywhere.
var sentinelRights = []string{"-@all", "allchannels", "+client|setname", "+sentinel|get-master-addr-by-name", "+sentinel|sentinels", "+subscribe", "+ping"}

// G4, G5, E67: a failover loses writes that were acknowledged, and brings back what was
// forgotten meanwhile. Nobody is told of it: not by the promoted replica, not when the
// old master is back, not after a planned failover under load; and hits return.
func TestG5SentinelLosesWrites(t *testing.T) {
	t.Parallel()
	s := redistest.StartSentinel(t, asUser(leastRights)...)
	for i := range s.Addrs() {
		s.Sentinel(i).SetUser("watcher", "secret", sentinelRights...)
	}
	all := nodes(t, rediscache.Server{
		Mode: rediscache.Sentinel, Addrs: s.Addrs(), MasterName: redistest.MasterName,
		User: "dualcheck", Password: "secret", SentinelUser: "watcher", SentinelPassword: "secret",
	})
	work := stillRight(t, 100, all, s.Server(0), s.Server(1))
	completes(t, all[0], "twice", "r1")
	completes(t, all[0], "damaged", "damaged")
	damages(t, s.Master(), all[0], "damaged")
	for _, n := range all {
		hit(t, n, "twice")
	}
	name := entryOf(t, all[0], "twice")
	s.WaitOK() // the replica has it too

	wants := func(how string) {
		t.Helper()
		for range 20 {
			for _, n := range all {
				if a := begins(t, n, "twice"); a.Verdict != claim.Replay || string(a.Record.Result.Body) != "r2" {
					t.Fatalf("G4: %s: verdict %d, %v from %d", how, a.Verdict, a.Record.Result, a.Source)
				}
			}
		}
	}
	old := s.LoseWrites(func() {
		if _, err := all[0].Forget(nodetest.Within(t, 20*time.Second), &claim.ForgetRequest{Namespace: "crowd", Key: "twice", Reason: "a test"}); err != nil {
			t.Fatal(err)
		}
		completes(t, all[1], "twice", "r2")
		for _, n := range all {
			hit(t, n, "twice")
		}
		work.more(100)
	})
	if !slices.Contains(s.Master().Keys("dc:*"), name) {
		t.Error("nothing was tested: r1 is not back")
	}
	wants("promoted")
	hitsReturn(t, all)
	for _, n := range all {
		hit(t, n, "twice")
	}
	s.BringBack(old)
	wants("brought back")
	work.more(100)
	start := time.Now()
	s.Failover()
	t.Logf("failed over within %v", time.Since(start).Round(time.Millisecond))
	wants("failed over")
	hitsReturn(t, all)
	for _, n := range all {
		if a := hit(t, n, "twice"); string(a.Record.Result.Body) != "r2" {
			t.Errorf("G4: %q is told", a.Record.Result.Body)
		}
	}
	wantRights(t, leastRights, s.Server(0), s.Server(1))
	for i := range s.Addrs() { // they do not count what they are asked
		if refused := s.Sentinel(i).Do("ACL", "LOG").([]any); len(refused) > 0 {
			t.Errorf("the sentinels' rights are too few: %v", refused[0])
		}
	}
}
