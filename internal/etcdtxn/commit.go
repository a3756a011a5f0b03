package etcdtxn

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/dualcheck/dualcheck/internal/claim"
)

const (
	// writesInFlight is how many batches of writes a node has in flight.
	writesInFlight = 2
	// writeBytes is how large a batch is at most, in bytes of keys and values: etcd takes
	// 1.5 MiB unless it is told otherwise. A larger member goes alone.
	writeBytes = 1 << 20
	// memberBytes is what a member takes besides keys and values.
	memberBytes = 64
	// usualOps is etcd's default of --max-txn-ops; opsMost bounds what is made of more.
	usualOps = 128
	opsMost  = 1024
	// waitingMost is Config.WaitingMost if that is not given.
	waitingMost = 10_000
)

// commits is the group commit: what arrives while transactions are in flight goes
// together as the next, one raft entry and one fsync for up to as many members as etcd
// allows. A node that is idle sends a batch of one at once.
type commits struct {
	mu      sync.Mutex
	waiting lanes[*proposal]
	// busy are the keys that are written by what waits or is on its way. A key is written
	// by at most one of them, for etcd refuses a transaction that could write one twice
	// (checkIntervals in its server/etcdserver/api/v3rpc/key.go), whatever the branches.
	busy    map[string]*proposal
	sending int
	// ops is how many operations a transaction may have, as far as is known.
	ops int
}

// proposal is one conditional write on its way into a batch.
type proposal struct {
	member
	view  *claim.View
	size  int
	since time.Duration // when it began to wait
	// again: an earlier try of it may yet arrive, so that etcd has to say what became.
	again bool
	// sent is guarded by commits.mu, like gone: its caller has left before that.
	sent, gone bool

	// landed is closed once the rest is known.
	landed chan struct{}
	out    settled
	see    seeing
	err    error
}

// errBehind: another write of the same key has landed meanwhile. Nothing was sent.
var errBehind = errors.New("behind another write of the key")

// errStale: it waited for so long that etcd would refuse it for its tick, and with it all
// that it is sent with. Nothing was sent.
var errStale = errors.New("its tick is too old")

// staleEarly is how many ticks before the window closes a write is no longer sent.
const staleEarly = 2

// errUnsent: the caller has left before anything was sent.
var errUnsent = errors.New("not sent")

// propose sends one conditional write together with others and returns what became of
// it; its errors are those of write, or errBehind, errStale, errUnsent, or a *claim.Error.
func (s *Store) propose(ctx context.Context, v *claim.View, namespace string, urgent, again bool, m member) (settled, seeing, error) {
	p := &proposal{member: m, view: v, size: m.size(), again: again, since: s.cfg.Monotonic(), landed: make(chan struct{})}
	before, err := s.enqueue(p, namespace, urgent)
	if err != nil {
		return settled{}, seeing{}, err
	}
	if before != nil {
		s.cfg.Observe.Behind()
		select {
		case <-before.landed:
			return settled{}, seeing{}, errBehind
		case <-ctx.Done():
			return settled{}, seeing{}, errUnsent
		}
	}
	select {
	case <-p.landed:
		return p.out, p.see, p.err
	case <-ctx.Done():
	}
	if s.commits.withdraw(p) {
		return settled{}, seeing{}, errUnsent
	}
	return settled{}, seeing{}, ctx.Err() // it is on its way: applied, or not
}

// enqueue has the proposal wait to be sent, unless one that writes the same key does or
// is on its way: that is returned.
func (s *Store) enqueue(p *proposal, namespace string, urgent bool) (before *proposal, err error) {
	c := &s.commits
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, put := range p.puts {
		if other := c.busy[put.key]; other != nil {
			return other, nil
		}
	}
	if !urgent && !c.waiting.admits(namespace, s.cfg.WaitingMost) {
		s.cfg.Observe.Crowded("write")
		return nil, overloaded()
	}
	if c.sending < writesInFlight {
		if err := s.sends.start(s.send); err != nil {
			return nil, err
		}
		c.sending++
	}
	for _, put := range p.puts {
		c.busy[put.key] = p
	}
	c.waiting.push(namespace, urgent, p)
	return nil, nil
}

// overloaded is for what would wait behind too much.
func overloaded() error {
	return &claim.Error{
		Reason:     claim.Overloaded,
		Message:    "more waits for etcd than this node may keep waiting: come back after the given time, or ask another node",
		RetryAfter: time.Duration(50+rand.IntN(150)) * time.Millisecond,
	}
}

// withdraw reports whether the proposal had not been sent, and never will be.
func (c *commits) withdraw(p *proposal) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.sent {
		return false
	}
	p.gone, p.err = true, errUnsent
	c.free(p)
	close(p.landed) // for those behind it
	return true
}

// free lets others write the proposal's keys.
func (c *commits) free(p *proposal) {
	for _, put := range p.puts {
		delete(c.busy, put.key)
	}
}

// send sends what waits, for as long as something does.
func (s *Store) send() {
	for batch := s.commits.take(s.tick()); len(batch) > 0; batch = s.commits.take(s.tick()) {
		s.cfg.Observe.Sent("write", len(batch), s.cfg.Monotonic()-oldest(batch))
		s.carry(batch)
		s.cfg.Observe.Landed("write")
	}
}

// tick is the version of the newest that this node has applied, 0 if none.
func (s *Store) tick() int64 {
	v, err := s.cfg.View.View()
	if err != nil {
		return 0
	}
	return v.Tick.Version
}

func oldest(batch []*proposal) time.Duration {
	since := batch[0].since
	for _, p := range batch {
		since = min(since, p.since)
	}
	return since
}

// take returns what a sender is to send next, at this tick; an empty batch ends the sender.
func (c *commits) take(tick int64) (batch []*proposal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	bytes, width := 0, 1
	c.waiting.take(c.ops, func(p *proposal) pick {
		if p.gone {
			return dropped
		}
		if !p.again && tick >= p.view.Tick.Version+claim.TickWindow-staleEarly {
			p.sent, p.err = true, errStale
			c.free(p)
			close(p.landed)
			return dropped
		}
		wider := max(width, len(p.puts))
		switch {
		case len(batch) == 0:
		case len(batch)+1+1+wider > c.ops, bytes+p.size > writeBytes:
			return enough
		case !sameTerms(p.view, batch[0].view):
			return left
		}
		p.sent = true
		batch, bytes, width = append(batch, p), bytes+p.size, wider
		return taken
	})
	if len(batch) == 0 {
		c.sending--
	}
	return batch
}

// sameTerms reports whether what was decided under two views may go under one guard.
func sameTerms(a, b *claim.View) bool {
	return a.Guard == b.Guard && a.Epoch == b.Epoch && a.Generation == b.Generation
}

// carry carries a batch out. Where one member has the whole refused, with nothing
// applied, the others are sent again at once without it.
func (s *Store) carry(batch []*proposal) {
	members := make([]member, len(batch))
	for i, p := range batch {
		members[i] = p.member
	}
	type wrote struct {
		out []settled
		see seeing
	}
	got, err := unpanicked(func() (w wrote, err error) {
		w.out, w.see, err = s.write(s.closing, termsOf(batch), members)
		return w, err
	})
	if err != nil && len(batch) > 1 && poisoned(err) {
		half := len(batch) / 2
		s.carry(batch[:half])
		s.carry(batch[half:])
		return
	}
	s.commits.mu.Lock()
	for _, p := range batch {
		s.commits.free(p)
	}
	s.commits.mu.Unlock()
	for i, p := range batch {
		if p.see, p.err = got.see, err; err == nil && got.see.admitted {
			p.out = got.out[i]
		}
		close(p.landed)
	}
}

// poisoned reports whether etcd refused a request for what is in it, before any of it
// was applied: one bad member does that to all.
func poisoned(err error) bool {
	if _, ok := errors.AsType[*claim.Error](err); ok {
		return false
	}
	err = rpctypes.Error(err)
	var known rpctypes.EtcdError
	code := status.Code(err)
	if errors.As(err, &known) {
		code = known.Code()
	}
	switch code {
	case codes.InvalidArgument, codes.NotFound, codes.OutOfRange, codes.FailedPrecondition:
		return true
	case codes.ResourceExhausted: // gRPC's own, for a request that it does not send
		return classOf(err) == denied
	}
	return false
}

// refused takes note of etcd's refusal of so many operations, if it was for that.
func (c *commits) refused(ops int, err error) {
	if !errors.Is(rpctypes.Error(err), rpctypes.ErrTooManyOps) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ops = max(min(c.ops, ops/2), leastOps/2)
}

// allowed is how many operations a transaction may have, as far as is known.
func (c *commits) allowed() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ops
}

// Fit takes over how many operations etcd allows a transaction, see MaxTxnOps.
func (s *Store) Fit(ops int) {
	s.commits.mu.Lock()
	defer s.commits.mu.Unlock()
	s.commits.ops = ops
}
