package claim_test

import (
	"bytes"
	"encoding/binary"
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// The times of every table: a claim at claimed with a lease of 30 s, ended 10 s
// later; results kept for 60 s, keys for 120 s.
const (
	claimed   = claim.Instant(1000 * time.Second)
	lease     = 30 * time.Second
	ended     = claimed + claim.Instant(10*time.Second)
	leaseEnd  = claimed + claim.Instant(lease)
	keepDone  = 60 * time.Second
	keepKey   = 120 * time.Second
	resultEnd = ended + claim.Instant(keepDone)
	// keyEnd is that of what ended, claimKeyEnd that of what is pending.
	keyEnd      = ended + claim.Instant(keepKey)
	claimKeyEnd = claimed + claim.Instant(keepKey)
	grace       = claim.Instant(500 * time.Millisecond)
	forever     = claim.Never
)

var (
	wallStart   = time.Date(2031, 5, 6, 7, 8, 9, 10, time.UTC)
	fingerprint = bytes.Repeat([]byte{0xF1}, 32)
	otherPrint  = bytes.Repeat([]byte{0xF2}, 32)
	bankResult  = &claim.Result{Code: 201, ContentType: "application/json", Body: []byte(`{"paid":1}`), Metadata: map[string]string{"location": "/p/1"}}
	otherResult = &claim.Result{Code: 201, ContentType: "application/json", Body: []byte(`{"paid":2}`), Metadata: map[string]string{"location": "/p/1"}}
	blocked     = &claim.Failure{Class: claim.Terminal, Code: 9, Message: "supplier is blocked", Details: []claim.Detail{{TypeURL: "type.googleapis.com/x.Y", Value: []byte{8, 1}}}}
	refused     = &claim.Failure{Class: claim.Terminal, Code: 7, Message: "supplier is blocked"}
	passing     = &claim.Failure{Class: claim.Retryable, Code: 14, Message: "503 from the bank"}
	unsure      = &claim.Failure{Class: claim.UnknownOutcome, Code: 4, Message: "no answer from the bank"}
)

func usualPolicy() claim.Policy {
	return claim.Policy{
		DefaultLease: lease, MaxLease: time.Hour,
		ResultRetention: keepDone, KeyRetention: keepKey,
		MaxResultBytes: 256 << 10,
	}
}

// world is one key and what is around it, moved by nothing but claim's functions.
type world struct {
	now       claim.Instant
	wall      time.Time
	policy    claim.Policy
	rec       *claim.Record
	revision  int64
	fenceBase int64
	claims    uint64
	usual     time.Duration
	jitter    float64
}

func newWorld() *world {
	return &world{now: claimed, wall: wallStart, policy: usualPolicy(), revision: 41, jitter: 1}
}

func (w *world) moment() claim.Moment {
	var id claim.ID
	binary.BigEndian.PutUint64(id[8:], w.claims+1)
	return claim.Moment{Now: w.now, Wall: w.wall, Policy: w.policy, ClaimID: id, FenceBase: w.fenceBase, Usual: w.usual, Jitter: w.jitter}
}

func (w *world) commit(write *claim.Record) *claim.Record {
	w.revision++
	rec := *write
	rec.Revision = w.revision
	w.rec = &rec
	return w.rec
}

func (w *world) pass(d time.Duration) { w.at(w.now.Add(d)) }

func (w *world) at(now claim.Instant) {
	w.wall = w.wall.Add(now.Sub(w.now))
	w.now = now
}

// begin carries a Begin out, as a Store does.
func (w *world) begin(req *claim.BeginRequest) (claim.Answer, error) {
	m := w.moment()
	a, write, err := claim.Begin(w.rec, req, m)
	if write != nil {
		w.claims++
		granted, _ := w.policy.Lease(req.Lease)
		rec := w.commit(write)
		a.Claim, a.Revision = rec.Grant(granted, w.now), rec.Revision
	}
	return a, err
}

func (w *world) finish(id claim.ID, req *claim.FinishRequest) (*claim.Record, error) {
	answer, write, err := claim.Finish(w.rec, id, req, w.moment())
	if write != nil {
		w.commit(write)
	}
	return answer, err
}

func (w *world) complete(id claim.ID, r *claim.Result) (*claim.Record, error) {
	return w.finish(id, &claim.FinishRequest{Namespace: "pay", Key: "k", Result: r})
}

func (w *world) fail(id claim.ID, f *claim.Failure) (*claim.Record, error) {
	return w.finish(id, &claim.FinishRequest{Namespace: "pay", Key: "k", Failure: f})
}

func (w *world) extend(id claim.ID, lease time.Duration) (*claim.Record, error) {
	answer, write, err := claim.Extend(w.rec, id, &claim.ExtendRequest{Namespace: "pay", Key: "k", Lease: &lease}, w.moment())
	if write != nil {
		w.commit(write)
	}
	return answer, err
}

func (w *world) resolve(req *claim.ResolveRequest) (*claim.Record, error) {
	answer, write, err := claim.Resolve(w.rec, req, w.moment())
	if write != nil {
		w.commit(write)
	}
	return answer, err
}

func (w *world) forget(force bool) error {
	write, _, err := claim.Forget(w.rec, &claim.ForgetRequest{Namespace: "pay", Key: "k", Reason: "test", Force: force}, w.moment())
	if write != nil {
		w.commit(write)
	}
	return err
}

func (w *world) open() { w.commit(claim.Open(w.rec)) }

// asks makes the Begin of one call; requestID "" makes it anybody's.
func asks(requestID string) *claim.BeginRequest {
	return &claim.BeginRequest{Namespace: "pay", Key: "k", Operation: "payment.capture", Fingerprint: fingerprint, RequestID: requestID, Owner: "erp-1"}
}

// first begins and must be given the claim.
func (w *world) first(t *testing.T, req *claim.BeginRequest) *claim.Grant {
	t.Helper()
	a, err := w.begin(req)
	if err != nil || a.Verdict != claim.First || a.Repeat {
		t.Fatalf("Begin: %s, want FIRST", tell(a, nil, err))
	}
	return a.Claim
}

// told begins and must be told so.
func (w *world) told(t *testing.T, req *claim.BeginRequest, want string) claim.Answer {
	t.Helper()
	a, err := w.begin(req)
	if got := tell(a, w.rec, err); got != want {
		t.Fatalf("Begin: %s, want %s", got, want)
	}
	return a
}

var verdicts = map[claim.Verdict]string{
	claim.First: "FIRST", claim.InProgress: "IN_PROGRESS", claim.Replay: "REPLAY", claim.ReplayFailure: "REPLAY_FAILURE",
	claim.Conflict: "CONFLICT", claim.Expired: "EXPIRED", claim.OutcomeUnknown: "UNKNOWN_OUTCOME",
}

var previousNames = map[claim.Previous]string{
	claim.PreviousNone: "NONE", claim.PreviousReleased: "RELEASED", claim.PreviousLapsed: "LAPSED",
}

// tell writes an answer to Begin in a few words: the verdict or the error's
// reason, and for a claim its attempt and what came before. rec is the record of a
// new claim.
func tell(a claim.Answer, rec *claim.Record, err error) string {
	switch {
	case err != nil:
		return string(claim.ReasonOf(err))
	case a.Repeat:
		return "REPEAT " + number(a.Claim.Attempt)
	case a.Verdict == claim.First && rec != nil:
		return "FIRST " + number(rec.Attempt) + " " + previousNames[rec.Previous]
	}
	return verdicts[a.Verdict]
}

func number(n int32) string {
	if n < 0 || n > 9 {
		return "?"
	}
	return string('0' + n)
}

// fixture is a record in one state, with the policy that governs it and the
// moment it came to be.
type fixture struct {
	rec    *claim.Record
	policy claim.Policy
	since  claim.Instant
	wall   time.Time
}

// The claims of each fixture: older lapsed and was taken over, before was
// released by its own holder, holder is the newest.
var (
	older  = claim.ID{15: 1}
	before = claim.ID{15: 2}
	holder = claim.ID{15: 3}
)

// fixtures makes a record in every state, each time anew. Where a third claim was
// given, two were before it; request id "spent" was the second's, "holder" is the
// third's.
func fixtures(t *testing.T) map[string]fixture {
	t.Helper()
	all := map[string]fixture{"none": {policy: usualPolicy()}}
	build := func(state string, then func(w *world), change ...func(p *claim.Policy)) {
		w := newWorld()
		w.at(claimed - claim.Instant(100*time.Second))
		w.first(t, asks("older"))
		w.at(w.rec.LeaseUntil + grace)
		id := w.first(t, asks("spent")).ID
		must(t)(w.fail(id, passing))
		w.at(claimed)
		for _, c := range change {
			c(&w.policy)
		}
		if id := w.first(t, asks("holder")).ID; id != holder || w.rec.ReleasedClaimID != before || w.rec.Attempt != 3 {
			t.Fatalf("the fixtures' third claim is %v, attempt %d, after %v", id, w.rec.Attempt, w.rec.ReleasedClaimID)
		}
		w.at(ended)
		if then != nil {
			then(w)
		}
		all[state] = fixture{w.rec, w.policy, w.now, w.wall}
	}
	never := func(p *claim.Policy) { p.TakeoverNever = true }
	three := func(p *claim.Policy) { p.MaxAttempts = 3 }
	release := func(w *world) { must(t)(w.fail(holder, passing)) }
	succeed := func(w *world) { must(t)(w.complete(holder, bankResult)) }
	operator := &claim.ResolveRequest{Namespace: "pay", Key: "k", State: claim.Released, Reason: "looked"}

	build("pending", nil)
	build("pending, kept 2 s", nil, func(p *claim.Policy) { p.ResultRetention, p.KeyRetention = 2*time.Second, 2*time.Second })
	build("pending, NEVER", nil, never)
	build("pending, NEVER, policy AUTO since", func(w *world) { w.policy.TakeoverNever = false }, never)
	build("pending, policy NEVER since", func(w *world) { w.policy.TakeoverNever = true })
	build("pending, used up", nil, three)
	build("pending without a lease", func(w *world) { w.rec.LeaseUntil, w.rec.KeyUntil = 0, 0 })
	build("pending without a lease, key_until set", func(w *world) { w.rec.LeaseUntil = 0 })
	build("pending without key_until", func(w *world) { w.rec.KeyUntil = 0 })
	build("released", release)
	build("released without key_until", func(w *world) { release(w); w.rec.KeyUntil = 0 })
	build("released by operator", func(w *world) {
		must(t)(w.fail(holder, unsure))
		must(t)(w.resolve(operator))
	})
	build("lapsed, released by operator", func(w *world) {
		w.at(leaseEnd + grace)
		must(t)(w.resolve(operator))
	})
	build("released, used up", release, three)
	build("released, used up, allowed again", func(w *world) { release(w); must(t)(w.resolve(operator)) }, three)
	build("unknown", func(w *world) { must(t)(w.fail(holder, unsure)) })
	build("unknown, NEVER", func(w *world) { must(t)(w.fail(holder, unsure)) }, never)
	build("succeeded", succeed)
	build("succeeded, NEVER", succeed, never)
	build("succeeded, kept alike", succeed, func(p *claim.Policy) { p.KeyRetention = p.ResultRetention })
	build("succeeded after its release", func(w *world) { release(w); succeed(w) })
	build("succeeded without key_until", func(w *world) { succeed(w); w.rec.KeyUntil = 0 })
	build("succeeded without result_until", func(w *world) { succeed(w); w.rec.ResultUntil = 0 })
	build("failed", func(w *world) { must(t)(w.fail(holder, blocked)) })
	build("held", func(w *world) { succeed(w); must0(t, w.forget(false)) })
	build("opened", func(w *world) { succeed(w); must0(t, w.forget(false)); w.open() })
	return all
}

// must makes a check that a call went well.
func must(t *testing.T) func(*claim.Record, error) {
	return func(_ *claim.Record, err error) { t.Helper(); must0(t, err) }
}

func must0(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// instants are the times at which a fixture is asked: when it came to be, and
// each deadline that any state has, with and without its grace, exactly and a
// nanosecond before and after.
func (f fixture) instants() []claim.Instant {
	times := []claim.Instant{f.since, claimed + claim.Instant(1e6*time.Hour)}
	for _, edge := range []claim.Instant{leaseEnd, resultEnd, keyEnd, claimKeyEnd, leaseEnd + grace + claim.Instant(keepKey)} {
		for _, e := range []claim.Instant{edge, edge + grace} {
			times = append(times, e-1, e, e+1)
		}
	}
	slices.Sort(times)
	return slices.DeleteFunc(slices.Compact(times), func(i claim.Instant) bool { return i < f.since })
}

func (f fixture) moment(now claim.Instant) claim.Moment {
	return claim.Moment{
		Now: now, Wall: f.wall.Add(now.Sub(f.since)), Policy: f.policy,
		ClaimID: claim.ID{1}, FenceBase: 7 << 40, Jitter: 1,
	}
}

// phases are the rows of a table for one state: each holds until its end, the
// last one forever.
type phases[Row any] struct {
	state string
	rows  []phase[Row]
}

type phase[Row any] struct {
	until claim.Instant
	want  Row
}

// everyInstant asks for each state and each of its instants, and checks that the
// table has every state and that no decision changes the record it is given.
func everyInstant[Row any](t *testing.T, table []phases[Row], ask func(t *testing.T, f fixture, now claim.Instant, want Row)) {
	t.Helper()
	all := fixtures(t)
	for _, p := range table {
		f, ok := all[p.state]
		if !ok {
			t.Fatalf("no state %q, or twice in the table", p.state)
		}
		delete(all, p.state)
		t.Run(p.state, func(t *testing.T) {
			untouched := copyOf(f.rec)
			for _, now := range f.instants() {
				i := slices.IndexFunc(p.rows, func(r phase[Row]) bool { return now < r.until })
				ask(t, f, now, p.rows[i].want)
			}
			same(t, "the record that was judged", f.rec, untouched)
		})
	}
	for state := range all {
		t.Errorf("state %q is not in the table", state)
	}
}

// copyOf copies a record as deep as a decision might reach by mistake.
func copyOf(r *claim.Record) *claim.Record {
	if r == nil {
		return nil
	}
	c := *r
	c.Spent = slices.Clone(r.Spent)
	c.Labels = maps.Clone(r.Labels)
	c.Digest = slices.Clone(r.Digest)
	c.Fingerprint = slices.Clone(r.Fingerprint)
	if r.Result != nil {
		res := *r.Result
		res.Body, res.Metadata = slices.Clone(res.Body), maps.Clone(res.Metadata)
		c.Result = &res
	}
	if r.Failure != nil {
		f := *r.Failure
		f.Details = slices.Clone(f.Details)
		c.Failure = &f
	}
	if r.Forgotten != nil {
		mark := *r.Forgotten
		c.Forgotten = &mark
	}
	return &c
}

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s:\n got %+v\nwant %+v", what, got, want)
	}
}
