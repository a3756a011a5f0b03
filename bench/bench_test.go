package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
	"github.com/dualcheck/dualcheck/bench/internal/suite"
)

// A test's program is started again as this program's own servers.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == rig.ServeEtcd || os.Args[1] == rig.ServeEmpty) {
		os.Exit(execute(os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func TestMistakesAreASentence(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"--suite nosuch", `no suite "nosuch"; there are [goals in-flight`},
		{"--target nosuch", `no target "nosuch"; there are [dualcheck `},
		{"--keys some", `--keys: "some" is none of new, zipf, hot`},
		{"--repeats 1.5", "--repeats is a share from 0 to 1"},
		{"--output yaml", `--output is table or json, not "yaml"`},
		{"--client soap", `--client is one of sdk, unary, stream, json, not "soap"`},
		{"--in-flight -1", "--in-flight is 0 or more"},
		{"--rate -1", "--rate is 0 or more"},
		{"--suite goals --slice 0s", "--slice is more than 0"},
		{"--suite goals --rounds 0", "--rounds is 1 or more"},
		{"--suite goals --in-flight 5", "--in-flight goes with --target"},
		{"--suite goals --target mariadb", "leave --target out, or --suite"},
		{"--suite goals --only nosuch", `--only: no goal or part "nosuch"; there are new-vs-etcd`},
		{"--suite limits --only new-vs-etcd", "--only goes with --suite goals or watch"},
		{"--suite watch --only new-vs-etcd", `--only: no goal or part "new-vs-etcd"; there are writes, readers, waiting, memory`},
		{"--suite watch --subscribers 5", "--subscribers is 20 or more"},
		{"--suite watch --waiters 20000", "--waiters is from 1 to 16000"},
		{"--suite watch --events 0", "--events is 1 or more"},
		{"--waiters 5", "--waiters goes with --suite"},
		{"--suite limits --strict", "--strict goes with --suite goals"},
		{"--slice 1s", "--slice goes with --suite"},
		{"--suite records --records 100,10", "the smallest first"},
		{"--result-bytes 999999", "--result-bytes is from 0 to 262144"},
		{"--addr 127.0.0.1:1 --dualcheck x", "say one of them"},
		{"--addr 127.0.0.1:1 --target mariadb", "--addr goes with targets of dualcheck's own, not mariadb"},
		{"something", "it takes no arguments"},
		{"--nosuch", "unknown flag: --nosuch"},
	} {
		var out, talk bytes.Buffer
		if code := execute(strings.Fields(c.args), &out, &talk); code != exitUsage {
			t.Errorf("%s: status %d", c.args, code)
		}
		if !strings.Contains(talk.String(), c.says) || strings.Count(talk.String(), "\n") != 1 || out.Len() > 0 {
			t.Errorf("%s: %q %q", c.args, talk.String(), out.String())
		}
	}
}

func TestList(t *testing.T) {
	var out, talk bytes.Buffer
	if code := execute([]string{"--list"}, &out, &talk); code != 0 || !strings.Contains(out.String(), "hot-key") || !strings.Contains(out.String(), "mariadb") {
		t.Errorf("%d %s %s", code, out.String(), talk.String())
	}
}

func TestWithoutANodeNothingIsMeasured(t *testing.T) {
	var out, talk bytes.Buffer
	missing := filepath.Join(t.TempDir(), "dualcheck")
	code := execute([]string{"--suite", "goals", "--slice", "10ms", "--dualcheck", missing, "--dir", t.TempDir()}, &out, &talk)
	if code != exitFailure || !strings.Contains(talk.String(), missing) || out.Len() > 0 {
		t.Errorf("%d %s %s", code, talk.String(), out.String())
	}
}

// build makes the program that serves.
func build(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "dualcheck")
	build := exec.Command("go", "build", "-o", bin, "./cmd/dualcheck")
	build.Dir = ".."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return bin
}

// TestGoalsWithEtcdAndRedis runs a few goals in short slices on real servers: figures
// mean nothing here, their shape and the absence of errors do.
func TestGoalsWithEtcdAndRedis(t *testing.T) {
	bin := build(t)
	var out, talk bytes.Buffer
	code := execute([]string{"--suite", "goals", "--only", "new-vs-etcd,new-vs-redis-aof,replay-vs-redis-get,idle-latency,bytes-per-record",
		"--slice", "100ms", "--warm-up", "50ms", "--rounds", "2", "--lives", "500", "--known", "500",
		"--dualcheck", bin, "--dir", t.TempDir(), "-o", "json"}, &out, &talk)
	if code != 0 {
		t.Fatalf("status %d: %s", code, talk.String())
	}
	var report struct {
		Rows []struct {
			ID           string
			Ratio, Ours  float64
			Rival        float64
			Errors       int64
			Note         string
			Rounds       []any
			RivalInFight int `json:"rival_in_flight"`
		}
		NotRun []any `json:"not_run"`
	}
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Rows) != 5 || len(report.NotRun) != 0 {
		t.Errorf("%s%s", talk.String(), out.String())
	}
	for _, row := range report.Rows {
		if row.Errors > 0 || row.Ratio <= 0 || row.Ours <= 0 || row.Rival <= 0 {
			t.Errorf("%+v", row)
		}
	}
	if !strings.Contains(talk.String(), "etcd-txn runs with ") {
		t.Errorf("the number in flight is not told: %s", talk.String())
	}
}

// TestWatchWithEtcdAndRedis runs all parts with few subscribers and callers: who was to be
// told was told, and what was to be off was.
func TestWatchWithEtcdAndRedis(t *testing.T) {
	bin := build(t)
	var out, talk bytes.Buffer
	code := execute([]string{"--suite", "watch", "--subscribers", "20", "--events", "200", "--waiters", "100",
		"--slice", "100ms", "--warm-up", "50ms", "--rounds", "2", "--known", "200",
		"--dualcheck", bin, "--dir", t.TempDir(), "-o", "json"}, &out, &talk)
	if code != 0 {
		t.Fatalf("status %d: %s", code, talk.String())
	}
	var report suite.Report
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Rows) != 22 || len(report.NotRun) != 0 {
		t.Errorf("%d rows: %s%s", len(report.Rows), talk.String(), out.String())
	}
	for _, row := range report.Rows {
		if row.Errors > 0 || row.PerSecond <= 0 {
			t.Errorf("%s: %+v", row.ID, row)
		}
		for _, a := range row.Against {
			if a.Rate <= 0 || len(a.Rounds) != 2 {
				t.Errorf("%s: %+v", row.ID, a)
			}
		}
		if told := row.Told; told != nil {
			if silence := strings.HasSuffix(row.ID, "elsewhere"); (told.PerSecond == 0) != silence || told.Ended > 0 || told.Undelivered > 0 {
				t.Errorf("%s: %+v", row.ID, told)
			}
		}
		switch {
		case strings.HasPrefix(row.ID, "events"):
			if row.Told == nil || row.Told.Answer == nil || row.Told.Question == nil || row.Told.Question.P50 <= row.Told.Answer.P50 {
				t.Errorf("%s: %+v", row.ID, row.Told)
			}
		case strings.HasPrefix(row.ID, "waiting"):
			if w := row.Waited; w == nil || w.Callers != 100 || w.Looks <= 0 {
				t.Errorf("%s: %+v", row.ID, w)
			}
		case strings.Contains(row.ID, "from Redis"):
			if row.MemoryRate == nil || *row.MemoryRate > 0 {
				t.Errorf("%s was answered from memory", row.ID)
			}
		case strings.Contains(row.ID, "from memory"):
			if row.MemoryRate == nil || *row.MemoryRate == 0 {
				t.Errorf("%s was not answered from memory", row.ID)
			}
		}
	}
}
