package rediscache_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// asUser are the arguments of a server that knows a user with these rights from its
// start on.
func asUser(rights []string) []string {
	return append([]string{"--user", "dualcheck", "on", ">secret"}, rights...)
}

// clusterRights are for a Cluster: where slots are, and to follow one on its way.
var clusterRights = append(slices.Clone(leastRights), "+cluster|slots", "+asking")

// sameSlot returns so many keys, all of one slot.
func sameSlot(n int) (keys []string) {
	slot := layout.NameOf("crowd", "same-0").Slot
	for i := 0; len(keys) < n; i++ {
		key := fmt.Sprintf("same-%d", i)
		if layout.NameOf("crowd", key).Slot == slot {
			keys = append(keys, key)
		}
	}
	return keys
}

// G5, E66, E68: a Cluster, used over all of its masters and none of its replicas, by a
// user with the least rights. Slots move under load; a master dies under load and its
// replica takes over. Nobody is told anything wrong, and hits return for all keys.
func TestG5Cluster(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, true, asUser(clusterRights)...)
	var servers []*redistest.Server
	for i := range c.Addrs() {
		servers = append(servers, c.Server(i))
	}
	all := nodes(t, rediscache.Server{Mode: rediscache.Cluster, Addrs: c.Addrs(), User: "dualcheck", Password: "secret"})
	work := stillRight(t, 100, all, servers...)
	slotOf := func(key string) int { return c.Slot(entryOf(t, all[0], key)) }

	// Some keys of each master.
	shards := map[*redistest.Server][]string{}
	for i := range 24 {
		key := fmt.Sprintf("shard-%d", i)
		completes(t, all[i%2], key, key)
		at := c.MasterOf(slotOf(key))
		shards[at] = append(shards[at], key)
	}
	if len(shards) != 3 {
		t.Fatalf("%d masters have keys", len(shards))
	}
	everyone := func() {
		t.Helper()
		for _, keys := range shards {
			for _, key := range keys {
				for _, n := range all {
					if a := hit(t, n, key); string(a.Record.Result.Body) != key {
						t.Errorf("G4: %s is told as %q", key, a.Record.Result.Body)
					}
				}
			}
		}
	}
	everyone()
	for i := 3; i < 6; i++ {
		stats := c.Server(i).Do("INFO", "commandstats").(string)
		for _, read := range []string{"cmdstat_get:", "cmdstat_readonly:", "cmdstat_eval:", "cmdstat_evalsha:"} {
			if strings.Contains(stats, read) {
				t.Errorf("a replica was asked: %s", stats)
			}
		}
	}

	// A slot is on its way: half of its keys are here, half there.
	same := sameSlot(12)
	before, meanwhile := same[:8], same[8:]
	for _, key := range before {
		completes(t, all[0], key, key)
		hit(t, all[1], key)
	}
	from := c.MasterOf(slotOf(before[0]))
	to := c.Masters()[0]
	if to == from {
		to = c.Masters()[1]
	}
	c.MoveSlot(slotOf(before[0]), to, func() {
		for _, key := range before {
			hit(t, all[0], key)
		}
		for _, key := range meanwhile {
			completes(t, all[1], key, key)
			if a := begins(t, all[0], key); string(a.Record.Result.Body) != key {
				t.Errorf("G4: %s is told as %q", key, a.Record.Result.Body)
			}
		}
	})
	for i, key := range same {
		hit(t, all[i%2], key)
	}
	for range 10 {
		slot := slotOf(work.old())
		to := c.Masters()[0]
		c.MoveSlot(slot, to, func() { work.more(callers) })
	}
	c.WaitOK()
	everyone()
	damages(t, c.MasterOf(slotOf(before[0])), all[0], before[0])
	wantRights(t, clusterRights, servers...)

	// A master dies. How the others are served meanwhile is only said.
	shards = map[*redistest.Server][]string{}
	for i := range 24 {
		key := fmt.Sprintf("shard-%d", i)
		at := c.MasterOf(slotOf(key))
		shards[at] = append(shards[at], key)
	}
	victim := c.MasterOf(slotOf("shard-0"))
	start := time.Now()
	victim.Kill()
	asked, hits := 0, 0
	nodetest.Eventually(t, soon, "the dead master's keys to be answered", func() error {
		for s, keys := range shards {
			for _, key := range keys {
				a := begins(t, all[0], key)
				if string(a.Record.Result.Body) != key {
					t.Fatalf("G4: %s is told as %q", key, a.Record.Result.Body)
				}
				switch {
				case s != victim:
					asked++
					if a.Source == claim.SourceRedis {
						hits++
					}
				case a.Source == claim.SourceRedis:
					return nil
				}
			}
		}
		return fmt.Errorf("degraded: %v", all[0].Cache.Degraded())
	})
	t.Logf("%v after a master died its keys are answered; meanwhile %d of %d repeats of others were",
		time.Since(start).Round(time.Millisecond), hits, asked)
	everyone()
	hitsReturn(t, all)
	victim.Restart()
	c.WaitOK()
	work.more(200)
	everyone()
	wantRights(t, clusterRights, servers...)
}
