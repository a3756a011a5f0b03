package etcdtxn

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// takes takes at most so many, and tells them in order.
func takes(l *lanes[string], most int, except ...string) string {
	var got []string
	l.take(most, func(x string) pick {
		if slices.Contains(except, x) {
			return left
		}
		got = append(got, x)
		return taken
	})
	return strings.Join(got, " ")
}

func TestNamespacesTakeTurns(t *testing.T) {
	var l lanes[string]
	for i := range 6 {
		l.push("storm", false, fmt.Sprint("s", i))
	}
	l.push("calm", false, "c0")
	l.push("other", false, "o0")
	l.push("other", false, "o1")
	for _, want := range []string{"s0 c0 o0 s1", "o1 s2 s3", "s4 s5", ""} {
		if got := takes(&l, max(len(strings.Fields(want)), 1)); got != want {
			t.Errorf("took %q, want %q", got, want)
		}
	}
}

// Whose turn it was when a batch was full is first in the next.
func TestTheTurnGoesOn(t *testing.T) {
	var l lanes[string]
	for i := range 3 {
		for _, ns := range []string{"a", "b", "c"} {
			l.push(ns, false, fmt.Sprint(ns, i))
		}
	}
	for _, want := range []string{"a0 b0", "c0 a1", "b1 c1", "a2 b2", "c2"} {
		if got := takes(&l, 2); got != want {
			t.Errorf("took %q, want %q", got, want)
		}
	}
}

// H27: what ends or keeps a claim goes first, and yet does not keep all else out.
func TestH27TheUrgentLane(t *testing.T) {
	var l lanes[string]
	for i := range 8 {
		l.push("a", false, fmt.Sprint("b", i))
		l.push("a", true, fmt.Sprint("f", i))
	}
	for _, want := range []string{"f0 f1 f2 b0", "f3 f4 f5 b1", "f6 f7 b2 b3", "b4 b5 b6 b7"} {
		if got := takes(&l, 4); got != want {
			t.Errorf("took %q, want %q", got, want)
		}
	}
	l.push("a", true, "alone")
	if got := takes(&l, 1); got != "alone" {
		t.Errorf("took %q", got)
	}
}

// What is left keeps its place.
func TestLeftKeepsItsPlace(t *testing.T) {
	var l lanes[string]
	for _, x := range []string{"1", "2", "3", "4"} {
		l.push("a", false, x)
	}
	if got := takes(&l, 2, "1", "2"); got != "3 4" {
		t.Errorf("took %q", got)
	}
	l.push("a", false, "5")
	if got := takes(&l, 3); got != "1 2 5" {
		t.Errorf("took %q", got)
	}
}

// A namespace that has filled the lane does not close it to the others.
func TestALaneThatOneNamespaceFilledAdmitsOthers(t *testing.T) {
	var l lanes[string]
	const most = 10
	for l.admits("storm", most) {
		l.push("storm", false, "s")
	}
	if l.usual.waiting != most {
		t.Errorf("the storm has %d waiting, want %d", l.usual.waiting, most)
	}
	for l.admits("calm", most) {
		l.push("calm", false, "c")
	}
	if got := l.usual.of("calm"); got == 0 || l.usual.waiting > 2*most {
		t.Errorf("the calm one has %d waiting of %d", got, l.usual.waiting)
	}
}

// Nothing is lost, doubled or turned round within a namespace, whatever is pushed and
// taken.
func TestLanesLoseNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l lanes[string]
		in, out := map[string][]string{}, map[string][]string{}
		n := 0
		take := func(most int, choose func(string) pick) {
			got := 0
			l.take(most, func(x string) pick {
				p := choose(x)
				if p == taken || p == dropped {
					lane := x[:2]
					out[lane] = append(out[lane], x)
				}
				if p == taken {
					got++
				}
				return p
			})
			if got > most {
				t.Fatalf("took %d of at most %d", got, most)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				ns, urgent := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "namespace"), rapid.Bool().Draw(t, "urgent")
				lane := ns + map[bool]string{true: "!", false: "."}[urgent]
				x := fmt.Sprint(lane, n)
				n++
				in[lane] = append(in[lane], x)
				l.push(ns, urgent, x)
			},
			"take": func(t *rapid.T) {
				take(rapid.IntRange(1, 5).Draw(t, "most"), func(string) pick {
					return rapid.SampledFrom([]pick{taken, dropped, enough}).Draw(t, "pick")
				})
			},
			"": func(t *rapid.T) {
				waiting := 0
				for lane := range in {
					waiting += len(in[lane]) - len(out[lane])
				}
				if got := l.urgent.waiting + l.usual.waiting; got != waiting {
					t.Fatalf("%d wait, want %d", got, waiting)
				}
			},
		})
		take(n+1, func(string) pick { return taken })
		for lane := range in {
			if !slices.Equal(in[lane], out[lane]) {
				t.Fatalf("%s: %v came out as %v", lane, in[lane], out[lane])
			}
		}
	})
}

// What has waited until etcd would refuse it for its tick is not sent: it would have all
// that it is sent with refused, and a queue that is once too long would never recover.
func TestWhatIsTooOldIsNotSent(t *testing.T) {
	c := commits{ops: 128, busy: map[string]*proposal{}}
	propose := func(key string, tick int64, again bool) *proposal {
		p := &proposal{member: member{key: key, puts: []put{{key: key}}}, view: &claim.View{Tick: claim.Tick{Version: tick}}, again: again, landed: make(chan struct{})}
		c.busy[key] = p
		c.waiting.push("ns", false, p)
		return p
	}
	old, doubted, fresh := propose("old", 5, false), propose("doubted", 5, true), propose("fresh", 12, false)
	batch := c.take(5 + claim.TickWindow - staleEarly)
	if len(batch) != 2 || batch[0] != doubted || batch[1] != fresh {
		t.Fatalf("%d are sent", len(batch))
	}
	select {
	case <-old.landed:
	default:
		t.Fatal("the old one's caller still waits")
	}
	if !errors.Is(old.err, errStale) || c.busy["old"] != nil || c.withdraw(old) {
		t.Errorf("it ended with %v, its key is busy: %v", old.err, c.busy["old"] != nil)
	}
}

// Large finishes, one of which fills a batch, do not keep all Begins out.
func TestLargeFinishesDoNotKeepBeginsOut(t *testing.T) {
	c := commits{ops: 128, busy: map[string]*proposal{}}
	push := func(key string, urgent bool, size int) {
		c.waiting.push("ns", urgent, &proposal{member: member{key: key, puts: []put{{key: key}}}, view: &claim.View{}, size: size, landed: make(chan struct{})})
	}
	push("begin", false, 300)
	for i := range 4 {
		push(fmt.Sprint("finish", i), true, writeBytes)
		for _, p := range c.take(0) {
			if p.key == "begin" {
				return
			}
		}
	}
	t.Error("four batches went without it")
}
