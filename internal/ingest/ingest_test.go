package ingest

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/fingerprint"
	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

// notes collects what a run reports.
type notes struct {
	mu  sync.Mutex
	all []Note
}

func (n *notes) add(note Note) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, note)
}

// of is the text of the notes with one outcome, a line each.
func (n *notes) of(outcome Outcome) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var b strings.Builder
	for _, note := range n.all {
		if note.Outcome == outcome {
			fmt.Fprintf(&b, "%d %s %s: %s\n", note.Line, note.Namespace, note.Key, note.Text)
		}
	}
	return b.String()
}

// counts is a summary without its times.
func counts(s Summary) Summary {
	s.Seconds, s.PerSecond = 0, 0
	return s
}

// deliveries is n keys, each delivered three times, the second time with its
// members in another order, the third time with another body.
func deliveries(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `{"namespace":"n","key":"k%d","operation":"op","body":{"a":1,"b":{"c":%d}}}`+"\n", i, i)
	}
	for i := range n {
		fmt.Fprintf(&b, `{"body":{"b":{"c":%d.0},"a":1e0},"key":"k%d","namespace":"n","operation":"op"}`+"\n", i, i)
	}
	for i := range n {
		fmt.Fprintf(&b, `{"namespace":"n","key":"k%d","operation":"op","body":{"a":2,"b":{"c":%d}}}`+"\n", i, i)
	}
	return b.String()
}

func TestEveryLineIsJudgedWhateverTheNumberOfWorkers(t *testing.T) {
	const n = 100
	for _, workers := range []int{1, 16, 64} {
		t.Run(fmt.Sprint(workers), func(t *testing.T) {
			service := &ingesttest.Service{}
			for _, want := range []Summary{
				{Lines: 3 * n, First: n, Replay: n, Conflict: n},
				{Lines: 3 * n, Replay: 2 * n, Conflict: n},
			} {
				var read atomic.Int64
				input := deliveries(n)
				got, err := Run(t.Context(), strings.NewReader(input), Options{
					Service:  ingesttest.Client{Service: service},
					Workers:  workers,
					Progress: func(bytes int) { read.Add(int64(bytes)) },
				})
				if err != nil {
					t.Fatal(err)
				}
				if counts(got) != want {
					t.Errorf("got %+v, want %+v", counts(got), want)
				}
				if read.Load() != int64(len(input)) {
					t.Errorf("progress told of %d bytes of %d", read.Load(), len(input))
				}
			}
			for _, r := range service.Records() {
				if r.GetState() != dualcheckv1.State_STATE_SUCCEEDED || len(r.GetResult().GetBody()) != 0 {
					t.Fatalf("%s is %v", r.GetKey(), r)
				}
			}
		})
	}
}

func TestTheLinesOfAKeyKeepTheirOrder(t *testing.T) {
	var mu sync.Mutex
	under := map[string]int{}
	seen := map[string][]string{}
	service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
		begin, ok := q.(*dualcheckv1.BeginRequest)
		if !ok {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		under[begin.GetKey()]++
		seen[begin.GetKey()] = append(seen[begin.GetKey()], begin.GetOperation())
		return nil
	}}
	var b strings.Builder
	const keys, each = 20, 30
	for i := range each {
		for k := range keys {
			fmt.Fprintf(&b, `{"namespace":"n","key":"k%d","operation":"op%d","body":0}`+"\n", k, i)
		}
	}
	got, err := Run(t.Context(), strings.NewReader(b.String()), Options{Service: ingesttest.Client{Service: service}, Workers: 64})
	if err != nil {
		t.Fatal(err)
	}
	if want := (Summary{Lines: keys * each, First: keys, Conflict: keys * (each - 1)}); counts(got) != want {
		t.Errorf("got %+v, want %+v", counts(got), want)
	}
	for key, operations := range seen {
		for i, operation := range operations {
			if operation != fmt.Sprintf("op%d", i) {
				t.Fatalf("%s: begun in the order %v", key, operations)
			}
		}
	}
}

func TestAKeyThatWaitsHoldsUpNoOther(t *testing.T) {
	for _, work := range []bool{false, true} {
		t.Run(fmt.Sprintf("work=%v", work), func(t *testing.T) {
			service := &ingesttest.Service{}
			client := ingesttest.Client{Service: service}
			other, err := client.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "n", Key: "held"})
			if err != nil {
				t.Fatal(err)
			}
			// Lines of the key that waits come before and between all others.
			var b strings.Builder
			const keys, each = 200, 3
			for range each {
				for k := range keys {
					fmt.Fprintf(&b, `{"namespace":"n","key":"held","body":1}`+"\n"+`{"namespace":"n","key":"k%d","body":1}`+"\n", k)
				}
			}
			var done atomic.Int64
			options := Options{
				Service: client,
				Workers: 16,
				Progress: func(int) {
					if done.Add(1) != keys*each {
						return
					}
					// Every other line is settled: now the holder finishes.
					_, err := client.Complete(t.Context(), &dualcheckv1.CompleteRequest{Namespace: "n", Key: "held", Token: other.GetClaim().GetToken()})
					if err != nil {
						t.Error(err)
					}
				},
			}
			if work {
				options.Journal = journalAt(t, filepath.Join(t.TempDir(), "journal"))
				defer closeJournal(t, options.Journal)
				options.Runner = runnerFunc(func(context.Context, Job) (Output, error) { return Output{}, nil })
			}
			got, err := Run(t.Context(), strings.NewReader(b.String()), options)
			if err != nil {
				t.Fatal(err)
			}
			if want := (Summary{Lines: 2 * keys * each, First: keys, Replay: keys*(each-1) + keys*each}); counts(got) != want {
				t.Errorf("got %+v, want %+v", counts(got), want)
			}
		})
	}
}

func TestWhatIsReadAheadIsBoundedInBytes(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	client := ingesttest.Client{Service: &ingesttest.Service{}}
	if _, err := client.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "n", Key: "held"}); err != nil {
		t.Fatal(err)
	}
	// An endless input of one key that waits is read until there is no room.
	const size = 8 << 20
	long := `{"namespace":"n","key":"held","body":"` + strings.Repeat("x", size) + `"}` + "\n"
	input := &endless{text: long}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for last := int64(-1); ; {
			timer := time.NewTimer(500 * time.Millisecond)
			<-timer.C
			now := input.read.Load()
			if now == last && now >= maxPending-2*size {
				interrupt()
				return
			}
			last = now
		}
	}()
	_, err := Run(ctx, input, Options{Service: client, Workers: 64})
	<-stopped
	if !errors.Is(err, ErrInterrupted) {
		t.Errorf("got %v", err)
	}
	// What is in the room, a line that waits for room, one that was read after it.
	if read := input.read.Load(); read > maxPending+3*size {
		t.Errorf("%d bytes were read ahead", read)
	}
}

// endless is a reader of text again and again.
type endless struct {
	text string
	at   int
	read atomic.Int64
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.text[e.at:])
	e.at = (e.at + n) % len(e.text)
	e.read.Add(int64(n))
	return n, nil
}

func TestLinesThatCannotBeJudgedAreToldAndTheRunGoesOn(t *testing.T) {
	input := strings.Join([]string{
		`{"namespace":"n","key":"a","body":1}`,
		``,
		`{"namespace":"n","key":"b"`,
		`{"namespace":"n"}`,
		`[1]`,
		`{"namespace":"n","key":7,"body":1}`,
		`{"namespace":"n","key":"c","body":{"id":9007199254740993}}`,
		`{"namespace":"n","key":"d","body":{"x":1,"x":2}}`,
		`{"namespace":"n","key":"e","body":null,"sent_by":"us"}`,
		`{"namespace":"n","key":"f","body":"` + strings.Repeat("x", maxLine) + `"}`,
		`{"namespace":"n","key":"g","body":1e400}`,
		`{"namespace":"n","key":"h","body":"` + "\xff" + `"}`,
		`{"namespace":"n","key":"i","key":"j","body":1}`,
		`{"namespace":"n","key":"z","body":1}`,
	}, "\n")
	var told notes
	got, err := Run(t.Context(), strings.NewReader(input), Options{
		Service: ingesttest.Client{Service: &ingesttest.Service{}},
		Workers: 1,
		Report:  told.add,
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := (Summary{Lines: 13, First: 3, Failed: 10}); counts(got) != want {
		t.Errorf("got %+v, want %+v", counts(got), want)
	}
	text := told.of(Failed)
	for _, want := range []string{
		"3  : not a line of JSON: unexpected EOF",
		"4 n : it has no key, no body",
		"5  : not a line of JSON: it is not an object",
		"6  : not a line of JSON: key must be a string",
		"7 n c: the body has no fingerprint: number is not kept by canonical JSON: 9007199254740993 would become 9007199254740992; send it as a string at \"/id\" (byte 6)",
		"8  : not a line of JSON: duplicate object member name at \"/body/x\"",
		"10  : the line is longer than 16 MiB",
		"11 n g: the body has no fingerprint: number is not kept by canonical JSON: 1e400 is too large",
		"12  : not a line of JSON: invalid UTF-8",
		"13  : not a line of JSON: duplicate object member name at \"/key\"",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it was not told %q, but:\n%s", want, text)
		}
	}
}

func TestExcludedMembersAreNoConflict(t *testing.T) {
	input := `{"namespace":"n","key":"a","body":{"sent_at":1,"x":1}}
{"namespace":"n","key":"a","body":{"sent_at":2,"x":1}}
{"namespace":"n","key":"b","body":{"x":1}}
`
	got, err := Run(t.Context(), strings.NewReader(input), Options{
		Service: ingesttest.Client{Service: &ingesttest.Service{}},
		Exclude: []fingerprint.Pointer{"/sent_at"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := (Summary{Lines: 3, First: 1, Replay: 1, Failed: 1}); counts(got) != want {
		t.Errorf("got %+v, want %+v", counts(got), want)
	}
}

func TestAKeyInProgressIsWaitedFor(t *testing.T) {
	service := &ingesttest.Service{}
	client := ingesttest.Client{Service: service}
	other, err := client.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "n", Key: "a"})
	if err != nil {
		t.Fatal(err)
	}
	var told notes
	got, err := Run(t.Context(), strings.NewReader(`{"namespace":"n","key":"a","body":1}`+"\n"), Options{
		Service: client,
		Report: func(n Note) {
			told.add(n)
			// The line is waiting: now the other claim's holder finishes.
			_, err := client.Complete(t.Context(), &dualcheckv1.CompleteRequest{Namespace: "n", Key: "a", Token: other.GetClaim().GetToken()})
			if err != nil {
				t.Error(err)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := (Summary{Lines: 1, Replay: 1}); counts(got) != want {
		t.Errorf("got %+v, want %+v", counts(got), want)
	}
	if told.of(waiting) == "" {
		t.Error("it was not told that the line waits")
	}
}

func TestWhatTheRecordSaysIsCountedByItsName(t *testing.T) {
	service := &ingesttest.Service{}
	client := ingesttest.Client{Service: service}
	for key, class := range map[string]dualcheckv1.FailureClass{
		"failed":  dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL,
		"unknown": dualcheckv1.FailureClass_FAILURE_CLASS_UNKNOWN,
		"free":    dualcheckv1.FailureClass_FAILURE_CLASS_RETRYABLE,
	} {
		begun, err := client.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "n", Key: key})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Fail(t.Context(), &dualcheckv1.FailRequest{
			Namespace: "n", Key: key, Token: begun.GetClaim().GetToken(),
			Failure: &dualcheckv1.Failure{Class: class, Code: 7, Message: "no"},
		}); err != nil {
			t.Fatal(err)
		}
	}
	input := `{"namespace":"n","key":"failed","body":1}
{"namespace":"n","key":"unknown","body":1}
{"namespace":"n","key":"free","body":1}
`
	got, err := Run(t.Context(), strings.NewReader(input), Options{Service: client})
	if err != nil {
		t.Fatal(err)
	}
	if want := (Summary{Lines: 3, First: 1, ReplayFailure: 1, InDoubt: 1}); counts(got) != want {
		t.Errorf("got %+v, want %+v", counts(got), want)
	}
}

func TestACallWithoutADefiniteAnswerIsSentAgainAsItWas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		tries := map[string]map[string]int{}
		service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
			mu.Lock()
			defer mu.Unlock()
			id := "complete"
			if begin, ok := q.(*dualcheckv1.BeginRequest); ok {
				id = begin.GetRequestId()
			}
			kind := fmt.Sprintf("%T", q)
			if tries[kind] == nil {
				tries[kind] = map[string]int{}
			}
			tries[kind][id]++
			switch tries[kind][id] {
			case 1:
				return ingesttest.Error(codes.Unavailable, "STORE_UNAVAILABLE", "no quorum", nil)
			case 2:
				return ingesttest.Error(codes.ResourceExhausted, "OVERLOADED", "too much at once", nil)
			case 3:
				return context.DeadlineExceeded
			}
			return nil
		}}
		got, err := Run(t.Context(), strings.NewReader(`{"namespace":"n","key":"a","body":1}`), Options{Service: ingesttest.Client{Service: service}})
		if err != nil {
			t.Fatal(err)
		}
		if want := (Summary{Lines: 1, First: 1}); counts(got) != want {
			t.Errorf("got %+v, want %+v", counts(got), want)
		}
		for kind, ids := range tries {
			if len(ids) != 1 {
				t.Errorf("%s was sent as %d calls", kind, len(ids))
			}
		}
	})
}

func TestABeginWhoseAnswerWasLostIsRepeatedAndGetsItsClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		service := &ingesttest.Service{}
		lossy := &losesFirstAnswer{Client: ingesttest.Client{Service: service}}
		got, err := Run(t.Context(), strings.NewReader(`{"namespace":"n","key":"a","body":1}`), Options{Service: lossy, Owner: "me"})
		if err != nil {
			t.Fatal(err)
		}
		if want := (Summary{Lines: 1, First: 1}); counts(got) != want {
			t.Errorf("got %+v, want %+v", counts(got), want)
		}
		if attempt := service.Record("n", "a").GetAttempt(); attempt != 1 {
			t.Errorf("the key has had %d claims", attempt)
		}
	})
}

func TestAServiceThatDoesNotAnswerEndsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		service := &ingesttest.Service{Before: func(context.Context, proto.Message) error {
			return ingesttest.Error(codes.Unavailable, "STORE_UNAVAILABLE", "no quorum", nil)
		}}
		begun := time.Now()
		got, err := Run(t.Context(), strings.NewReader(deliveries(100)), Options{
			Service: ingesttest.Client{Service: service}, Workers: 4, RetryFor: time.Minute,
		})
		if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "no quorum (STORE_UNAVAILABLE)") {
			t.Errorf("got %v", err)
		}
		if !got.Interrupted || got.Lines > 4 || got.Failed != got.Lines || got.Lines == 0 {
			t.Errorf("got %+v", got)
		}
		if took := time.Since(begun); took > time.Minute {
			t.Errorf("it took %v", took)
		}
	})
}

func TestAnInterruptFinishesWhatRunsAndBeginsNothingMore(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	service := &ingesttest.Service{Before: func(_ context.Context, q proto.Message) error {
		if q, ok := q.(*dualcheckv1.CompleteRequest); ok && q.GetKey() == "k2" {
			interrupt()
		}
		return nil
	}}
	got, err := Run(ctx, strings.NewReader(deliveries(50)), Options{Service: ingesttest.Client{Service: service}, Workers: 1})
	if !errors.Is(err, ErrInterrupted) {
		t.Errorf("got %v", err)
	}
	if want := (Summary{Lines: 3, First: 3, Interrupted: true}); counts(got) != want {
		t.Errorf("got %+v, want %+v", counts(got), want)
	}
	for _, r := range service.Records() {
		if r.GetState() != dualcheckv1.State_STATE_SUCCEEDED {
			t.Errorf("%s was left %v", r.GetKey(), r.GetState())
		}
	}
}

func TestAnInterruptEndsAWait(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	client := ingesttest.Client{Service: &ingesttest.Service{}}
	if _, err := client.Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "n", Key: "a"}); err != nil {
		t.Fatal(err)
	}
	got, err := Run(ctx, strings.NewReader(`{"namespace":"n","key":"a","body":1}`), Options{
		Service: client, Report: func(Note) { interrupt() },
	})
	if !errors.Is(err, ErrInterrupted) || counts(got) != (Summary{Interrupted: true}) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestAnInputThatCannotBeReadEndsTheRun(t *testing.T) {
	broken := errors.New("broken disk")
	got, err := Run(t.Context(), &failsAfter{text: deliveries(1), err: broken}, Options{Service: ingesttest.Client{Service: &ingesttest.Service{}}})
	if !errors.Is(err, broken) || got.Lines != 3 {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestOptionsThatMakeNoSenseAreRefused(t *testing.T) {
	service := ingesttest.Client{Service: &ingesttest.Service{}}
	for name, o := range map[string]Options{
		"no service":          {},
		"negative workers":    {Service: service, Workers: -1},
		"wait too long":       {Service: service, Wait: time.Minute},
		"owner not UTF-8":     {Service: service, Owner: "me@\xff"},
		"negative lease":      {Service: service, Lease: -1},
		"work and no journal": {Service: service, Runner: Command{}},
		"content type too long": {
			Service: service, Journal: &Journal{}, Runner: Command{ContentType: strings.Repeat("x", maxContentType+1)},
		},
		"content type not UTF-8": {Service: service, Journal: &Journal{}, Runner: &Command{ContentType: "text/\xff"}},
	} {
		if _, err := Run(t.Context(), strings.NewReader(""), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// losesFirstAnswer answers the first Begin with Unavailable although it was
// judged.
type losesFirstAnswer struct {
	ingesttest.Client
	lost atomic.Bool
}

func (l *losesFirstAnswer) Begin(ctx context.Context, q *dualcheckv1.BeginRequest, o ...callOption) (*dualcheckv1.BeginResponse, error) {
	answer, err := l.Client.Begin(ctx, q, o...)
	if !l.lost.Swap(true) {
		return nil, ingesttest.Error(codes.Unavailable, "STORE_UNAVAILABLE", "the answer was lost", nil)
	}
	return answer, err
}

// failsAfter is a reader of text that ends in err.
type failsAfter struct {
	text string
	err  error
}

func (f *failsAfter) Read(p []byte) (int, error) {
	if f.text == "" {
		return 0, f.err
	}
	n := copy(p, f.text)
	f.text = f.text[n:]
	return n, nil
}
