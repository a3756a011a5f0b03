// Package target is what can be loaded: dualcheck as its callers use it, and what others
// would use instead. One file a rival; All lists them.
//
// What always holds: an operation that was not answered as it must be is an error. A new
// key is told to be new, a known one brings its result, whole; so a system that answers
// fast and wrongly is not fast.
package target

import (
	"context"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// Target is a system under load.
type Target interface {
	// Prepare makes what operations need: tables, and the known keys, each finished with
	// its result.
	Prepare(ctx context.Context) error
	// Do is one operation on the key with a number. Many run at once.
	Do(ctx context.Context, key uint64) error
	Close() error
}

// Spec is how a target is used.
type Spec struct {
	// Name tells the keys of this target from those of others of the same kind.
	Name string
	// Client is how dualcheck is called: sdk, unary, stream or json.
	Client string
	// Connections is to how many connections calls are spread; 0: the target's own
	// choice. Databases have one for each operation in flight.
	Connections int
	// InFlight is the most that will be asked at once.
	InFlight int
	// Known keys, numbers below it, are finished before.
	Known       uint64
	ResultBytes int
	// Batch is how many keys an operation of a batch has.
	Batch int
	// Records is how many others there are in etcd before.
	Records int
}

// Kind is a target by name.
type Kind struct {
	Name, About string
	// Ours needs a node; others are measured beside it.
	Ours bool
	// Keys is how many an operation has; nil: one.
	Keys func(Spec) int
	Open func(context.Context, *rig.Rig, Spec) (Target, error)
}

// All is every kind there is.
func All() []Kind {
	return []Kind{
		beginKind, lifeKind, replayKind, batchKind, hotKind, waitingOneKind, waitingEachKind,
		etcdTxnKind,
		redisSetAlwaysKind, redisSetEverySecondKind, redisGetKind, redisGetPipelinedKind,
		postgresKind, mariaDBKind, redisMySQLKind, redisMySQLLifeKind,
		emptyCallKind, emptyStreamKind, etcdNestedKind, etcdReadKind, redisPingKind,
	}
}

// Find finds a kind by its name.
func Find(name string) (Kind, error) {
	var names []string
	for _, k := range All() {
		if k.Name == name {
			return k, nil
		}
		names = append(names, k.Name)
	}
	return Kind{}, fmt.Errorf("no target %q; there are %v", name, names)
}

// namer makes the names of keys: alike for all targets, and no other run's.
type namer struct{ prefix string }

func newNamer(r *rig.Rig, s Spec) namer { return namer{"po-" + r.Run() + "-" + s.Name + "-"} }

// key is the name of a key: one allocation, that of the string which every client wants.
func (n namer) key(number uint64) string {
	var b [96]byte
	return string(strconv.AppendUint(append(b[:0], n.prefix...), number, 10))
}

// result is what work brings: text that does not compress to nothing.
func result(n int) []byte {
	b := make([]byte, 0, n+32)
	for i := uint64(1); len(b) < n; i++ {
		b = hex.AppendEncode(b, strconv.AppendUint(nil, i*0x9e3779b97f4a7c15, 36))
	}
	return b[:n]
}
