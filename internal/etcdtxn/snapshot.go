package etcdtxn

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// place is where a claim.Piece begins, and how many slots are to be read together.
type place struct {
	slot, slots int
	last        string
}

func (p place) String() string { return fmt.Sprintf("%d %d %s", p.slot, p.slots, p.last) }

func parsePlace(at string) (p place, err error) {
	if at == "" {
		return place{slots: 1}, nil
	}
	parts := strings.SplitN(at, " ", 3)
	if len(parts) != 3 {
		return place{}, fmt.Errorf("no place: %q", at)
	}
	p.last = parts[2]
	p.slot, err = strconv.Atoi(parts[0])
	if err == nil {
		p.slots, err = strconv.Atoi(parts[1])
	}
	return p, err
}

// Piece reads a part of a namespace's records; "" is the first. As no revision is asked
// for, there is nothing that compaction could take away.
func (s *Store) Piece(ctx context.Context, namespace, at string) (claim.Piece, error) {
	from, err := parsePlace(at)
	if err != nil {
		return claim.Piece{}, err
	}
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 20*time.Millisecond, 500*time.Millisecond
	answers, now, revision, err := s.readSlots(ctx, namespace, cursor{from.slot, from.last}, from.slots, wait)
	if err != nil {
		return claim.Piece{}, err
	}
	piece := claim.Piece{Now: now, Revision: revision}
	next, _, err := handOn(namespace, cursor{from.slot, from.last}, now, answers, refuse, func(rec *claim.Record, now claim.Instant) bool {
		if rec.Forgotten == nil && !rec.Gone(now) {
			piece.Records = append(piece.Records, rec)
		}
		return true
	})
	if err != nil {
		return claim.Piece{}, err
	}
	if next.slot >= claim.Slots {
		return piece, nil
	}
	piece.Before = layout.RecordsOf(next.slot, namespace)
	if next.last != "" {
		piece.Before = next.last + "\x00"
	}
	slots := min(2*from.slots, slotsARead)
	if len(piece.Records) >= recordsARead {
		slots = 1
	}
	piece.Next = place{next.slot, slots, next.last}.String()
	return piece, nil
}
