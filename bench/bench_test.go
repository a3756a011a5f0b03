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
		{"--suite goals --only nosuch", `--only: no goal "nosuch"; there are new-vs-etcd`},
		{"--suite limits --only new-vs-etcd", "--only goes with --suite goals"},
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

// TestGoalsWithEtcdAndRedis runs a few goals in short slices on real servers: figures
// mean nothing here, their shape and the absence of errors do.
func TestGoalsWithEtcdAndRedis(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "dualcheck")
	build := exec.Command("go", "build", "-o", bin, "./cmd/dualcheck")
	build.Dir = ".."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
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
