package claimtest

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// G6: the same call again is given the same claim, marked as a repeat; another
// owner, another request id and no request id are other callers.
func repeat(b *bench) {
	g := b.first("k", "r", 0)
	call := func(requestID, owner string) *claim.BeginRequest {
		req := b.asks("k")
		req.RequestID, req.Owner = requestID, owner
		return req
	}
	for range 3 {
		a := b.toldOf(call("r", "erp-1"), claim.First)
		// What is left is reckoned anew from what the Store has read: it may be a
		// little more than the first answer told, never more than the lease.
		if !a.Repeat || a.Claim.Token != g.Token || a.Claim.Fence != g.Fence || a.Claim.Attempt != g.Attempt || a.Claim.Previous != g.Previous || a.Claim.Left > min(g.Left+claim.TickEvery, time.Hour) {
			b.Fatalf("given %+v, repeated as %+v (%v)", g, a.Claim, a.Repeat)
		}
	}
	for _, other := range []*claim.BeginRequest{call("r", "erp-2"), call("r", ""), call("other", "erp-1"), call("", "erp-1")} {
		b.toldOf(other, claim.InProgress)
	}
	b.finishes("k", g.Token, done, claim.Succeeded)
	b.toldOf(call("r", "erp-1"), claim.Replay)
}

// C38, H26: Begins that are asked together are told what they would be one after
// another, with one claim among them.
func together(b *bench) {
	ask := func(fingerprint byte, requestID string) *claim.BeginRequest {
		req := b.asks("k")
		req.RequestID, req.Owner, req.Fingerprint = requestID, "erp-1", bytes.Repeat([]byte{fingerprint}, 32)
		return req
	}
	all := func(want ...claim.Verdict) []claim.Begun {
		b.Helper()
		begun := b.Store.BeginTogether(b.Context(), []*claim.BeginRequest{ask(1, "r1"), ask(1, "r1"), ask(2, "r2"), ask(1, "r3")})
		for i, v := range want {
			if begun[i].Err != nil || begun[i].Answer.Verdict != v {
				b.Fatalf("number %d is told %+v, %v, want %v", i, begun[i].Answer, begun[i].Err, v)
			}
		}
		return begun
	}
	begun := all(claim.First, claim.First, claim.Conflict, claim.InProgress)
	first, again := begun[0].Answer, begun[1].Answer
	if first.Repeat || !again.Repeat || again.Claim.Token != first.Claim.Token || again.Claim.Fence != first.Claim.Fence {
		b.Errorf("given %+v %+v, repeated as %+v %+v", first, first.Claim, again, again.Claim)
	}
	for i, each := range begun {
		if a := each.Answer; a.Revision != first.Revision || a.Source != claim.SourceEtcd {
			b.Errorf("number %d is told revision %d of %d by %d", i, a.Revision, first.Revision, a.Source)
		}
	}
	all(claim.First, claim.First, claim.Conflict, claim.InProgress)
	b.finishes("k", first.Claim.Token, done, claim.Succeeded)
	all(claim.Replay, claim.Replay, claim.Conflict, claim.Replay)
}

// G2, C30, C31, C32: a replay is the result byte for byte, without credentials.
func replay(b *bench) {
	g := b.first("k", "", 0)
	f := b.finishes("k", g.Token, done, claim.Succeeded)
	want := &claim.Result{Code: 201, ContentType: "text/plain", Body: []byte("done\x00\xff"), Metadata: map[string]string{"location": "/7"}}
	for range 3 {
		a := b.told("k", claim.Replay)
		if !reflect.DeepEqual(a.Record.Result, want) {
			b.Fatalf("replayed %+v", a.Record.Result)
		}
		if a.Record.FinishedAt.IsZero() || len(a.Record.Digest) != 32 || a.Record.FinishRevision == 0 || a.Record.FinishRevision != f.Record.FinishRevision || a.Revision != a.Record.Revision {
			b.Fatalf("replayed %+v, finished as %+v", a.Record, f.Record)
		}
		if a.KeyAction() != claim.Stop {
			b.Fatalf("key action %d", a.KeyAction())
		}
	}
}

// C26, C36: a failure for good comes back typed.
func replayFailure(b *bench) {
	g := b.first("k", "", 0)
	b.finishes("k", g.Token, blocked, claim.Failed)
	for range 2 {
		a := b.told("k", claim.ReplayFailure)
		if !reflect.DeepEqual(a.Record.Failure, blocked.Failure) || a.KeyAction() != claim.Rotate {
			b.Fatalf("replayed %+v, key action %d", a.Record.Failure, a.KeyAction())
		}
	}
}

// C05, C28, C45: another payload or operation is a conflict in any state, told
// nothing but when the key was claimed.
func conflict(b *bench) {
	with := func(print byte, operation string) *claim.BeginRequest {
		req := b.asks("k")
		req.Fingerprint, req.Operation = bytes.Repeat([]byte{print}, 32), operation
		return req
	}
	g := b.toldOf(with(1, "capture"), claim.First).Claim
	conflicts := func() {
		b.Helper()
		for _, req := range []*claim.BeginRequest{with(2, "capture"), with(1, "refund"), with(2, "")} {
			a := b.toldOf(req, claim.Conflict)
			if a.Record.CreatedAt.IsZero() || !reflect.DeepEqual(a.Record, &claim.Record{CreatedAt: a.Record.CreatedAt}) || a.KeyAction() != claim.Rotate {
				b.Fatalf("told %+v, key action %d", a.Record, a.KeyAction())
			}
		}
	}
	conflicts()
	b.toldOf(with(1, ""), claim.InProgress)
	b.finishes("k", g.Token, passing, claim.Released)
	conflicts()
	g = b.toldOf(with(1, ""), claim.First).Claim
	b.finishes("k", g.Token, unsure, claim.Unknown)
	conflicts()
	b.finishes("k", g.Token, blocked, claim.Failed)
	conflicts()
	b.toldOf(with(1, "capture"), claim.ReplayFailure)
}

// C25, H10, H22: a release frees the key; its request id is spent; repeating it is
// fine, also after the next claim and its finish.
func release(b *bench) {
	a := b.first("k", "a", 0)
	b.finishes("k", a.Token, passing, claim.Released)
	spent := b.asks("k")
	spent.RequestID, spent.Owner = "a", "erp-1"
	_, err := b.Store.Begin(b.Context(), spent)
	b.refuses(err, claim.RequestIDSpent)

	next := b.first("k", "b", 0)
	if next.Attempt != 2 || next.Previous != claim.PreviousReleased || next.Fence <= a.Fence || next.Token == a.Token {
		b.Fatalf("%+v after %+v", next, a)
	}
	b.finishes("k", a.Token, passing, claim.Pending)
	b.told("k", claim.InProgress)
	b.finishes("k", next.Token, done, claim.Succeeded)
	b.finishes("k", a.Token, passing, claim.Succeeded)
	b.told("k", claim.Replay)
}

// C12, C16, C17: a dead caller holds the key for its lease; what it does after a
// takeover changes nothing.
func takeover(b *bench) {
	a := b.first("k", "r", time.Second)
	b.lapse()
	next := b.first("k", "r", time.Hour) // its repeat is judged as anyone
	if next.Attempt != 2 || next.Previous != claim.PreviousLapsed || next.Fence <= a.Fence || next.Token == a.Token {
		b.Fatalf("%+v after %+v", next, a)
	}
	for _, late := range []claim.FinishRequest{done, blocked, passing, unsure} {
		_, err := b.finish("k", a.Token, late)
		if told := b.refuses(err, claim.ClaimLost); told["attempt"] != "2" || told["state"] != "STATE_PENDING" {
			b.Fatalf("told %v", told)
		}
	}
	_, err := b.extend("k", a.Token, time.Hour)
	b.refuses(err, claim.ClaimLost)
	b.told("k", claim.InProgress)
	b.finishes("k", next.Token, otherwise, claim.Succeeded)
	_, err = b.finish("k", a.Token, otherwise)
	b.refuses(err, claim.ClaimLost)
	if r := b.told("k", claim.Replay).Record; r.Attempt != 2 || string(r.Result.Body) != "otherwise" {
		b.Fatalf("replayed %+v", r)
	}
}

// C20, H16, H28: under TAKEOVER_NEVER a lapsed claim is unknown, whatever the
// policy is by then, until its holder or an operator says what happened.
func takeoverNever(b *bench) {
	b.policy(func(p *claim.Policy) { p.TakeoverNever = true })
	late := b.first("late", "", time.Second)
	asked := b.first("asked", "", time.Second)
	extended := b.first("extended", "", time.Second)
	b.policy(nil)
	b.lapse()
	for _, key := range []string{"late", "asked", "extended"} {
		b.told(key, claim.OutcomeUnknown)
		if f, err := b.Store.Get(b.Context(), &claim.GetRequest{Namespace: b.ns, Key: key}); err != nil || f.Record.State != claim.Unknown {
			b.Fatalf("Get %s: %+v, %v", key, f.Record, err)
		}
	}
	b.finishes("late", late.Token, done, claim.Succeeded)
	b.told("late", claim.Replay)
	if f, err := b.resolves("asked", claim.ResolveRequest{State: claim.Released}); err != nil || f.Record.State != claim.Released {
		b.Fatalf("resolve: %+v, %v", f.Record, err)
	}
	_, err := b.finish("asked", asked.Token, done)
	b.refuses(err, claim.ClaimLost)
	b.told("asked", claim.First)
	if _, err := b.extend("extended", extended.Token, time.Hour); err != nil {
		b.Fatal(err)
	}
	b.told("extended", claim.InProgress)
}

// C35, G2: the same finish again is fine, a different one is told what is stored.
func finishAgain(b *bench) {
	g := b.first("k", "", 0)
	f := b.finishes("k", g.Token, done, claim.Succeeded)
	for range 2 {
		if again := b.finishes("k", g.Token, done, claim.Succeeded); again.Record.Revision != f.Record.Revision {
			b.Fatalf("written again: %d, was %d", again.Record.Revision, f.Record.Revision)
		}
	}
	for _, other := range []claim.FinishRequest{otherwise, blocked, passing, unsure, {}} {
		_, err := b.finish("k", g.Token, other)
		told := b.refuses(err, claim.AlreadyFinished)
		if told["state"] != "STATE_SUCCEEDED" || told["attempt"] != "1" || told["digest"] != fmt.Sprintf("%x", f.Record.Digest) || told["finished_at"] == "" {
			b.Fatalf("told %v", told)
		}
	}
	if r := b.told("k", claim.Replay).Record; r.Revision != f.Record.Revision || !bytes.Equal(r.Digest, f.Record.Digest) {
		b.Fatalf("finished as %+v, replayed %+v", f.Record, r)
	}
}

// G3, G11: a token finishes its own key only; keys that nobody knows are told so.
func finishByAnyoneElse(b *bench) {
	g := b.first("k", "", 0)
	other := b.first("other", "", 0)
	for _, token := range []string{"", "nonsense", other.Token, g.Token[1:] + "A"} {
		_, err := b.finish("k", token, done)
		b.refuses(err, claim.TokenInvalid)
		_, err = b.extend("k", token, time.Hour)
		b.refuses(err, claim.TokenInvalid)
	}
	b.told("k", claim.InProgress)
	b.finishes("k", g.Token, done, claim.Succeeded)
}

// H23, H37: after its own release a claim may still complete, while no newer one was
// given; anything else leaves the key free.
func finishAfterItsOwnRelease(b *bench) {
	g := b.first("free", "", 0)
	b.finishes("free", g.Token, passing, claim.Released)
	b.finishes("free", g.Token, passing, claim.Released)
	b.finishes("free", g.Token, unsure, claim.Released)
	b.told("free", claim.First)

	g = b.first("done", "", 0)
	b.finishes("done", g.Token, passing, claim.Released)
	_, err := b.extend("done", g.Token, time.Hour)
	b.refuses(err, claim.ClaimLost)
	b.finishes("done", g.Token, done, claim.Succeeded)
	b.finishes("done", g.Token, passing, claim.Succeeded)
	b.told("done", claim.Replay)
}

// C27: UNKNOWN holds the key; its own holder may still finish it.
func unknownOutcome(b *bench) {
	g := b.first("k", "r", 0)
	b.finishes("k", g.Token, unsure, claim.Unknown)
	b.finishes("k", g.Token, unsure, claim.Unknown)
	again := b.asks("k")
	again.RequestID, again.Owner = "r", "erp-1"
	b.toldOf(again, claim.OutcomeUnknown)
	_, err := b.extend("k", g.Token, time.Hour)
	b.refuses(err, claim.ClaimLost)
	_, err = b.forgets("k", false)
	b.refuses(err, claim.ClaimLive)
	b.finishes("k", g.Token, done, claim.Succeeded)
	b.told("k", claim.Replay)
}

// C39, C40: a result over the limit is omitted and the key finished; an empty one
// replays as empty.
func largeResult(b *bench) {
	large := claim.FinishRequest{Result: &claim.Result{Code: 200, Body: make([]byte, 1025), Metadata: map[string]string{"etag": "1"}}}
	g := b.first("large", "", 0)
	b.finishes("large", g.Token, large, claim.Succeeded)
	b.finishes("large", g.Token, large, claim.Succeeded)
	r := b.told("large", claim.Replay).Record
	if !r.ResultOmitted || r.ResultSize != 1025 || r.Result.Body != nil || r.Result.Metadata["etag"] != "1" {
		b.Fatalf("replayed %+v of %+v", r.Result, r)
	}
	omitted := claim.FinishRequest{Omitted: &claim.Omitted{Digest: r.Digest, Size: 1025}}
	b.finishes("large", g.Token, omitted, claim.Succeeded)
	g = b.first("omitted", "", 0)
	b.finishes("omitted", g.Token, omitted, claim.Succeeded)
	b.finishes("omitted", g.Token, large, claim.Succeeded)

	g = b.first("empty", "", 0)
	b.finishes("empty", g.Token, claim.FinishRequest{}, claim.Succeeded)
	if r := b.told("empty", claim.Replay).Record; r.ResultOmitted || r.ResultSize != 0 || r.Result != nil && len(r.Result.Body) != 0 {
		b.Fatalf("replayed %+v of %+v", r.Result, r)
	}
}

// C15, H11: an extended claim outlives its first lease; a deadline never moves back;
// a lapsed claim can be extended while nobody took it over.
func extend(b *bench) {
	alive, lapsed := b.first("alive", "", time.Second), b.first("lapsed", "", time.Second)
	g, err := b.extend("alive", alive.Token, time.Hour)
	if err != nil || g.Token != alive.Token || g.Fence != alive.Fence || g.Attempt != 1 || g.Left <= 30*time.Minute || g.Left > time.Hour {
		b.Fatalf("extended to %+v, %v", g, err)
	}
	if g, err = b.extend("alive", alive.Token, 2*time.Second); err != nil || g.Left <= 30*time.Minute {
		b.Fatalf("moved back to %+v, %v", g, err)
	}
	if g, err = b.extend("alive", alive.Token, 2*time.Hour); err != nil || g.Left <= time.Hour || g.Fence != alive.Fence {
		b.Fatalf("extended again to %+v, %v", g, err)
	}
	b.lapse()
	b.told("alive", claim.InProgress)
	if g, err = b.extend("lapsed", lapsed.Token, 0); err == nil {
		b.Fatalf("extended by nothing to %+v", g)
	}
	b.refuses(err, claim.LeaseInvalid)
	if g, err = b.extend("lapsed", lapsed.Token, 100*time.Hour); err != nil || g.Left <= time.Hour || g.Left > 2*time.Hour {
		b.Fatalf("extended to %+v, %v, want max_lease", g, err)
	}
	b.told("lapsed", claim.InProgress)
	b.finishes("alive", alive.Token, done, claim.Succeeded)
	_, err = b.extend("alive", alive.Token, time.Hour)
	b.refuses(err, claim.ClaimLost)
}

func get(b *bench) {
	_, err := b.Store.Get(b.Context(), &claim.GetRequest{Namespace: b.ns, Key: "k"})
	b.refuses(err, claim.RecordNotFound)
	req := b.asks("k")
	req.Operation, req.Owner, req.Fingerprint = "capture", "erp-1", bytes.Repeat([]byte{1}, 32)
	req.Labels, req.TraceID = map[string]string{"plant": "7"}, bytes.Repeat([]byte{2}, 16)
	g := b.toldOf(req, claim.First).Claim
	f, err := b.Store.Get(b.Context(), &claim.GetRequest{Namespace: b.ns, Key: "k"})
	if err != nil {
		b.Fatal(err)
	}
	r := f.Record
	if r.Namespace != b.ns || r.Key != "k" || r.State != claim.Pending || r.Operation != "capture" || r.Owner != "erp-1" || !bytes.Equal(r.Fingerprint, req.Fingerprint) ||
		!maps.Equal(r.Labels, req.Labels) || !bytes.Equal(r.TraceID, req.TraceID) || r.Attempt != 1 || r.CreatedAt.IsZero() || r.ClaimedAt.IsZero() || !r.FinishedAt.IsZero() {
		b.Fatalf("pending: %+v", r)
	}
	if left := r.LeaseUntil.Sub(f.Now); left <= 30*time.Minute || left > time.Hour+time.Second || f.Revision < r.Revision || r.Revision == 0 || f.Source != claim.SourceEtcd {
		b.Fatalf("pending: %v left of %+v", left, f)
	}
	done := b.finishes("k", g.Token, done, claim.Succeeded)
	f, err = b.Store.Get(b.Context(), &claim.GetRequest{Namespace: b.ns, Key: "k"})
	if err != nil || f.Record.State != claim.Succeeded || string(f.Record.Result.Body) != "done\x00\xff" || f.Record.Revision != done.Record.Revision || f.Record.FinishedAt.IsZero() || f.Record.LeaseUntil != 0 {
		b.Fatalf("finished: %+v, %v", f.Record, err)
	}
}

func resolve(b *bench) {
	release := claim.ResolveRequest{State: claim.Released}
	succeed := claim.ResolveRequest{State: claim.Succeeded, Result: done.Result}
	fail := claim.ResolveRequest{State: claim.Failed, Failure: blocked.Failure}
	_, err := b.resolves("k", release)
	b.refuses(err, claim.RecordNotFound)
	b.first("k", "", 0)
	_, err = b.resolves("k", succeed)
	b.refuses(err, claim.ClaimLive)
	for key, c := range map[string]struct {
		req  claim.ResolveRequest
		want claim.Verdict
	}{"succeeded": {succeed, claim.Replay}, "failed": {fail, claim.ReplayFailure}, "released": {release, claim.First}} {
		g := b.first(key, "r", 0)
		b.finishes(key, g.Token, unsure, claim.Unknown)
		f, err := b.resolves(key, c.req)
		if err != nil || f.Record.State != c.req.State {
			b.Fatalf("%s: %+v, %v", key, f.Record, err)
		}
		again, err := b.resolves(key, c.req)
		if key == "released" {
			if err != nil || again.Record.Revision != f.Record.Revision {
				b.Fatalf("%s again: %+v, %v", key, again.Record, err)
			}
		} else {
			b.refuses(err, claim.AlreadyFinished)
		}
		b.told(key, c.want)
	}
}

// A key whose attempts are used up waits for an operator, who may allow as many more.
func usedUp(b *bench) {
	b.policy(func(p *claim.Policy) { p.MaxAttempts = 2 })
	for attempt := int32(1); attempt <= 4; attempt++ {
		g := b.first("k", "", 0)
		if g.Attempt != attempt {
			b.Fatalf("attempt %d, want %d", g.Attempt, attempt)
		}
		b.finishes("k", g.Token, passing, claim.Released)
		if attempt%2 != 0 {
			continue
		}
		if a := b.told("k", claim.OutcomeUnknown); a.Detail == "" {
			b.Fatal("it is not said that the attempts are used up")
		}
		if _, err := b.resolves("k", claim.ResolveRequest{State: claim.Released}); err != nil {
			b.Fatal(err)
		}
	}
	b.told("k", claim.First)
}

// G4: once forget has answered, the key is as new and the old answer never comes back.
func forget(b *bench) {
	_, err := b.forgets("k", true)
	b.refuses(err, claim.RecordNotFound)
	g := b.first("k", "r", 0)
	_, err = b.forgets("k", false)
	b.refuses(err, claim.ClaimLive)
	b.finishes("k", g.Token, done, claim.Succeeded)
	revision, err := b.forgets("k", false)
	if err != nil || revision <= 0 {
		b.Fatalf("forget: %d, %v", revision, err)
	}
	_, err = b.Store.Get(b.Context(), &claim.GetRequest{Namespace: b.ns, Key: "k"})
	b.refuses(err, claim.RecordNotFound)
	_, err = b.finish("k", g.Token, done)
	b.refuses(err, claim.RecordNotFound)
	other := b.asks("k")
	other.Fingerprint, other.Operation = bytes.Repeat([]byte{2}, 32), "another"
	next := b.toldOf(other, claim.First).Claim
	if next.Attempt != 1 || next.Previous != claim.PreviousNone || next.Fence <= g.Fence {
		b.Fatalf("%+v after %+v", next, g)
	}
	_, err = b.finish("k", g.Token, done)
	b.refuses(err, claim.ClaimLost)
	b.finishes("k", next.Token, otherwise, claim.Succeeded)
	if r := b.told("k", claim.Replay).Record; string(r.Result.Body) != "otherwise" {
		b.Fatalf("replayed %+v", r)
	}
}

// H05: while a forget is under way, Begins are held: a caller sees the old answer,
// then IN_PROGRESS, then FIRST, in this order, and FIRST by the time it has answered. Only a
// cache may still tell the old answer meanwhile: of another node, that has not heard of it.
func forgetAgainstBegins(b *bench) {
	g := b.first("k", "", 0)
	b.finishes("k", g.Token, done, claim.Succeeded)
	answered := make(chan error, 1)
	go func() {
		_, err := b.forgets("k", false)
		answered <- err
	}()
	order := []claim.Verdict{claim.Replay, claim.InProgress, claim.First}
	at := 0
	for {
		over := len(answered) > 0
		a, err := b.Store.Begin(b.Context(), b.asks("k"))
		if err != nil {
			b.Error(err)
			break
		}
		now := slices.Index(order, a.Verdict)
		if now == 0 && at == 1 && !over && a.Source != claim.SourceEtcd {
			continue
		}
		if now < at || over && now != 2 {
			b.Errorf("verdict %d after %d; forget has answered: %v", a.Verdict, order[at], over)
			break
		}
		if at = now; a.Verdict == claim.First {
			break
		}
	}
	if err := <-answered; err != nil {
		b.Fatal(err)
	}
}

// C55, C57: a result whose time is over is EXPIRED, a key whose time is over is new,
// removed or not.
func expiry(b *bench) {
	b.policy(func(p *claim.Policy) { p.ResultRetention = time.Second })
	for key, req := range map[string]claim.FinishRequest{"succeeded": done, "failed": blocked} {
		g := b.first(key, "", 0)
		if _, err := b.finish(key, g.Token, req); err != nil {
			b.Fatal(err)
		}
	}
	b.policy(func(p *claim.Policy) { p.ResultRetention, p.KeyRetention = time.Second, time.Second })
	g := b.first("gone", "r", 0)
	b.finishes("gone", g.Token, done, claim.Succeeded)
	b.policy(nil) // each is kept as it was promised at its claim
	b.lapse()
	for key, want := range map[string]claim.KeyAction{"succeeded": claim.Stop, "failed": claim.Rotate} {
		a := b.told(key, claim.Expired)
		if a.KeyAction() != want || a.Record.FinishedAt.IsZero() || len(a.Record.Digest) != 32 || a.Record.Result != nil || a.Record.Failure != nil {
			b.Fatalf("%s: %+v, key action %d", key, a.Record, a.KeyAction())
		}
		if f, err := b.Store.Get(b.Context(), &claim.GetRequest{Namespace: b.ns, Key: key}); err != nil || f.Record.Result != nil || f.Record.Failure != nil || len(f.Record.Digest) != 32 {
			b.Fatalf("%s: %+v, %v", key, f.Record, err)
		}
	}
	_, err := b.finish("gone", g.Token, done)
	b.refuses(err, claim.RecordNotFound)
	_, err = b.extend("gone", g.Token, time.Hour)
	b.refuses(err, claim.RecordNotFound)
	_, err = b.Store.Get(b.Context(), &claim.GetRequest{Namespace: b.ns, Key: "gone"})
	b.refuses(err, claim.RecordNotFound)
	if next := b.first("gone", "r", 0); next.Attempt != 1 || next.Previous != claim.PreviousNone || next.Fence <= g.Fence {
		b.Fatalf("%+v after %+v", next, g)
	}
}

// A policy governs from the moment it is put; a held namespace gives no claims.
func policyChange(b *bench) {
	b.policy(func(p *claim.Policy) { p.DefaultLease, p.MaxLease = 2*time.Minute, 3*time.Minute })
	if g := b.first("default", "", 0); g.Left > 2*time.Minute || g.Left < time.Minute {
		b.Fatalf("%v left of the default", g.Left)
	}
	if g := b.first("most", "", 9*time.Hour); g.Left > 3*time.Minute || g.Left < 2*time.Minute {
		b.Fatalf("%v left of max_lease", g.Left)
	}
	if g := b.first("least", "", time.Nanosecond); g.Left > time.Second {
		b.Fatalf("%v left of the least", g.Left)
	}
	b.policy(func(p *claim.Policy) { p.RequireFingerprint = true })
	_, err := b.Store.Begin(b.Context(), b.asks("k"))
	b.refuses(err, claim.FingerprintRequired)
	b.policy(nil)
	b.told("k", claim.First)
}

// What cannot be is refused, with a reason, and nothing is written.
func refusals(b *bench) {
	for _, none := range []time.Duration{0, -1} {
		req := b.asks("k")
		req.Lease = &none
		_, err := b.Store.Begin(b.Context(), req)
		b.refuses(err, claim.LeaseInvalid)
	}
	_, err := b.Store.Get(b.Context(), &claim.GetRequest{Namespace: b.ns, Key: "k"})
	b.refuses(err, claim.RecordNotFound)
	g := b.first("k", "", 0)
	_, err = b.Store.Finish(b.Context(), &claim.FinishRequest{Namespace: b.ns, Key: "never-begun", Token: g.Token})
	b.refuses(err, claim.TokenInvalid)
}

func list(b *bench) {
	want := map[string]claim.State{}
	for i := range 25 {
		key := fmt.Sprintf("k%02d", i)
		g := b.first(key, "", 0)
		want[key] = claim.Pending
		if i%5 == 0 {
			b.finishes(key, g.Token, done, claim.Succeeded)
			want[key] = claim.Succeeded
		}
	}
	other := *b
	other.ns = b.ns + "x"
	other.policy(nil)
	other.first("k99", "", 0)
	for _, size := range []int{1, 10, 25, 100} {
		b.lists(size, 0, want)
	}
	maps.DeleteFunc(want, func(_ string, s claim.State) bool { return s != claim.Succeeded })
	b.lists(2, claim.Succeeded, want)
	b.lists(10, claim.Failed, nil)
	_, err := b.Store.List(b.Context(), &claim.ListRequest{Namespace: b.ns, Size: 10, Page: "no page token!"})
	b.refuses(err, claim.RequestInvalid)
}

// lists walks all pages, and must see each record once, in its state and without
// its body.
func (b *bench) lists(size int, state claim.State, want map[string]claim.State) {
	b.Helper()
	seen := map[string]claim.State{}
	for page, pages := "", 0; pages == 0 || page != ""; pages++ {
		got, err := b.Store.List(b.Context(), &claim.ListRequest{Namespace: b.ns, State: state, Size: size, Page: page})
		if err != nil || len(got.Records) > size || pages > 1000 {
			b.Fatalf("page %d of %d: %d records, %v", pages, size, len(got.Records), err)
		}
		for _, r := range got.Records {
			if _, twice := seen[r.Key]; twice || r.Namespace != b.ns || r.Result != nil && r.Result.Body != nil {
				b.Fatalf("%s of %s listed twice, of elsewhere or with its body", r.Key, r.Namespace)
			}
			seen[r.Key] = r.State
		}
		page = got.Next
	}
	if !maps.Equal(seen, want) && len(seen)+len(want) > 0 {
		b.Fatalf("in pages of %d: %v, want %v", size, seen, want)
	}
}
