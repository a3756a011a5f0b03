package suite

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/target"
)

func TestOrderTurnsRound(t *testing.T) {
	for round, want := range [][]int{{0, 1, 2}, {2, 1, 0}, {0, 1, 2}} {
		if got := order(3, round); !slices.Equal(got, want) {
			t.Errorf("round %d: %v", round, got)
		}
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		of   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 2, 100}, 3}} {
		if got := median(c.of); got != c.want {
			t.Errorf("%v: %v", c.of, got)
		}
	}
}

// ran is a contestant whose rounds had these rates and no latencies.
func ran(id string, errors int64, rates ...float64) *contestant {
	c := &contestant{Row: Row{ID: id, InFlight: 64}, keys: 1}
	for i, rate := range rates {
		r := load.Result{Ops: int64(rate), Duration: time.Second}
		if i == 0 && errors > 0 {
			r.Errors, r.FirstError = errors, "refused"
		}
		c.rounds = append(c.rounds, r)
	}
	return c
}

func TestGoals(t *testing.T) {
	g := goal{id: "g", ours: "a", rival: "b", reach: 2, unit: "keys/s", value: perSecond}
	less := g
	less.less = true
	p99 := g
	p99.lowerP99 = true
	for _, c := range []struct {
		name         string
		goal         goal
		mine, theirs *contestant
		ratio        float64
		met          bool
		note         string
	}{
		// Of medians the ratio would be 2: it is of the rounds.
		{"median of the rounds", g, ran("a", 0, 100, 200, 300), ran("b", 0, 100, 50, 300), 1, false, ""},
		{"reached", g, ran("a", 0, 200, 240, 260), ran("b", 0, 100, 100, 100), 2.4, true, ""},
		{"less is better", less, ran("a", 0, 100, 100), ran("b", 0, 200, 220), 2.1, true, ""},
		{"our errors", g, ran("a", 3, 500), ran("b", 0, 100), 5, false, "a had 3 errors, the first: refused"},
		{"the rival's errors", g, ran("a", 0, 500), ran("b", 1, 100), 5, false, "b had 1 errors"},
		{"p99 not lower", p99, ran("a", 0, 500), ran("b", 0, 100), 5, false, "p99 0 µs against 0 µs"},
		{"a rival that answers nothing", g, ran("a", 0, 500), ran("b", 0, 0), 0, false, ""},
		{"no rival", g, ran("a", 0, 500), nil, 0, false, "b was not run: it is not installed"},
	} {
		running := map[string]*contestant{"a": c.mine}
		if c.theirs != nil {
			running["b"] = c.theirs
		}
		row := c.goal.judge(running, map[string]string{"b": "it is not installed"})
		if row.Ratio != c.ratio || row.Met != c.met || !strings.Contains(row.Note, c.note) {
			t.Errorf("%s: ratio %v, met %v, %q", c.name, row.Ratio, row.Met, row.Note)
		}
	}
}

// TestGoalTable keeps what is to be reached as the design has it.
func TestGoalTable(t *testing.T) {
	want := map[string]float64{"new-vs-etcd": 2.5, "new-vs-mariadb": 2.2, "new-vs-redis-aof": 0.9, "life-vs-redis-mysql": 3,
		"replay-vs-redis-get": 1.5, "idle-latency": 0.8, bytesPerRecord: 0.5}
	got := map[string]float64{bytesPerRecord: bytesGoal}
	rows := map[string]Row{}
	for _, row := range goalRows(Options{}) {
		rows[row.ID] = row
	}
	for _, g := range goals {
		got[g.id] = g.reach
		if rows[g.ours].Target == "" || rows[g.rival].Target == "" {
			t.Errorf("%s compares %s with %s, which are not both run", g.id, g.ours, g.rival)
		}
		if strings.HasPrefix(g.ours, "new,") != (rows[g.ours].InFlight == 1) {
			t.Errorf("%s has %d in flight", g.id, rows[g.ours].InFlight)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("%v", got)
	}
	if n := len(goalRows(Options{Only: []string{"new-vs-etcd"}})); n != 2 {
		t.Errorf("for one goal %d contestants run", n)
	}
}

func TestGoalJSON(t *testing.T) {
	g := goals[0]
	report := &GoalReport{NotRun: []NotRun{}, Rows: []GoalRow{
		g.judge(map[string]*contestant{g.ours: ran(g.ours, 0, 10), g.rival: ran(g.rival, 0, 5)}, nil), g.judge(nil, nil)}}
	var out bytes.Buffer
	if err := JSON(&out, report); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Rows []map[string]any `json:"rows"`
		All  map[string]any   `json:"machine"`
		Not  []any            `json:"not_run"`
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.All == nil || got.Not == nil || len(got.Rows) != 2 {
		t.Fatalf("%s", out.String())
	}
	for _, row := range got.Rows {
		for _, name := range []string{"id", "ratio", "goal", "met", "ours", "rival", "unit", "in_flight", "rival_in_flight", "rounds", "errors", "note"} {
			if v, ok := row[name]; !ok || v == nil {
				t.Errorf("no %s in %v", name, row)
			}
		}
	}
	out.Reset()
	if err := report.Table(&out); err != nil || !strings.Contains(out.String(), "new-vs-etcd") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// TestRows looks at every row of every suite: a target that there is, under a name that
// no other has.
func TestRows(t *testing.T) {
	o := Options{Records: []int{10, 20}, Known: 10, Repeats: 0.9, Client: "unary", Subscribers: 20, Events: 50, Waiters: 30}
	suites := append(All(), Suite{Name: Goals, rows: goalRows})
	for _, s := range suites {
		seen := map[string]bool{}
		for _, row := range s.rows(o) {
			if seen[name(row.ID)] {
				t.Errorf("%s: %q comes twice", s.Name, row.ID)
			}
			seen[name(row.ID)] = true
			kind, err := target.Find(row.Target)
			if err != nil {
				t.Errorf("%s: %v", s.Name, err)
			}
			if _, err := load.ParseKind(string(row.Keys)); err != nil {
				t.Errorf("%s, %s: %v", s.Name, row.ID, err)
			}
			if s.Name != Goals && row.InFlight == 0 && kind.Ours {
				t.Errorf("%s, %s: nothing in flight", s.Name, row.ID)
			}
		}
	}
	if _, err := Find("nosuch"); err == nil || !strings.Contains(err.Error(), "hot-key") {
		t.Errorf("%v", err)
	}
}

func TestResultBytes(t *testing.T) {
	r := Runner{Options: Options{ResultBytes: 200}}
	for of, want := range map[int]int{0: 200, none: 0, 64: 64} {
		if got := r.filled(Row{ResultBytes: of}).ResultBytes; got != want {
			t.Errorf("%d: %d", of, got)
		}
	}
}
