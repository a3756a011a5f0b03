// Package claimtest holds what tests of claims share: the suite that every
// claim.Store passes, and Memory, a Store in memory.
package claimtest

import (
	"bytes"
	"context"
	"encoding/base64"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// DefaultPolicy is what Memory's namespaces have until a policy is put.
func DefaultPolicy() claim.Policy {
	return claim.Policy{
		DefaultLease: 30 * time.Second, MaxLease: time.Hour,
		ResultRetention: 24 * time.Hour, KeyRetention: 72 * time.Hour,
		MaxResultBytes: 256 << 10,
	}
}

// Memory is a claim.Store in memory, whose time stands still until it is advanced.
// Each call is judged at once and alone; nothing is ever removed.
type Memory struct {
	// Hold, if set, is waited for between the mark of a forget and its opening, and
	// keeps the key held if it fails. Set it before the first call.
	Hold func(ctx context.Context) error

	mu       sync.Mutex
	now      claim.Instant
	revision int64
	records  map[name]*claim.Record
	policies map[string]claim.Policy
	sealer   claim.Sealer
}

type name struct{ namespace, key string }

var _ claim.Store = (*Memory)(nil)

// NewMemory makes an empty store.
func NewMemory() *Memory {
	return &Memory{
		records:  map[name]*claim.Record{},
		policies: map[string]claim.Policy{},
		sealer:   claim.NewSealer(bytes.Repeat([]byte{0x5E}, 32)),
	}
}

// Harness is the store as the suite takes it.
func (s *Memory) Harness() Harness {
	return Harness{Store: s, Clock: memoryClock{s}, PutPolicy: func(_ *testing.T, namespace string, p claim.Policy) { s.PutPolicy(namespace, p) }}
}

type memoryClock struct{ *Memory }

func (c memoryClock) Advance(_ *testing.T, d time.Duration) { c.Memory.Advance(d) }

// Advance lets cluster time pass.
func (s *Memory) Advance(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = s.now.Add(d)
}

// PutPolicy sets a namespace's policy.
func (s *Memory) PutPolicy(namespace string, p claim.Policy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.policies[namespace] = p
}

// look returns what a call is judged by: the record, and the moment.
func (s *Memory) look(n name) (*claim.Record, claim.Moment) {
	p, ok := s.policies[n.namespace]
	if !ok {
		p = DefaultPolicy()
	}
	wall := time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC).Add(time.Duration(s.now))
	return s.records[n], claim.Moment{Now: s.now, Wall: wall, Policy: p, ClaimID: claim.NewID(), Jitter: 1}
}

func (s *Memory) commit(n name, write *claim.Record) *claim.Record {
	s.revision++
	rec := *write
	rec.Revision = s.revision
	s.records[n] = &rec
	return &rec
}

// settle commits what was decided, if anything, and tells of the record.
func (s *Memory) settle(n name, m claim.Moment, rec, write *claim.Record) claim.Found {
	if write != nil {
		rec = s.commit(n, write)
	}
	return claim.Found{Record: rec.At(m.Now), Now: m.Now, Revision: s.revision, Source: claim.SourceEtcd}
}

// Begin implements claim.Store.
func (s *Memory) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	begun := s.BeginTogether(ctx, []*claim.BeginRequest{req})
	return begun[0].Answer, begun[0].Err
}

// BeginTogether implements claim.Store.
func (s *Memory) BeginTogether(_ context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := name{reqs[0].Namespace, reqs[0].Key}
	rec, m := s.look(n)
	begun, write, writer := claim.Together(rec, reqs, m)
	if write != nil {
		rec = s.commit(n, write)
	}
	for i := range begun {
		a := &begun[i].Answer
		a.Source = claim.SourceEtcd
		if begun[i].Err == nil && i >= writer {
			a.Revision = rec.Revision
		}
		if a.Verdict == claim.First && begun[i].Err == nil {
			a.Claim = rec.Grant(rec.LeaseUntil.Sub(rec.Claimed), m.Now)
			a.Claim.Token = s.sealer.Seal(n.namespace, n.key, a.Claim.ID)
		}
	}
	return begun
}

// Finish implements claim.Store.
func (s *Memory) Finish(_ context.Context, req *claim.FinishRequest) (claim.Found, error) {
	id, err := s.sealer.Open(req.Namespace, req.Key, req.Token)
	if err != nil {
		return claim.Found{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := name{req.Namespace, req.Key}
	rec, m := s.look(n)
	_, write, err := claim.Finish(rec, id, req, m)
	if err != nil {
		return claim.Found{}, err
	}
	return s.settle(n, m, rec, write), nil
}

// Extend implements claim.Store.
func (s *Memory) Extend(_ context.Context, req *claim.ExtendRequest) (*claim.Grant, error) {
	id, err := s.sealer.Open(req.Namespace, req.Key, req.Token)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := name{req.Namespace, req.Key}
	rec, m := s.look(n)
	_, write, err := claim.Extend(rec, id, req, m)
	if err != nil {
		return nil, err
	}
	if write != nil {
		rec = s.commit(n, write)
	}
	g := rec.Grant(0, m.Now)
	g.Token = req.Token
	return g, nil
}

// Get implements claim.Store.
func (s *Memory) Get(_ context.Context, req *claim.GetRequest) (claim.Found, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := name{req.Namespace, req.Key}
	rec, m := s.look(n)
	if err := claim.Known(rec, req.Namespace, m); err != nil {
		return claim.Found{}, err
	}
	return s.settle(n, m, rec, nil), nil
}

// Resolve implements claim.Store.
func (s *Memory) Resolve(_ context.Context, req *claim.ResolveRequest) (claim.Found, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := name{req.Namespace, req.Key}
	rec, m := s.look(n)
	_, write, err := claim.Resolve(rec, req, m)
	if err != nil {
		return claim.Found{}, err
	}
	return s.settle(n, m, rec, write), nil
}

// Forget implements claim.Store.
func (s *Memory) Forget(ctx context.Context, req *claim.ForgetRequest) (int64, error) {
	n := name{req.Namespace, req.Key}
	mark, err := s.mark(n, req)
	if err != nil || mark.Forgotten.Opened {
		return mark.Revision, err
	}
	if s.Hold != nil {
		if err := s.Hold(ctx); err != nil {
			return 0, &claim.Error{Reason: claim.StoreUnavailable, Message: "the key is marked but not yet free: forget it again", Err: err}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.records[n]; now.Revision == mark.Revision {
		s.commit(n, claim.Open(now))
	}
	return mark.Revision, nil
}

// mark puts the mark of a forget and returns it, or the one that is there.
func (s *Memory) mark(n name, req *claim.ForgetRequest) (claim.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, m := s.look(n)
	write, _, err := claim.Forget(rec, req, m)
	if err != nil {
		return claim.Record{}, err
	}
	if write != nil {
		rec = s.commit(n, write)
	}
	return *rec, nil
}

// List implements claim.Store; records come in the order of their keys.
func (s *Memory) List(_ context.Context, req *claim.ListRequest) (claim.Page, error) {
	after, err := base64.RawURLEncoding.DecodeString(req.Page)
	if err != nil {
		return claim.Page{}, &claim.Error{Reason: claim.RequestInvalid, Field: "page_token", Message: "this is no page token of this list"}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	page := claim.Page{Now: s.now}
	for _, rec := range s.sorted(req.Namespace) {
		if rec.Gone(s.now) || rec.Forgotten != nil || rec.Key <= string(after) {
			continue
		}
		told := rec.At(s.now)
		if req.State != 0 && told.State != req.State {
			continue
		}
		if len(page.Records) == req.Size {
			page.Next = base64.RawURLEncoding.EncodeToString([]byte(page.Records[req.Size-1].Key))
			break
		}
		if told.Result != nil {
			light := *told.Result
			light.Body = nil
			told.Result = &light
		}
		page.Records = append(page.Records, told)
	}
	return page, nil
}

func (s *Memory) sorted(namespace string) []*claim.Record {
	var all []*claim.Record
	for n, rec := range s.records {
		if n.namespace == namespace {
			all = append(all, rec)
		}
	}
	slices.SortFunc(all, func(a, b *claim.Record) int { return strings.Compare(a.Key, b.Key) })
	return all
}
