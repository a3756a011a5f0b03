package robustness

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// kinds are what chaos does: each at least once in every run.
var kinds = []string{
	"chaos: Redis flushed", "chaos: Redis master killed", "chaos: Redis failed over", "chaos: Redis lost writes", "chaos: Redis master paused",
	"chaos: node held from etcd", "chaos: node cut from etcd", "chaos: etcd leader moved",
	"chaos: client cut from a node", "chaos: client held from a node", "chaos: answers lost", "chaos: server drained", "chaos: server cut off",
	"tampered: garbage", "tampered: bits", "tampered: swapped", "tampered: old brought back", "tampered: old under a new name", "tampered: stage made confirmed", "tampered: no expiry",
}

// breakRedis does to Redis what happens to it, everything once and then at random,
// until ctx ends. It is for the test's own goroutine: what does not work ends
// the test.
func (w *caller) breakRedis(ctx context.Context, s *redistest.Sentinel) {
	acts := []func(){
		func() {
			s.Master().Flush()
			w.stats.add("chaos: Redis flushed")
		},
		func() {
			old := s.Master()
			old.Kill()
			s.AwaitOther(old)
			w.stats.add("chaos: Redis master killed")
			pause(ctx, w.between(0, time.Second))
			s.BringBack(old)
		},
		func() {
			s.Failover()
			w.stats.add("chaos: Redis failed over")
		},
		func() {
			old := s.LoseWrites(func() { pause(ctx, w.between(100*time.Millisecond, time.Second)) })
			w.stats.add("chaos: Redis lost writes")
			pause(ctx, w.between(0, time.Second))
			s.BringBack(old)
		},
		func() {
			// Whether the sentinels replace it meanwhile is up to them.
			master := s.Master()
			master.Pause()
			pause(ctx, time.Second)
			master.Resume()
			w.stats.add("chaos: Redis master paused")
			s.WaitOK()
		},
	}
	for round := 0; ctx.Err() == nil; round++ {
		for _, i := range w.Perm(len(acts)) {
			if round > 0 {
				i = w.IntN(len(acts))
				if w.one(40) {
					i = 0
				}
			}
			acts[i]()
			if !pause(ctx, w.between(100*time.Millisecond, 1500*time.Millisecond)) {
				return
			}
		}
	}
}

// breakLinks moves the leader of etcd and keeps one node after the other from etcd,
// while Redis answers it.
func (w *caller) breakLinks(ctx context.Context, t testing.TB, etcd *etcdtest.Cluster, links [][]*redistest.Proxy) {
	for round := 0; ctx.Err() == nil; round++ {
		link := links[w.IntN(len(links))]
		each := func(do func(*redistest.Proxy)) {
			for _, p := range link {
				do(p)
			}
		}
		kind := w.IntN(3)
		if round < 3 {
			kind = round
		}
		switch kind {
		case 0:
			if err := moveLeader(ctx, etcd); err != nil && ctx.Err() == nil {
				t.Logf("the leader was not moved: %v", err)
			} else {
				w.stats.add("chaos: etcd leader moved")
			}
		case 1:
			each((*redistest.Proxy).Hold)
			pause(ctx, w.between(500*time.Millisecond, 6*time.Second))
			each((*redistest.Proxy).Release)
			w.stats.add("chaos: node held from etcd")
		default:
			each((*redistest.Proxy).Cut)
			pause(ctx, w.between(500*time.Millisecond, 6*time.Second))
			each((*redistest.Proxy).Mend)
			w.stats.add("chaos: node cut from etcd")
		}
		if !pause(ctx, w.between(500*time.Millisecond, 3*time.Second)) {
			return
		}
	}
}

func moveLeader(ctx context.Context, etcd *etcdtest.Cluster) error {
	leader := etcd.Leader()
	next := etcd.Member((leader + 1) % 3)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{etcd.Endpoint(leader)}, DialTimeout: 5 * time.Second})
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err = client.MoveLeader(ctx, uint64(next.Server.MemberID()))
	return err
}

// thief writes to Redis what was never meant to be there, and brings back what it
// found there before.
type thief struct {
	*caller
	redis *redis.Client
	taken []theft           // the oldest first
	names map[string]string // the newest name of each hash
	stage string            // the newest that it met
}

type theft struct{ name, value string }

// hashOf is what stays of a name when the epochs change.
func hashOf(name string) string { return name[strings.LastIndexByte(name, ':')+1:] }

// newer tells which of two names of one hash has the newer slot epoch, a number.
func newer(a, b string) bool { return len(a) > len(b) || len(a) == len(b) && a > b }

// tamper tampers until ctx ends. What fails, fails: Redis is being broken too.
func (h *thief) tamper(ctx context.Context) {
	h.names = map[string]string{}
	for pause(ctx, h.between(5*time.Millisecond, 80*time.Millisecond)) {
		call, cancel := context.WithTimeout(ctx, time.Second)
		if what, err := h.once(call); err == nil && what != "" {
			h.stats.add("tampered: " + what)
		}
		cancel()
	}
}

func (h *thief) once(ctx context.Context) (what string, err error) {
	name, err := h.redis.RandomKey(ctx).Result()
	if err != nil || !strings.HasPrefix(name, "dc:") || strings.HasSuffix(name, ":probe") {
		return "", err
	}
	value, err := h.redis.Get(ctx, name).Result()
	if err != nil {
		return "", h.redis.Del(ctx, name).Err() // a list of ours
	}
	if newer(name, h.names[hashOf(name)]) {
		h.names[hashOf(name)] = name
	}
	if strings.HasPrefix(value, "s1") {
		h.stage = value
	}
	put := func(name, value string) error { return h.redis.Set(ctx, name, value, 30*time.Second).Err() }
	switch n := h.IntN(100); {
	case n < 45:
		if h.taken = append(h.taken, theft{name, value}); len(h.taken) > 3000 {
			h.taken = h.taken[1000:]
		}
		return "", nil
	case n < 50:
		junk := make([]byte, h.IntN(300))
		for i := range junk {
			junk[i] = byte(h.Uint32())
		}
		switch h.IntN(4) {
		case 0:
			err = h.redis.Del(ctx, name).Err()
			if err == nil {
				err = h.redis.RPush(ctx, name, "a", "list").Err()
			}
		case 1:
			err = put(name, "c1"+string(junk))
		case 2:
			err = put(name, value[:h.IntN(len(value)+1)])
		default:
			err = put(name, string(junk))
		}
		return "garbage", err
	case n < 55 && len(value) > 0:
		changed := []byte(value)
		changed[h.IntN(len(changed))] ^= 1 << h.IntN(8)
		return "bits", put(name, string(changed))
	case n < 63 && len(h.taken) > 0:
		other := h.taken[h.IntN(len(h.taken))]
		if err = put(name, other.value); err == nil {
			err = put(other.name, value)
		}
		return "swapped", err
	case n < 75 && len(h.taken) > 0:
		old := h.taken[h.IntN(len(h.taken))]
		return "old brought back", put(old.name, old.value)
	case n < 90:
		for _, old := range h.taken {
			if at := h.names[hashOf(old.name)]; hashOf(old.name) == hashOf(name) && old.name != at {
				return "old under a new name", put(at, old.value)
			}
		}
	case n < 95 && h.stage != "":
		return "stage made confirmed", put(name, "c1"+h.stage[2:])
	case n < 97:
		return "no expiry", h.redis.Persist(ctx, name).Err()
	}
	return "", nil
}
