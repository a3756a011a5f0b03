package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/dualcheck/dualcheck/internal/embedetcd"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// finishes has a key begun and completed.
func finishes(t *testing.T, addr, key string) {
	t.Helper()
	code, answer := post(t, addr, "/v1/dedup:begin", `{"namespace": "demo", "key": "`+key+`"}`)
	if code != 200 || answer["verdict"] != "VERDICT_FIRST" {
		t.Fatalf("%d %v", code, answer)
	}
	token := answer["claim"].(map[string]any)["token"].(string)
	if code, answer = post(t, addr, "/v1/dedup:complete", `{"namespace": "demo", "key": "`+key+`", "token": "`+token+`", "result": {"body": "aGk="}}`); code != 200 {
		t.Fatalf("%d %v", code, answer)
	}
}

// replayedFrom asks for a finished key and returns who answered.
func replayedFrom(t *testing.T, addr, key string) any {
	t.Helper()
	code, answer := post(t, addr, "/v1/dedup:begin", `{"namespace": "demo", "key": "`+key+`"}`)
	if code != 200 || answer["verdict"] != "VERDICT_REPLAY" || answer["record"].(map[string]any)["result"].(map[string]any)["body"] != "aGk=" {
		t.Fatalf("%d %v", code, answer)
	}
	return answer["source"]
}

// dev runs a Redis that answers repeats; when it dies it is started again, and hits
// return without a restart of dev.
func TestDevRunsRedis(t *testing.T) {
	r, at := dev(t, filepath.Join(t.TempDir(), "state"))
	if at.Redis == "" || !strings.Contains(r.talk.String(), "Redis "+at.Redis) {
		t.Fatalf("no Redis: %+v\n%s", at, r.talk.String())
	}
	finishes(t, at.HTTP, "k")
	if source := replayedFrom(t, at.HTTP, "k"); source != "SOURCE_MEMORY" {
		t.Errorf("answered by %v", source)
	}
	if code, answer := post(t, at.HTTP, "/v1/admin/switches:put", `{"switch": {"name": "bypass-memory", "on": true, "reason": "test"}}`); code != 200 {
		t.Fatalf("%d %v", code, answer)
	}
	r.until("Redis answers", func() bool { return replayedFrom(t, at.HTTP, "k") == "SOURCE_REDIS" })
	client := redis.NewClient(&redis.Options{Addr: at.Redis, MaxRetries: -1})
	defer client.Close()
	client.ShutdownNoSave(t.Context()) // has no answer
	r.until("its death is told", func() bool { return strings.Contains(r.talk.String(), "redis-server died") })
	r.until("Redis answers again", func() bool { return replayedFrom(t, at.HTTP, "k") == "SOURCE_REDIS" })
	if _, text := get(t, at.HTTP, "/metrics"); !strings.Contains(text, `dualcheck_redis_looks_total{finding="hit"}`) || !strings.Contains(text, `dualcheck_believed 1`) ||
		!strings.Contains(text, `dualcheck_memory_looks_total{finding="hit"}`) || !strings.Contains(text, `dualcheck_memory_bypassed 1`) || !strings.Contains(text, `dualcheck_memory_entries 1`) {
		t.Error("the metrics say nothing of hits")
	}
	r.until("it is ready and whole", func() bool {
		code, text := get(t, at.HTTP, "/readyz?verbose")
		return code == 200 && strings.Contains(text, "[+] redis ok")
	})
}

// Without a redis-server one line says so, and everything works.
func TestDevWithoutRedis(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	r, at := dev(t, filepath.Join(t.TempDir(), "state"))
	const line = "dualcheck runs without Redis, which is correct and slower: redis-server is not installed"
	if strings.Count(r.talk.String(), line) != 1 || !strings.Contains(r.talk.String(), "apt-get install redis-server") || at.Redis != "" {
		t.Errorf("it says\n%s", r.talk.String())
	}
	finishes(t, at.HTTP, "k")
	if source := replayedFrom(t, at.HTTP, "k"); source != "SOURCE_MEMORY" {
		t.Errorf("answered by %v", source)
	}
	if _, text := get(t, at.HTTP, "/readyz?verbose"); !strings.Contains(text, "[ ] redis: this node has none") {
		t.Errorf("it says %s", text)
	}
}

// serve reaches Redis by its settings: TLS by an authority of its own, a user, a
// password in a file.
func TestServeWithRedis(t *testing.T) {
	etcd, err := embedetcd.Start(t.Context(), t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(etcd.Close)
	server, ca := redistest.StartTLS(t)
	server.SetUser("dualcheck", "p w", "~dc:*", "+@all")
	password := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("p w\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	serve := func(more ...string) (*running, string) {
		r := background(t, append([]string{"serve", "--etcd-endpoints", etcd.Endpoint(), "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--redis-addrs", server.Addr(), "--memory-bytes", "0"}, more...)...)
		addr, _ := r.addrs()
		return r, addr
	}
	r, addr := serve("--redis-ca-file", ca, "--redis-user", "dualcheck", "--redis-password-file", password)
	finishes(t, addr, "k")
	r.until("Redis answers", func() bool { return replayedFrom(t, addr, "k") == "SOURCE_REDIS" })

	if err := os.WriteFile(password, []byte("another\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r, addr = serve("--redis-ca-file", ca, "--redis-user", "dualcheck", "--redis-password-file", password)
	r.until("it says why Redis is not used", func() bool {
		_, text := get(t, addr, "/readyz?verbose")
		return strings.Contains(text, "[!] redis: not used") && strings.Contains(text, "degraded=redis") && strings.Contains(text, "WRONGPASS")
	})
	if source := replayedFrom(t, addr, "k"); source != "SOURCE_ETCD" {
		t.Errorf("answered by %v", source)
	}
	if !strings.Contains(r.talk.String(), "Redis is not used") {
		t.Error(fmt.Sprint("the log says nothing of it\n", r.talk.String()))
	}
}
