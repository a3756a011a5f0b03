package claimtest

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Clock lets cluster time pass.
type Clock interface {
	// Advance returns once at least d of cluster time has passed for the Store.
	Advance(t *testing.T, d time.Duration)
}

// Harness is a Store and what moves it.
type Harness struct {
	Store claim.Store
	Clock Clock
	// PutPolicy returns once the Store obeys the policy.
	PutPolicy func(t *testing.T, namespace string, p claim.Policy)
}

// Suite checks that a Store behaves as claim.Store must. Each of its tests runs in
// parallel, opens a Harness of its own and uses a namespace of its own, so that
// harnesses may share what is behind them: wherever a claim or a record must last,
// it lasts an hour, and no test minds if more time passes than it asked for. A
// Store that must really wait waits for some ten seconds.
func Suite(t *testing.T, open func(t *testing.T) Harness) {
	for _, test := range []struct {
		name string
		run  func(b *bench)
	}{
		{"OneFirstAmongAHundred", oneFirstAmongAHundred},
		{"OneHolderAtATime", oneHolderAtATime},
		{"OneFinishAmongMany", oneFinishAmongMany},
		{"Together", together},
		{"Repeat", repeat},
		{"Replay", replay},
		{"ReplayFailure", replayFailure},
		{"Conflict", conflict},
		{"Release", release},
		{"Takeover", takeover},
		{"TakeoverNever", takeoverNever},
		{"FinishAgain", finishAgain},
		{"FinishByAnyoneElse", finishByAnyoneElse},
		{"FinishAfterItsOwnRelease", finishAfterItsOwnRelease},
		{"UnknownOutcome", unknownOutcome},
		{"LargeResult", largeResult},
		{"Extend", extend},
		{"Get", get},
		{"Resolve", resolve},
		{"UsedUp", usedUp},
		{"Forget", forget},
		{"ForgetAgainstBegins", forgetAgainstBegins},
		{"Expiry", expiry},
		{"PolicyChange", policyChange},
		{"Refusals", refusals},
		{"List", list},
		{"RandomHistories", randomHistories},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			id := claim.NewID()
			b := &bench{T: t, Harness: open(t), ns: fmt.Sprintf("%s-%x", strings.ToLower(test.name), id[:4])}
			b.policy(nil)
			test.run(b)
		})
	}
}

// bench is one test with its Store and namespace.
type bench struct {
	*testing.T
	Harness
	ns string
}

// policy puts a policy under which all lasts for an hour, but for what is changed.
func (b *bench) policy(change func(p *claim.Policy)) {
	b.Helper()
	p := claim.Policy{
		DefaultLease: time.Hour, MaxLease: 2 * time.Hour,
		ResultRetention: time.Hour, KeyRetention: 2 * time.Hour,
		MaxResultBytes: 1024,
	}
	if change != nil {
		change(&p)
	}
	b.PutPolicy(b.T, b.ns, p)
}

// asks makes a Begin of anyone.
func (b *bench) asks(key string) *claim.BeginRequest {
	return &claim.BeginRequest{Namespace: b.ns, Key: key}
}

func (b *bench) begin(req *claim.BeginRequest) claim.Answer {
	b.Helper()
	a, err := b.Store.Begin(b.Context(), req)
	if err != nil {
		b.Fatalf("Begin %s: %v", req.Key, err)
	}
	return a
}

// told begins as anyone and checks the verdict.
func (b *bench) told(key string, want claim.Verdict) claim.Answer {
	b.Helper()
	return b.toldOf(b.asks(key), want)
}

func (b *bench) toldOf(req *claim.BeginRequest, want claim.Verdict) claim.Answer {
	b.Helper()
	a := b.begin(req)
	if a.Verdict != want {
		b.Fatalf("Begin %s: verdict %d (%s), want %d", req.Key, a.Verdict, a.Detail, want)
	}
	if (a.Verdict == claim.First) != (a.Claim != nil && a.Claim.Token != "" && a.Claim.Fence > 0) {
		b.Fatalf("Begin %s: verdict %d with claim %+v", req.Key, a.Verdict, a.Claim)
	}
	sentAway := want == claim.InProgress || want == claim.OutcomeUnknown
	// A cache may tell of what is finished, and of nothing else.
	finished := want == claim.Replay || want == claim.ReplayFailure || want == claim.Conflict
	if sentAway != (a.RetryAfter > 0) || a.Source == 0 || a.Source != claim.SourceEtcd && !finished || a.Stale {
		b.Fatalf("Begin %s: %+v", req.Key, a)
	}
	return a
}

// first begins with a request id and must be given the claim.
func (b *bench) first(key, requestID string, lease time.Duration) *claim.Grant {
	b.Helper()
	req := b.asks(key)
	req.RequestID, req.Owner = requestID, "erp-1"
	if lease != 0 {
		req.Lease = &lease
	}
	a := b.toldOf(req, claim.First)
	if a.Repeat {
		b.Fatalf("Begin %s: a repeat", key)
	}
	// H02, H33: no claim is told of with less than half of its lease, or more than
	// is true.
	if whole := lease - 100*time.Millisecond; lease >= time.Second && lease <= time.Hour && (a.Claim.Left > whole || a.Claim.Left < whole-lease/2) {
		b.Fatalf("Begin %s: %v left of %v", key, a.Claim.Left, lease)
	}
	return a.Claim
}

func (b *bench) finish(key, token string, req claim.FinishRequest) (claim.Found, error) {
	req.Namespace, req.Key, req.Token = b.ns, key, token
	return b.Store.Finish(b.Context(), &req)
}

// finishes must be accepted, and the record be in this state.
func (b *bench) finishes(key, token string, req claim.FinishRequest, want claim.State) claim.Found {
	b.Helper()
	f, err := b.finish(key, token, req)
	if err != nil || f.Record.State != want {
		b.Fatalf("finish %s: %+v, %v, want %v", key, f.Record, err, want)
	}
	return f
}

// refuses checks an error's reason and returns its metadata.
func (b *bench) refuses(err error, want claim.Reason) map[string]string {
	b.Helper()
	var told *claim.Error
	if !errors.As(err, &told) || told.Reason != want {
		b.Fatalf("%v, want %s", err, want)
	}
	return told.Metadata
}

func (b *bench) extend(key, token string, lease time.Duration) (*claim.Grant, error) {
	return b.Store.Extend(b.Context(), &claim.ExtendRequest{Namespace: b.ns, Key: key, Token: token, Lease: &lease})
}

func (b *bench) resolves(key string, req claim.ResolveRequest) (claim.Found, error) {
	req.Namespace, req.Key, req.Reason = b.ns, key, "asked the bank"
	return b.Store.Resolve(b.Context(), &req)
}

func (b *bench) forgets(key string, force bool) (int64, error) {
	return b.Store.Forget(b.Context(), &claim.ForgetRequest{Namespace: b.ns, Key: key, Reason: "test", Force: force})
}

// lapse lets so much time pass that a lease or a retention of a second is over.
func (b *bench) lapse() { b.Clock.Advance(b.T, time.Second+claim.Grace) }

// at once runs f n times at the same time.
func atOnce(n int, f func(i int)) {
	var callers sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		callers.Go(func() { <-start; f(i) })
	}
	close(start)
	callers.Wait()
}

var (
	done      = claim.FinishRequest{Result: &claim.Result{Code: 201, ContentType: "text/plain", Body: []byte("done\x00\xff"), Metadata: map[string]string{"Location": "/7", "Set-Cookie": "s"}}}
	otherwise = claim.FinishRequest{Result: &claim.Result{Code: 201, ContentType: "text/plain", Body: []byte("otherwise")}}
	blocked   = claim.FinishRequest{Failure: &claim.Failure{Class: claim.Terminal, Code: 9, Message: "blocked", Details: []claim.Detail{{TypeURL: "type.googleapis.com/x.Y", Value: []byte{255, 0}}}}}
	passing   = claim.FinishRequest{Failure: &claim.Failure{Class: claim.Retryable, Message: "503"}}
	unsure    = claim.FinishRequest{Failure: &claim.Failure{Class: claim.UnknownOutcome, Message: "no answer"}}
)

// G1, C01: exactly one caller is given the claim.
func oneFirstAmongAHundred(b *bench) {
	var mu sync.Mutex
	verdicts := map[claim.Verdict]int{}
	atOnce(100, func(int) {
		a, err := b.Store.Begin(b.Context(), b.asks("k"))
		if err != nil {
			b.Error(err)
			return
		}
		if a.Verdict == claim.InProgress && (a.RetryAfter <= 0 || a.RetryAfter > time.Hour) {
			b.Errorf("retry_after %v", a.RetryAfter)
		}
		mu.Lock()
		defer mu.Unlock()
		verdicts[a.Verdict]++
	})
	if verdicts[claim.First] != 1 || verdicts[claim.InProgress] != 99 {
		b.Fatalf("verdicts %v", verdicts)
	}
}

// G1: through releases, nobody holds the key beside another, attempts count up and
// fences grow with them.
func oneHolderAtATime(b *bench) {
	var mu sync.Mutex
	holders, fences := 0, map[int32]int64{}
	enter := func(g *claim.Grant) {
		mu.Lock()
		defer mu.Unlock()
		if holders++; holders > 1 || fences[g.Attempt] != 0 {
			b.Errorf("attempt %d is held beside another, or was given twice", g.Attempt)
		}
		fences[g.Attempt] = g.Fence
	}
	leave := func() {
		mu.Lock()
		defer mu.Unlock()
		holders--
	}
	atOnce(8, func(int) {
		for range 10 {
			a, err := b.Store.Begin(b.Context(), b.asks("k"))
			if err != nil {
				b.Error(err)
				return
			}
			if a.Verdict != claim.First {
				continue
			}
			enter(a.Claim)
			leave()
			if _, err := b.finish("k", a.Claim.Token, passing); err != nil {
				b.Error(err)
			}
		}
	})
	for attempt := int32(2); int(attempt) <= len(fences); attempt++ {
		if fences[attempt] <= fences[attempt-1] {
			b.Errorf("attempt %d has fence %d after %d", attempt, fences[attempt], fences[attempt-1])
		}
	}
}

// G2: of many finishes at once one is stored, and all others are told which.
func oneFinishAmongMany(b *bench) {
	g := b.first("k", "", 0)
	var mu sync.Mutex
	accepted := []string{}
	digests := map[string]bool{}
	atOnce(20, func(i int) {
		body := fmt.Sprint("result ", i)
		_, err := b.finish("k", g.Token, claim.FinishRequest{Result: &claim.Result{Body: []byte(body)}})
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			accepted = append(accepted, body)
			return
		}
		var told *claim.Error
		if !errors.As(err, &told) || told.Reason != claim.AlreadyFinished {
			b.Error(err)
			return
		}
		digests[told.Metadata["digest"]] = true
	})
	a := b.told("k", claim.Replay)
	if len(accepted) != 1 || string(a.Record.Result.Body) != accepted[0] {
		b.Fatalf("accepted %v, replayed %s", accepted, a.Record.Result.Body)
	}
	if len(digests) != 1 || !digests[fmt.Sprintf("%x", a.Record.Digest)] {
		b.Fatalf("the losers were told %v, stored is %x", digests, a.Record.Digest)
	}
}
