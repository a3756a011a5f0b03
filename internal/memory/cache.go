package memory

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Viewer tells what this node has applied; watch.Follower is one.
type Viewer interface {
	View() (claim.View, error)
}

// Observer is told what happens, for metrics.
type Observer interface {
	// Remembered is a look for an answer: see Finding.
	Remembered(finding string)
	// Absent is a cached Get that was told that there is no such key, by what told so:
	// read or filter.
	Absent(by string)
}

// Config is what a Cache is made of.
type Config struct {
	// Bytes is how much of the node's memory records may take, about.
	Bytes int64
	View  Viewer
	// Encode makes what is sent of a record, all but its deadlines: claim.Record.Encoded.
	// nil, or a nil result, keeps records as they are.
	Encode func(rec *claim.Record) []byte
	// Absent, if set, reports that there is no such key, or was none within the last
	// claim.BelievedFor. It is asked for cached Gets alone, and may fail to report.
	Absent func(namespace, key string) bool
	// TTL says for how long a record is kept; nil: as long as its policy allows.
	TTL func(rec *claim.Record, now claim.Instant, p claim.Policy) time.Duration
	// Observe may be nil.
	Observe Observer
	// Monotonic is the process's clock; nil is the real one. It never tells 0.
	Monotonic func() time.Duration
}

// Cache is what this node remembers.
type Cache struct {
	cfg     Config
	records *otter.Cache[name, *entry]
	absent  absences
	evicted atomic.Uint64
}

// name is what a record is kept under: the plain names, since to hash them as the name of
// etcd's key would cost more than the rest of an answer.
type name struct{ namespace, key string }

// entry is a finished record and by what it is told.
type entry struct {
	revision int64
	slot     int
	epochs   claim.Epochs
	// until is the first moment at which it is not told any more.
	until  claim.Instant
	weight uint32
	// record is whole until it is told for the first time, and then encoded: most are never
	// told, and to encode one costs more than to keep it.
	record atomic.Pointer[claim.Record]
}

// New makes a Cache.
func New(cfg Config) *Cache {
	if cfg.Observe == nil {
		cfg.Observe = nobody{}
	}
	if cfg.Monotonic == nil {
		start := time.Now().Add(-1)
		cfg.Monotonic = func() time.Duration { return time.Since(start) }
	}
	c := &Cache{cfg: cfg, absent: newAbsences(cfg.Monotonic)}
	c.records = otter.Must(&otter.Options[name, *entry]{
		MaximumWeight: uint64(max(cfg.Bytes, 1)),
		Weigher:       func(_ name, e *entry) uint32 { return e.weight },
		OnAtomicDeletion: func(e otter.DeletionEvent[name, *entry]) {
			if e.WasEvicted() {
				c.evicted.Add(1)
			}
		},
	})
	return c
}

// Size is what a Cache holds.
type Size struct {
	Bytes, Entries uint64
	// Evictions counts what had to go because there was no room.
	Evictions uint64
}

// Size tells what is there.
func (c *Cache) Size() Size {
	return Size{Bytes: c.records.WeightedSize(), Entries: uint64(max(c.records.EstimatedSize(), 0)), Evictions: c.evicted.Load()}
}

// told is an entry's record as it is told.
func (c *Cache) told(e *entry) *claim.Record {
	rec := e.record.Load()
	if rec.Encoded != nil || c.cfg.Encode == nil {
		return rec
	}
	light := *rec.At(0) // no deadline is over then
	if light.Encoded = c.cfg.Encode(&light); light.Encoded == nil {
		return rec
	}
	light.Result, light.Failure = nil, nil
	e.record.Store(&light)
	return &light
}

// drop removes this very entry.
func (c *Cache) drop(at name, e *entry) {
	c.records.ComputeIfPresent(at, func(there *entry) (*entry, otter.ComputeOp) {
		if there != e {
			return there, otter.CancelOp
		}
		return nil, otter.InvalidateOp
	})
}

const (
	// fixedWeight is what an entry takes besides what is in its record: itself, its place
	// in the table and among the others, the record's fields.
	fixedWeight = 800
	// mapWeight is what a map takes that has few members, pairWeight each of them.
	mapWeight, pairWeight = 330, 32
)

// weigh tells about how many bytes a record takes, whole or encoded.
func weigh(rec *claim.Record) uint32 {
	// The small things are there twice once they are encoded.
	n := fixedWeight + 2*(len(rec.Namespace)+len(rec.Key)+len(rec.Operation)+len(rec.Fingerprint)+len(rec.Owner)+len(rec.Digest)+len(rec.TraceID)) + weighMap(rec.Labels)
	if r := rec.Result; r != nil {
		n += len(r.ContentType) + len(r.Body) + weighMap(r.Metadata)
	}
	if f := rec.Failure; f != nil {
		n += len(f.Message)
		for _, d := range f.Details {
			n += 2*pairWeight + len(d.TypeURL) + len(d.Value)
		}
	}
	return uint32(min(n+len(rec.Encoded), math.MaxUint32))
}

func weighMap(m map[string]string) int {
	if len(m) == 0 {
		return 0
	}
	n := mapWeight
	for k, v := range m {
		n += pairWeight + 2*(len(k)+len(v))
	}
	return n
}

type nobody struct{}

func (nobody) Remembered(string) {}
func (nobody) Absent(string)     {}
