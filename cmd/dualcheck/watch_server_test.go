package main

import (
	"bufio"
	"context"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/contractjson"
)

var timesAndRevisions = regexp.MustCompile(`(?m)^\d{4}-\S+  | \d+  `)

// A namespace is watched while its keys change, by the command and as lines over HTTP, and
// while its server is started anew.
func TestWatchARealServer(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	server, at := dev(t, dir)
	do := func(args ...string) outcome { return command(t, "", append(args, "--addr", at.GRPC)...) }
	do("begin", "payments", "order-0").wants(t, exitOK)
	do("begin", "payments", "other").wants(t, exitOK)
	do("begin", "elsewhere", "order-0").wants(t, exitOK)

	lines := watchOverHTTP(t, at.HTTP)
	w := background(t, "watch", "payments", "--addr", at.GRPC, "--prefix", "order-", "--snapshot", "--values")
	w.until("the snapshot is told", func() bool { return strings.Contains(w.talk.String(), "RESYNC ends") })
	begun := do("begin", "payments", "order-1", "-o", "json")
	token := regexp.MustCompile(`"token":"([^"]+)"`).FindStringSubmatch(begun.stdout)[1]
	do("complete", "payments", "order-1", "--token="+token, "--body", "paid").wants(t, exitOK)
	do("forget", "payments", "order-1", "--reason", "a test").wants(t, exitOK)
	w.until("the forget is told", func() bool { return strings.Contains(w.talk.String(), "DELETE") })
	said := spaces.ReplaceAllString(timesAndRevisions.ReplaceAllString(w.talk.String(), ""), " ")
	if want := "watching payments at " + at.GRPC + "\nRESYNC: what is there follows; what was shown before may be out of date (asked-for)\n" +
		"PUT PENDING order-0\nRESYNC ends: what was not named since it began is not there\n" +
		"PUT PENDING order-1\nPUT SUCCEEDED order-1 code=0 body=paid\nDELETE - order-1\n"; said != want {
		t.Errorf("it said\n%s", said)
	}
	var keys []string
	for len(keys) < 3 {
		for _, e := range lines().GetEvents() {
			keys = append(keys, e.GetKey()+" "+trimEnum(e.GetState().String(), "STATE_"))
		}
	}
	if got := strings.Join(keys, ", "); got != "order-1 PENDING, order-1 SUCCEEDED, order-1 UNSPECIFIED" {
		t.Errorf("lines tell %s", got)
	}

	// The server stops, and is there again: nothing that was told counts any more.
	if err := server.end(); err != nil {
		t.Fatal(err)
	}
	w.until("it notices", func() bool { return strings.Contains(w.talk.String(), "is opened again") })
	again := background(t, "dev", "--state-dir", dir, "--grpc-addr", at.GRPC, "--http-addr", "127.0.0.1:0")
	again.devAt(dir)
	w.until("it is connected again", func() bool { return strings.Contains(w.talk.String(), "watching payments at "+at.GRPC+" again") })
	w.until("it has begun anew", func() bool { return strings.Count(w.talk.String(), "RESYNC ends") == 2 })
	do("begin", "payments", "order-2").wants(t, exitOK)
	w.until("it goes on", func() bool { return strings.Contains(w.talk.String(), "order-2") })
	if err := w.end(); err != nil || !strings.Contains(w.talk.String(), "goes on from here") {
		t.Errorf("%v\n%s", err, w.talk.String())
	}
}

// watchOverHTTP opens a Watch over HTTP; what it returns reads a line.
func watchOverHTTP(t *testing.T, addr string) func() *dualcheckv1.WatchResponse {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/watch", strings.NewReader(`{"namespace": "payments"}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	lines := bufio.NewScanner(resp.Body)
	return func() *dualcheckv1.WatchResponse {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("no more lines: %v", lines.Err())
		}
		var m dualcheckv1.WatchResponse
		if err := contractjson.Unmarshal(lines.Bytes(), &m); err != nil {
			t.Fatalf("%v: %s", err, lines.Text())
		}
		return &m
	}
}
