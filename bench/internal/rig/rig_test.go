package rig

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func newRig(t *testing.T, cfg Config) *Rig {
	t.Helper()
	cfg.Dir, cfg.Log = t.TempDir(), slog.New(slog.DiscardHandler)
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// TestAbsenceIsTold: what is not installed is an error that says so and how to have it,
// each time.
func TestAbsenceIsTold(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	r := newRig(t, Config{})
	for range 2 {
		_, err := r.AppendOnly(t.Context(), "always")
		if err == nil || !strings.Contains(err.Error(), "redis-server is not installed (Debian: apt-get install") {
			t.Errorf("%v", err)
		}
	}
	if _, err := find("nosuchd", "nosuch-server", "/nonexistent/*/bin"); err == nil || !strings.Contains(err.Error(), "nosuchd is not installed") {
		t.Errorf("%v", err)
	}
}

func TestAServerThatEndsAtOnceIsTold(t *testing.T) {
	r := newRig(t, Config{Self: []string{"/bin/sh", "-c", "echo broken >&2; exit 3", "-"}})
	if _, err := r.Etcd(t.Context()); err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "broken") {
		t.Errorf("%v", err)
	}
	if _, err := r.Node(t.Context()); err == nil {
		t.Error("a node without etcd")
	}
}

func TestAnotherUserOnlyForRoot(t *testing.T) {
	bin, args, err := as("nobody", "/bin/true", []string{"-x"})
	switch {
	case err != nil:
		t.Fatal(err)
	case os.Geteuid() != 0:
		if bin != "/bin/true" || len(args) != 1 {
			t.Errorf("%s %q", bin, args)
		}
	case !slices.Contains(args, "--pdeathsig") || args[len(args)-1] != "-x" || args[len(args)-2] != "/bin/true":
		t.Errorf("%s %q", bin, args)
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	r := newRig(t, Config{})
	if _, err := os.Stat(r.dir); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if _, err := os.Stat(r.dir); !os.IsNotExist(err) {
		t.Errorf("%v", err)
	}
}

func TestRecords(t *testing.T) {
	r := newRig(t, Config{})
	for _, c := range [][3]int{{0, 0, 0}, {10, 0, 10}, {10, 10, 10}, {25, 10, 25}, {5, 25, 25}} {
		if from, to := r.Records(c[0]); from != c[1] || to != c[2] {
			t.Errorf("%d: %d to %d", c[0], from, to)
		}
	}
}

func TestMetrics(t *testing.T) {
	got, state, err := readMetrics(strings.NewReader(`# HELP dualcheck_begin_verdicts_total x
dualcheck_begin_verdicts_total{namespace="bench",source="SOURCE_REDIS",verdict="VERDICT_REPLAY"} 30
dualcheck_begin_verdicts_total{namespace="bench",source="SOURCE_MEMORY",verdict="VERDICT_REPLAY_FAILURE"} 40
dualcheck_begin_verdicts_total{namespace="bench",source="SOURCE_ETCD",verdict="VERDICT_REPLAY"} 30
dualcheck_begin_verdicts_total{namespace="bench",source="SOURCE_ETCD",verdict="VERDICT_FIRST"} 1e+06
dualcheck_etcd_call_duration_seconds_count{kind="read",outcome="ok"} 12
dualcheck_etcd_call_duration_seconds_count{kind="revisions",outcome="ok"} 3
dualcheck_etcd_call_duration_seconds_count{kind="begin",outcome="ok"} 99
dualcheck_wait_looks_total 3
dualcheck_wait_looked_keys_total 250
dualcheck_memory_evictions_total 7
dualcheck_begins_waiting 20
dualcheck_watch_subscribers 4
dualcheck_watch_state{state="live",watch="cluster"} 1
dualcheck_watch_state{state="off",watch="records"} 0
dualcheck_watch_state{state="catching-up",watch="records"} 1
`))
	want := Counters{Replays: 100, Hits: 70, Memory: 40, Reads: 15, Looks: 3, Looked: 250, Evicted: 7}
	if err != nil || got != want {
		t.Errorf("%+v %v", got, err)
	}
	if state != (State{Waiting: 20, Subscribers: 4, Records: "catching-up"}) {
		t.Errorf("%+v", state)
	}
	if d := got.Minus(Counters{Replays: 40, Hits: 40, Reads: 2}).Plus(Counters{Reads: 1}); d.Replays != 60 || d.Hits != 30 || d.Reads != 14 || d.Evicted != 7 {
		t.Errorf("%+v", d)
	}
}

func TestProcessorTime(t *testing.T) {
	for stat, want := range map[string]time.Duration{
		"4711 (a (name) ) S 1 4711 4711 0 -1 4194560 1 0 0 0 150 25 7 7 20 0 9 0 1 2 3": 1750 * time.Millisecond,
		"4711 (short) S 1 2": 0,
		"":                   0,
	} {
		if got := processorTime(stat); got != want {
			t.Errorf("%q: %v", stat, got)
		}
	}
	r := newRig(t, Config{})
	if node, etcd := r.Busy(); node != 0 || etcd != 0 {
		t.Errorf("%v and %v of what does not run", node, etcd)
	}
}

// TestASiteIsClosedAlone: its servers end, the last first, and no others.
func TestASiteIsClosedAlone(t *testing.T) {
	r := newRig(t, Config{})
	var stopped []string
	start := func(r *Rig, name string) {
		t.Helper()
		name = r.own(name)
		if _, err := r.lazily(name, func(string) (string, func(), error) {
			return name, func() { stopped = append(stopped, name) }, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	here, other := r.At(Site{Name: "here"}), r.At(Site{Name: "here-too"})
	start(here, "etcd")
	start(r, "etcd")
	start(other, "etcd")
	start(here, "node")
	start(here, "node") // it runs already
	r.CloseSite()
	here.CloseSite()
	if !slices.Equal(stopped, []string{"here.node", "here.etcd"}) {
		t.Errorf("%q", stopped)
	}
	if _, err := os.Stat(filepath.Join(r.dir, "here.etcd")); !os.IsNotExist(err) {
		t.Errorf("%v", err)
	}
	start(here, "etcd")
	r.Close()
	if !slices.Equal(stopped[2:], []string{"here.etcd", "here-too.etcd", "etcd"}) {
		t.Errorf("%q", stopped)
	}
}
