package feed

import (
	"context"
	"time"

	"github.com/bits-and-blooms/bloom/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/watch"
)

const (
	// filterWorth is how often within filterEvery somebody must have asked for a key that
	// there may not be, before it is worth reading all names.
	filterWorth = 200
	filterEvery = 10 * time.Second
	// filterFalse is how often the filter takes a key that there is not for one that there
	// may be: then etcd is asked, as without it.
	filterFalse = 0.01
	// filterLeast and filterMost are for how many keys it is made: 1.2 bytes each. Where
	// there are more, there is none.
	filterLeast = 1 << 16
	filterMost  = 32 << 20
	// filterPage is how many names are read at once; filterShare of the time is spent on
	// that.
	filterPage  = 5000
	filterShare = 5
)

// filter tells for sure of some keys that etcd does not hold them: a Bloom filter (Bloom,
// Space/time trade-offs in hash coding with allowable errors, 1970) of all that were there
// or have come since. It is of one era, for it misses nothing only while the feed does.
type filter struct {
	bits  *bloom.BloomFilter
	era   uint64
	whole bool // all names that were there are in it
	added int64
	most  int64 // when so many are in it, it is made anew
}

// add takes a key of etcd's in.
func (f *filter) add(key string) {
	f.bits.AddString(key)
	f.added++
}

// Absent reports that there is no such key, or was none within the last
// claim.BelievedFor. It is false for most keys that there are not, too, for as long as
// nobody has asked often, or the feed is not live.
func (f *Feed) Absent(namespace, key string) bool {
	f.asked.Add(1)
	name := layout.NameOf(namespace, key).Key
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.filter != nil && f.filter.whole && f.state == watch.Live && f.reach.Within(claim.BelievedFor, f.cfg.Monotonic()) &&
		!f.filter.bits.TestString(name)
}

// keepFilter makes the filter once it is worth it, and makes it anew when it is full,
// until ctx ends.
func (f *Feed) keepFilter(ctx context.Context) {
	ticks := time.NewTicker(f.cfg.FilterEvery)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		if asked := f.asked.Swap(0); asked < filterWorth || f.filtered() {
			continue
		}
		if err := f.fillFilter(ctx); err != nil && ctx.Err() == nil {
			f.cfg.Log.Debug("the filter of names was not made", "cause", err)
		}
	}
}

// filtered reports whether there is a filter that serves.
func (f *Feed) filtered() bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.filter != nil && f.filter.era == f.era && f.filter.whole && f.filter.added < f.filter.most
}

// fillFilter reads all names. What is written meanwhile comes by the watch.
func (f *Feed) fillFilter(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, listTimeout)
	n, err := f.cfg.Records.CountNames(call)
	cancel()
	if err != nil || n > filterMost {
		return err
	}
	room := max(2*n, filterLeast)
	made := &filter{bits: bloom.NewWithEstimates(uint(room), filterFalse), most: room}
	f.mu.Lock()
	made.era = f.era
	f.filter = made
	live := f.state == watch.Live
	f.mu.Unlock()
	if !live {
		return nil
	}
	for after := ""; ; {
		began := time.Now()
		call, cancel := context.WithTimeout(ctx, listTimeout)
		names, err := f.cfg.Records.Names(call, after, filterPage)
		cancel()
		if err != nil {
			return err
		}
		f.mu.Lock()
		gone := f.filter != made
		if !gone {
			for _, name := range names {
				made.add(name)
			}
			made.whole = len(names) < filterPage
		}
		f.mu.Unlock()
		if gone || made.whole {
			return nil
		}
		after = names[len(names)-1]
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After((filterShare - 1) * time.Since(began)):
		}
	}
}
