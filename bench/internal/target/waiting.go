package target

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dualcheck/dualcheck"
	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

var (
	waitingOneKind = Kind{Name: "dualcheck-waiting", About: "Begins that wait for one key until it is finished: latencies from the finish's answer to each one's", Ours: true,
		Open: func(ctx context.Context, r *rig.Rig, s Spec) (Target, error) { return openWaiting(ctx, r, s, true) }}
	waitingEachKind = Kind{Name: "dualcheck-waiting-each", About: "the same, each for a key of its own, 2,000 of which are finished a second", Ours: true,
		Open: func(ctx context.Context, r *rig.Rig, s Spec) (Target, error) { return openWaiting(ctx, r, s, false) }}
)

const (
	// waitFor is how long a Begin waits: the most that there is.
	waitFor = 30 * time.Second
	// gatherTimeout is how long callers may take until all of them wait, and quietMost how
	// long is looked at most at what they cost meanwhile: both and the finishes within
	// waitFor.
	gatherTimeout = 10 * time.Second
	quietMost     = 8 * time.Second
	// finishRate is how many keys are finished a second where each has its own.
	finishRate = 2000
	// waitClients is how many clients the callers share: a session has 10,000 calls at most.
	waitClients = 4
	holdLease   = 5 * time.Minute
)

// Whole is a target that is not loaded by single operations: a slice of it is a course of
// its own, with as many callers as the plan has in flight.
type Whole interface {
	Load(ctx context.Context, plan load.Plan) (load.Result, Waited, error)
}

// Waited is what waiting callers cost while they waited.
type Waited struct {
	Callers, Keys int
	Quiet         time.Duration // for how long that was looked at
	Cost          rig.Counters
	Last          time.Duration // from the (last) finish to the last answer
}

// waiting has many callers wait for what one other finishes.
type waiting struct {
	namer
	node    rig.Node
	holder  *dualcheck.Client
	callers []*dualcheck.Client
	one     bool
	result  dualcheck.Result
	next    *atomic.Uint64
}

func openWaiting(ctx context.Context, r *rig.Rig, s Spec, one bool) (Target, error) {
	n, err := r.Node(ctx)
	if err != nil {
		return nil, err
	}
	if n.HTTP == "" {
		return nil, errors.New("whether all callers wait is asked of a node's metrics, and where those of this node are is not known: leave --addr out")
	}
	w := &waiting{namer: newNamer(r, s), node: n, one: one, next: new(atomic.Uint64),
		result: dualcheck.Result{Code: 200, ContentType: contentType, Body: result(s.ResultBytes)}}
	if w.holder, err = dualcheck.New([]string{n.GRPC}, dualcheck.WithOwner(owner+"-holder")); err != nil {
		return nil, err
	}
	for i := range waitClients {
		c, err := dualcheck.New([]string{n.GRPC}, dualcheck.WithOwner(fmt.Sprintf("%s-%d", owner, i)))
		if err != nil {
			return nil, errors.Join(err, w.Close())
		}
		w.callers = append(w.callers, c)
	}
	return w, nil
}

func (w *waiting) Prepare(context.Context) error { return nil }

func (w *waiting) Do(context.Context, uint64) error {
	return errors.New("callers that wait are many or none: there is no single operation")
}

func (w *waiting) Close() error {
	errs := []error{w.holder.Close()}
	for _, c := range w.callers {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// Load holds keys, has all callers wait for them, looks at what that costs, finishes the
// keys and measures how long after its key's finish each caller is answered.
func (w *waiting) Load(ctx context.Context, plan load.Plan) (load.Result, Waited, error) {
	callers, keys := plan.InFlight, plan.InFlight
	if w.one {
		keys = 1
	}
	if plan.Rate > 0 {
		return load.Result{}, Waited{}, errors.New("callers that wait have no rate: leave --rate out")
	}
	paced := time.Duration(float64(keys) / finishRate * float64(time.Second))
	waited := Waited{Callers: callers, Keys: keys, Quiet: min(plan.Duration, quietMost)}
	if gatherTimeout+plan.WarmUp+waited.Quiet+paced > waitFor {
		return load.Result{}, waited, fmt.Errorf("%d callers, a warm-up of %v and a slice of %v do not fit in the %v that callers wait", callers, plan.WarmUp, plan.Duration, waitFor)
	}
	first := w.next.Add(uint64(keys)) - uint64(keys)
	key := func(i int) string { return w.key(first + uint64(i%keys)) }
	claims := make([]*dualcheck.Claim, keys)
	if err := each(ctx, keys, 256, func(ctx context.Context, i int) (err error) {
		claims[i], err = w.hold(ctx, key(i))
		return err
	}); err != nil {
		return load.Result{}, waited, err
	}

	began := time.Now()
	answered, finished := make([]time.Duration, callers), make([]time.Duration, keys)
	meter := load.NewMeter()
	ctx, cancel := context.WithTimeout(ctx, 2*waitFor)
	defer cancel()
	var group sync.WaitGroup
	defer group.Wait()
	for i := range callers {
		group.Go(func() {
			if err := w.wait(ctx, i, key(i)); err != nil {
				meter.Fail(err.Error())
				return
			}
			answered[i] = time.Since(began)
		})
	}
	fail := func(err error) (load.Result, Waited, error) {
		cancel() // the callers
		return load.Result{}, waited, err
	}
	if err := w.node.Await(ctx, gatherTimeout, func(s rig.State) bool { return int(s.Waiting) >= callers }, fmt.Sprintf("has not all %d callers waiting", callers)); err != nil {
		if first := meter.Result(0).FirstError; first != "" {
			err = fmt.Errorf("%w; the first error: %s", err, first)
		}
		return fail(err)
	}
	if err := pass(ctx, plan.WarmUp); err != nil {
		return fail(err)
	}
	before, err := w.node.Counters(ctx)
	if err != nil {
		return fail(err)
	}
	from := time.Now()
	if err := pass(ctx, waited.Quiet); err != nil {
		return fail(err)
	}
	after, err := w.node.Counters(ctx)
	if err != nil {
		return fail(err)
	}
	waited.Quiet, waited.Cost = time.Since(from), after.Minus(before)

	finishing := time.Since(began)
	if err := w.finish(ctx, claims, finished, began, paced); err != nil {
		return fail(err)
	}
	group.Wait()
	last := time.Duration(0)
	for i, at := range answered {
		if at > 0 {
			meter.Record(at - finished[i%keys])
			last = max(last, at)
		}
	}
	for _, at := range finished {
		waited.Last = max(waited.Last, at)
	}
	waited.Last = last - waited.Last
	return meter.Result(last - finishing), waited, nil
}

// hold takes a key that nobody has had.
func (w *waiting) hold(ctx context.Context, key string) (*dualcheck.Claim, error) {
	o, err := w.holder.Begin(ctx, sdkKey(key), dualcheck.Lease(holdLease))
	if err != nil {
		return nil, err
	}
	if o.Claim == nil {
		return nil, fmt.Errorf("key %s that is to be waited for: %v instead of FIRST", key, o.Verdict)
	}
	return o.Claim, nil
}

// wait waits for one until it is told what a key was finished with.
func (w *waiting) wait(ctx context.Context, caller int, key string) error {
	o, err := w.callers[caller%len(w.callers)].Begin(ctx, sdkKey(key), dualcheck.Wait(waitFor))
	if err != nil {
		return err
	}
	if o.Verdict != dualcheck.Replay {
		return fmt.Errorf("a caller that waited was answered %v instead of REPLAY", o.Verdict)
	}
	got, err := o.Result()
	if err == nil && len(got.Body) != len(w.result.Body) {
		err = fmt.Errorf("a replay of %d bytes instead of %d", len(got.Body), len(w.result.Body))
	}
	return err
}

// finish finishes all keys and notes when each was; many are paced, so that they do not
// wait for each other.
func (w *waiting) finish(ctx context.Context, claims []*dualcheck.Claim, finished []time.Duration, began time.Time, paced time.Duration) error {
	complete := func(ctx context.Context, i uint64) error {
		if i >= uint64(len(claims)) {
			return nil // the moment of the end has its operation too
		}
		_, err := w.holder.Complete(ctx, claims[i], w.result)
		finished[i] = time.Since(began)
		return err
	}
	if w.one {
		return complete(ctx, 0)
	}
	r := load.Run(ctx, load.Plan{InFlight: 512, Rate: finishRate, Duration: paced, Keys: load.Keys{Kind: load.New, Fresh: new(atomic.Uint64)}}, complete)
	if r.Errors > 0 {
		return fmt.Errorf("%d keys could not be finished, the first: %s", r.Errors, r.FirstError)
	}
	return ctx.Err()
}

// pass lets time pass.
func pass(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
