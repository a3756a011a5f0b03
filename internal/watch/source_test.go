package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// told is a Reader that keeps what it is told.
type told struct {
	states []string
	// revision and goal are what etcd is said to have; err that it does not say.
	revision, goal int64
	err            error
}

func (r *told) List(context.Context) (int64, error) { return r.revision, r.err }
func (r *told) Apply([]*clientv3.Event)             {}
func (r *told) Progressed(int64)                    {}
func (r *told) Ask(context.Context) (revision, goal int64, err error) {
	return r.revision, r.goal, r.err
}
func (r *told) Told(state State, _ error) { r.states = append(r.states, state.String()) }

// following is a Source that has listed at revision 10 and watches, without a watch.
func following(t *testing.T, resumes bool) (s *Source, r *told, at func(time.Duration)) {
	t.Helper()
	now := time.Hour
	r = &told{revision: 10, goal: 10}
	s = NewSource(SourceConfig{Reader: r, Resumes: resumes, Log: slog.New(slog.DiscardHandler), Monotonic: func() time.Duration { return now }})
	if from, err := s.begin(context.Background()); err != nil || from != 10 {
		t.Fatal(from, err)
	}
	s.brought(10, true)
	return s, r, func(d time.Duration) { now = time.Hour + d }
}

// asked reports what a restart was asked for, nil if none was.
func asked(s *Source) error {
	select {
	case a := <-s.again:
		return a.cause
	default:
		return nil
	}
}

// Live is who has brought all that a read saw; not who is behind it for a while, nor who
// has brought nothing or heard nothing of etcd for a while.
func TestStatesAreToldAsTheyAre(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(t *testing.T, s *Source, r *told, at func(time.Duration))
		want []string
	}{
		"in step": {func(t *testing.T, s *Source, r *told, at func(time.Duration)) {
			for i := range 10 {
				at(time.Duration(i) * time.Second)
				ask(t, s)
				s.brought(10, false)
				s.judge()
			}
		}, nil},
		"behind": {func(t *testing.T, s *Source, r *told, at func(time.Duration)) {
			r.revision, r.goal = 20, 20
			ask(t, s)
			at(behindMost)
			s.brought(15, false)
			s.brought(20, false)
		}, []string{"catching-up", "live"}},
		"silent": {func(t *testing.T, s *Source, _ *told, at func(time.Duration)) {
			at(silentMost)
			s.judge()
			ask(t, s)
			s.brought(10, false)
		}, []string{"catching-up", "live"}},
		"etcd does not answer": {func(t *testing.T, s *Source, r *told, at func(time.Duration)) {
			r.err = errors.New("away")
			at(unaskedMost)
			if err := s.ask(context.Background()); !errors.Is(err, r.err) {
				t.Error(err)
			}
			s.brought(10, false)
			r.err = nil
			ask(t, s)
			s.brought(10, false)
		}, []string{"catching-up", "live"}},
		"cut off": {func(_ *testing.T, s *Source, _ *told, _ func(time.Duration)) {
			s.ended(errClosed)
			s.assess() // there is no watch to be live
		}, []string{"catching-up"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, r, at := following(t, true)
			if want := []string{"resyncing", "live"}; !slices.Equal(r.states, want) {
				t.Fatalf("%v, want %v", r.states, want)
			}
			r.states = nil
			c.do(t, s, r, at)
			if !slices.Equal(r.states, c.want) {
				t.Errorf("told %v, want %v", r.states, c.want)
			}
		})
	}
}

func ask(t *testing.T, s *Source) {
	t.Helper()
	if err := s.ask(context.Background()); err != nil {
		t.Error(err)
	}
}

// A reader that resumes goes on where it was after a cut, and begins anew after what cannot
// be gone on from; one that does not resume always begins anew. A slow one, whose backlog
// only grows, is given up after a while, and its backlog with it.
func TestWhatIsGoneOnFrom(t *testing.T) {
	s, r, at := following(t, true)
	s.ended(fmt.Errorf("watch: %w", errClosed))
	r.revision = 12
	if from, err := s.begin(context.Background()); err != nil || from != 10 || s.Following().Lists != 1 {
		t.Errorf("after a cut: from %d, %v", from, err)
	}
	s.brought(10, true)
	r.goal = 12
	ask(t, s)
	for d := time.Duration(0); d < hopelessAfter; d += time.Second {
		at(d)
		s.brought(11, false) // it gets on, and never there
		s.judge()
		if cause := asked(s); cause != nil {
			t.Fatalf("given up after %v: %v", d, cause)
		}
	}
	if f := s.Following(); f.State != CatchingUp || f.Behind != 1 || f.BehindFor < hopelessAfter-2*time.Second {
		t.Errorf("%+v", f)
	}
	at(hopelessAfter)
	s.judge()
	if cause := asked(s); !errors.Is(cause, errHopeless) {
		t.Errorf("not given up: %v", cause)
	}
	s.ended(errHopeless)
	r.revision = 30
	if from, err := s.begin(context.Background()); err != nil || from != 30 || s.Following().Lists != 2 {
		t.Errorf("after that: from %d, %v", from, err)
	}
	s.brought(30, true)
	r.revision = 29
	if err := s.ask(context.Background()); !errors.Is(err, ErrWentBack) {
		t.Errorf("etcd went back: %v", err)
	}
	if from, err := s.begin(context.Background()); err != nil || from != 29 {
		t.Errorf("after that: from %d, %v", from, err)
	}

	always, r2, _ := following(t, false)
	always.ended(errClosed)
	r2.revision = 11
	if from, err := always.begin(context.Background()); err != nil || from != 11 || always.Following().Lists != 2 {
		t.Errorf("one that does not resume: from %d, %v", from, err)
	}
}

// A watch that brings nothing, not even how far it is, is made anew, where it was.
func TestASilentWatchIsMadeAnew(t *testing.T) {
	s, _, at := following(t, true)
	for d := time.Duration(0); d < 2*silentMost; d += time.Second {
		at(d)
		s.judge()
		if cause := asked(s); cause != nil {
			t.Fatalf("after %v: %v", d, cause)
		}
	}
	at(2 * silentMost)
	s.judge()
	if cause := asked(s); !errors.Is(cause, errSilent) || s.void {
		t.Errorf("%v, void %v", cause, s.void)
	}
}
