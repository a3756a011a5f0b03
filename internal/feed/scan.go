package feed

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

const (
	// scanWindow is how many records of a scan are kept for those behind its first
	// reader, and scanBytes roughly how large they may be together.
	scanWindow = 1 << 15
	scanBytes  = 32 << 20
	// scanShared is for how long others may join a scan, and how long those who cannot
	// wait for it to be over before they begin another.
	scanShared = 2 * time.Second
	// scanKept is for how long a scan that nobody takes anything of keeps its pieces.
	scanKept = time.Minute
	// scanReads is how many pieces a node reads at once, whoever wants them: the keys of
	// others are not to suffer for a look at all of a namespace.
	scanReads = 2
)

// errOvertaken: the reader is so far behind others of the same scan that what it has yet
// to read is no longer kept.
var errOvertaken = errors.New("the scan has gone on")

// scan is one look at what a namespace has, for all who begin anew at about the same
// time. Whichever reader needs a piece first has it read; the others take what is kept.
// A reader who is too far behind is left behind: nobody waits for it.
type scan struct {
	feed      *Feed
	namespace string
	// from is the revision from which on changes make up for what the scan, in which each
	// piece has a later one, does not show.
	from  int64
	began time.Duration
	// readers is how many are at it; the feed's mu is its.
	readers int

	mu     sync.Mutex
	pieces []*claim.Piece // the first one kept has number first
	first  int
	kept   int // records in pieces
	bytes  int64
	next   string
	over   bool
	used   time.Duration // when a piece was last asked for
	// reading is closed when the piece that is being read has been; nil: none is.
	reading chan struct{}
}

// piece returns the piece of a number. io.EOF: there is none, the last one was before.
func (s *scan) piece(ctx context.Context, number int) (*claim.Piece, error) {
	for {
		s.mu.Lock()
		s.used = s.feed.cfg.Monotonic()
		switch {
		case number < s.first:
			s.mu.Unlock()
			return nil, errOvertaken
		case number < s.first+len(s.pieces):
			p := s.pieces[number-s.first]
			s.mu.Unlock()
			return p, nil
		case s.over:
			s.mu.Unlock()
			return nil, io.EOF
		case s.reading != nil:
			reading := s.reading
			s.mu.Unlock()
			select {
			case <-reading:
				continue
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		done, at := make(chan struct{}), s.next
		s.reading = done
		s.mu.Unlock()
		err := s.read(ctx, at, done)
		if err != nil {
			return nil, err
		}
	}
}

// read reads the next piece and keeps it.
func (s *scan) read(ctx context.Context, at string, done chan struct{}) error {
	p, err := s.feed.readPiece(ctx, s.namespace, at)
	if err == nil {
		s.feed.scanned()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reading = nil
	close(done)
	if err != nil {
		return err
	}
	s.pieces = append(s.pieces, &p)
	s.kept += len(p.Records)
	s.bytes += sizeOf(&p)
	s.next, s.over = p.Next, p.Next == ""
	for len(s.pieces) > 1 && (s.kept > scanWindow || s.bytes > scanBytes) {
		s.kept -= len(s.pieces[0].Records)
		s.bytes -= sizeOf(s.pieces[0])
		s.pieces[0] = nil
		s.pieces = s.pieces[1:]
		s.first++
	}
	return nil
}

// readPiece reads a piece, in turn.
func (f *Feed) readPiece(ctx context.Context, namespace, at string) (claim.Piece, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	late := func(err error) error {
		return claim.Unavailable("etcd does not tell in time what is there", err)
	}
	select {
	case f.reading <- struct{}{}:
		defer func() { <-f.reading }()
	case <-ctx.Done():
		return claim.Piece{}, late(ctx.Err())
	}
	p, err := f.cfg.Records.Piece(ctx, namespace, at)
	if errors.Is(err, context.DeadlineExceeded) {
		err = late(err)
	}
	return p, err
}

// dropped drops the pieces of a scan that nobody is at, or that nobody has taken anything
// of for long, and reports whether it has. A reader that is still at it begins anew. The
// feed's mu is held.
func (s *scan) dropped(now time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if (s.readers > 0 || now-s.began < scanShared) && now-s.used < scanKept {
		return false
	}
	s.first += len(s.pieces) + 1
	s.pieces, s.kept, s.bytes = nil, 0, 0
	return true
}

// sizeOf is roughly what a piece takes, in bytes.
func sizeOf(p *claim.Piece) int64 {
	size := int64(0)
	for _, r := range p.Records {
		size += 2 * overhead
		if r.Result != nil {
			size += int64(len(r.Result.Body))
		}
	}
	return size
}

// state reports whether a reader may begin with the scan, and whether it is over.
func (s *scan) state() (whole, over bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.first == 0, s.over
}

// scanned counts a piece.
func (f *Feed) scanned() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.pieces++
}

// scanOf returns a scan to begin with, or how long to wait before asking again; f.mu is
// held.
func (f *Feed) scanOf(namespace string) (*scan, time.Duration) {
	now := f.cfg.Monotonic()
	if s := f.scans[namespace]; s != nil {
		whole, over := s.state()
		age := now - s.began
		if _, kept := f.ring.after(s.from); whole && kept && age < scanShared {
			s.readers++
			return s, 0
		}
		if !over && age < scanShared {
			return nil, scanShared / 20
		}
	}
	s := &scan{feed: f, namespace: namespace, from: f.ring.applied, began: now, used: now, readers: 1}
	f.scans[namespace], f.kept = s, append(f.kept, s)
	f.counts.scans++
	return s, 0
}
