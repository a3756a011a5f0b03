package memory_test

import (
	"bytes"
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/memory"
	"github.com/dualcheck/dualcheck/internal/nodetest"
)

func TestMain(m *testing.M) { os.Exit(etcdtest.Main(m)) }

// world is a memory, what its node has applied, the process's clock and the Store behind.
type world struct {
	*memory.Cache
	claim.Store
	seen   nodetest.Counter
	behind behind

	mu   sync.Mutex
	view claim.View
	err  error  // of View
	once func() // called by the next View
	now  time.Duration
}

// open makes a world in which all is well and nothing is remembered.
func open(change func(c *memory.Config)) *world {
	w := &world{now: time.Hour, view: claim.View{
		Now: at, Tick: claim.Tick{Time: at}, Epoch: claim.ID{1}, Believed: true,
		SlotEpochs: &[claim.Slots]int64{}, Sealer: claim.NewSealer(nil),
		Default: claim.Policy{DefaultLease: time.Minute, MaxLease: time.Hour, ResultRetention: time.Hour, KeyRetention: 2 * time.Hour, CacheTTLMax: 24 * time.Hour},
	}}
	config := memory.Config{Bytes: 1 << 20, View: w, Observe: &w.seen, Monotonic: w.clock}
	if change != nil {
		change(&config)
	}
	w.Cache = memory.New(config)
	w.Store = w.Front(&w.behind)
	return w
}

// at is when most of a test happens.
const at = claim.Instant(1000 * time.Hour)

func (w *world) View() (claim.View, error) {
	w.mu.Lock()
	once := w.once
	w.once = nil
	w.mu.Unlock()
	if once != nil {
		once()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.view, w.err
}

func (w *world) clock() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

// change changes what the node has applied.
func (w *world) change(f func(v *claim.View)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.view)
}

func (w *world) pass(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now += d
}

// then returns a copy of the view as it is now.
func (w *world) then() *claim.View {
	v, _ := w.View()
	return &v
}

// raise moves the epoch of a key's slot.
func (w *world) raise(key string) {
	w.change(func(v *claim.View) {
		moved := *v.SlotEpochs
		moved[layout.NameOf("ns", key).Slot]++
		v.SlotEpochs = &moved
	})
}

// begin asks as anyone.
func (w *world) begin(t testing.TB, key string) claim.Answer {
	t.Helper()
	a, err := w.Begin(t.Context(), &claim.BeginRequest{Namespace: "ns", Key: key})
	if err != nil {
		t.Errorf("begin %s: %v", key, err)
	}
	return a
}

// remembers checks that memory answers, with this result.
func (w *world) remembers(t testing.TB, key, body string) {
	t.Helper()
	if a := w.begin(t, key); a.Verdict != claim.Replay || a.Source != claim.SourceMemory || a.Stale || string(a.Record.Result.Body) != body {
		t.Errorf("%s: %+v, want a REPLAY of %q from memory", key, a, body)
	}
	f, err := w.Get(t.Context(), &claim.GetRequest{Namespace: "ns", Key: key})
	if err != nil || f.Source != claim.SourceMemory || f.Stale || string(f.Record.Result.Body) != body || f.Revision != f.Record.Revision {
		t.Errorf("%s: %+v, %v, want %q from memory", key, f, err, body)
	}
}

// asksBehind checks that the Store behind is asked, for a Begin and for a Get.
func (w *world) asksBehind(t testing.TB, key string) {
	t.Helper()
	begins, gets := w.behind.asked()
	if a := w.begin(t, key); a.Source != claim.SourceEtcd {
		t.Errorf("%s: %+v, want the Store behind to answer", key, a)
	}
	if f, err := w.Get(t.Context(), &claim.GetRequest{Namespace: "ns", Key: key}); claim.ReasonOf(err) != claim.RecordNotFound {
		t.Errorf("%s: %+v, %v, want the Store behind to answer", key, f, err)
	}
	if b, g := w.behind.asked(); b != begins+1 || g != gets+1 {
		t.Errorf("%s: the Store behind was asked %d and %d times, want each once", key, b-begins, g-gets)
	}
}

// finished is a record of a key that succeeded, at this revision.
func finished(key, body string, revision int64) *claim.Record {
	return &claim.Record{
		Namespace: "ns", Key: key, Operation: "pay", State: claim.Succeeded, Owner: "o", Attempt: 1,
		Fingerprint: bytes.Repeat([]byte{7}, 32), Digest: bytes.Repeat([]byte{9}, 32),
		ResultUntil: at.Add(time.Hour), KeyUntil: at.Add(2 * time.Hour), CreatedAt: time.Unix(1, 0), FinishedAt: time.Unix(2, 0),
		Result: &claim.Result{Code: 200, Body: []byte(body)}, ResultSize: int64(len(body)), Revision: revision,
	}
}

// behind is a Store that counts what it is asked. It says that keys are in progress, and
// that there are none.
type behind struct {
	claim.Store
	mu           sync.Mutex
	begins, gets int
	err          error  // of what is asked
	during       func() // called while it is asked
}

func (b *behind) asked() (begins, gets int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.begins, b.gets
}

// set sets what is told, and what happens meanwhile.
func (b *behind) set(err error, during func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err, b.during = err, during
}

func (b *behind) ask(n *int) error {
	b.mu.Lock()
	*n++
	err, during := b.err, b.during
	b.mu.Unlock()
	if during != nil {
		during()
	}
	return err
}

func (b *behind) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	begun := b.BeginTogether(ctx, []*claim.BeginRequest{req})
	return begun[0].Answer, begun[0].Err
}

func (b *behind) BeginTogether(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	if err := b.ask(&b.begins); err != nil {
		return claim.NoneBegun(len(reqs), err)
	}
	begun := make([]claim.Begun, len(reqs))
	for i := range begun {
		begun[i].Answer = claim.Answer{Verdict: claim.InProgress, Source: claim.SourceEtcd}
	}
	return begun
}

func (b *behind) Get(_ context.Context, req *claim.GetRequest) (claim.Found, error) {
	err := b.ask(&b.gets)
	if err == nil {
		err = claim.Known(nil, req.Namespace, claim.Moment{})
	}
	return claim.Found{}, err
}

func (b *behind) Finish(context.Context, *claim.FinishRequest) (claim.Found, error) {
	return claim.Found{}, nil
}

func (b *behind) Extend(context.Context, *claim.ExtendRequest) (*claim.Grant, error) {
	return &claim.Grant{}, nil
}

func (b *behind) Resolve(context.Context, *claim.ResolveRequest) (claim.Found, error) {
	return claim.Found{}, nil
}

func (b *behind) Forget(context.Context, *claim.ForgetRequest) (int64, error) { return 1, nil }
