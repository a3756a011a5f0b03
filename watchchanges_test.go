package dualcheck

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// follow calls f with each change until the test ends.
func follow(t interface{ Cleanup(func()) }, w *Watch, f func(Change)) {
	ctx, cancel := context.WithCancel(context.Background())
	var ranging sync.WaitGroup
	ranging.Go(func() {
		for c := range w.Changes(ctx) {
			f(c)
		}
	})
	t.Cleanup(func() { cancel(); ranging.Wait() })
}

func TestChangesAreToldInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, w := watchInMemory(t)
		s := f.next(t)
		var got []string
		follow(t, w, func(c Change) {
			got = append(got, fmt.Sprintf("%v %s%d%s", c.Kind, c.Key, c.Entry.Revision, c.Cause))
		})
		wants := func(want ...string) {
			t.Helper()
			synctest.Wait()
			if strings.Join(got, ", ") != strings.Join(want, ", ") {
				t.Errorf("told %q, not %q", got, want)
			}
			got = nil
		}
		s.tell(begin("as asked"), told("", put("a", 1)))
		wants()
		s.tell(end("1"))
		wants("RESYNC 0as asked")
		s.tell(told("2", put("a", 2), put("b", 3), put("a", 4)), told("3", forgot("b", 5), put("a", 4), forgot("c", 6)))
		wants("PUT a2", "PUT b3", "PUT a4", "GONE b3")
		s.tell(begin("too slow"), told("", put("c", 7), forgot("a", 8)), end("4"))
		wants("RESYNC 0too slow")
		s.tell(told("5", put("d", 9)))
		wants("PUT d9")
		s.tell(told("6", putUntil("d", 10, time.Now().Add(2*time.Second))))
		<-time.After(2*time.Second + expireEvery)
		wants("PUT d10", "GONE d10")

		// Who begins later is sent to the copy first, and who stops is told no more.
		for c := range w.Changes(t.Context()) {
			if c.Kind != ChangeResync {
				t.Errorf("began with %v", c.Kind)
			}
			break
		}
		w.mu.Lock()
		if n := len(w.watchers); n != 1 {
			t.Errorf("%d range over changes", n)
		}
		w.mu.Unlock()
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for range w.Changes(ended) {
			t.Error("told though the context has ended")
		}
		// What was told before the end is still to be had.
		n := 0
		for c := range w.Changes(t.Context()) {
			if c.Kind == ChangeResync {
				s.tell(told("7", put("e", 11), put("f", 12)))
				synctest.Wait()
				w.Close()
			} else {
				n++
			}
		}
		if n != 2 {
			t.Errorf("%d changes after the end", n)
		}
	})
}

func TestAQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 10 * (itemBytes + 4)
		f, w := watchInMemory(t, WithQueueBytes(most))
		s := f.next(t)
		s.tell(begin(""), end("0"))
		synctest.Wait()
		slow := make(chan struct{})
		counts := make(map[ChangeKind]int)
		var kinds []string
		follow(t, w, func(c Change) {
			counts[c.Kind]++
			kinds = append(kinds, c.Kind.String()+c.Cause)
			<-slow
		})
		synctest.Wait()
		for i := range 1000 {
			s.tell(told("1", put(fmt.Sprintf("%04d", i), int64(i+1))))
			if i%100 == 0 {
				synctest.Wait()
				for q := range w.watchers {
					if q.bytes > most || len(q.changes) > 20 {
						t.Fatalf("%d bytes wait, %d changes", q.bytes, len(q.changes))
					}
				}
			}
		}
		synctest.Wait()
		if w.Len() != 1000 {
			t.Errorf("the copy waited for who is slow: %d", w.Len())
		}
		slow <- struct{}{} // the first, which sent it to the copy
		synctest.Wait()
		if counts[ChangeResync] != 2 || counts[ChangePut] != 0 || !strings.Contains(kinds[1], "faster") {
			t.Errorf("told %v", kinds)
		}
		// What comes after it is told again, up to the bound, however it is taken.
		for i := range 10 {
			s.tell(told("2", put("aaaa", int64(2000+i))))
		}
		synctest.Wait()
		for i := range 50 {
			slow <- struct{}{}
			synctest.Wait()
			s.tell(told("2", put("aaaa", int64(3000+i))))
			synctest.Wait()
			for q := range w.watchers {
				if q.bytes > most || len(q.changes) > 30 {
					t.Fatalf("%d bytes wait, %d changes", q.bytes, len(q.changes))
				}
			}
		}
		if counts[ChangeResync] != 2 || counts[ChangePut] != 50 {
			t.Errorf("told %v", counts)
		}
		close(slow)
		synctest.Wait()
		for q := range w.watchers {
			if q.bytes != 0 || q.head != len(q.changes) {
				t.Errorf("%d bytes are left", q.bytes)
			}
		}
	})
}

// world is what a property test's server has: a log of changes, each the only one of its
// revision, and what they come to. It can go back, as etcd does that is restored; then
// revisions come again, with other contents.
type world struct {
	log      []*dualcheckv1.Event
	revision int64
	epoch    int
	oldest   int // what is older has left the ring
	unique   int
}

// change puts a key, or forgets it.
func (w *world) change(key string, forget bool) {
	w.revision++
	w.unique++
	e := put(key, w.revision)
	if forget {
		e = forgot(key, w.revision)
	}
	e.Digest = []byte(strconv.Itoa(w.unique))
	if w.unique%3 == 0 {
		e.KeyUntil = timestamppb.New(time.Now().Add(time.Hour))
	}
	w.log = append(w.log, e)
}

// at is what was there once n changes were made.
func (w *world) at(n int) map[string]*dualcheckv1.Event {
	there := make(map[string]*dualcheckv1.Event)
	for _, e := range w.log[:n] {
		if e.GetType() == dualcheckv1.EventType_EVENT_TYPE_DELETE {
			delete(there, e.GetKey())
		} else {
			there[e.GetKey()] = e
		}
	}
	return there
}

// restore goes back to n changes.
func (w *world) restore(n int) {
	w.log, w.revision = w.log[:n:n], 0
	if n > 0 {
		w.revision = w.log[n-1].GetRevision()
	}
	w.epoch++
	w.oldest = min(w.oldest, n)
}

func (w *world) token(at int) string { return fmt.Sprintf("%d/%d", w.epoch, at) }

// place is where a token goes on; false: that is not told any more.
func (w *world) place(token string) (int, bool) {
	var epoch, at int
	if _, err := fmt.Sscanf(token, "%d/%d", &epoch, &at); err != nil || epoch != w.epoch || at < w.oldest {
		return 0, false
	}
	return at, true
}

// script tells a stream what the tape says, and at its end all that there is. It returns
// how much of the tape is left.
func (w *world) script(s *toldStream, tape []byte) []byte {
	place, ok := w.place(s.GetResumeToken())
	var pages []*dualcheckv1.Event // of a snapshot that has not ended
	snapshot := false
	resync := func(arg int) {
		snapshot = true
		// The place may lag behind what the reader knew, and the pages be read later.
		place = max(w.oldest, len(w.log)-arg%4)
		there := w.at(max(place, len(w.log)-arg/4%4))
		pages = pages[:0]
		for _, key := range slices.Sorted(maps.Keys(there)) {
			pages = append(pages, there[key])
		}
		s.tell(begin("because"))
	}
	send := func(n int) {
		if n = min(n, len(w.log)-place); n > 0 {
			place += n
			s.tell(told(w.token(place), w.log[place-n:place]...))
		}
	}
	page := func(n int) {
		n = min(n, len(pages))
		if n > 0 {
			s.tell(told(w.token(place), pages[:n]...))
			pages = pages[n:]
		}
		if snapshot && len(pages) == 0 {
			snapshot = false
			s.tell(end(w.token(place)))
		}
	}
	if ok {
		s.tell(progress(s.GetResumeToken())) // where it goes on
	} else {
		resync(0)
	}
	for len(tape) > 1 {
		op, arg := tape[0], int(tape[1])
		tape = tape[2:]
		switch op % 16 {
		case 0, 1, 2, 3:
			w.change(string(rune('a'+arg%4)), arg/4%3 == 0)
		case 4, 5, 6:
			send(1 + arg%3)
		case 7, 8, 9:
			page(1 + arg%3)
		case 10:
			if place == len(w.log) {
				s.tell(progress(w.token(place)))
			}
		case 11:
			s.over <- errBroken
			return tape
		case 12:
			w.oldest = max(w.oldest, len(w.log)-arg%4)
			if place < w.oldest {
				resync(arg / 4)
			}
		case 13:
			resync(arg)
		case 14:
			if arg%4 == 0 {
				w.restore(max(0, len(w.log)-arg/4%8))
				resync(0)
			}
		case 15:
			synctest.Wait() // what was told is handled before more is
		}
	}
	if len(tape) == 1 { // which comes first is drawn as well
		send(len(w.log) - place)
	}
	page(len(pages))
	send(len(w.log) - place)
	s.tell(progress(w.token(place)))
	return nil
}

// TestG9TheCopyIsTheTruth: whatever happens, in whatever order it is told, and wherever
// streams are cut, begin anew or are resumed, in the end the copy is what there is; and so
// is what somebody keeps who follows Changes, however slowly.
func TestG9TheCopyIsTheTruth(t *testing.T) {
	tb := t
	rapid.Check(t, func(t *rapid.T) {
		tape := rapid.SliceOfN(rapid.Byte(), 0, 400).Draw(t, "tape")
		// What is drawn prefers small numbers, and so few kinds of steps: it is scrambled.
		scramble := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "scramble"), 1))
		for i := range tape {
			tape[i] ^= byte(scramble.Uint32())
		}
		queue := rapid.IntRange(1, 1500).Draw(t, "queue")
		wrong := "" // a bubble is not rapid's goroutine, and must not fail its test
		synctest.Test(tb, func(st *testing.T) {
			f, w := watchInMemory(st, WithQueueBytes(queue))
			mine := make(map[string]string)
			follow(st, w, func(c Change) {
				switch c.Kind {
				case ChangeResync:
					clear(mine)
					for key, e := range w.All() {
						mine[key] = string(e.Digest)
					}
				case ChangePut:
					mine[c.Key] = string(c.Entry.Digest)
				case ChangeGone:
					delete(mine, c.Key)
				}
				<-time.After(time.Millisecond)
			})
			var truth world
			for left := tape; ; {
				s := f.next(st)
				if left = truth.script(s, left); left == nil {
					break
				}
			}
			synctest.Wait()
			if st := w.Status(); !st.Synced || !w.Fresh(time.Second) {
				wrong += fmt.Sprintf("%+v; ", st)
			}
			want := make(map[string]string)
			for key, e := range truth.at(len(truth.log)) {
				want[key] = string(e.GetDigest())
			}
			got := make(map[string]string)
			for key, e := range w.All() {
				got[key] = string(e.Digest)
			}
			if !maps.Equal(want, got) || w.Len() != len(want) {
				wrong += fmt.Sprintf("the copy is %v, and the truth %v; ", got, want)
			}
			<-time.After(time.Second)
			synctest.Wait()
			if !maps.Equal(want, mine) {
				wrong += fmt.Sprintf("following made %v, and the truth is %v; ", mine, want)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			var bytes int64
			expire := 0
			for i := range w.copy.shards {
				for _, it := range w.copy.shards[i].items {
					if bytes += it.bytes(); it.until != 0 {
						expire++
					}
				}
			}
			if bytes != w.copy.bytes || expire != len(w.copy.expiring) {
				wrong += fmt.Sprintf("%d bytes and %d that expire, counted as %d and %d; ", bytes, expire, w.copy.bytes, len(w.copy.expiring))
			}
		})
		if wrong != "" {
			t.Fatal(wrong)
		}
	})
}
