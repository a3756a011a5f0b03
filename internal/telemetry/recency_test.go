package telemetry

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestTTLsAreCountedByWhatChoseThem(t *testing.T) {
	m := NewMetrics(Build{})
	r := m.Recency(func() int { return 7 })
	r.TTL("supplier", 20*time.Minute)
	r.TTL("supplier", 2*time.Hour)
	r.TTL("nothing", 2*time.Hour)
	problems, err := testutil.GatherAndLint(m.registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, line := range []string{
		`dualcheck_cache_ttl_seconds_sum{by="supplier"} 8400`, `dualcheck_cache_ttl_seconds_count{by="supplier"} 2`,
		`dualcheck_cache_ttl_seconds_bucket{by="supplier",le="1200"} 1`, `dualcheck_cache_ttl_seconds_count{by="nothing"} 1`, "dualcheck_cache_habits 7",
	} {
		if !strings.Contains(w.Body.String(), line) {
			t.Errorf("no %s", line)
		}
	}
}
