package load

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
)

// Kind is how the keys of operations are distributed.
type Kind string

// The kinds.
const (
	// New: no key comes twice.
	New Kind = "new"
	// Zipf: a share of repeats asks for known keys, few of them often; the rest is new.
	Zipf Kind = "zipf"
	// Hot: a share of repeats asks for one known key; the rest is new.
	Hot Kind = "hot"
)

// ParseKind reads the name of a kind.
func ParseKind(name string) (Kind, error) {
	switch k := Kind(name); k {
	case New, Zipf, Hot:
		return k, nil
	}
	return "", fmt.Errorf("%q is none of new, zipf, hot", name)
}

// zipfS is how steep the distribution is: with 10,000 known keys the first gets a
// sixth of the repeats, the first hundred over half.
const zipfS = 1.1

// Keys draws numbers of keys: those below Known have been finished before, all others
// are new.
type Keys struct {
	Kind    Kind
	Repeats float64 // the share of known keys, unless Kind is New
	Known   uint64
	// Fresh is the next new key. It is shared by all slices of one target.
	Fresh *atomic.Uint64
}

// source draws for one worker.
type source struct {
	Keys
	rand *rand.Rand
	zipf *rand.Zipf
}

func (k Keys) source(worker int) *source {
	s := &source{Keys: k, rand: rand.New(rand.NewPCG(uint64(worker), k.Fresh.Load()))}
	if k.Kind == Zipf {
		s.zipf = rand.NewZipf(s.rand, zipfS, 1, k.Known-1)
	}
	return s
}

func (s *source) next() uint64 {
	if s.Kind != New && s.rand.Float64() < s.Repeats {
		if s.Kind == Zipf {
			return s.zipf.Uint64()
		}
		return 0
	}
	return s.Fresh.Add(1) - 1
}
