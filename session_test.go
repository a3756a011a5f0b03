package dualcheck

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

func k(name string) Key { return Key{Namespace: "orders", Key: name} }

func TestConcurrentCallsShareFrames(t *testing.T) {
	var answers []*dualcheckv1.SessionAnswer
	f := start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		answers = append(answers, first(c))
		frames := s.fake.seen()
		if last := frames[len(frames)-1]; c == last[len(last)-1] { // a frame is answered by a frame
			s.send(&dualcheckv1.SessionResponse{Answers: answers})
			answers = nil
		}
		return nil
	})
	c := newClient(t, []string{f.addr})
	const n = 4000
	all := keys(n)
	if err := together(500, n-1, func(i int) error {
		out, err := c.Begin(t.Context(), all[i])
		if err == nil && out.Claim.Token != all[i].Key {
			err = fmt.Errorf("%s has the claim of %s", all[i].Key, out.Claim.Token)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if frames := len(f.seen()); frames > n/4 {
		t.Errorf("%d calls went in %d frames", n, frames)
	}
}

func TestAnIdleClientSendsACallAtOnce(t *testing.T) {
	f := start(t, nil)
	c := newClient(t, []string{f.addr})
	for i := range 3 {
		if _, err := c.Begin(t.Context(), k("a")); err != nil {
			t.Fatal(err)
		}
		if frames := f.seen(); len(frames) != i+1 || len(frames[i]) != 1 {
			t.Fatalf("%d frames after %d calls", len(frames), i+1)
		}
	}
}

func TestFramesKeepTheOrderAndTheBounds(t *testing.T) {
	s := &session{pending: map[uint64]*call{}, wake: make(chan struct{}, 1)}
	sizes := make([]int, 2500)
	sizes = append(sizes, bytesInFrame/2, bytesInFrame/2, 3*bytesInFrame, 10)
	for _, size := range sizes {
		if !s.enqueue(&call{kind: kindGet, body: make([]byte, size)}) {
			t.Fatal("not taken")
		}
	}
	s.cancels = []uint64{99}
	var lengths []int
	var last uint64
	for {
		batch, cancels := s.take(nil, nil, time.Now())
		if len(batch)+len(cancels) == 0 {
			break
		}
		lengths = append(lengths, len(batch)+len(cancels))
		for _, cl := range batch {
			if cl.id != last+1 {
				t.Fatalf("call %d after %d", cl.id, last)
			}
			last = cl.id
		}
	}
	// 1,000 and 1,000; 500 and half a frame, with the cancel; half a frame; one alone; 1.
	if want := []int{1000, 1000, 502, 1, 1, 1}; !slices.Equal(lengths, want) {
		t.Errorf("frames of %v calls, want %v", lengths, want)
	}
}

func TestAnswersComeInAnyOrder(t *testing.T) {
	const n = 100
	var held []*dualcheckv1.SessionAnswer
	f := start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		if held = append(held, first(c)); len(held) == n {
			slices.Reverse(held)
			s.send(&dualcheckv1.SessionResponse{Answers: append(held, &dualcheckv1.SessionAnswer{Id: 1 << 40})})
		}
		return nil
	})
	c := newClient(t, []string{f.addr})
	all := keys(n + 1)
	if err := together(n, n, func(i int) error {
		out, err := c.Begin(t.Context(), all[i])
		if err == nil && out.Claim.Token != all[i].Key {
			err = fmt.Errorf("%s has the claim of %s", all[i].Key, out.Claim.Token)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

func TestC54ABrokenStreamIsRetriedWithTheSameRequestID(t *testing.T) {
	var n atomic.Int64
	f := start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		if n.Add(1) == 1 {
			return errBroken
		}
		return s.answer(well(c))
	})
	var seen []Retry
	c := newClient(t, []string{f.addr}, WithOwner("me"), WithObserver(observer(func(r Retry) { seen = append(seen, r) })))
	for _, opts := range [][]CallOption{nil, nil, {RequestID("mine")}} {
		if _, err := c.Begin(t.Context(), k("a"), opts...); err != nil {
			t.Fatal(err)
		}
	}
	calls := f.calls()
	if len(calls) != 4 {
		t.Fatalf("%d calls", len(calls))
	}
	if !proto.Equal(calls[0].GetBegin(), calls[1].GetBegin()) || len(calls[0].GetBegin().GetRequestId()) != 36 || calls[0].GetBegin().GetOwner() != "me" {
		t.Errorf("sent %v, then %v", calls[0], calls[1])
	}
	if calls[0].GetRetryCount() != 0 || calls[1].GetRetryCount() != 1 || calls[2].GetRetryCount() != 0 {
		t.Errorf("retry counts %v", calls)
	}
	if calls[2].GetBegin().GetRequestId() == calls[1].GetBegin().GetRequestId() {
		t.Error("the next call has the same request id")
	}
	if calls[3].GetBegin().GetRequestId() != "mine" {
		t.Errorf("the caller's request id became %q", calls[3].GetBegin().GetRequestId())
	}
	if len(seen) != 1 || seen[0].Method != "Begin" || !errors.Is(seen[0].Err, ErrConnectionLost) {
		t.Errorf("observed %+v", seen)
	}
}

type observer func(Retry)

func (o observer) Retrying(r Retry) { o(r) }

func TestACancelledCallReturnsAtOnceAndIsWithdrawn(t *testing.T) {
	f := start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		if c.GetGet() != nil {
			return s.answer(well(c))
		}
		return nil
	})
	c := newClient(t, []string{f.addr})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := c.Begin(ctx, k("a"), Wait(20*time.Second))
		failed <- err
	}()
	within(t, "the call is there", func() bool { return len(f.calls()) == 1 })
	cancel()
	err := <-failed
	e, ok := errors.AsType[*Error](err)
	if !ok || !errors.Is(err, context.Canceled) || !errors.Is(err, ErrCanceled) || !e.MaybeAccepted || status.Code(err) != codes.Canceled {
		t.Fatalf("got %#v", err)
	}
	within(t, "the call is withdrawn", func() bool {
		calls := f.calls()
		return len(calls) == 2 && calls[1].GetCancel() != nil && calls[1].GetId() == calls[0].GetId()
	})
	if _, err := c.Get(t.Context(), k("a")); err != nil {
		t.Fatal(err)
	}
}

func TestTheDeadlineTravels(t *testing.T) {
	f := start(t, nil)
	c := newClient(t, []string{f.addr})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := c.Begin(ctx, k("a")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Begin(t.Context(), k("b")); err != nil {
		t.Fatal(err)
	}
	calls := f.calls()
	if d := calls[0].GetTimeout().AsDuration(); d <= 50*time.Second || d > time.Minute {
		t.Errorf("a timeout of %v", d)
	}
	if calls[1].GetTimeout() != nil {
		t.Errorf("a timeout of %v without a deadline", calls[1].GetTimeout())
	}
}

func TestADrainingServerAnswersWhatItTookAndGetsNoMore(t *testing.T) {
	drains := make(chan *fakeSession, 1)
	var waiting *dualcheckv1.SessionCall
	handle := func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		if c.GetBegin().GetWait() != nil {
			waiting = c
			drains <- s
			return nil
		}
		return s.answer(well(c))
	}
	held := make(chan struct{})
	holds := func(f *fake) {
		f.held = held
		sessions := 0
		f.opened = func(*fakeSession) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			if sessions++; sessions > 1 {
				return errBroken // it has stopped
			}
			return nil
		}
	}
	a, b := start(t, handle, holds), start(t, handle, holds)
	c := newClient(t, []string{a.addr, b.addr})
	within(t, "both are connected", func() bool { return c.up() == 2 })
	type answer struct {
		out *Outcome
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		out, err := c.Begin(t.Context(), k("a"), Wait(20*time.Second))
		answered <- answer{out, err}
	}()
	s := <-drains
	old, other := s.fake, a
	if old == a {
		other = b
	}
	before := len(other.calls())
	s.send(&dualcheckv1.SessionResponse{Draining: true})
	within(t, "the session is left", func() bool {
		if _, err := c.Begin(t.Context(), k("a")); err != nil {
			t.Fatal(err)
		}
		return len(other.calls()) > before
	})
	_ = s.answer(first(waiting))
	close(held)
	if got := <-answered; got.err != nil || got.out.Claim.Token != "a" {
		t.Fatalf("the call from before: %v", got.err)
	}
}

// up is how many servers have an open session.
func (c *Client) up() (n int) {
	for _, s := range c.servers {
		if s.session(0) != nil {
			n++
		}
	}
	return n
}

func TestAKeyStaysWithItsServer(t *testing.T) {
	var mu sync.Mutex
	by := map[string]string{} // key → the server that had it
	var fakes []*fake
	var addrs []string
	for range 3 {
		var f *fake
		f = start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
			key := c.GetBegin().GetKey() + c.GetComplete().GetKey()
			mu.Lock()
			defer mu.Unlock()
			if was, ok := by[key]; ok && was != f.addr {
				by[key] = "moved to " + f.addr
			} else {
				by[key] = f.addr
			}
			return s.answer(well(c))
		})
		fakes, addrs = append(fakes, f), append(addrs, f.addr)
	}
	one := newClient(t, addrs)
	slices.Reverse(addrs)
	two := newClient(t, addrs)
	within(t, "all are connected", func() bool { return one.up() == 3 && two.up() == 3 })
	all := keys(300)
	life := func(c *Client) {
		t.Helper()
		for _, key := range all {
			out, err := c.Begin(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Complete(t.Context(), out.Claim, Result{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	life(one)
	life(two)
	count := map[string]int{}
	before := map[string]string{}
	mu.Lock()
	for key, addr := range by {
		before[key] = addr
		count[addr]++
	}
	mu.Unlock()
	for _, f := range fakes {
		if count[f.addr] < 50 {
			t.Errorf("%d keys of 300 at %s: %v", count[f.addr], f.addr, count)
		}
	}
	gone := fakes[1]
	gone.srv.Stop()
	within(t, "it is missed", func() bool { return one.up() == 2 })
	life(one)
	mu.Lock()
	defer mu.Unlock()
	for key, addr := range by {
		if before[key] != gone.addr && addr != before[key] {
			t.Errorf("%s was at %s and %s, though that is there", key, before[key], addr)
		}
	}
}

func TestAServerThatDiesHasItsCallsRetriedElsewhere(t *testing.T) {
	silent := func(*fakeSession, *dualcheckv1.SessionCall) error { return nil }
	a, b := start(t, silent), start(t, silent)
	c := newClient(t, []string{a.addr, b.addr}, WithCloseTimeout(100*time.Millisecond))
	within(t, "both are connected", func() bool { return c.up() == 2 })
	done := make(chan error, 1)
	go func() {
		_, err := c.Complete(t.Context(), &Claim{Key: k("a"), Token: "x"}, Result{})
		done <- err
	}()
	within(t, "one has the call", func() bool { return len(a.calls())+len(b.calls()) == 1 })
	dies, lives := a, b
	if len(b.calls()) == 1 {
		dies, lives = b, a
	}
	dies.srv.Stop()
	within(t, "the other has it", func() bool { return len(lives.calls()) == 1 })
	if n := lives.calls()[0].GetRetryCount(); n != 1 {
		t.Errorf("retry count %d", n)
	}
	lives.srv.Stop()
	c.Close()
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestNothingHangsOrIsMixedUpWhenStreamsBreakAndCallersLeave(t *testing.T) {
	var n atomic.Int64
	handle := func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		switch i := n.Add(1); {
		case c.GetCancel() != nil:
			return nil
		case i%400 == 0:
			return errBroken
		case i%571 == 0:
			s.send(&dualcheckv1.SessionResponse{Draining: true, Answers: []*dualcheckv1.SessionAnswer{first(c)}})
			return nil
		case i%7 == 0:
			go func() { _ = s.answer(first(c)) }() // late, or never
			return nil
		}
		return s.answer(first(c))
	}
	a, b := start(t, handle), start(t, handle)
	c := newClient(t, []string{a.addr, b.addr}, WithTries(1000), WithStreams(2), WithMaxCalls(50))
	all := keys(3001)
	left := 0
	var mu sync.Mutex
	if err := together(100, len(all)-1, func(i int) error {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if i%5 == 0 {
			time.AfterFunc(time.Duration(i)*time.Microsecond, cancel)
		}
		out, err := c.Begin(ctx, all[i])
		switch {
		case err == nil && out.Claim.Token != all[i].Key:
			return fmt.Errorf("%s has the claim of %s", all[i].Key, out.Claim.Token)
		case err != nil && i%5 == 0 && errors.Is(err, context.Canceled):
			mu.Lock()
			left++
			mu.Unlock()
			return nil
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, s := range c.servers {
		for _, l := range s.lanes {
			if open := l.open.Load(); open != nil {
				open.mu.Lock()
				if len(open.pending)+len(open.queue) != 0 {
					t.Errorf("%d calls are left", len(open.pending)+len(open.queue))
				}
				open.mu.Unlock()
			}
		}
	}
	t.Logf("%d callers left", left)
}

func TestAServerWithoutSessionIsAskedByUnaryCalls(t *testing.T) {
	for _, opts := range [][]Option{nil, {WithUnary()}} {
		f := start(t, nil, func(f *fake) {
			f.opened = func(*fakeSession) error { return status.Error(codes.Unimplemented, "no sessions here") }
		})
		c := newClient(t, []string{f.addr}, opts...)
		out, err := c.Begin(t.Context(), k("second time"))
		if err != nil || out.Verdict != First || out.Claim.Token != "second time" || out.Claim.LeaseLeft() <= 0 {
			t.Fatalf("%v, %v", out, err)
		}
		f.mu.Lock()
		counts := []string{strings.Join(f.unary[0].Get("dualcheck-retry-count"), ","), strings.Join(f.unary[1].Get("dualcheck-retry-count"), ",")}
		f.mu.Unlock()
		if !slices.Equal(counts, []string{"0", "1"}) {
			t.Errorf("retry counts %v", counts)
		}
		_, err = c.Begin(t.Context(), k("never"))
		e, ok := errors.AsType[*Error](err)
		if !ok || e.Reason != ErrKeyInvalid || e.Field != "key" || e.Metadata["a"] != "b" || e.RetryAfter != time.Second || e.Tries != 1 {
			t.Errorf("got %+v", e)
		}
		if s, ok := status.FromError(err); !ok || s.Code() != codes.InvalidArgument || len(s.Details()) != 3 {
			t.Errorf("as a status: %v", s)
		}
	}
}

func TestAStreamThatIsRefusedLetsEachCallSpeakForItself(t *testing.T) {
	f := start(t, func(*fakeSession, *dualcheckv1.SessionCall) error {
		return status.Error(codes.InvalidArgument, "a frame that cannot be decoded")
	})
	c := newClient(t, []string{f.addr})
	if out, err := c.Begin(t.Context(), k("a")); err != nil || out.Verdict != First {
		t.Fatalf("%v, %v", out, err)
	}
}

func TestWhatIsNoTextIsNotSent(t *testing.T) {
	f := start(t, nil)
	c := newClient(t, []string{f.addr})
	_, err := c.Begin(t.Context(), k("\xff"))
	if !errors.Is(err, ErrKeyInvalid) || status.Code(err) != codes.InvalidArgument {
		t.Errorf("a key: %v", err)
	}
	if _, err = c.Begin(t.Context(), k("a"), Labels(map[string]string{"a": "\xff"})); !errors.Is(err, ErrLabelsInvalid) {
		t.Errorf("a label: %v", err)
	}
	if _, err = c.Complete(t.Context(), &Claim{Key: k("a"), Token: "x"}, Result{Metadata: map[string]string{"\xff": ""}}); !errors.Is(err, ErrResultInvalid) {
		t.Errorf("a result: %v", err)
	}
	if _, err = c.Complete(t.Context(), nil, Result{}); !errors.Is(err, ErrTokenInvalid) {
		t.Errorf("no claim: %v", err)
	}
	if len(f.calls()) != 0 {
		t.Error("something was sent")
	}
}

func TestCallsAreBoundedAndFinishesAreNot(t *testing.T) {
	f := start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		if c.GetBegin() != nil {
			return nil // for ever
		}
		return s.answer(well(c))
	})
	c := newClient(t, []string{f.addr}, WithMaxCalls(2))
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	for range 2 {
		waiting.Go(func() { _, _ = c.Begin(ctx, k("a")) })
	}
	within(t, "both are there", func() bool { return len(f.calls()) == 2 })
	short, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	_, err := c.Begin(short, k("b"))
	e, ok := errors.AsType[*Error](err)
	if !ok || !errors.Is(err, context.DeadlineExceeded) || e.MaybeAccepted {
		t.Errorf("one too many: %v", err)
	}
	claim := &Claim{Key: k("a"), Token: "x"}
	if err := c.Extend(t.Context(), claim, 0); err != nil || claim.LeaseLeft() <= 0 {
		t.Errorf("extend: %v", err)
	}
	if stored, err := c.Complete(t.Context(), claim, Result{}); err != nil || len(stored.Encoded()) == 0 {
		t.Errorf("complete: %v", err)
	}
	cancel()
	waiting.Wait()
}

func TestCloseWaitsForFinishesAndEndsTheRest(t *testing.T) {
	release := make(chan struct{})
	f := start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		if c.GetComplete() != nil {
			go func() { <-release; _ = s.answer(well(c)) }()
		}
		return nil
	})
	c := newClient(t, []string{f.addr})
	begun, completed, closed := make(chan error, 1), make(chan error, 1), make(chan error, 1)
	go func() { _, err := c.Begin(t.Context(), k("a")); begun <- err }()
	go func() {
		_, err := c.Complete(t.Context(), &Claim{Key: k("b"), Token: "x"}, Result{})
		completed <- err
	}()
	within(t, "both are there", func() bool { return len(f.calls()) == 2 })
	go func() { closed <- c.Close() }()
	within(t, "nothing new is begun", func() bool { return c.closing.Load() })
	if _, err := c.Begin(t.Context(), k("c")); !errors.Is(err, ErrClosed) {
		t.Errorf("a Begin while closing: %v", err)
	}
	close(release)
	if err := <-completed; err != nil {
		t.Errorf("the finish: %v", err)
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if err := <-begun; !errors.Is(err, ErrClosed) {
		t.Errorf("the Begin: %v", err)
	}
	if _, err := c.Complete(t.Context(), &Claim{Key: k("b"), Token: "x"}, Result{}); !errors.Is(err, ErrClosed) {
		t.Errorf("a finish after Close: %v", err)
	}
	goleakNow(t)
}

// goleakNow is for what TestMain's check would find only at the end.
func goleakNow(t *testing.T) {
	t.Helper()
	within(t, "no goroutine of the client is left", func() bool {
		buf := make([]byte, 1<<20)
		return !strings.Contains(string(buf[:runtime.Stack(buf, true)]), "dualcheck.(*lane)")
	})
}

func TestAllocationsPerCall(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer *dualcheckv1.BeginResponse
		most   float64
	}{
		{"first", firstAnswer(), 3},   // the outcome with its claim; its token; a share of the frames
		{"replay", replayAnswer(), 2}, // the outcome; a share of the frames
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newClient(t, []string{echo(t, answerBegin, tt.answer)})
			all := keys(1024)
			ctx := context.Background()
			call := func(i int) error { _, err := c.Begin(ctx, all[i%len(all)]); return err }
			n, most := 50_000, tt.most
			if raceDetector {
				n, most = 5_000, most+10
			}
			if err := together(256, n, call); err != nil {
				t.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if err := together(256, n, call); err != nil {
				t.Fatal(err)
			}
			runtime.ReadMemStats(&after)
			if each := float64(after.Mallocs-before.Mallocs) / float64(n); each > most {
				t.Errorf("%.2f allocations a call, over %.2f", each, most)
			}
		})
	}
}

func TestAReplayKeepsNoLargeFrame(t *testing.T) {
	s := &session{}
	a := s.copied([]byte("one"))
	b := s.copied(make([]byte, slabMost))
	if cap(s.slab) != slabSize || cap(a) != 3 || cap(b) != slabMost {
		t.Errorf("slab %d, answers %d and %d", cap(s.slab), cap(a), cap(b))
	}
	if large := s.copied(make([]byte, slabMost+1)); len(large) != slabMost+1 || len(s.slab) != 3+slabMost {
		t.Error("a large answer shares")
	}
}

func TestLeaseCountsFromWhenItWasSent(t *testing.T) {
	hold := 50 * time.Millisecond
	f := start(t, func(s *fakeSession, c *dualcheckv1.SessionCall) error {
		timer := time.NewTimer(hold)
		<-timer.C
		a := first(c)
		a.GetBegin().Claim.LeaseLeft = durationpb.New(time.Second)
		return s.answer(a)
	})
	c := newClient(t, []string{f.addr})
	out, err := c.Begin(t.Context(), k("a"))
	if err != nil {
		t.Fatal(err)
	}
	if left := out.Claim.LeaseLeft(); left > time.Second-hold {
		t.Errorf("%v left of a second that took %v to arrive", left, hold)
	}
}
