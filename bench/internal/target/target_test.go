package target

import (
	"slices"
	"strings"
	"testing"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

func TestKinds(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range All() {
		if k.Name == "" || k.About == "" || k.Open == nil || seen[k.Name] {
			t.Errorf("%q is not a kind, or comes twice", k.Name)
		}
		seen[k.Name] = true
	}
	if _, err := Find("nosuch"); err == nil || !strings.Contains(err.Error(), "etcd-txn") {
		t.Errorf("%v", err)
	}
	for name := range callers {
		if !slices.Contains(Clients(), name) {
			t.Errorf("client %s is not told", name)
		}
	}
}

func TestAKeyIsOneAllocation(t *testing.T) {
	n := namer{"po-abcdef-new-"}
	if got := n.key(42); got != "po-abcdef-new-42" {
		t.Error(got)
	}
	var kept string
	if allocs := testing.AllocsPerRun(100, func() { kept = n.key(123456) }); allocs > 1 {
		t.Errorf("%v allocations for %s", allocs, kept)
	}
}

func TestResult(t *testing.T) {
	for _, n := range []int{0, 1, 200, 4096} {
		if got := len(result(n)); got != n {
			t.Errorf("%d bytes instead of %d", got, n)
		}
	}
}

// TestOwnBytes counts by hand.
func TestOwnBytes(t *testing.T) {
	const key = "po-4711"
	want := len("bench") + len(key) + len("order.accept") + 32 + len("bench-1") + len(key) + 200 + len("application/json") + 32 + 16 + 5*8 + 2*8
	if got := OwnBytes(key, 200); got != want {
		t.Errorf("%d instead of %d", got, want)
	}
}

func TestAnswersAreLookedAt(t *testing.T) {
	d := own{result: result(10)}
	for _, c := range []struct {
		answer
		text string
	}{
		{answer{verdict: dualcheckv1.Verdict_VERDICT_REPLAY, size: 10}, ""},
		{answer{verdict: dualcheckv1.Verdict_VERDICT_REPLAY, size: 9}, "9 bytes instead of 10"},
		{answer{verdict: dualcheckv1.Verdict_VERDICT_FIRST}, "VERDICT_FIRST instead of VERDICT_REPLAY"},
	} {
		switch err := d.whole(c.answer); {
		case err == nil && c.text == "":
		case err == nil, !strings.Contains(err.Error(), c.text):
			t.Errorf("%+v: %v", c.answer, err)
		}
	}
}

func TestTableNames(t *testing.T) {
	if got := tableName(Spec{Name: "redis-mysql-life"}); got != "claims_redis_mysql_life" {
		t.Error(got)
	}
}
