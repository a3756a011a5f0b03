package memory

import (
	"github.com/maypok86/otter/v2"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// Shown is who is shown what etcd holds. It is an etcdtxn.Cache, and so is a Cache.
type Shown interface {
	Stage(v *claim.View, rec *claim.Record, value []byte) (committed func(revision int64))
	Found(v *claim.View, rec *claim.Record, value []byte)
}

// With shows all to another too.
func (c *Cache) With(other Shown) Shown { return both{c, other} }

type both struct{ memory, other Shown }

func (b both) Stage(v *claim.View, rec *claim.Record, value []byte) func(int64) {
	here, there := b.memory.Stage(v, rec, value), b.other.Stage(v, rec, value)
	return func(revision int64) {
		here(revision)
		there(revision)
	}
}

func (b both) Found(v *claim.View, rec *claim.Record, value []byte) {
	b.memory.Found(v, rec, value)
	b.other.Found(v, rec, value)
}

// Stage is shown a finished record that is about to be proposed under this view: it enters
// once it was committed, and not before.
func (c *Cache) Stage(v *claim.View, rec *claim.Record, _ []byte) func(revision int64) {
	e := c.entry(v, rec)
	if e == nil {
		return func(int64) {}
	}
	return func(revision int64) {
		if rec.Revision != revision {
			committed := *rec
			committed.Revision = revision
			rec = &committed
		}
		c.enter(e, rec)
	}
}

// Found is shown a finished record that was read, under a view from before the read.
func (c *Cache) Found(v *claim.View, rec *claim.Record, _ []byte) { c.Keep(v, rec) }

// Keep keeps a finished record that was read, under a view whose epochs are those from
// before the read.
func (c *Cache) Keep(v *claim.View, rec *claim.Record) {
	if there, ok := c.records.GetEntryQuietly(name{rec.Namespace, rec.Key}); ok && there.Value.revision >= rec.Revision && there.Value.epochs.Cluster == v.Epoch {
		return // one that is void is dropped by whoever asks for it
	}
	if e := c.entry(v, rec); e != nil {
		c.enter(e, rec)
	}
}

// entry makes a record's entry; nil if it is not one to be kept. What is read while this
// node does not believe is not: it would be told by nobody.
func (c *Cache) entry(v *claim.View, rec *claim.Record) *entry {
	p, err := v.Policy(rec.Namespace)
	if err != nil || v.BypassMemory || !v.Believed || !rec.State.Finished() || rec.Forgotten != nil {
		return nil
	}
	ttl := p.CacheTTLMax
	if c.cfg.TTL != nil {
		ttl = c.cfg.TTL(rec, v.Now, p)
	}
	until := min(rec.CachedUntil(), v.Now.Add(ttl))
	if until <= v.Now {
		return nil
	}
	slot := layout.NameOf(rec.Namespace, rec.Key).Slot
	return &entry{slot: slot, epochs: v.Epochs(slot), until: until, weight: weigh(rec)}
}

// enter puts a record in, unless what is there is as new.
func (c *Cache) enter(e *entry, rec *claim.Record) {
	e.revision = rec.Revision
	e.record.Store(rec)
	c.records.Compute(name{rec.Namespace, rec.Key}, func(there *entry, found bool) (*entry, otter.ComputeOp) {
		if found && !e.newer(there) {
			return there, otter.CancelOp
		}
		return e, otter.WriteOp
	})
}

// newer reports whether an entry may take another's place: it is of a later revision, or of
// the same one and known to have outlived more of what was taken back.
func (e *entry) newer(than *entry) bool {
	if e.revision == than.revision {
		return e.epochs.Cluster == than.epochs.Cluster && e.epochs.Slot > than.epochs.Slot
	}
	return e.revision > than.revision
}
