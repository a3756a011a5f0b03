package memory_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/memory"
)

// G4: each rule by which memory may not answer, alone: the Store behind is asked.
// Afterwards it answers again, or has dropped what will never be true again.
func TestG4EveryRuleOfTheMemory(t *testing.T) {
	const deadline = time.Hour - claim.CacheMargin // of what finished makes
	for _, c := range []struct {
		name   string
		policy func(p *claim.Policy)
		change func(v *claim.View)
		found  memory.Finding
		drops  bool
	}{
		{"it does not believe", nil, func(v *claim.View) { v.Believed = false }, memory.Disbelieved, false},
		{"the epoch was raised", nil, func(v *claim.View) { v.Epoch = claim.ID{2} }, memory.Epoch, true},
		{"the slots' epochs moved", nil, func(v *claim.View) {
			moved := *v.SlotEpochs
			for i := range moved {
				moved[i]++
			}
			v.SlotEpochs = &moved
		}, memory.Epoch, true},
		{"bypassed", nil, func(v *claim.View) { v.BypassMemory = true }, memory.Bypassed, false},
		{"near the result's end", nil, func(v *claim.View) { v.Now = at.Add(deadline) }, memory.Expired, true},
		{"kept for long enough", func(p *claim.Policy) { p.CacheTTLMax = time.Minute }, func(v *claim.View) { v.Now = at.Add(time.Minute) }, memory.Expired, true},
		{"undeclared", nil, func(v *claim.View) { v.RefuseUndeclared = true }, memory.Undeclared, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := open(nil)
			if c.policy != nil {
				w.change(func(v *claim.View) { c.policy(&v.Default) })
			}
			w.Keep(w.then(), finished("k", "r", 5))
			w.remembers(t, "k", "r")
			was := w.then()
			w.change(c.change)
			w.asksBehind(t, "k")
			if w.seen.Of("remembered "+string(c.found)) == 0 {
				t.Errorf("want %s: %v", c.found, &w.seen)
			}
			w.change(func(v *claim.View) { *v = *was })
			if c.drops {
				w.asksBehind(t, "k")
			} else {
				w.remembers(t, "k", "r")
			}
		})
	}
}

// A moment before its time, a record is told; and the time of the nearer deadline counts.
func TestToldUntilItsDeadlines(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(rec *claim.Record, p *claim.Policy)
		until  time.Duration
	}{
		{"the result's", func(*claim.Record, *claim.Policy) {}, time.Hour - claim.CacheMargin},
		{"the key's", func(rec *claim.Record, _ *claim.Policy) { rec.KeyUntil = at.Add(time.Minute) }, time.Minute - claim.CacheMargin},
		{"the policy's", func(_ *claim.Record, p *claim.Policy) { p.CacheTTLMax = time.Second }, time.Second},
	} {
		w := open(nil)
		rec := finished("k", "r", 5)
		w.change(func(v *claim.View) { c.change(rec, &v.Default) })
		w.Keep(w.then(), rec)
		w.change(func(v *claim.View) { v.Now = at.Add(c.until - 1) })
		w.remembers(t, "k", "r")
		w.change(func(v *claim.View) { v.Now = at.Add(c.until) })
		w.asksBehind(t, "k")
	}
}

// Within what the policy allows, how keys come back says for how long a record is kept.
func TestKeptForAsLongAsKeysComeBack(t *testing.T) {
	w := open(func(c *memory.Config) {
		c.TTL = func(*claim.Record, claim.Instant, claim.Policy) time.Duration { return 10 * time.Second }
	})
	w.Keep(w.then(), finished("k", "r", 5))
	w.change(func(v *claim.View) { v.Now = at.Add(10*time.Second - 1) })
	w.remembers(t, "k", "r")
	w.change(func(v *claim.View) { v.Now = at.Add(10 * time.Second) })
	w.asksBehind(t, "k")
}

// Nothing but what is finished, dated and still told is kept, and nothing while an operator
// says so or this node does not believe.
func TestWhatIsNotKept(t *testing.T) {
	for name, change := range map[string]func(rec *claim.Record, v *claim.View){
		"pending":      func(rec *claim.Record, _ *claim.View) { rec.State, rec.LeaseUntil = claim.Pending, at.Add(time.Minute) },
		"released":     func(rec *claim.Record, _ *claim.View) { rec.State = claim.Released },
		"unknown":      func(rec *claim.Record, _ *claim.View) { rec.State = claim.Unknown },
		"a mark":       func(rec *claim.Record, _ *claim.View) { rec.Forgotten = &claim.Forgotten{} },
		"no key_until": func(rec *claim.Record, _ *claim.View) { rec.KeyUntil = 0 },
		"no result_until": func(rec *claim.Record, _ *claim.View) {
			rec.ResultUntil = 0
		},
		"over":        func(rec *claim.Record, _ *claim.View) { rec.ResultUntil = at.Add(claim.CacheMargin) },
		"bypassed":    func(_ *claim.Record, v *claim.View) { v.BypassMemory = true },
		"disbelieved": func(_ *claim.Record, v *claim.View) { v.Believed = false },
		"undeclared":  func(_ *claim.Record, v *claim.View) { v.RefuseUndeclared = true },
		"not cached":  func(_ *claim.Record, v *claim.View) { v.Default.CacheTTLMax = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			w := open(nil)
			rec, v := finished("k", "r", 5), w.then()
			change(rec, v)
			w.Keep(v, rec)
			w.Found(v, rec, nil)
			w.Stage(v, rec, nil)(5)
			if n := w.Size().Entries; n != 0 {
				t.Errorf("%d entries", n)
			}
		})
	}
}

// What is proposed is told once it was committed, and with its revision; what never is, is
// never told.
func TestStagedIsToldOnceCommitted(t *testing.T) {
	w := open(nil)
	committed := w.Stage(w.then(), finished("k", "r", 0), nil)
	w.Stage(w.then(), finished("lost", "r", 0), nil)
	w.asksBehind(t, "k")
	committed(17)
	w.remembers(t, "k", "r")
	if a := w.begin(t, "k"); a.Revision != 17 || a.Record.Revision != 17 || a.Record.FinishRevision != 17 {
		t.Errorf("%+v, %+v", a, a.Record)
	}
	w.asksBehind(t, "lost")
}

// With another, both are shown all.
func TestWithAnother(t *testing.T) {
	w, other := open(nil), open(nil)
	both := w.With(other.Cache)
	both.Found(w.then(), finished("found", "r", 5), nil)
	both.Stage(w.then(), finished("staged", "r", 0), nil)(6)
	for _, to := range []*world{w, other} {
		to.remembers(t, "found", "r")
		to.remembers(t, "staged", "r")
	}
}

// E28: a slow reader that read r1 before it was taken back, and comes in after r2: r2 stays.
// Where r2 is not there any more, r1 enters and is told to nobody.
func TestE28ASlowReaderBringsNothingBack(t *testing.T) {
	w := open(nil)
	before := w.then()
	r1 := finished("k", "r1", 5)
	w.Keep(before, r1)
	w.raise("k")
	w.asksBehind(t, "k") // which drops it
	w.Keep(w.then(), finished("k", "r2", 9))
	w.Keep(before, r1)
	w.Found(before, r1, nil)
	w.Stage(before, finished("k", "r1", 0), nil)(5)
	w.remembers(t, "k", "r2")

	w.raise("k")
	w.asksBehind(t, "k")
	w.Stage(before, finished("k", "r1", 0), nil)(5)
	w.asksBehind(t, "k")
}

// E28: in whatever order what was read comes in, the newest is what stays.
func TestE28TheNewestStays(t *testing.T) {
	var all []func(w *world, v *claim.View)
	for _, revision := range []int64{3, 5, 8} {
		rec := finished("k", fmt.Sprint("r", revision), revision)
		all = append(all, func(w *world, v *claim.View) { w.Keep(v, rec) })
		staged := *rec
		staged.Revision = 0
		all = append(all, func(w *world, v *claim.View) { w.Stage(v, &staged, nil)(revision) })
	}
	for range 200 {
		w := open(nil)
		v := w.then()
		shuffled := slices.Clone(all)
		slices.SortFunc(shuffled, func(_, _ func(*world, *claim.View)) int { return 1 - 2*int(claim.NewID()[0]&1) })
		var running sync.WaitGroup
		for _, f := range shuffled {
			running.Go(func() { f(w, v) })
		}
		running.Wait()
		w.remembers(t, "k", "r8")
	}
}

// Who met what was taken back drops that, and not what came in meanwhile.
func TestE28WhatCameInMeanwhileStays(t *testing.T) {
	w := open(nil)
	w.Keep(w.then(), finished("k", "r1", 5))
	w.raise("k")
	later := w.then()
	w.once = func() { w.Keep(later, finished("k", "r2", 9)) }
	if a := w.begin(t, "k"); a.Source != claim.SourceEtcd {
		t.Errorf("%+v", a)
	}
	w.remembers(t, "k", "r2")
}

// What was read anew after its slot's epoch moved takes the place of what was read before,
// though it is the same record.
func TestTheSameRecordUnderLaterEpochs(t *testing.T) {
	w := open(nil)
	before := w.then()
	w.Keep(before, finished("k", "r", 5))
	w.raise("k")
	w.Stage(w.then(), finished("k", "r", 0), nil)(5)
	w.remembers(t, "k", "r")
	w.Stage(before, finished("k", "r", 0), nil)(5) // nor the other way
	w.remembers(t, "k", "r")
}

// C65, G5: fingerprint and operation are compared with every answer: CONFLICT, which shows
// nothing of the other request, and then REPLAY.
func TestC65ComparedOnTheMemoryPath(t *testing.T) {
	for _, encode := range []func(*claim.Record) []byte{nil, func(*claim.Record) []byte { return []byte("encoded") }} {
		w := open(func(c *memory.Config) { c.Encode = encode })
		w.Keep(w.then(), finished("k", "r", 5))
		mine, other := bytes.Repeat([]byte{7}, 32), bytes.Repeat([]byte{8}, 32)
		for _, c := range []struct {
			print     []byte
			operation string
			want      claim.Verdict
		}{
			{other, "pay", claim.Conflict}, {mine, "pay", claim.Replay}, {mine, "refund", claim.Conflict}, {nil, "refund", claim.Conflict},
			{other, "", claim.Conflict}, {mine, "", claim.Replay}, {nil, "pay", claim.Replay}, {nil, "", claim.Replay},
		} {
			a, err := w.Begin(t.Context(), &claim.BeginRequest{Namespace: "ns", Key: "k", Fingerprint: c.print, Operation: c.operation})
			if err != nil || a.Verdict != c.want || a.Source != claim.SourceMemory {
				t.Errorf("%x, %q: %+v, %v, want verdict %d", c.print, c.operation, a, err, c.want)
			}
			if a.Verdict == claim.Conflict && (a.Record.Encoded != nil || a.Record.Result != nil || a.Record.Key != "" || a.Record.CreatedAt.IsZero()) {
				t.Errorf("a conflict shows %+v", a.Record)
			}
		}
		begun := w.BeginTogether(t.Context(), []*claim.BeginRequest{{Namespace: "ns", Key: "k", Fingerprint: other}, {Namespace: "ns", Key: "k"}})
		if len(begun) != 2 || begun[0].Answer.Verdict != claim.Conflict || begun[1].Answer.Verdict != claim.Replay || begun[1].Answer.Source != claim.SourceMemory {
			t.Errorf("together: %+v", begun)
		}
	}
}

// What is told otherwise is the Store's behind: of Begins together it is asked for all.
func TestUndecidedIsAskedBehind(t *testing.T) {
	w := open(nil)
	w.Keep(w.then(), finished("k", "r", 5))
	w.change(func(v *claim.View) { v.Default.RequireFingerprint = true })
	begun := w.BeginTogether(t.Context(), []*claim.BeginRequest{{Namespace: "ns", Key: "k", Fingerprint: bytes.Repeat([]byte{7}, 32)}, {Namespace: "ns", Key: "k"}})
	if begins, _ := w.behind.asked(); begins != 1 || begun[0].Answer.Source != claim.SourceEtcd || w.seen.Of("remembered undecided") != 1 {
		t.Errorf("%+v, %v", begun, &w.seen)
	}
	w.change(func(v *claim.View) { v.Default.RequireFingerprint, v.Default.Held = false, true })
	if a := w.begin(t, "k"); a.Source != claim.SourceEtcd {
		t.Errorf("while its namespace is deleted: %+v", a)
	}
}

// A node without a view passes all on.
func TestWithoutAView(t *testing.T) {
	w := open(nil)
	w.Keep(w.then(), finished("k", "r", 5))
	w.err = errors.New("none yet")
	w.asksBehind(t, "k")
}

// H14, G7: while this node does not believe and etcd cannot be asked, a namespace that has
// it is told what was true when etcd last could be, marked stale, and no longer than by the
// last tick and all the time since. Others are told the error.
func TestH14StaleFromMemory(t *testing.T) {
	w := open(nil)
	w.change(func(v *claim.View) {
		open := v.Default
		open.ReplayWithoutEtcd = true
		v.Policies = map[string]claim.Policy{"ns": open}
	})
	closed := finished("k", "r", 5)
	closed.Namespace = "closed"
	w.Keep(w.then(), closed)
	w.Keep(w.then(), finished("k", "r", 5))
	w.change(func(v *claim.View) { v.Believed = false })
	ask := func(namespace string) (claim.Answer, claim.Found, error) {
		a, err := w.Begin(t.Context(), &claim.BeginRequest{Namespace: namespace, Key: "k"})
		f, err2 := w.Get(t.Context(), &claim.GetRequest{Namespace: namespace, Key: "k"})
		return a, f, errors.Join(err, err2)
	}
	// etcd answers: what it says is told.
	if a, _, _ := ask("ns"); a.Source != claim.SourceEtcd || a.Stale {
		t.Errorf("%+v", a)
	}
	w.behind.set(claim.Unavailable("away", nil), nil)
	if begun := w.BeginTogether(t.Context(), []*claim.BeginRequest{{Namespace: "ns", Key: "k"}, {Namespace: "ns", Key: "k"}}); begun[1].Answer.Verdict != claim.Replay || !begun[1].Answer.Stale {
		t.Errorf("together: %+v", begun)
	}
	stale := func(what string, want bool) {
		t.Helper()
		if a, f, err := ask("ns"); want && (err != nil || !a.Stale || !f.Stale || a.Source != claim.SourceMemory || f.Source != claim.SourceMemory || a.Verdict != claim.Replay) ||
			!want && (claim.ReasonOf(err) != claim.StoreUnavailable || a.Verdict != 0 || f.Record != nil) {
			t.Errorf("%s: %+v, %+v, %v, want stale %t", what, a, f, err, want)
		}
	}
	stale("away", true)
	if a, f, err := ask("closed"); claim.ReasonOf(err) != claim.StoreUnavailable {
		t.Errorf("FAIL_CLOSED: %+v, %+v, %v", a, f, err)
	}
	w.behind.set(claim.Errorf(claim.Overloaded, "no room"), nil)
	if _, _, err := ask("ns"); claim.ReasonOf(err) != claim.Overloaded {
		t.Errorf("an error that is not about etcd: %v", err)
	}
	// The node's clock stands still: what counts is all the time since the tick.
	const left = time.Hour - claim.CacheMargin
	w.behind.set(claim.Unavailable("away", nil), func() { w.change(func(v *claim.View) { v.TickAge = left - 1 }) })
	stale("its time is nearly over", true)
	w.behind.set(claim.Unavailable("away", nil), func() { w.change(func(v *claim.View) { v.TickAge = left }) })
	stale("its time is over", false)
	w.change(func(v *claim.View) { v.TickAge = 0 })
	for what, change := range map[string]func(v *claim.View){
		"bypassed meanwhile": func(v *claim.View) { v.BypassMemory = true },
		"raised meanwhile":   func(v *claim.View) { v.Epoch = claim.ID{2} },
	} {
		was := w.then()
		w.behind.set(claim.Unavailable("away", nil), func() { w.change(change) })
		stale(what, false)
		w.change(func(v *claim.View) { *v = *was })
		w.Keep(&claim.View{Now: at, Epoch: was.Epoch, SlotEpochs: was.SlotEpochs, Believed: true, Policies: was.Policies}, finished("k", "r", 5))
	}
}

// A record is encoded once, when it is first told, and its result is then in the encoding
// alone; once that is no longer kept, neither is the encoding.
func TestEncodedWhenFirstTold(t *testing.T) {
	encoded := 0
	w := open(func(c *memory.Config) {
		c.Encode = func(rec *claim.Record) []byte {
			encoded++
			if rec.Result == nil || rec.FinishRevision == 0 {
				t.Errorf("to be encoded: %+v", rec)
			}
			return []byte("encoded")
		}
	})
	rec := finished("k", "r", 5)
	w.Keep(w.then(), rec)
	if encoded != 0 {
		t.Error("encoded though nobody was told")
	}
	for range 3 {
		a := w.begin(t, "k")
		if r := a.Record; string(r.Encoded) != "encoded" || r.Result != nil || r.Owner != "o" || r.Revision != 5 || r.FinishRevision != 5 {
			t.Errorf("%+v", r)
		}
		if gone := a.Record.At(a.Record.ResultUntil.Add(claim.Grace)); gone.Encoded != nil {
			t.Error("it outlives its result")
		}
	}
	if encoded != 1 || rec.Encoded != nil || rec.Result == nil {
		t.Errorf("encoded %d times; the record that came in is %+v", encoded, rec)
	}
	hidden := finished("other", "r", 6)
	hidden.FinishRevision = 4 // that of the finish; a later write has a later one
	w.Keep(w.then(), hidden)
	if a := w.begin(t, "other"); string(a.Record.Encoded) != "encoded" || a.Record.FinishRevision != 4 {
		t.Errorf("%+v", a.Record)
	}
	if hidden.Encoded != nil || hidden.Result == nil {
		t.Errorf("the record that came in is %+v", hidden)
	}
	w = open(func(c *memory.Config) { c.Encode = func(*claim.Record) []byte { return nil } })
	w.Keep(w.then(), rec)
	w.remembers(t, "k", "r") // what cannot be encoded is told as it is
}

// Its bytes are bounded, and what it takes is about what it says.
func TestBytesAreBounded(t *testing.T) {
	const most = 1 << 20
	w := open(func(c *memory.Config) { c.Bytes = most })
	for i := range 3000 {
		w.Keep(w.then(), finished(fmt.Sprint("k", i), string(make([]byte, 1000)), int64(i+1)))
	}
	var size memory.Size
	w.CleanUp()
	if size = w.Size(); size.Bytes > most || size.Entries < 300 || size.Evictions+size.Entries != 3000 {
		t.Errorf("%+v", size)
	}
	w.Keep(w.then(), finished("too large", string(make([]byte, most)), 1))
	w.CleanUp()
	w.asksBehind(t, "too large")
	if after := w.Size(); after.Entries != size.Entries {
		t.Errorf("one that is too large left %d of %d entries", after.Entries, size.Entries)
	}
}

// No record's size is more than can be told.
func TestWeightsDoNotOverflow(t *testing.T) {
	if n := memory.Weigh(finished("k", "r", 1)); n < 500 || n > 2000 {
		t.Errorf("a small record takes %d bytes", n)
	}
	rec := finished("k", "r", 1)
	rec.Labels = map[string]string{"a": "b"}
	rec.Failure = &claim.Failure{Message: "m", Details: []claim.Detail{{TypeURL: "t", Value: []byte("v")}}}
	if small, n := memory.Weigh(finished("k", "r", 1)), memory.Weigh(rec); n <= small || n > math.MaxUint16 {
		t.Errorf("with more in it %d bytes, without %d", n, small)
	}
}
