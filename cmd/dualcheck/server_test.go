package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/embedetcd"
)

// talkBuffer takes what a command says while it runs.
type talkBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *talkBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *talkBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// running is a command that runs until it is stopped.
type running struct {
	t    *testing.T
	talk talkBuffer
	stop context.CancelFunc
	done chan struct{}
	err  error
}

// background runs a command line within the test's process.
func background(t *testing.T, args ...string) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{t: t, stop: cancel, done: make(chan struct{})}
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(&r.talk)
	root.SetErr(&r.talk)
	go func() {
		defer close(r.done)
		r.err = root.ExecuteContext(ctx)
	}()
	t.Cleanup(func() { r.end() })
	return r
}

// end stops the command and returns how it ended.
func (r *running) end() error {
	r.stop()
	<-r.done
	return r.err
}

// until waits for f, for as long as the command runs.
func (r *running) until(what string, f func() bool) {
	r.t.Helper()
	deadline := time.After(30 * time.Second)
	for !f() {
		select {
		case <-r.done:
			r.t.Fatalf("%s: it ended with %v\n%s", what, r.err, r.talk.String())
		case <-deadline:
			r.t.Fatalf("never: %s\n%s", what, r.talk.String())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

var servingLine = regexp.MustCompile(`msg=serving .*http=(\S+) debug=(\S+)`)

// addrs waits for a serve to serve and returns where.
func (r *running) addrs() (http, debug string) {
	r.t.Helper()
	var found []string
	r.until("it serves", func() bool { found = servingLine.FindStringSubmatch(r.talk.String()); return found != nil })
	return found[1], found[2]
}

// devAt waits for a dev on this directory and returns its addresses.
func (r *running) devAt(dir string) (at devAddrs) {
	r.t.Helper()
	r.until("it is ready", func() bool {
		b, err := os.ReadFile(filepath.Join(dir, devFile))
		return err == nil && json.Unmarshal(b, &at) == nil
	})
	return at
}

// post calls the JSON side and returns the answer.
func post(t *testing.T, addr, path, body string) (int, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return answerTo(t, req)
}

func answerTo(t *testing.T, req *http.Request) (int, map[string]any) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	doc := map[string]any{}
	if json.Unmarshal(b, &doc) != nil {
		doc["text"] = string(b)
	}
	return resp.StatusCode, doc
}

func get(t *testing.T, addr, path string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	code, doc := answerTo(t, req)
	text, _ := doc["text"].(string)
	return code, text
}

func dev(t *testing.T, dir string) (*running, devAddrs) {
	t.Helper()
	r := background(t, "dev", "--state-dir", dir, "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0")
	return r, r.devAt(dir)
}

func TestDevFromNothingAndAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	r, at := dev(t, dir)
	code, answer := post(t, at.HTTP, "/v1/dedup:begin", `{"namespace": "demo", "key": "k"}`)
	if code != 200 || answer["verdict"] != "VERDICT_FIRST" {
		t.Fatalf("%d %v", code, answer)
	}
	token := answer["claim"].(map[string]any)["token"].(string)
	if code, answer := post(t, at.HTTP, "/v1/dedup:complete", `{"namespace": "demo", "key": "k", "token": "`+token+`", "result": {"body": "aGk="}}`); code != 200 {
		t.Fatalf("%d %v", code, answer)
	}
	hello := r.talk.String()
	for _, part := range []string{program() + " begin demo order-1 --addr " + at.GRPC, "curl -s http://" + at.HTTP + "/v1/dedup:begin", "grpcurl -plaintext"} {
		if !strings.Contains(hello, part) {
			t.Errorf("no %q in\n%s", part, hello)
		}
	}

	second := background(t, "dev", "--state-dir", dir, "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0")
	<-second.done
	says := second.err.Error()
	if strings.Contains(says, "\n") || !strings.Contains(says, fmt.Sprintf("pid %d", os.Getpid())) || !strings.Contains(says, at.GRPC) || !strings.Contains(says, at.HTTP) {
		t.Errorf("the second says %q", says)
	}
	if p := problemOf(second.err); p.ExitCode != exitFailure {
		t.Errorf("the second exits %d", p.ExitCode)
	}

	if err := r.end(); err != nil {
		t.Fatalf("%v\n%s", err, r.talk.String())
	}
	if _, err := os.Stat(filepath.Join(dir, devFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", devFile, err)
	}
	if talk := r.talk.String(); strings.Contains(talk, "level=ERROR") || strings.Contains(talk, "level=WARN") {
		t.Errorf("it complains:\n%s", talk)
	}

	_, at = dev(t, dir)
	code, answer = post(t, at.HTTP, "/v1/dedup:begin", `{"namespace": "demo", "key": "k"}`)
	if code != 200 || answer["verdict"] != "VERDICT_REPLAY" {
		t.Errorf("after a restart: %d %v", code, answer)
	}
}

// What an operator did is told by dev as well, though it is at info.
func TestActsAreLogged(t *testing.T) {
	r, at := dev(t, t.TempDir())
	if code, answer := post(t, at.HTTP, "/v1/admin/namespaces:put", `{"namespace": {"name": "a"}}`); code != 200 {
		t.Fatalf("%d %v", code, answer)
	}
	if code, answer := post(t, at.HTTP, "/v1/admin/namespaces:delete", `{"name": "a"}`); code != 200 {
		t.Fatalf("%d %v", code, answer)
	}
	if code, answer := post(t, at.HTTP, "/v1/dedup:begin", `{"namespace": "demo", "key": "k"}`); code != 200 {
		t.Fatalf("%d %v", code, answer)
	}
	if code, answer := post(t, at.HTTP, "/v1/admin/records:forget", `{"namespace": "demo", "key": "k", "reason": "a test of the log", "force": true}`); code != 200 {
		t.Fatalf("%d %v", code, answer)
	}
	talk := r.talk.String()
	for _, part := range []string{`act="put namespace"`, `act="delete namespace"`, `act="forget record"`, `why="a test of the log"`} {
		if !strings.Contains(talk, part) {
			t.Errorf("no %s in\n%s", part, talk)
		}
	}
	for _, chatter := range []string{"msg=serving", "msg=registered"} {
		if strings.Contains(talk, chatter) {
			t.Errorf("%s in\n%s", chatter, talk)
		}
	}
}

// Whoever opens a port to others is told what that means.
func TestListeningOpenlyIsWarnedOf(t *testing.T) {
	for addr, warned := range map[string]bool{"127.0.0.1:0": false, "[::1]:0": false, ":0": true, "0.0.0.0:0": true} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			if addr == "[::1]:0" { // a machine without IPv6
				continue
			}
			t.Fatal(err)
		}
		for _, secure := range []bool{false, true} {
			var talk talkBuffer
			ears{grpc: l}.warnOpen(slog.New(slog.NewTextHandler(&talk, nil)), secure)
			if got := strings.Count(talk.String(), "whoever reaches these ports may call"); (got == 1) != warned || strings.Contains(talk.String(), "debug-addr") ||
				strings.Contains(talk.String(), "without TLS") != (warned && !secure) {
				t.Errorf("%s, TLS %v: %s", addr, secure, talk.String())
			}
		}
		var talk talkBuffer
		ears{debug: l}.warnOpen(slog.New(slog.NewTextHandler(&talk, nil)), true)
		l.Close()
		if got := strings.Count(talk.String(), "its heap dump holds tokens and results"); (got == 1) != warned || strings.Contains(talk.String(), "these ports") {
			t.Errorf("%s for pprof: %s", addr, talk.String())
		}
	}
}

func TestPortInUse(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for flag, other := range map[string]string{"grpc-addr": "http-addr", "http-addr": "grpc-addr"} {
		r := background(t, "dev", "--state-dir", t.TempDir(), "--"+flag, taken.Addr().String(), "--"+other, "127.0.0.1:0")
		<-r.done
		if says := fmt.Sprint(r.err); !strings.Contains(says, taken.Addr().String()+" is in use") || !strings.Contains(says, "--"+flag) || strings.Contains(says, "\n") {
			t.Errorf("%s: %q", flag, says)
		}
	}
}

func TestServeTwoNodesOnOneEtcd(t *testing.T) {
	etcd, err := embedetcd.Start(t.Context(), t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(etcd.Close)
	serve := func(id string, more ...string) *running {
		return background(t, append([]string{"serve", "--etcd-endpoints", etcd.Endpoint(), "--node-id", id, "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"}, more...)...)
	}
	one, two := serve("one", "--debug-addr", "127.0.0.1:0"), serve("two", "--require-declared-namespaces")
	first, debug := one.addrs()
	other, _ := two.addrs()
	if code, text := get(t, debug, "/debug/pprof/goroutine?debug=1"); code != http.StatusOK || !strings.Contains(text, "goroutine profile") {
		t.Errorf("pprof: %d %.80s", code, text)
	}
	if code, _ := get(t, first, "/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("pprof is on the port of everyone: %d", code)
	}
	if code, answer := post(t, other, "/v1/dedup:begin", `{"namespace": "a", "key": "k"}`); code != 404 {
		t.Errorf("an undeclared namespace: %d %v", code, answer)
	}
	if code, answer := post(t, first, "/v1/admin/namespaces:put", `{"namespace": {"name": "a"}}`); code != 200 {
		t.Fatalf("%d %v", code, answer)
	}
	code, answer := post(t, first, "/v1/dedup:begin", `{"namespace": "a", "key": "k"}`)
	if code != 200 || answer["verdict"] != "VERDICT_FIRST" {
		t.Fatalf("%d %v", code, answer)
	}
	one.until("the other node knows the namespace", func() bool {
		code, answer = post(t, other, "/v1/dedup:begin", `{"namespace": "a", "key": "k"}`)
		return code == 200
	})
	if answer["verdict"] != "VERDICT_IN_PROGRESS" {
		t.Errorf("%v", answer)
	}
	one.until("both nodes are listed", func() bool {
		_, answer = post(t, other, "/v1/admin/cluster:get", `{}`)
		nodes, _ := answer["nodes"].([]any)
		return len(nodes) == 2
	})
	members := answer["etcdMembers"].([]any)
	if answer["node"] != "two" || members[0].(map[string]any)["leader"] != true || answer["epoch"] == nil || answer["clock"] == nil {
		t.Errorf("cluster: %v", answer)
	}
	if _, metrics := get(t, first, "/metrics"); !strings.Contains(metrics, "dualcheck_ready 1") || !strings.Contains(metrics, `dualcheck_etcd_call_duration_seconds_count{`) || !strings.Contains(metrics, "dualcheck_tick_age_seconds") {
		t.Error("metrics of the node are missing")
	}
	for _, r := range []*running{one, two} {
		if err := r.end(); err != nil {
			t.Errorf("%v\n%s", err, r.talk.String())
		}
	}
}

// A node whose etcd does not answer runs, says so, and serves once it does.
func TestServeWithoutEtcd(t *testing.T) {
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	free.Close()
	r := background(t, "serve", "--etcd-endpoints", gone.Addr().String(), "--grpc-addr", "127.0.0.1:0", "--http-addr", addr)
	r.until("it says that etcd does not answer", func() bool {
		return strings.Contains(r.talk.String(), "etcd does not answer: this node is not ready, and keeps trying") && strings.Contains(r.talk.String(), "no etcd endpoint answers")
	})
	if code, _ := get(t, addr, "/livez"); code != 200 {
		t.Errorf("/livez %d", code)
	}
	if code, text := get(t, addr, "/readyz?verbose"); code != 503 || !strings.Contains(text, "[-] cluster") {
		t.Errorf("/readyz %d %s", code, text)
	}
	code, answer := post(t, addr, "/v1/dedup:begin", `{"namespace": "a", "key": "k"}`)
	if code != 503 || !strings.Contains(fmt.Sprint(answer), "STORE_UNAVAILABLE") {
		t.Errorf("begin: %d %v", code, answer)
	}
	began := time.Now()
	if err := r.end(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %v to stop", took)
	}
}

func TestCheckConfig(t *testing.T) {
	for _, args := range [][]string{
		{"serve", "--etcd-endpoints=a:1", "--check-config"},
		{"config", "check", "--etcd-endpoints=a:1"},
	} {
		r := background(t, args...)
		<-r.done
		if r.err != nil || !strings.Contains(r.talk.String(), "in order") {
			t.Errorf("%v: %v %s", args, r.err, r.talk.String())
		}
		r = background(t, append(args, "--tls-cert-file=/none", "--tls-key-file=/none")...)
		<-r.done
		if r.err == nil || problemOf(r.err).ExitCode != exitUsage || !strings.Contains(r.err.Error(), "(the flags)") {
			t.Errorf("%v: %v", args, r.err)
		}
		r = background(t, append(args, "--tls-cert-file=/none", "--tls-key-file=/none", "--grpc-addr=:7071", "--log-level=loud")...)
		<-r.done
		if lines := strings.Split(strings.TrimSpace(r.talk.String()), "\n"); problemOf(r.err).ExitCode != exitUsage || len(lines) != 4 ||
			lines[0] != "dualcheck: the settings cannot be used:" || !strings.Contains(lines[1], "are one port") || !strings.Contains(lines[2], "loud") || !strings.Contains(lines[3], "/none") {
			t.Errorf("%v: %v\n%s", args, r.err, r.talk.String())
		}
	}
	r := background(t, "config", "print", "--etcd-endpoints=a:1")
	<-r.done
	if r.err != nil || !strings.Contains(r.talk.String(), "grpc-addr: :7070 # default") {
		t.Errorf("%v %s", r.err, r.talk.String())
	}
}

func TestTLSForEtcd(t *testing.T) {
	_, certFile, keyFile := selfSigned(t)
	for name, c := range map[string]struct {
		s    settings
		none bool
		fail bool
	}{
		"in the clear":           {s: settings{EtcdEndpoints: []string{"a:1"}}, none: true},
		"by URL":                 {s: settings{EtcdEndpoints: []string{"https://a:1"}}},
		"by authority":           {s: settings{EtcdEndpoints: []string{"a:1"}, EtcdCAFile: certFile}},
		"with a certificate":     {s: settings{EtcdEndpoints: []string{"a:1"}, EtcdCAFile: certFile, EtcdCertFile: certFile, EtcdKeyFile: keyFile}},
		"an authority not there": {s: settings{EtcdEndpoints: []string{"a:1"}, EtcdCAFile: "/none"}, fail: true},
	} {
		config, err := c.s.etcdTLS()
		if (err != nil) != c.fail || (config == nil) != (c.none || c.fail) {
			t.Errorf("%s: %v %v", name, config, err)
			continue
		}
		if config != nil && strings.Contains(name, "authority") != (config.RootCAs != nil) && name != "with a certificate" {
			t.Errorf("%s: roots %v", name, config.RootCAs)
		}
		if name == "with a certificate" && config.GetClientCertificate == nil {
			t.Error("no certificate is shown")
		}
	}
}

func TestAdvertisedAddress(t *testing.T) {
	for listening, host := range map[string]string{"127.0.0.1": "127.0.0.1", "0.0.0.0": hostname(), "::": hostname(), "10.1.2.3": "10.1.2.3"} {
		if got := advertised(&net.TCPAddr{IP: net.ParseIP(listening), Port: 7070}); got != net.JoinHostPort(host, "7070") {
			t.Errorf("%s is advertised as %s", listening, got)
		}
	}
}
