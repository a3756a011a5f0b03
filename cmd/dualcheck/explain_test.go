package main

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

func TestAddresses(t *testing.T) {
	for text, want := range map[string]address{
		"host:1":                 {target: "host:1"},
		"host":                   {target: "host:7070"},
		"10.0.0.1":               {target: "10.0.0.1:7070"},
		"::1":                    {target: "[::1]:7070"},
		"[::1]":                  {target: "[::1]:7070"},
		"[::1]:80":               {target: "[::1]:80"},
		":7070":                  {target: ":7070"},
		"http://host:1":          {target: "host:1", plain: true},
		"HTTP://host/":           {target: "host:7070", plain: true},
		"https://host":           {target: "host:7070", tls: true},
		"https://host:443":       {target: "host:443", tls: true},
		"dns:///host:1":          {target: "dns:///host:1"},
		"dns:1":                  {target: "dns:1"},
		"unix:/run/dualcheck":    {target: "unix:/run/dualcheck"},
		"unix:///run/dualcheck":  {target: "unix:///run/dualcheck"},
		"passthrough:///host:80": {target: "passthrough:///host:80"},
	} {
		if got, err := parseAddress(text); err != nil || got != want {
			t.Errorf("%s is %+v (%v), want %+v", text, got, err, want)
		}
	}
	for text, word := range map[string]string{
		"":                  "names no host",
		"http://":           "names no host",
		"ftp://host":        "http:// or https://",
		"http://host:1/v1":  "port",
		"http://host/v1":    "nothing after it",
		"host:":             "65535",
		"host:0":            "65535",
		"host:65536":        "65535",
		"host:grpc":         "65535",
		"a:b:c":             "nothing after it",
		"user@host:80":      "nothing after it",
		"http://host:80?x=": "65535",
	} {
		command(t, "", "get", "n", "a", "--addr="+text).complains(t, exitUsage, word)
	}
	command(t, "", "get", "n", "a", "--addr=http://host", "--tls").complains(t, exitUsage, "http://", "--tls")
	for target, want := range map[string]bool{"localhost:1": true, ":1": true, "[::1]:1": true, "127.9.0.1:1": true, "host:1": false, "10.0.0.1:1": false, "unix:x": false} {
		if got := (address{target: target}).isLoopback(); got != want {
			t.Errorf("%s is loopback: %v", target, got)
		}
	}
}

func TestAnAddressAsABrowserHasIt(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	command(t, "", "begin", "n", "a", "--addr", "http://"+addr+"/").wants(t, exitOK, "FIRST", "--addr=http://"+addr+"/ n a --token")
	t.Setenv(addrVariable, "http://"+addr)
	command(t, "", "begin", "n", "a").wants(t, exitInProgress)
}

// TestACallMadeTheWrongWayIsAMistake: retrying would not help, so it is not 10.
func TestACallMadeTheWrongWayIsAMistake(t *testing.T) {
	_, plain := startFake(t, &ingesttest.Service{})
	pair, ca, _ := selfSigned(t)
	_, secure := startFake(t, &ingesttest.Service{}, grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"},
	})))
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	json := web.Listener.Addr().String()
	var one sync.WaitGroup
	_, port, err := net.SplitHostPort(secure)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args  []string
		words []string
	}{
		{[]string{"--addr", json}, []string{"this looks like the JSON port", "7070 unless told otherwise"}},
		{[]string{"--addr", plain, "--tls"}, []string{"does not speak TLS on this port; leave --tls out\n"}},
		{[]string{"--addr", "https://" + plain}, []string{"does not speak TLS"}},
		{[]string{"--addr", secure}, []string{"try --tls (and --ca-file)"}},
		{[]string{"--addr", secure, "--tls"}, []string{"cannot be verified", "--ca-file"}},
		{[]string{"--addr", "localhost:" + port, "--ca-file", ca}, []string{"localhost", "--addr must name a host"}},
	} {
		one.Go(func() {
			command(t, "", append([]string{"get", "n", "a"}, c.args...)...).complains(t, exitUsage, c.words...)
		})
		one.Go(func() {
			lines := command(t, `{"namespace":"n","key":"c","body":1}`, append([]string{"ingest", "-"}, c.args...)...)
			lines.complains(t, exitUsage, c.words...)
		})
	}
	one.Wait()
	told := object(t, command(t, "", "get", "n", "a", "-o", "json", "--addr", plain, "--tls").stderr)
	if told["reason"] != "USAGE" || told["status"] != "INVALID_ARGUMENT" || told["exit_code"] != 2.0 {
		t.Errorf("got %v", told)
	}
	command(t, "", "begin", "n", "a", "--addr", "https://"+secure, "--ca-file", ca).wants(t, exitOK, "FIRST")
}

func TestDevIsOfferedWhereItWouldHelp(t *testing.T) {
	here := explainer{at: address{target: "localhost:7070"}}
	there := explainer{at: address{target: "db.example:7070"}}
	const refused = `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:7070: connect: connection refused"`
	explained := func(e explainer, said string) problem {
		return problemOf(ranError{e.explain(t.Context(), status.Error(codes.Unavailable, said), time.Second)})
	}
	if p := explained(here, refused); !strings.HasPrefix(p.Advice, "start one with dualcheck dev, or name another") ||
		p.Message != "no server answers at localhost:7070 (dial tcp 127.0.0.1:7070: connect: connection refused)" ||
		p.Reason != "STORE_UNAVAILABLE" || p.ExitCode != exitUnavailable {
		t.Errorf("got %+v", p)
	}
	for _, p := range []problem{explained(there, refused), explained(here, "name resolver error: produced zero addresses")} {
		if strings.Contains(p.Advice, "dev") || p.ExitCode != exitUnavailable {
			t.Errorf("got %+v", p)
		}
	}
	p := explained(there, "unexpected HTTP status code received from server: 404 (Not Found)")
	if p.ExitCode != exitUsage || !strings.Contains(p.Message, "does not speak gRPC") {
		t.Errorf("got %+v", p)
	}
}

// TestACallThatWasCutOffSaysHowToRepeatIt: whatever words gRPC has for it.
func TestACallThatWasCutOffSaysHowToRepeatIt(t *testing.T) {
	e := explainer{at: address{target: "localhost:7070"}}
	for _, err := range []error{
		status.Error(codes.DeadlineExceeded, "stream terminated by RST_STREAM with error code: CANCEL"),
		status.Error(codes.Canceled, "stream terminated by RST_STREAM with error code: CANCEL"),
		ingesttest.Error(codes.DeadlineExceeded, "STORE_UNAVAILABLE", "send the same call again", nil),
	} {
		call := &callError{err: e.explain(t.Context(), err, 3*time.Second), command: "begin", requestID: "id-1"}
		if p := problemOf(ranError{call}); p.Message != "no answer within 3s" || p.Status != "DEADLINE_EXCEEDED" || p.Reason != "STORE_UNAVAILABLE" ||
			p.RequestID != "id-1" || !strings.HasSuffix(p.Advice, "; repeat it with --request-id=id-1") || p.ExitCode != exitUnavailable {
			t.Errorf("%v became %+v", err, p)
		}
	}
	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.explain(stopped, status.Error(codes.Canceled, "context canceled"), time.Second); status.Code(err) != codes.Canceled {
		t.Errorf("an interrupt became %v", err)
	}
}

func TestTheVeryCallCanBeRepeated(t *testing.T) {
	var mu sync.Mutex
	silent := true
	service := &ingesttest.Service{}
	service.Before = func(ctx context.Context, _ proto.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if silent {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}
	_, addr := startFake(t, service)
	t.Setenv(addrVariable, addr)
	lost := command(t, "", "begin", "n", "a", "--timeout", "100ms")
	lost.complains(t, exitUnavailable, "no answer within ", "ms; it may need more --timeout; repeat it with ")
	id := regexp.MustCompile(`repeat it with (--request-id=[0-9a-f-]{36})\n`).FindStringSubmatch(lost.stderr)
	if id == nil {
		t.Fatalf("it said %q", lost.stderr)
	}
	told := object(t, command(t, "", "begin", "n", "a", "--timeout", "100ms", "--request-id=x y", "-o", "json").stderr)
	if told["request_id"] != "x y" || !strings.HasSuffix(told["advice"].(string), "repeat it with --request-id='x y'") {
		t.Errorf("got %v", told)
	}
	told = object(t, command(t, "", "get", "n", "a", "--timeout", "100ms", "-o", "json").stderr)
	if _, there := told["request_id"]; there {
		t.Errorf("got %v", told)
	}
	mu.Lock()
	silent = false
	mu.Unlock()
	command(t, "", "begin", "n", "a", id[1]).wants(t, exitOK, "FIRST")
	command(t, "", "begin", "n", "a", id[1]).wants(t, exitOK, "FIRST", "this call had been answered before")
}

// TestTheScriptOfHelpDoesTheWorkOnce runs the script that begin --help shows.
func TestTheScriptOfHelpDoesTheWorkOnce(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	dir := t.TempDir()
	jq := "#!/bin/sh\nsed 's/.*\"token\":\"\\([^\"]*\\)\".*/\\1/'\n"
	for name, text := range map[string]string{"jq": jq, "capture": "#!/bin/sh\necho ran >>ran.txt\necho paid\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	run := func(order string) (string, int) {
		cmd := exec.Command("sh", "-c", beginScript)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "order="+order, addrVariable+"="+addr, "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	if out, code := run("o 1"); code != 0 || !strings.HasPrefix(out, "SUCCEEDED") {
		t.Errorf("first: %d, %q", code, out)
	}
	if out, code := run("o 1"); code != 0 || out != "o 1 is done already\n" {
		t.Errorf("again: %d, %q", code, out)
	}
	if body := service.Record("payments", "o 1").GetResult().GetBody(); string(body) != "paid" {
		t.Errorf("it stored %q", body)
	}
	if ran, err := os.ReadFile(filepath.Join(dir, "ran.txt")); string(ran) != "ran\n" {
		t.Errorf("the work ran as %q (%v)", ran, err)
	}
	command(t, "", "begin", "payments", "o 2", "--addr", addr).wants(t, exitOK)
	if out, code := run("o 2"); code != 75 || !strings.Contains(out, "again later") {
		t.Errorf("in progress: %d, %q", code, out)
	}
}

func TestWhatAClaimThatDecidesNoMoreIsTold(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	for key, words := range map[string]string{
		"retryable": "the claim has ended (RELEASED): the next begin is FIRST\n",
		"terminal":  "the claim has ended (FAILED): dualcheck get n terminal\n",
		"unknown":   "the claim has ended (UNKNOWN): find out what happened, then: dualcheck resolve n unknown --state=",
		"success":   "the claim has ended (SUCCEEDED): dualcheck get n success\n",
	} {
		token := object(t, command(t, "", "begin", "n", key, "-o", "json").stdout)["claim"].(map[string]any)["token"].(string)
		if key == "success" {
			command(t, "", "complete", "n", key, "--token", token).wants(t, exitOK)
		} else {
			command(t, "", "fail", "n", key, "--token", token, "--class", key).wants(t, exitOK)
		}
		command(t, "", "extend", "n", key, "--token", token).complains(t, exitRefused, "CLAIM_LOST", words)
	}
	command(t, "", "complete", "n", "success", "--token", "older").complains(t, exitRefused, "the claim has ended (SUCCEEDED)")
}

func TestHintsUseTheProgramAsItWasCalled(t *testing.T) {
	before := calledAs
	defer func() { calledAs = before }()
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	calledAs = "./my dist/dualcheck"
	command(t, "", "begin", "n", "a").wants(t, exitOK, "\n './my dist/dualcheck' complete n a --token=")
	calledAs = "./dist/dualcheck"
	command(t, "", "namespace", "get", "n").complains(t, exitNotFound, "; ./dist/dualcheck namespace put n\n")
	command(t, "", "get", "n", "a", "--addr=127.0.0.1:1").complains(t, exitUnavailable, "start one with ./dist/dualcheck dev")
}

func TestEveryErrorAsJSONSaysWhatItIs(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	lines := `{"namespace":"n","key":"a","body":1}` + "\n" + `{"namespace":"n","key":"a","body":2}` + "\n"
	for _, c := range []struct {
		stdin          string
		args           []string
		exit           int
		status, reason string
	}{
		{"", []string{"get", "n", "a", "--addr", "127.0.0.1:1"}, exitUnavailable, "UNAVAILABLE", "STORE_UNAVAILABLE"},
		{"", []string{"begin", "n", "a", "--lease", "soon"}, exitUsage, "INVALID_ARGUMENT", "USAGE"},
		{"", []string{"begni"}, exitUsage, "INVALID_ARGUMENT", "USAGE"},
		{"", []string{"ingest", "/no/such/file"}, exitUsage, "INVALID_ARGUMENT", "USAGE"},
		{"", []string{"get", "n", "none"}, exitNotFound, "NOT_FOUND", "RECORD_NOT_FOUND"},
		{`{"key":"a","body":1}`, []string{"ingest", "-"}, exitFailure, "FAILED_PRECONDITION", "LINES_FAILED"},
		{lines, []string{"ingest", "-", "--fail-on-conflict"}, exitConflict, "ALREADY_EXISTS", "LINES_IN_CONFLICT"},
	} {
		said := command(t, c.stdin, append(c.args, "-o", "json")...)
		all := strings.Split(strings.TrimSpace(said.stderr), "\n")
		got := object(t, all[len(all)-1])
		if said.code != c.exit || got["exit_code"] != float64(c.exit) || got["status"] != c.status || got["reason"] != c.reason || got["message"] == "" || got["code"] == nil {
			t.Errorf("%q: %d, %v", c.args, said.code, got)
		}
	}
	before := object(t, command(t, "", "begin", "n", "a", "-o", "json", "--lease", "soon").stderr)
	if before["reason"] != "USAGE" {
		t.Errorf("got %v", before)
	}
}

func TestHelpIsOfferedForTheCommandLineAlone(t *testing.T) {
	command(t, "", "begin", "n", "a", "--lease", "soon").complains(t, exitUsage, "--help shows what is possible")
	for _, args := range [][]string{
		{"ingest", "/no/such/file"},
		{"begin", "n", "a", "--fingerprint-of", "/no/such/file"},
		{"complete", "n", "a", "--token=x", "--body-file", "/no/such/file"},
		{"begin", "n", "a", "--ca-file", "/no/such/file"},
		{"namespace", "put", "n", "-f", "/no/such/file"},
	} {
		said := command(t, "", args...)
		said.complains(t, exitUsage, "no such file")
		if strings.Contains(said.stderr, "--help") {
			t.Errorf("%q: it said %q", args, said.stderr)
		}
	}
}

func TestALeaseThatEndsOrHasLapsedIsTold(t *testing.T) {
	service := &ingesttest.Service{}
	_, addr := startFake(t, service)
	t.Setenv(addrVariable, addr)
	command(t, "", "begin", "n", "a", "--lease", "2h").wants(t, exitOK)
	command(t, "", "get", "n", "a").wants(t, exitOK, "PENDING: a claim is live; its lease ends in ")
	command(t, "", "records", "n").wants(t, exitOK, "STATE LEASE", " left 1 ")
	service.Lapse()
	command(t, "", "get", "n", "a").wants(t, exitOK, "PENDING: lease lapsed 12", "s ago: the next begin may take it over")
	command(t, "", "records", "n").wants(t, exitOK, "PENDING lapsed 12")
}

func TestNothingToListIsSaid(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{})
	t.Setenv(addrVariable, addr)
	for _, c := range [][]string{{"records", "n"}, {"namespace", "list"}} {
		name := map[string]string{"records": "records", "namespace": "namespaces"}[c[0]]
		if said := command(t, "", c...); said.code != exitOK || said.stdout != "" || said.stderr != "no "+name+"\n" {
			t.Errorf("%q: %+v", c, said)
		}
		if said := command(t, "", append(c, "-o", "json")...); said.code != exitOK || said.stdout != `{"`+name+`":[]}`+"\n" || said.stderr != "" {
			t.Errorf("%q: %+v", c, said)
		}
	}
}

func TestABodyThatWasNotKeptIsWarnedOf(t *testing.T) {
	_, addr := startFake(t, &ingesttest.Service{MaxResultBytes: 3})
	t.Setenv(addrVariable, addr)
	for _, key := range []string{"a", "b", "c"} {
		command(t, "", "begin", "n", key).wants(t, exitOK)
	}
	long := command(t, "", "complete", "n", "a", "--token=token-1", "--body", "four")
	long.complains(t, exitOK, "warning: the body of 4 bytes was not kept", "max_result_bytes", "256 KiB by default", "dualcheck namespace put n --max-result-bytes=BYTES")
	warned := object(t, command(t, "", "complete", "n", "b", "--token=token-2", "--body", "four", "-o", "json").stderr)
	if !strings.Contains(warned["warning"].(string), "max_result_bytes") {
		t.Errorf("got %v", warned)
	}
	if short := command(t, "", "complete", "n", "c", "--token=token-3", "--body", "abc"); short.stderr != "" {
		t.Errorf("it warned %q", short.stderr)
	}
	command(t, "", "complete", "--help").wants(t, exitOK, "max_result_bytes: 256 KiB by default")
}

func TestEtcdThatAnswersNoNodeIsNoAnswer(t *testing.T) {
	server, addr := startFake(t, &ingesttest.Service{})
	server.members = []*dualcheckv1.EtcdMember{{Endpoint: "a:2379", Error: "connection refused"}}
	said := command(t, "", "cluster", "--addr", addr)
	said.complains(t, exitUnavailable, "no etcd answers node node-1")
	said.wants(t, exitUnavailable, "NODE VERSION GRPC STARTED ROLE", "ETCD VERSION SIZE IN USE QUOTA NOTE", "connection refused")
}
