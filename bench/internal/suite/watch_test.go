package suite

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/bench/internal/load"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
	"github.com/dualcheck/dualcheck/bench/internal/target"
)

var watchOptions = Options{Subscribers: 1000, Events: 1000, Waiters: 10_000, Repeats: 0.9}

// TestWatchRows keeps what makes the rows comparable.
func TestWatchRows(t *testing.T) {
	s, err := Find(Watch)
	if err != nil {
		t.Fatal(err)
	}
	var parts []string
	watched := map[string]bool{} // sites
	for _, rows := range s.parts(watchOptions) {
		parts = append(parts, rows[0].Part)
		for _, row := range rows {
			if row.Readers != nil {
				watched[row.Site.Name] = true
			}
			for _, id := range row.Against {
				if !slices.ContainsFunc(rows, func(other Row) bool { return other.ID == id && other.ID != row.ID }) {
					t.Errorf("%s is compared with %s, which is not in its part", row.ID, id)
				}
			}
			if kind, err := target.Find(row.Target); err != nil || kind.Ours != (row.Site.Name != "") {
				t.Errorf("%s: a node of its own, %v: %v", row.ID, row.Site, err)
			}
		}
	}
	if !slices.Equal(parts, WatchParts()) {
		t.Errorf("parts %q", parts)
	}
	off := 0
	for _, row := range s.rows(watchOptions) {
		if row.Watch == watchOff {
			off++
			if watched[row.Site.Name] || row.Readers != nil {
				t.Errorf("%s: its node has subscribers", row.ID)
			}
		}
	}
	if off != 2 {
		t.Errorf("%d rows with the watch off", off)
	}
	one := watchOptions
	one.Only = []string{partMemory}
	if rows := watching(one); len(rows) != 7 {
		t.Errorf("%d rows of memory", len(rows))
	}
	if got := many(1000); got != (Readers{Reading: 900, Silent: 100}) {
		t.Errorf("%+v", got)
	}
}

func TestPartsOfOtherSuites(t *testing.T) {
	rows := func(Options) []Row { return []Row{{ID: "a"}, {ID: "b"}} }
	if got := len(Suite{rows: rows}.parts(Options{})); got != 1 {
		t.Errorf("%d parts", got)
	}
	if got := len(Suite{rows: rows, alone: true}.parts(Options{})); got != 2 {
		t.Errorf("%d parts of rows that run alone", got)
	}
}

// measured is what a meter makes of such latencies in a second.
func measured(all ...time.Duration) load.Result {
	m := load.NewMeter()
	for _, d := range all {
		m.Record(d)
	}
	return m.Result(time.Second)
}

func TestAgainst(t *testing.T) {
	base, c := ran("base", 0, 100, 200, 400), ran("c", 0, 50, 400, 100)
	c.Against = []string{"base", "that did not run"}
	base.busy, c.busy = []cores{{0.5, 1}, {1, 1}, {1, 1}}, []cores{{1, 1}, {1, 1}, {1, 1}}
	got := c.against(map[string]*contestant{"base": base})
	if len(got) != 1 || got[0].ID != "base" || got[0].Rate != 0.5 || !slices.Equal(got[0].Rounds, []float64{0.5, 2, 0.25}) || got[0].Events != nil || got[0].NodeTime != 4 || got[0].EtcdTime != 2 {
		t.Errorf("%+v", got)
	}
	for _, x := range []struct {
		*contestant
		d time.Duration
	}{{base, 2 * time.Millisecond}, {c, 3 * time.Millisecond}} {
		x.Rate, x.Readers = 10, &Readers{Reading: 3}
		for range x.rounds {
			x.told = append(x.told, target.Told{Events: int64(x.d / time.Millisecond), Latency: measured(time.Second), Whole: measured(x.d)})
		}
	}
	got = c.against(map[string]*contestant{"base": base})
	if e := got[0].Events; e == nil || e.Rate != 1.5 || e.P99 < 1.49 || e.P99 > 1.51 {
		t.Errorf("%+v", got[0].Events)
	}
}

// TestWatchTable: what was told and what waiting cost are beside their rows.
func TestWatchTable(t *testing.T) {
	told, waited := ran("told", 0, 10, 10), ran("waited", 0, 5)
	told.Readers, told.Against = &Readers{Reading: 900, Silent: 100}, []string{"waited"}
	late := load.NewMeter()
	late.Record(4 * time.Millisecond)
	late.Fail("it had not come")
	told.told = []target.Told{
		{Events: 700, Latency: late.Result(time.Second), Whole: measured(7 * time.Millisecond), Resyncs: 3},
		{Events: 900, Latency: measured(4 * time.Millisecond), Whole: measured(7 * time.Millisecond), Ended: 1, Why: "OVERLOADED"},
	}
	waited.waits = []target.Waited{{Callers: 10_000, Keys: 1, Quiet: 2 * time.Second, Cost: rig.Counters{Reads: 6, Looks: 2, Looked: 2}, Last: 9 * time.Millisecond}}
	f, g := told.figures(), waited.figures()
	f.Against = told.against(map[string]*contestant{"waited": waited})
	if f.Told.PerSecond != 800 || f.Told.Undelivered != 1 || f.Told.Resyncs != 3 || f.Told.Ended != 1 || f.Told.Answer.P50 < 3990 || f.Told.Question.Max < 6990 {
		t.Errorf("%+v", f.Told)
	}
	if *g.Waited != (Waited{Callers: 10_000, Keys: 1, EtcdReads: 3, Looks: 1, LookedKeys: 1, Last: 9000}) {
		t.Errorf("%+v", g.Waited)
	}
	var out bytes.Buffer
	if err := (&Report{Rows: []Figures{f, g}}).Table(&out); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		"(events, from the answer)", "900 readers", "told to begin anew 3 times", "ended 1 streams, the first: OVERLOADED", "events 1 had not come",
		"while 10000 callers waited for 1 keys the node read etcd 3 times a second", "9000 µs after", "divided, the median",
	} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("%q is not told:\n%s", text, out.String())
		}
	}
}
