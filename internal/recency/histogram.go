package recency

import (
	"math"
	"slices"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

const (
	// perOctave is how finely ages are told apart: a TTL is at most 19 % longer than it
	// would have to be.
	perOctave = 4
	// octaves reach from one second to 48 days; what is older is in one bucket.
	octaves = 22
	beyond  = perOctave*octaves + 1

	// tail is the share of repeats that may be older than the TTL, half of the one in a
	// hundred that may be lost at most: see histogram.
	tail = 1.0 / 200
	// enough is how many repeats make a habit known. Among so many, five are beyond the
	// tail, which is the least that says something of it: a true share of two in a
	// hundred would show five or fewer once in fourteen thousand times.
	enough = 1000
	// cycle is for how long repeats are gathered before older ones make room: a day,
	// which is the longest time in which most habits come round.
	cycle = 24 * time.Hour
	// disorder is by how much moments may come in another order than they were, calls
	// being of different length; more is cluster time that went back.
	disorder = time.Minute
)

// edges are the upper ends of the buckets. The last bucket has none.
var edges = func() (e [beyond]time.Duration) {
	for i := range e {
		e[i] = time.Duration(float64(time.Second) * math.Exp2(float64(i)/perOctave))
	}
	return e
}()

// histogram is one habit: how old keys were when they came back, in the cycle that runs
// and the one before it. So a habit that has changed is wholly forgotten within two
// cycles; and what belongs to one hour of the day weighs at least half of what it does
// in truth at any other hour, which is why the tail is half of what may be lost.
type histogram struct {
	counts [2]counts // of this cycle, of the one before
	// since is when the first repeat was seen, began when this cycle did.
	since, began claim.Instant
}

type counts struct {
	of    [beyond + 1]uint32
	total uint32
}

func (h *histogram) add(age time.Duration, now claim.Instant) {
	h.turn(now)
	if h.counts[0].total+h.counts[1].total >= math.MaxUint32/2 {
		h.counts[0].halve()
		h.counts[1].halve()
	}
	i, _ := slices.BinarySearch(edges[:], age)
	h.counts[0].of[i]++
	h.counts[0].total++
}

func (c *counts) halve() {
	c.total = 0
	for i := range c.of {
		c.of[i] /= 2
		c.total += c.of[i]
	}
}

// turn begins a new cycle when this one is over and has repeats enough to speak for
// itself: a namespace that has ten a day would else never be known, and one that slept
// would forget what it was. The watch begins with the first repeat, and anew if cluster
// time went back: it was restored from a snapshot, or is another cluster's.
func (h *histogram) turn(now claim.Instant) {
	switch {
	case h.seen() == 0 || now < h.began.Add(-disorder):
		h.since, h.began = now, now
	case now.Sub(h.began) >= cycle && h.counts[0].total >= enough:
		h.counts[1], h.counts[0], h.began = h.counts[0], counts{}, now
	}
}

func (h *histogram) seen() uint32 { return h.counts[0].total + h.counts[1].total }

// known reports whether the habit may shorten a TTL that is this long at most.
func (h *histogram) known(now claim.Instant, longest time.Duration) bool {
	return h.seen() >= enough && now.Sub(h.since) >= longest
}

// reach is the least edge beyond which the tail is, of the repeats that the longest TTL
// reaches: 0 if there are none. What comes back later still is missed whatever the TTL
// is, and so is no reason for a longer one.
func (h *histogram) reach(longest time.Duration) time.Duration {
	last, _ := slices.BinarySearch(edges[:], longest)
	reached := uint32(0)
	for i := range last + 1 {
		reached += h.counts[0].of[i] + h.counts[1].of[i]
	}
	most, late := float64(reached)*tail, uint32(0)
	for i := last; i >= 0; i-- {
		if late += h.counts[0].of[i] + h.counts[1].of[i]; float64(late) > most {
			return edgeOf(i)
		}
	}
	return 0
}

// edgeOf is the upper end of a bucket; the last one has none.
func edgeOf(i int) time.Duration {
	if i == beyond {
		return math.MaxInt64
	}
	return edges[i]
}
