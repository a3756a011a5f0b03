package memory_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/memory"
)

// reads asks for a key that there is not, and returns whether the Store behind was asked.
func (w *world) reads(t testing.TB, key string, cached bool) bool {
	t.Helper()
	_, before := w.behind.asked()
	if f, err := w.Get(t.Context(), &claim.GetRequest{Namespace: "ns", Key: key, Cached: cached}); claim.ReasonOf(err) != claim.RecordNotFound {
		t.Errorf("get %s: %+v, %v", key, f, err)
	}
	_, after := w.behind.asked()
	return after > before
}

// That there is no such key is told from memory to cached Gets alone, for 3 s from when the
// read was sent that found none, however long that took.
func TestAbsenceIsToldToCachedGetsFor3s(t *testing.T) {
	w := open(nil)
	took := time.Second
	w.behind.set(nil, func() { w.pass(took) })
	if !w.reads(t, "k", false) || !w.reads(t, "k", true) { // what a plain one found is not remembered
		t.Error("it was told before anybody looked")
	}
	if w.reads(t, "k", true) || !w.reads(t, "other", true) {
		t.Error("it is remembered by its name")
	}
	if w.pass(claim.BelievedFor - 2*took - 1); w.reads(t, "k", true) {
		t.Error("it is remembered for 3 s")
	}
	if w.pass(1); !w.reads(t, "k", true) {
		t.Error("and no longer")
	}
	took = claim.BelievedFor
	w.reads(t, "slow", true)
	if !w.reads(t, "slow", true) {
		t.Error("a read that took 3 s is true no longer")
	}
	took = 0
	w.reads(t, "k", true)
	if !w.reads(t, "k", false) {
		t.Error("a plain Get was told from memory")
	}
	if begins, _ := w.behind.asked(); w.begin(t, "k").Source != claim.SourceEtcd {
		t.Error("a Begin was told from memory")
	} else if after, _ := w.behind.asked(); after != begins+1 {
		t.Error("a Begin was not asked behind")
	}
	if w.seen.Of("absent by read") != 2 {
		t.Error(&w.seen)
	}
}

// Who is told that there is a key, or writes it, through this node, is not told by it
// afterwards that there is none; nor by a read that was under way meanwhile.
func TestAbsenceEndsWithThisNodesWrites(t *testing.T) {
	for name, write := range map[string]func(w *world) error{
		"begin": func(w *world) error {
			_, err := w.Begin(t.Context(), &claim.BeginRequest{Namespace: "ns", Key: "k"})
			return err
		},
		"begin together": func(w *world) error {
			return w.BeginTogether(t.Context(), []*claim.BeginRequest{{Namespace: "ns", Key: "k"}, {Namespace: "ns", Key: "k"}})[1].Err
		},
		"finish": func(w *world) error {
			_, err := w.Finish(t.Context(), &claim.FinishRequest{Namespace: "ns", Key: "k"})
			return err
		},
		"extend": func(w *world) error {
			_, err := w.Extend(t.Context(), &claim.ExtendRequest{Namespace: "ns", Key: "k"})
			return err
		},
		"resolve": func(w *world) error {
			_, err := w.Resolve(t.Context(), &claim.ResolveRequest{Namespace: "ns", Key: "k"})
			return err
		},
		"forget": func(w *world) error {
			_, err := w.Forget(t.Context(), &claim.ForgetRequest{Namespace: "ns", Key: "k"})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := open(nil)
			w.reads(t, "k", true)
			w.pass(1)
			if err := write(w); err != nil {
				t.Fatal(err)
			}
			if !w.reads(t, "k", true) {
				t.Error("it is remembered over the write")
			}
			w.pass(1)
			w.reads(t, "k", true)
			if w.reads(t, "k", true) {
				t.Error("what a read found that was sent after the write is not remembered")
			}
			// While a read is under way, the key is written.
			w.pass(claim.BelievedFor)
			w.behind.set(nil, func() {
				w.behind.set(nil, nil)
				w.pass(1)
				if err := write(w); err != nil {
					t.Error(err)
				}
				w.pass(1)
			})
			w.reads(t, "k", true)
			if !w.reads(t, "k", true) {
				t.Error("a read that was under way during the write is remembered")
			}
		})
	}
}

// A key that a plain Get found, or that is remembered, is not absent.
func TestAbsenceEndsWithWhatWasFound(t *testing.T) {
	w := open(nil)
	w.reads(t, "k", true)
	w.Keep(w.then(), finished("k", "r", 5))
	w.remembers(t, "k", "r")
	if f, err := w.Get(t.Context(), &claim.GetRequest{Namespace: "ns", Key: "k", Cached: true}); err != nil || f.Source != claim.SourceMemory {
		t.Errorf("%+v, %v", f, err)
	}

	store := &found{}
	w = open(nil)
	w.Store = w.Front(store)
	get := func(cached bool) error {
		_, err := w.Get(t.Context(), &claim.GetRequest{Namespace: "ns", Key: "k", Cached: cached})
		return err
	}
	if err := get(true); claim.ReasonOf(err) != claim.RecordNotFound {
		t.Fatal(err)
	}
	store.there = true
	w.pass(1)
	if err := get(true); claim.ReasonOf(err) != claim.RecordNotFound {
		t.Errorf("it is not remembered: %v", err)
	}
	if err := get(false); err != nil {
		t.Error(err)
	}
	if err := get(true); err != nil {
		t.Errorf("after somebody was told of it: %v", err)
	}
}

// found is a Store that knows all keys, or none.
type found struct {
	behind
	there bool
}

func (f *found) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	if f.there {
		return claim.Found{Record: finished(req.Key, "r", 5), Source: claim.SourceEtcd}, nil
	}
	return f.behind.Get(ctx, req)
}

// While an operator bypasses memory, or the namespace must be declared and is not, the
// Store behind says what is so.
func TestAbsenceIsBypassed(t *testing.T) {
	for name, change := range map[string]func(v *claim.View){
		"bypassed":   func(v *claim.View) { v.BypassMemory = true },
		"undeclared": func(v *claim.View) { v.RefuseUndeclared = true },
	} {
		w := open(nil)
		w.reads(t, "k", true)
		w.change(change)
		if !w.reads(t, "k", true) {
			t.Errorf("%s: told from memory", name)
		}
	}
}

// How many are remembered is bounded: one takes another's place.
func TestAbsencesAreBounded(t *testing.T) {
	w := open(nil)
	const keys = 1 << 17
	for i := range keys {
		w.reads(t, fmt.Sprint("k", i), true)
	}
	kept := 0
	for i := range keys {
		if !w.reads(t, fmt.Sprint("k", i), true) {
			kept++
		}
	}
	if kept == 0 || kept > 1<<16 {
		t.Errorf("%d are remembered", kept)
	}
}

// A filter says for cached Gets, and for them alone, which keys there are not; not of one
// that this node has just met, since a filter may be behind.
func TestAbsentByTheFilter(t *testing.T) {
	asked := 0
	w := open(func(c *memory.Config) {
		c.Absent = func(namespace, key string) bool { asked++; return namespace == "ns" && key != "maybe" }
	})
	if w.reads(t, "k", true) || w.seen.Of("absent by filter") != 1 {
		t.Error("the filter was not asked")
	}
	if !w.reads(t, "maybe", true) || !w.reads(t, "k", false) || w.begin(t, "k").Source != claim.SourceEtcd || asked != 2 {
		t.Errorf("the filter was asked %d times", asked)
	}
	if !w.reads(t, "k", true) {
		t.Error("the filter was believed of a key that was just begun")
	}
	w.pass(claim.BelievedFor)
	if w.reads(t, "k", true) {
		t.Error("the filter is not believed any more")
	}
}
