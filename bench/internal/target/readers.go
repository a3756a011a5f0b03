package target

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// Readers are subscribers of a node's Watch, each with a connection of its own, as so many
// processes have. They count what they are told, and keep no copy of it: what they cost
// beside the node is little.
type Readers struct {
	spec   ReadersSpec
	conns  connections
	began  time.Time
	cancel context.CancelFunc
	group  sync.WaitGroup
	all    []*reader

	closing atomic.Bool // they are ended by us

	from, to atomic.Int64 // what counts is in between; nanoseconds since began
	writes   []write      // by their numbers from the first
	answered atomic.Int64 // how many of them were
}

// write is when one was asked for, and when it was answered; 0: never.
type write struct{ asked, answered atomic.Int64 }

// ReadersSpec says how many there are and what they do.
type ReadersSpec struct {
	// Reading take all that they are told; Silent read no more than that they are
	// subscribed, so that what they are told is held for them.
	Reading, Silent int
	// Elsewhere: they watch a namespace in which nothing happens.
	Elsewhere bool
	// Keys is what the names of keys begin with whose events are looked for, First the
	// number of the first, and Most how many there will be; 0: events are counted alone.
	Keys  string
	First uint64
	Most  int
}

// Told is what readers were told.
type Told struct {
	// Events reached those who read within the time that counts.
	Events int64
	// Latency is from a write's answer to its event at a reader, of every tenth reader;
	// its errors are events that had not come soon after the end. An event may come first,
	// most of all where answers are late: so Whole is from the question to the event.
	Latency, Whole load.Result
	// Resyncs is how often a reader was told to begin anew; Ended how many streams the
	// node ended, and Why the first.
	Resyncs, Ended int64
	Why            string
}

const (
	elsewhere = "bench-elsewhere"
	// sampled is every how manyth reader looks at keys.
	sampled = 10
	// silentWindow is what those who do not read have room for.
	silentWindow = 64 << 10
	openers      = 64
	// drainTimeout is for how long events may be late that are still counted.
	drainTimeout = 10 * time.Second
	drainPoll    = 10 * time.Millisecond
)

// Prefix is what the names of a target's keys begin with.
func Prefix(r *rig.Rig, name string) string { return newNamer(r, Spec{Name: name}).prefix }

// OpenReaders subscribes them, and returns once all are subscribed.
func OpenReaders(ctx context.Context, n rig.Node, spec ReadersSpec) (*Readers, error) {
	ctx, cancel := context.WithCancel(ctx)
	r := &Readers{spec: spec, began: time.Now(), cancel: cancel, writes: make([]write, spec.Most)}
	for i := range spec.Reading + spec.Silent {
		var opts []grpc.DialOption
		if i >= spec.Reading {
			opts = append(opts, grpc.WithStaticStreamWindowSize(silentWindow), grpc.WithStaticConnWindowSize(silentWindow))
		}
		conn, err := dial(n.GRPC, opts...)
		if err != nil {
			return nil, errors.Join(err, r.close())
		}
		r.conns = append(r.conns, conn)
	}
	r.all = make([]*reader, len(r.conns))
	late := time.AfterFunc(openTimeout, cancel)
	err := each(ctx, len(r.conns), openers, func(_ context.Context, i int) (err error) {
		if r.all[i], err = r.open(ctx, i); err != nil { // its stream outlives this function
			cancel() // those that are being opened
		}
		return err
	})
	late.Stop()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe: %w", err), r.close())
	}
	for _, one := range r.all[:spec.Reading] {
		r.group.Go(func() { one.read() })
	}
	return r, nil
}

func (r *Readers) open(ctx context.Context, i int) (*reader, error) {
	one := &reader{of: r}
	if i < r.spec.Reading && i%sampled == 0 && r.spec.Most > 0 {
		one.came = make([]int64, r.spec.Most)
	}
	req := &dualcheckv1.WatchRequest{Namespace: namespace}
	if r.spec.Elsewhere {
		req.Namespace = elsewhere
	}
	var err error
	if one.stream, err = r.conns[i].NewStream(ctx, &grpc.StreamDesc{StreamName: "Watch", ServerStreams: true}, dualcheckv1.WatchService_Watch_FullMethodName, grpc.ForceCodecV2(rawCodec{})); err != nil {
		return nil, err
	}
	if err := one.stream.SendMsg(req); err != nil {
		return nil, err
	}
	if err := one.stream.CloseSend(); err != nil {
		return nil, err
	}
	var first raw
	if err := one.stream.RecvMsg(&first); err != nil {
		return nil, err
	}
	first.data.Free()
	return one, nil
}

// Count says when what counts begins and ends.
func (r *Readers) Count(from, to time.Time) {
	r.from.Store(int64(from.Sub(r.began)))
	r.to.Store(int64(to.Sub(r.began)))
}

// Asked notes that the write of the key with a number is asked for now.
func (r *Readers) Asked(key uint64) {
	if i := key - r.spec.First; i < uint64(len(r.writes)) {
		r.writes[i].asked.Store(int64(time.Since(r.began)))
	}
}

// Answered notes that it was answered.
func (r *Readers) Answered(key uint64) {
	if i := key - r.spec.First; i < uint64(len(r.writes)) {
		r.writes[i].answered.Store(int64(time.Since(r.began)))
		r.answered.Add(1)
	}
}

// Finish waits for what is late, ends all and tells what they were told.
func (r *Readers) Finish(ctx context.Context) (told Told, err error) {
	r.drain(ctx)
	err = r.close()
	meter, whole := load.NewMeter(), load.NewMeter()
	from, to := r.from.Load(), r.to.Load()
	for _, one := range r.all[:r.spec.Reading] {
		told.Events += one.events
		told.Resyncs += one.resyncs
		if one.ended != nil {
			told.Ended++
			if told.Why == "" {
				told.Why = one.ended.Error()
			}
		}
		for i := range one.came {
			switch at := r.writes[i].answered.Load(); {
			case at <= from || at > to: // it does not count
			case one.came[i] == 0:
				meter.Fail(fmt.Sprintf("an event had not come %v after the end", drainTimeout))
			default:
				meter.Record(time.Duration(one.came[i] - at))
				whole.Record(time.Duration(one.came[i] - r.writes[i].asked.Load()))
			}
		}
	}
	told.Latency, told.Whole = meter.Result(time.Duration(to-from)), whole.Result(time.Duration(to-from))
	return told, err
}

// drain waits until those who look at keys have seen them all.
func (r *Readers) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	poll := time.NewTicker(drainPoll)
	defer poll.Stop()
	for _, one := range r.all[:r.spec.Reading] {
		for one.came != nil && !one.over.Load() && one.seen.Load() < r.answered.Load() {
			select {
			case <-poll.C:
			case <-ctx.Done():
				return
			}
		}
	}
}

func (r *Readers) close() error {
	r.closing.Store(true)
	r.cancel()
	err := r.conns.Close()
	r.group.Wait()
	return err
}

// reader is one of them. What it counts is its goroutine's, until that has ended.
type reader struct {
	of     *Readers
	stream grpc.ClientStream
	came   []int64 // when each event came; nil: it does not look
	seen   atomic.Int64
	over   atomic.Bool

	events, resyncs int64
	ended           error
}

func (one *reader) read() {
	for {
		var m raw
		err := one.stream.RecvMsg(&m)
		if err != nil {
			if !one.of.closing.Load() {
				one.ended = err
			}
			one.over.Store(true)
			return
		}
		now := int64(time.Since(one.of.began))
		n := one.take(m.data.ReadOnlyData(), now)
		m.data.Free()
		if now > one.of.from.Load() && now <= one.of.to.Load() {
			one.events += n
		}
	}
}

// Numbers of fields: of WatchResponse, of Resync and of Event.
const (
	fieldEvents = 2
	fieldResync = 4
	fieldBegin  = 1
	fieldKey    = 4
)

// take reads as much of a WatchResponse as is counted, and returns the number of events.
func (one *reader) take(b []byte, now int64) (events int64) {
	fields(b, func(number protowire.Number, value []byte) {
		switch number {
		case fieldEvents:
			events++
			if one.came != nil {
				one.event(value, now)
			}
		case fieldResync:
			for len(value) > 0 {
				number, _, n := protowire.ConsumeField(value)
				if n < 0 {
					return
				}
				if number == fieldBegin {
					one.resyncs++
				}
				value = value[n:]
			}
		}
	})
	return events
}

// event notes when the event of a key came for the first time.
func (one *reader) event(b []byte, now int64) {
	fields(b, func(number protowire.Number, value []byte) {
		if number != fieldKey {
			return
		}
		rest, ok := strings.CutPrefix(string(value), one.of.spec.Keys)
		key, err := strconv.ParseUint(rest, 10, 64)
		if i := key - one.of.spec.First; ok && err == nil && i < uint64(len(one.came)) && one.came[i] == 0 {
			one.came[i] = now
			one.seen.Add(1)
		}
	})
}

// fields calls f with each field of a message that has bytes.
func fields(b []byte, f func(protowire.Number, []byte)) {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return
		}
		if kind == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(b)
			f(number, value)
		}
		b = b[n:]
	}
}

// raw is a message as it came.
type raw struct{ data mem.Buffer }

// rawCodec leaves what comes as it is.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no message", v)
	}
	b, err := proto.Marshal(m)
	return mem.BufferSlice{mem.SliceBuffer(b)}, err
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(*raw)
	if !ok {
		return fmt.Errorf("%T is not what takes bytes", v)
	}
	m.data = data.MaterializeToBuffer(mem.DefaultBufferPool())
	return nil
}
