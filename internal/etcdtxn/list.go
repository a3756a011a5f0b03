package etcdtxn

import (
	"context"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

const (
	// slotsARead is how many slots one flat read covers at most: one at first, twice
	// as many for as long as they are nearly empty, so that neither a namespace of a
	// few records takes long nor one of many fills the memory.
	slotsARead = 64
	// recordsARead is how many records of one slot are read at once: each may have a
	// result of 1 MiB.
	recordsARead = 32
	// listBudget is how many keys one page may look at, and listWithin how long, so
	// that a page of a rare state is short rather than late.
	listBudget = 5000
	listWithin = claim.AnswerWithin - 2*time.Second
)

// cursor is a place in a namespace's records: a slot, and the last key seen there.
type cursor struct {
	slot int
	last string
}

// List returns a page of a namespace's records, slot by slot, without bodies.
func (s *Store) List(ctx context.Context, req *claim.ListRequest) (claim.Page, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	at, err := parsePage(req.Namespace, req.Page)
	if err != nil {
		return claim.Page{}, err
	}
	var page claim.Page
	seen, until := 0, time.Now().Add(listWithin)
	next, err := s.scanUntil(ctx, req.Namespace, at, until, s.passOver, func(rec *claim.Record, now claim.Instant) bool {
		seen++
		page.Now = now
		if rec.Forgotten == nil && !rec.Gone(now) {
			if told := rec.At(now); req.State == 0 || told.State == req.State {
				if told.Result != nil {
					light := *told.Result
					light.Body = nil
					told.Result = &light
				}
				page.Records = append(page.Records, told)
			}
		}
		return len(page.Records) < req.Size && seen < listBudget
	})
	if err != nil {
		return claim.Page{}, err
	}
	if next.slot < claim.Slots {
		page.Next = next.token()
	}
	return page, nil
}

// passOver leaves a record that cannot be read out of a list, so that the rest can be
// seen; whoever asks for its key is told.
func (s *Store) passOver(err error) error {
	s.log.Error("a record is left out of a list", "error", err)
	return nil
}

// refuse stops at a record that cannot be read.
func refuse(err error) error { return err }

// scan hands a namespace's records on, slot by slot from a place, until it is told
// to stop. It returns the place after the last record; its slot is claim.Slots at
// the end. A record that cannot be read is handed to unreadable, whose error ends it.
func (s *Store) scan(ctx context.Context, namespace string, at cursor, unreadable func(error) error, more func(*claim.Record, claim.Instant) bool) (cursor, error) {
	return s.scanUntil(ctx, namespace, at, time.Time{}, unreadable, more)
}

// scanUntil is scan that stops at a time too, once it has got anywhere.
func (s *Store) scanUntil(ctx context.Context, namespace string, at cursor, until time.Time, unreadable func(error) error, more func(*claim.Record, claim.Instant) bool) (cursor, error) {
	first := at
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 20*time.Millisecond, 500*time.Millisecond
	for slots := 1; at.slot < claim.Slots; {
		if !until.IsZero() && at != first && time.Now().After(until) {
			return at, nil
		}
		answers, now, _, err := s.readSlots(ctx, namespace, at, slots, wait)
		if err != nil {
			return at, err
		}
		found := 0
		for _, a := range answers {
			found += len(a.GetResponseRange().GetKvs())
		}
		slots = min(2*slots, slotsARead)
		if found >= recordsARead {
			slots = 1
		}
		stop := false
		if at, stop, err = handOn(namespace, at, now, answers, unreadable, more); err != nil || stop {
			return at, err
		}
	}
	return at, nil
}

// readSlots reads a namespace's records in so many consecutive slots from a place, flat
// and linearizably; of each slot at most recordsARead. It returns when that was, and
// etcd's revision then.
func (s *Store) readSlots(ctx context.Context, namespace string, at cursor, slots int, wait *backoff.ExponentialBackOff) ([]*pb.ResponseOp, claim.Instant, int64, error) {
	for {
		v, err := s.cfg.View.View()
		if err != nil {
			return nil, 0, 0, err
		}
		var ops []*pb.RequestOp
		for slot := at.slot; slot < min(at.slot+min(slots, s.commits.allowed()-2), claim.Slots); slot++ {
			prefix := layout.RecordsOf(slot, namespace)
			from := prefix
			if slot == at.slot && at.last != "" {
				from = at.last + "\x00"
			}
			ops = append(ops, &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{
				Key: []byte(from), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix)), Limit: recordsARead,
			}}})
		}
		began := time.Now()
		answers, see, err := s.flat(ctx, ops)
		if err != nil {
			s.observe("list", string(classOf(err)), began)
			if err := s.pause(ctx, wait, err, false); err != nil {
				return nil, 0, 0, err
			}
			continue
		}
		if !see.saw.Matches(&v) {
			s.observe("list", "refused", began)
			if err := s.catchUp(ctx, &v, see); err != nil {
				return nil, 0, 0, err
			}
			continue
		}
		s.observe("list", "ok", began)
		return answers, max(v.Now, see.saw.Tick.Time), see.revision, nil
	}
}

// handOn gives the records of consecutive slots to more, until it wants no more.
func handOn(namespace string, at cursor, now claim.Instant, slots []*pb.ResponseOp, unreadable func(error) error, more func(*claim.Record, claim.Instant) bool) (next cursor, stop bool, err error) {
	for _, slot := range slots {
		for _, kv := range slot.GetResponseRange().GetKvs() {
			rec, err := layout.DecodeRecord(kv.Value, kv.ModRevision, "", "")
			if err != nil {
				if err := unreadable(err); err != nil {
					return at, true, err
				}
				at.last = string(kv.Key)
				continue
			}
			at.last = string(kv.Key)
			if rec.Namespace == namespace && !more(rec, now) {
				return at, true, nil
			}
		}
		if slot.GetResponseRange().GetMore() {
			return at, false, nil // the rest of this slot is read next
		}
		at = cursor{slot: at.slot + 1}
	}
	return at, false, nil
}

func (c cursor) token() string {
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%03x:%s", c.slot, c.last[strings.LastIndexByte(c.last, '/')+1:]))
}

func parsePage(namespace, token string) (cursor, error) {
	if token == "" {
		return cursor{}, nil
	}
	bad := &claim.Error{Reason: claim.RequestInvalid, Field: "page_token", Message: "this is no page token of this list: send the next_page_token of the page before"}
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		return cursor{}, bad
	}
	var c cursor
	digits, hash, ok := strings.Cut(string(raw), ":")
	if !ok || len(digits) != 3 || strings.Trim(hash, "0123456789abcdef") != "" || len(hash) > 32 {
		return cursor{}, bad
	}
	slot, err := strconv.ParseUint(digits, 16, 12)
	if err != nil {
		return cursor{}, bad
	}
	c.slot = int(slot)
	if hash != "" {
		c.last = layout.RecordsOf(c.slot, namespace) + hash
	}
	return c, nil
}
