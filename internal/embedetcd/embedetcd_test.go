package embedetcd

import (
	"bufio"
	"context"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// childEnv makes the test binary run as a process that only keeps an etcd.
const childEnv = "EMBEDETCD_TEST_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		s, err := Start(context.Background(), dir, slog.New(slog.DiscardHandler))
		if err != nil {
			panic(err)
		}
		os.Stdout.WriteString(s.Endpoint() + "\n")
		select {} // until it is killed
	}
	os.Exit(m.Run())
}

func connect(t *testing.T, endpoint string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func put(t *testing.T, endpoint, key string) {
	t.Helper()
	client := connect(t, endpoint)
	defer client.Close()
	if _, err := client.Put(t.Context(), key, "v"); err != nil {
		t.Fatal(err)
	}
}

func has(t *testing.T, endpoint, key string) bool {
	t.Helper()
	client := connect(t, endpoint)
	defer client.Close()
	resp, err := client.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return len(resp.Kvs) == 1
}

func mustStart(t *testing.T, dir string) *Server {
	t.Helper()
	s, err := Start(t.Context(), dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRestartFindsItsDataAndItsPort(t *testing.T) {
	dir := t.TempDir()
	first := mustStart(t, dir)
	put(t, first.Endpoint(), "k")
	endpoint := first.Endpoint()
	first.Close()
	second := mustStart(t, dir)
	defer second.Close()
	if second.Endpoint() != endpoint {
		t.Errorf("endpoint %s, was %s", second.Endpoint(), endpoint)
	}
	if !has(t, second.Endpoint(), "k") {
		t.Error("what was put before the restart is gone")
	}
}

func TestPortTakenMeanwhile(t *testing.T) {
	dir := t.TempDir()
	first := mustStart(t, dir)
	endpoint := first.Endpoint()
	first.Close()
	taken, err := net.Listen("tcp", endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	second := mustStart(t, dir)
	defer second.Close()
	if second.Endpoint() == endpoint {
		t.Error("the endpoint is one that somebody else listens on")
	}
	put(t, second.Endpoint(), "k")
}

func TestRestartAfterKill(t *testing.T) {
	dir := t.TempDir()
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childEnv+"="+dir)
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = child.Process.Kill() })
	line, _, err := bufio.NewReader(out).ReadLine()
	if err != nil {
		t.Fatal(err)
	}
	put(t, string(line), "k")
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // it was killed
	s := mustStart(t, dir)
	defer s.Close()
	if !has(t, s.Endpoint(), "k") {
		t.Error("what was acknowledged before the kill is gone")
	}
}
