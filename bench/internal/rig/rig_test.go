package rig

import (
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
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

func TestCounters(t *testing.T) {
	got, err := readCounters(strings.NewReader(`# HELP dualcheck_begin_verdicts_total x
dualcheck_begin_verdicts_total{namespace="bench",source="SOURCE_REDIS",verdict="VERDICT_REPLAY"} 70
dualcheck_begin_verdicts_total{namespace="bench",source="SOURCE_ETCD",verdict="VERDICT_REPLAY"} 30
dualcheck_begin_verdicts_total{namespace="bench",source="SOURCE_ETCD",verdict="VERDICT_FIRST"} 1e+06
dualcheck_etcd_call_duration_seconds_count{kind="read",outcome="ok"} 12
dualcheck_etcd_call_duration_seconds_count{kind="begin",outcome="ok"} 99
dualcheck_ready 1
`))
	if err != nil || got != (Counters{Replays: 100, Hits: 70, Reads: 12}) {
		t.Errorf("%+v %v", got, err)
	}
	if d := got.Minus(Counters{Replays: 40, Hits: 40, Reads: 2}).Plus(Counters{Reads: 1}); d != (Counters{Replays: 60, Hits: 30, Reads: 11}) {
		t.Errorf("%+v", d)
	}
}
