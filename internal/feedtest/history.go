package feedtest

import (
	"context"
	"encoding/hex"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// History is what was written of a namespace's records, as a watch of the test's own saw
// it from the start, over a connection that nothing happens to.
type History struct {
	namespace string

	mu      sync.Mutex
	changes map[string][]Event // by key, oldest first
	applied int64
	moved   chan struct{}
}

// Record follows etcd from now on until the test ends. Nothing of the namespace may have
// been written before.
func Record(t testing.TB, client *clientv3.Client, namespace string) *History {
	t.Helper()
	h := &History{namespace: namespace, changes: map[string][]Event{}, moved: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	start, err := client.Get(ctx, layout.Records, clientv3.WithCountOnly())
	if err != nil {
		t.Fatal(err)
	}
	watch := client.Watch(ctx, layout.Root, clientv3.WithPrefix(), clientv3.WithRev(start.Header.Revision+1))
	var running sync.WaitGroup
	running.Go(func() {
		for resp := range watch {
			if err := resp.Err(); err != nil {
				t.Errorf("the history is lost: %v", err)
				return
			}
			h.take(t, resp)
		}
	})
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
	return h
}

func (h *History) take(t testing.TB, resp clientv3.WatchResponse) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range resp.Events {
		if !strings.HasPrefix(string(e.Kv.Key), layout.Records) || e.Type == clientv3.EventTypeDelete {
			continue
		}
		rec, err := layout.DecodeRecord(e.Kv.Value, e.Kv.ModRevision, "", "")
		if err != nil {
			t.Errorf("the history has a record that cannot be read: %v", err)
			continue
		}
		if rec.Namespace == h.namespace && (rec.Forgotten == nil || rec.Forgets()) {
			h.changes[rec.Key] = append(h.changes[rec.Key], EventOf(rec))
		}
	}
	h.applied = resp.Header.Revision
	close(h.moved)
	h.moved = make(chan struct{})
}

// EventOf is a record's change as a reader is told of it.
func EventOf(rec *claim.Record) Event {
	e := Event{Key: rec.Key, Revision: rec.Revision, Deleted: rec.Forgotten != nil}
	if !e.Deleted {
		e.State, e.Digest = rec.State.String(), hex.EncodeToString(rec.Digest)
	}
	return e
}

// Await waits until the history has everything up to etcd's revision now.
func (h *History) Await(t testing.TB, client *clientv3.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	// A write of its own, below the root, which the watch brings.
	put, err := client.Put(ctx, layout.Root+"/x/feedtest", "")
	if err != nil {
		t.Fatal(err)
	}
	for {
		h.mu.Lock()
		there, moved := h.applied >= put.Header.Revision, h.moved
		h.mu.Unlock()
		if there {
			return
		}
		select {
		case <-moved:
		case <-ctx.Done():
			t.Fatal("the history does not get on")
		}
	}
}

// Deletes counts the forgets so far.
func (h *History) Deletes(prefix string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key, all := range h.changes {
		for _, e := range all {
			if e.Deleted && strings.HasPrefix(key, prefix) {
				n++
			}
		}
	}
	return n
}

// Newest is the revision of the newest change of the keys with a prefix.
func (h *History) Newest(prefix string) (newest int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key, all := range h.changes {
		if strings.HasPrefix(key, prefix) {
			newest = max(newest, all[len(all)-1].Revision)
		}
	}
	return newest
}

// at is what was written of a key at a revision. What the history has not seen yet, for
// its watch may be the later one, is waited for.
func (h *History) at(key string, revision int64) (Event, bool) {
	deadline := time.After(10 * time.Second)
	for {
		h.mu.Lock()
		all := h.changes[key]
		i := sort.Search(len(all), func(i int) bool { return all[i].Revision >= revision })
		moved, there := h.moved, h.applied >= revision
		h.mu.Unlock()
		if i < len(all) && all[i].Revision == revision {
			return all[i], true
		}
		if there {
			return Event{}, false
		}
		select {
		case <-moved:
		case <-deadline:
			return Event{}, false
		}
	}
}

// between is the revision of a change of a key after one revision and before another.
func (h *History) between(key string, after, before int64) (int64, bool) {
	h.at(key, before) // it is there
	h.mu.Lock()
	defer h.mu.Unlock()
	all := h.changes[key]
	i := sort.Search(len(all), func(i int) bool { return all[i].Revision > after })
	if i < len(all) && all[i].Revision < before {
		return all[i].Revision, true
	}
	return 0, false
}

// Last is how the keys with a prefix are at the end.
func (h *History) Last(prefix string) map[string]Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	last := map[string]Event{}
	for key, all := range h.changes {
		if e := all[len(all)-1]; !e.Deleted && strings.HasPrefix(key, prefix) {
			last[key] = e
		}
	}
	return last
}
