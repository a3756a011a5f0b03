package server

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// C62: what a node does without is told with every answer, good or bad, over gRPC and
// over JSON, and in health; and it stays ready.
func TestC62DegradedIsLoud(t *testing.T) {
	var lost atomic.Bool
	w := start(t, func(c *Config) {
		c.RedisAway = func() error {
			if lost.Load() {
				return errors.New("not used, etcd answers what memory does not: connection refused")
			}
			return nil
		}
	})
	told := func(want string) {
		t.Helper()
		for _, key := range []string{"k", " not a key"} {
			var trailer metadata.MD
			_, err := w.Get(t.Context(), &dualcheckv1.GetRequest{Namespace: "ns", Key: key}, grpc.Trailer(&trailer))
			if got := strings.Join(trailer.Get("dualcheck-degraded"), ","); got != want {
				t.Errorf("trailer %q, want %q (%v)", got, want, err)
			}
			_, header, _ := w.post("/v1/dedup:get", `{"namespace":"ns","key":"`+key+`"}`)
			if got := header.Get("Dualcheck-Degraded"); got != want {
				t.Errorf("header %q, want %q", got, want)
			}
		}
	}
	ready := func(line, verdict string) {
		t.Helper()
		if code, body := w.get("/readyz?verbose"); code != 200 || !strings.Contains(body, line+"\n") || !strings.HasSuffix(body, verdict+"\n") {
			t.Errorf("%d %s", code, body)
		}
		if code, body := w.get("/readyz"); code != 200 || body != "ok\n" {
			t.Errorf("%d %s", code, body)
		}
	}
	told("")
	ready("[+] redis ok", "ready")
	lost.Store(true)
	told("redis")
	ready("[!] redis: not used, etcd answers what memory does not: connection refused", "ready degraded=redis")
	lost.Store(false)
	told("")
	ready("[+] redis ok", "ready")
}

// A node without Redis lacks nothing.
func TestNodeWithoutRedisIsNotDegraded(t *testing.T) {
	w := start(t)
	if code, body := w.get("/readyz?verbose"); code != 200 || !strings.Contains(body, "[ ] redis: this node has none") || !strings.HasSuffix(body, "ready\n") {
		t.Errorf("%d %s", code, body)
	}
	if _, header, _ := w.post("/v1/dedup:get", `{"namespace":"ns","key":"k"}`); header.Get("Dualcheck-Degraded") != "" {
		t.Error("it says that it is degraded")
	}
}
