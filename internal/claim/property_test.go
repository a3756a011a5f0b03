package claim_test

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Several callers at one key: they begin, repeat, finish, extend; messages arrive
// twice and late; an operator resolves and forgets; policies change; time passes.
// What they are told is compared with ledger, which keeps only what anyone could
// have noted down, and never looks into the record.
func TestArbitraryHistoriesKeepThePromises(t *testing.T) {
	for round := 0; round < 30 && !t.Failed(); round++ { // of rapid.checks histories each
		rapid.Check(t, func(t *rapid.T) {
			h := &history{w: newWorld(), ledger: ledger{phase: "none"}, claims: map[claim.ID]*given{}}
			t.Repeat(map[string]func(*rapid.T){
				"begin":      h.begin,
				"finish":     h.finish,
				"extend":     h.extend,
				"late copy":  h.lateCopy,
				"resolve":    h.resolve,
				"forget":     h.forget,
				"time":       h.time,
				"a deadline": h.deadline,
				"policy":     h.policy,
				"":           h.check,
			})
		})
	}
}

// given is one claim as its holder knows it.
type given struct {
	call         call
	id           claim.ID
	attempt      int32
	fence        int64
	since, until claim.Instant
	// Of the policy under which it was given.
	never               bool
	keepDone, keepKey   time.Duration
	released, takenBack bool
}

// ledger is what was told about the key so far.
type ledger struct {
	phase               string // none, pending, released, unknown, done, held
	print, operation    string
	attempt, forgiven   int32
	newest, before      *given
	outcome             *claim.Record
	resultUntil, keyEnd claim.Instant // 0: none
	spent               []string
}

// call is one call of Begin, that may arrive more than once.
type call struct {
	requestID, owner, print, operation string
	lease                              time.Duration
}

type history struct {
	ledger
	w      *world
	claims map[claim.ID]*given
	order  []claim.ID
	fence  int64
	copies []func(t *rapid.T)
	// last is the record as the step before left it.
	last *claim.Record
}

func (h *history) begin(t *rapid.T) {
	c := call{
		requestID: rapid.SampledFrom([]string{"", "r1", "r2", fmt.Sprint("fresh", len(h.copies))}).Draw(t, "request id"),
		owner:     rapid.SampledFrom([]string{"erp-1", "erp-2"}).Draw(t, "owner"),
		print:     rapid.SampledFrom([]string{"", string(fingerprint), string(fingerprint), string(fingerprint), string(otherPrint)}).Draw(t, "print"),
		operation: rapid.SampledFrom([]string{"", "capture", "capture", "capture", "refund"}).Draw(t, "operation"),
		lease:     rapid.SampledFrom([]time.Duration{time.Second, 5 * time.Second, time.Minute}).Draw(t, "lease"),
	}
	h.copies = append(h.copies, func(t *rapid.T) { h.begun(t, c) })
	h.begun(t, c)
}

// begun carries a call out and checks what it is told.
func (h *history) begun(t *rapid.T, c call) {
	h.expire()
	want := h.verdict(c)
	a, err := h.w.begin(&claim.BeginRequest{
		Namespace: "pay", Key: "k", Operation: c.operation, Fingerprint: []byte(c.print),
		RequestID: c.requestID, Owner: c.owner, Lease: &c.lease,
	})
	got := tell(a, nil, err)
	if a.Verdict == claim.First && a.Repeat {
		got = "REPEAT"
	}
	if got != want {
		t.Fatalf("told %s, want %s", got, want)
	}
	if err == nil && (a.KeyAction() == claim.Proceed) != (a.Verdict == claim.First) {
		t.Fatalf("%s with key action %d", got, a.KeyAction())
	}
	switch got {
	case "FIRST":
		h.give(t, c, a.Claim)
	case "REPEAT": // G6: the marked repeat of its own call
		g := h.newest
		if g.call.requestID != c.requestID || g.call.owner != c.owner || a.Claim.ID != g.id || a.Claim.Fence != g.fence || a.Claim.Attempt != g.attempt || a.Claim.Left >= g.until.Sub(h.w.now) {
			t.Fatalf("%+v repeated as %+v", g, a.Claim)
		}
	case "REPLAY", "REPLAY_FAILURE": // G2: outcome, digest and bytes
		o := h.outcome
		if a.Record.State != o.State || !bytes.Equal(a.Record.Digest, o.Digest) || fmt.Sprint(a.Record.Result) != fmt.Sprint(o.Result) || fmt.Sprint(a.Record.Failure) != fmt.Sprint(o.Failure) {
			t.Fatalf("finished as %+v, replayed %+v", o, a.Record)
		}
	case "EXPIRED":
		if a.Record.State != h.outcome.State || !bytes.Equal(a.Record.Digest, h.outcome.Digest) || a.Record.Result != nil || a.Record.Failure != nil {
			t.Fatalf("finished as %+v, expired as %+v", h.outcome, a.Record)
		}
	}
}

// verdict is what the ledger says a call must be told.
func (h *history) verdict(c call) string {
	now, spent := h.w.now, slices.Contains(h.spent, c.owner+"/"+c.requestID)
	differs := c.print != "" && h.print != "" && c.print != h.print || c.operation != "" && h.operation != "" && c.operation != h.operation
	usedUp := h.w.policy.MaxAttempts > 0 && h.attempt-h.forgiven >= h.w.policy.MaxAttempts
	again := "FIRST"
	if usedUp {
		again = "UNKNOWN_OUTCOME"
	} else if spent {
		again = "REQUEST_ID_SPENT"
	}
	switch {
	case h.phase == "none":
		return "FIRST"
	case h.phase == "held":
		return "IN_PROGRESS"
	case differs:
		return "CONFLICT"
	case h.phase == "unknown":
		return "UNKNOWN_OUTCOME"
	case h.phase == "released":
		return again
	case h.phase == "done" && now >= h.resultUntil+grace:
		return "EXPIRED"
	case h.phase == "done" && h.outcome.State == claim.Failed:
		return "REPLAY_FAILURE"
	case h.phase == "done":
		return "REPLAY"
	case now < h.newest.until && c.requestID != "" && c.requestID == h.newest.call.requestID && c.owner == h.newest.call.owner:
		return "REPEAT"
	case now < h.newest.until+grace: // G1
		return "IN_PROGRESS"
	case h.newest.never:
		return "UNKNOWN_OUTCOME"
	}
	return again
}

// give notes a new claim down.
func (h *history) give(t *rapid.T, c call, g *claim.Grant) {
	if h.claims[g.ID] != nil {
		t.Fatalf("claim %x was given before", g.ID)
	}
	if g.Fence <= h.fence {
		t.Fatalf("fence %d after %d", g.Fence, h.fence)
	}
	previous := claim.PreviousNone
	if h.phase != "none" {
		previous = map[string]claim.Previous{"released": claim.PreviousReleased, "pending": claim.PreviousLapsed}[h.phase]
	} else {
		h.ledger = ledger{phase: "none"}
	}
	h.attempt++
	if g.Attempt != h.attempt || g.Previous != previous {
		t.Fatalf("attempt %d after %v, want %d after %v", g.Attempt, g.Previous, h.attempt, previous)
	}
	if h.print == "" {
		h.print = c.print
	}
	if h.operation == "" {
		h.operation = c.operation
	}
	p := h.w.policy
	h.before, h.newest = h.newest, &given{
		call: c, id: g.ID, attempt: g.Attempt, fence: g.Fence, since: h.w.now, until: h.w.now.Add(c.lease),
		never: p.TakeoverNever, keepDone: p.ResultRetention, keepKey: p.KeyRetention,
	}
	h.fence, h.phase = g.Fence, "pending"
	h.claims[g.ID] = h.newest
	h.order = append(h.order, g.ID)
	h.keepPending()
}

func (h *history) keepPending() {
	h.keyEnd = max(h.newest.until, h.newest.since.Add(h.newest.keepKey))
	if h.newest.never {
		h.keyEnd = 0
	}
}

// expire forgets a key whose time is over.
func (h *history) expire() {
	if h.keyEnd != 0 && h.w.now >= h.keyEnd+grace {
		h.ledger = ledger{phase: "none"}
	}
}

// anyClaim draws a claim that was ever given, the newer the likelier.
func (h *history) anyClaim(t *rapid.T) claim.ID {
	if len(h.order) == 0 {
		return claim.ID{15: 99}
	}
	return h.order[len(h.order)-1-rapid.IntRange(0, min(len(h.order)-1, 3)).Draw(t, "how old a claim")]
}

func (h *history) finish(t *rapid.T) {
	id := h.anyClaim(t)
	req := rapid.SampledFrom([]*claim.FinishRequest{
		{Result: bankResult}, {Result: otherResult}, {Failure: blocked}, {Failure: passing}, {Failure: unsure},
		{Omitted: &claim.Omitted{Digest: resultDigest(bankResult), Size: 10}},
	}).Draw(t, "finish")
	h.copies = append(h.copies, func(t *rapid.T) { h.finished(t, id, req) })
	h.finished(t, id, req)
}

// finished carries a finish out and checks that it does what the ledger allows.
func (h *history) finished(t *rapid.T, id claim.ID, req *claim.FinishRequest) {
	h.expire()
	revision := h.w.revision
	answer, err := h.w.finish(id, req)
	got := string(claim.ReasonOf(err))
	switch {
	case err == nil && h.w.revision == revision:
		got = "OK"
	case err == nil:
		got = answer.State.String()
	case h.w.revision != revision:
		t.Fatalf("%v, yet it was written", err)
	}
	if want := h.finishes(id, req); got != want {
		t.Fatalf("%s, want %s", got, want)
	}
	switch got {
	case "STATE_RELEASED":
		h.newest.released = true
		h.release()
	case "STATE_UNKNOWN":
		h.phase, h.keyEnd = "unknown", 0
	case "STATE_SUCCEEDED", "STATE_FAILED":
		h.settle(answer)
	}
}

// finishes is what the ledger says a finish must come to.
func (h *history) finishes(id claim.ID, req *claim.FinishRequest) string {
	release := req.Failure == passing
	unknown := req.Failure == unsure
	newest := h.newest != nil && h.newest.id == id && !h.newest.takenBack
	switch {
	case h.phase == "none" || h.phase == "held":
		return "RECORD_NOT_FOUND"
	case newest && release && h.newest.released:
		return "OK"
	case release && h.before != nil && h.before.id == id && h.before.released && (h.phase != "done" || !h.newest.released):
		return "OK"
	case !newest: // G3
		return "CLAIM_LOST"
	case h.phase == "done":
		if !release && !unknown && bytes.Equal(h.outcome.Digest, digestFor(req)) {
			return "OK"
		}
		return "ALREADY_FINISHED"
	case h.phase == "released" && unknown, h.phase == "unknown" && unknown:
		return "OK"
	case release:
		return "STATE_RELEASED"
	case unknown:
		return "STATE_UNKNOWN"
	case req.Failure != nil:
		return "STATE_FAILED"
	}
	return "STATE_SUCCEEDED"
}

func digestFor(req *claim.FinishRequest) []byte {
	switch {
	case req.Failure != nil:
		return failureDigest(req.Failure)
	case req.Omitted != nil:
		return req.Omitted.Digest
	}
	return resultDigest(req.Result)
}

func (h *history) release() {
	h.phase, h.keyEnd = "released", h.w.now.Add(h.newest.keepKey)
	if r := h.newest.call.requestID; r != "" && !slices.Contains(h.spent, h.newest.call.owner+"/"+r) {
		h.spent = append(h.spent, h.newest.call.owner+"/"+r)
		h.spent = h.spent[max(0, len(h.spent)-16):]
	}
}

func (h *history) settle(answer *claim.Record) {
	h.phase, h.outcome = "done", answer
	h.resultUntil, h.keyEnd = h.w.now.Add(h.newest.keepDone), h.w.now.Add(h.newest.keepKey)
}

func (h *history) extend(t *rapid.T) {
	id := h.anyClaim(t)
	lease := rapid.SampledFrom([]time.Duration{time.Second, 20 * time.Second, 2 * time.Minute}).Draw(t, "lease")
	h.copies = append(h.copies, func(t *rapid.T) { h.extended(t, id, lease) })
	h.extended(t, id, lease)
}

func (h *history) extended(t *rapid.T, id claim.ID, lease time.Duration) {
	h.expire()
	answer, err := h.w.extend(id, lease)
	want := claim.Reason("")
	switch {
	case h.phase == "none" || h.phase == "held":
		want = claim.RecordNotFound
	case h.phase != "pending" || h.newest.id != id:
		want = claim.ClaimLost
	}
	if claim.ReasonOf(err) != want {
		t.Fatalf("%v, want %q", err, want)
	}
	if err != nil {
		return
	}
	h.newest.until = max(h.newest.until, h.w.now.Add(lease))
	h.keepPending()
	if answer.LeaseUntil != h.newest.until || answer.Fence() != h.newest.fence {
		t.Fatalf("extended to %v with fence %d, want %v with %d", answer.LeaseUntil, answer.Fence(), h.newest.until, h.newest.fence)
	}
}

func (h *history) lateCopy(t *rapid.T) {
	if len(h.copies) == 0 {
		return // nothing was sent yet
	}
	rapid.SampledFrom(h.copies).Draw(t, "message")(t)
}

func (h *history) resolve(t *rapid.T) {
	req := rapid.SampledFrom([]*claim.ResolveRequest{
		{State: claim.Succeeded, Result: otherResult}, {State: claim.Failed, Failure: refused}, {State: claim.Released},
	}).Draw(t, "resolve")
	h.expire()
	revision := h.w.revision
	answer, err := h.w.resolve(req)
	usedUp := h.w.policy.MaxAttempts > 0 && h.attempt-h.forgiven >= h.w.policy.MaxAttempts
	want, written := claim.Reason(""), true
	switch {
	case h.phase == "none" || h.phase == "held":
		want = claim.RecordNotFound
	case h.phase == "done":
		want = claim.AlreadyFinished
	case h.phase == "pending" && h.w.now < h.newest.until+grace:
		want = claim.ClaimLive
	case h.phase == "released" && !usedUp:
		written = false
	}
	if claim.ReasonOf(err) != want || (h.w.revision != revision) != (written && want == "") {
		t.Fatalf("%v, wrote %v, want %q, %v", err, h.w.revision != revision, want, written)
	}
	if err != nil || !written {
		return
	}
	if req.State != claim.Released {
		h.settle(answer)
		return
	}
	if usedUp {
		h.forgiven = h.attempt
	}
	h.newest.takenBack = h.newest.takenBack || h.phase != "released"
	h.release()
}

func (h *history) forget(t *rapid.T) {
	h.expire()
	if h.phase == "held" {
		h.w.open()
		h.ledger = ledger{phase: "none"}
		return
	}
	force := rapid.Bool().Draw(t, "force")
	err := h.w.forget(force)
	want := claim.Reason("")
	opened := h.w.rec != nil && h.w.rec.Forgotten != nil && h.w.rec.Forgotten.Opened
	switch {
	case h.phase == "none" && !opened:
		want = claim.RecordNotFound
	case !force && (h.phase == "unknown" || h.phase == "pending" && (h.newest.never || h.w.now < h.newest.until+grace)):
		want = claim.ClaimLive
	}
	if claim.ReasonOf(err) != want {
		t.Fatalf("%v, want %q", err, want)
	}
	if err == nil && !opened {
		h.ledger = ledger{phase: "held"}
	}
}

func (h *history) time(t *rapid.T) {
	h.w.pass(rapid.SampledFrom([]time.Duration{1, time.Millisecond, 500 * time.Millisecond, time.Second, 29 * time.Second, 2 * time.Minute, 24 * time.Hour}).Draw(t, "step"))
}

// deadline goes to one of the record's deadlines, or next to it.
func (h *history) deadline(t *rapid.T) {
	if h.phase == "none" || h.phase == "held" {
		return // nothing has a deadline yet
	}
	edge := rapid.SampledFrom([]claim.Instant{h.newest.until, h.resultUntil, h.keyEnd}).Draw(t, "deadline")
	edge += rapid.SampledFrom([]claim.Instant{0, grace}).Draw(t, "grace") + rapid.SampledFrom([]claim.Instant{-1, 0, 1}).Draw(t, "beside")
	if edge > h.w.now {
		h.w.at(edge)
	}
}

func (h *history) policy(t *rapid.T) {
	p := &h.w.policy
	p.TakeoverNever = rapid.Bool().Draw(t, "never")
	p.MaxAttempts = rapid.SampledFrom([]int32{0, 0, 2, 3}).Draw(t, "max attempts")
	p.ResultRetention = rapid.SampledFrom([]time.Duration{2 * time.Second, keepDone}).Draw(t, "result retention")
	p.KeyRetention = rapid.SampledFrom([]time.Duration{p.ResultRetention, keepKey}).Draw(t, "key retention")
}

// check compares the record with the one a step ago: a claim's deadline never
// moves back, and a finished record never changes while its key is known.
func (h *history) check(t *rapid.T) {
	old, rec := h.last, h.w.rec
	h.last = copyOf(rec)
	if old == nil || rec.Forgotten != nil || old.Forgotten != nil {
		return
	}
	if rec.State == claim.Pending && rec.ClaimID == old.ClaimID && rec.LeaseUntil < old.LeaseUntil {
		t.Fatalf("the deadline moved back from %v to %v", old.LeaseUntil, rec.LeaseUntil)
	}
	if old.State.Finished() && !old.Gone(h.w.now) && !reflect.DeepEqual(old, h.last) {
		t.Fatalf("a finished record changed from %+v to %+v", old, rec)
	}
}

func TestC29EveryAnswerButFirstSaysWhatToDoWithTheKey(t *testing.T) {
	told := map[claim.Verdict]claim.KeyAction{}
	for _, f := range fixtures(t) {
		for _, now := range f.instants() {
			beginRequests(func(req *claim.BeginRequest, _ func(begins) string) {
				a, _, err := claim.Begin(f.rec, req, f.moment(now))
				if err != nil {
					return
				}
				action := a.KeyAction()
				if first := a.Verdict == claim.First; first != (action == claim.Proceed) || !first && action != claim.Reuse && action != claim.Rotate && action != claim.Stop {
					t.Errorf("%s with key action %d", verdicts[a.Verdict], action)
				}
				told[a.Verdict] = action
			})
		}
	}
	if len(told) != 7 {
		t.Errorf("only %d of 7 verdicts were seen: %v", len(told), told)
	}
}
