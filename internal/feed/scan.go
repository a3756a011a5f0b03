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
	// scanKept is for how long after its last piece was read a scan keeps pieces for those
	// who are behind.
	scanKept = time.Minute
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

	mu     sync.Mutex
	pieces []*claim.Piece // the first one kept has number first
	first  int
	kept   int // records in pieces
	bytes  int64
	next   string
	over   bool
	ended  time.Duration // when it was over
	// reading is closed when the piece that is being read has been; nil: none is.
	reading chan struct{}
}

// piece returns the piece of a number. io.EOF: there is none, the last one was before.
func (s *scan) piece(ctx context.Context, number int) (*claim.Piece, error) {
	for {
		s.mu.Lock()
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
	call, cancel := context.WithTimeout(ctx, listTimeout)
	p, err := s.feed.cfg.Records.Piece(call, s.namespace, at)
	cancel()
	if errors.Is(err, context.DeadlineExceeded) {
		err = claim.Unavailable("etcd does not tell in time what is there", err)
	}
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
	if s.next, s.over = p.Next, p.Next == ""; s.over {
		s.ended = s.feed.cfg.Monotonic()
	}
	for len(s.pieces) > 1 && (s.kept > scanWindow || s.bytes > scanBytes) {
		s.kept -= len(s.pieces[0].Records)
		s.bytes -= sizeOf(s.pieces[0])
		s.pieces[0] = nil
		s.pieces = s.pieces[1:]
		s.first++
	}
	return nil
}

// dropped drops the pieces of a scan that is long over, and reports whether it has. A
// reader that is still at it begins anew.
func (s *scan) dropped(now time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.over || now-s.ended < scanKept {
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
			return s, 0
		}
		if !over && age < scanShared {
			return nil, scanShared / 20
		}
	}
	s := &scan{feed: f, namespace: namespace, from: f.ring.applied, began: now}
	f.scans[namespace], f.kept = s, append(f.kept, s)
	f.counts.scans++
	return s, 0
}
