package server

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/contractjson"
	"github.com/dualcheck/dualcheck/internal/feed"
)

// lineReader is a client's side of a Watch over HTTP.
type lineReader struct {
	t      *testing.T
	resp   *http.Response
	lines  *bufio.Scanner
	cancel context.CancelFunc
}

// watchLines opens a Watch over HTTP; it has answered with its headers.
func (w *world) watchLines(t *testing.T, client *http.Client, body string) *lineReader {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url+"/v1/watch", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 8<<20)
	return &lineReader{t, resp, lines, cancel}
}

// next reads a line that is a message.
func (r *lineReader) next() *dualcheckv1.WatchResponse {
	r.t.Helper()
	if !r.lines.Scan() {
		r.t.Fatalf("no more lines: %v", r.lines.Err())
	}
	var m dualcheckv1.WatchResponse
	if err := contractjson.Unmarshal(r.lines.Bytes(), &m); err != nil {
		r.t.Fatalf("%v: %s", err, r.lines.Text())
	}
	return &m
}

// end reads the last line, which is an error.
func (r *lineReader) end() jsonError {
	r.t.Helper()
	if !r.lines.Scan() {
		r.t.Fatalf("no last line: %v", r.lines.Err())
	}
	var last struct {
		Error *jsonError `json:"error"`
	}
	if err := json.Unmarshal(r.lines.Bytes(), &last); err != nil || last.Error == nil {
		r.t.Fatalf("%v: %s", err, r.lines.Text())
	}
	if r.lines.Scan() {
		r.t.Errorf("a line after the last: %s", r.lines.Text())
	}
	if err := r.lines.Err(); err != nil {
		r.t.Error(err)
	}
	return *last.Error
}

func TestLines(t *testing.T) {
	w := start(t)
	r := w.watchLines(t, http.DefaultClient, `{"namespace":"a","keyPrefix":"or","includeValues":true}`)
	if h := r.resp.Header; r.resp.StatusCode != http.StatusOK || h.Get("Content-Type") != "application/x-ndjson" || h.Get("X-Accel-Buffering") != "no" || h.Get("Cache-Control") != "no-store" || h.Get("Content-Encoding") != "" {
		t.Errorf("%d %v", r.resp.StatusCode, h)
	}
	if m := r.next(); !m.GetProgress() || m.GetResumeToken() != "0" {
		t.Errorf("%v", m)
	}
	if got := w.feed.last(); got != (feed.Request{Namespace: "a", Prefix: "or"}) {
		t.Errorf("asked %+v", got)
	}
	for i := range 3 { // each comes by itself
		w.feed.tell(feed.Batch{Events: []feed.Event{finished("order", int64(i+1), 5)}})
		if m := r.next(); m.GetEvents()[0].GetRevision() != int64(i+1) || len(m.GetEvents()[0].GetRecord().GetResult().GetBody()) != 5 {
			t.Errorf("%v", m)
		}
	}
	r.cancel()
	eventually(t, "the subscription is closed", func() bool { return w.feed.subscribers() == 0 })
}

// What curl shows is a line each, without a wrapper.
func TestLinesAsTheyAreWritten(t *testing.T) {
	w := start(t)
	r := w.watchLines(t, http.DefaultClient, `{"namespace":"a"}`)
	r.next()
	w.feed.tell(feed.Batch{Events: []feed.Event{{Deleted: true, Record: finished("k", 7, 0).Record}}})
	if !r.lines.Scan() {
		t.Fatal(r.lines.Err())
	}
	line := strings.ReplaceAll(r.lines.Text(), " ", "")
	if line != `{"resumeToken":"1","events":[{"type":"EVENT_TYPE_DELETE","kind":"EVENT_KIND_RECORD","namespace":"a","key":"k","revision":"7"}]}` {
		t.Errorf("%s", line)
	}
}

func TestLinesThatCannotBegin(t *testing.T) {
	w := start(t, func(c *Config) { c.MaxSubscribers = 1 })
	for name, c := range map[string]struct {
		body, reason string
		status       int
	}{
		"namespace": {`{"namespace":"A"}`, "NAMESPACE_INVALID", 400},
		"statuses":  {`{"namespace":"a","kinds":["EVENT_KIND_STATUS"]}`, "UNIMPLEMENTED", 501},
		"kind":      {`{"namespace":"a","kinds":["EVENT_KIND_OTHER"]}`, "REQUEST_INVALID", 400},
		"prefix":    {`{"namespace":"a","keyPrefix":"\u0000"}`, "KEY_INVALID", 400},
		"token":     {`{"namespace":"a","resumeToken":"soon"}`, "REQUEST_INVALID", 400},
	} {
		code, headers, body := w.post("/v1/watch", c.body)
		if e := parseError(t, body); code != c.status || e.reason() != c.reason || headers.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %s", name, code, body)
		}
	}
	r := w.watchLines(t, http.DefaultClient, `{"namespace":"a"}`)
	r.next()
	code, headers, body := w.post("/v1/watch", `{"namespace":"a"}`)
	if e := parseError(t, body); code != 429 || e.reason() != "OVERLOADED" || headers.Get("Retry-After") == "" {
		t.Errorf("%d %s", code, body)
	}
	if code, _, body := w.post("/v1/watch", `{"namespace":"a"}`, "Grpc-Timeout", "soon"); code != 400 {
		t.Errorf("%d %s", code, body)
	}
}

// The last line says why there are no more.
func TestLinesEndWithAnError(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	pool := issue(t, certFile, keyFile, 1)
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(protocol, func(t *testing.T) {
			client := http.DefaultClient
			w := start(t, func(c *Config) {
				if protocol == "HTTP/2.0" {
					c.TLS = must(TLS(certFile, keyFile, slog.New(slog.DiscardHandler)))
				}
			})
			if protocol == "HTTP/2.0" {
				client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}}
				defer client.CloseIdleConnections()
			}
			r := w.watchLines(t, client, `{"namespace":"a"}`)
			if r.resp.Proto != protocol {
				t.Fatal(r.resp.Proto)
			}
			r.next()
			w.feed.tell(feed.Batch{Events: []feed.Event{finished("k", 1, 0)}})
			r.next()
			stopped := w.stopping(t, 30*time.Second)
			if e := r.end(); e.reason() != "DRAINING" || e.Code != int(codes.Unavailable) || !strings.Contains(e.Message, "resume token") {
				t.Errorf("%+v", e)
			}
			client.CloseIdleConnections()
			if took, err := stopped(); err != nil || took > 3*time.Second {
				t.Errorf("the stop took %v, %v", took, err)
			}
		})
	}
}

// A panic after the first line is the last line.
func TestLinesAfterAPanic(t *testing.T) {
	w := start(t)
	r := w.watchLines(t, http.DefaultClient, `{"namespace":"a"}`)
	r.next()
	w.feed.tell(feed.Batch{Events: []feed.Event{{}}})
	if e := r.end(); e.reason() != "INTERNAL" {
		t.Errorf("%+v", e)
	}
}

// The server's deadlines for a whole request and a whole answer are none for lines.
func TestLinesGoOnForLongerThanACall(t *testing.T) {
	w := start(t)
	hasty := httptest.NewUnstartedServer(w.server.http.Handler)
	hasty.Config.ReadTimeout, hasty.Config.WriteTimeout = 300*time.Millisecond, 300*time.Millisecond
	hasty.Start()
	defer hasty.Close()
	w.url = hasty.URL
	r := w.watchLines(t, http.DefaultClient, `{"namespace":"a"}`)
	r.next()
	pause := time.NewTicker(200 * time.Millisecond)
	defer pause.Stop()
	for i := range 6 {
		<-pause.C
		w.feed.tell(feed.Batch{Events: []feed.Event{finished("k", int64(i+1), 0)}})
		r.next()
	}
	<-pause.C
	<-pause.C // nothing is written for longer, too
	w.feed.tell(feed.Batch{Progress: true})
	r.next()
	r.cancel()
}

// deaf opens a Watch over HTTP of which it reads nothing.
func (w *world) deaf(t *testing.T) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.(*net.TCPConn).SetReadBuffer(4 << 10); err != nil {
		t.Fatal(err)
	}
	body := `{"namespace":"a","includeValues":true}`
	fmt.Fprintf(conn, "POST /v1/watch HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	return conn
}

// flood is more than sockets and gRPC take ahead of a reader.
func (w *world) flood() {
	for range 60 {
		w.feed.tell(feed.Batch{Events: []feed.Event{finished("k", 1, 200<<10)}})
	}
}

// An HTTP reader that never reads is cut off, and holds up nobody.
func TestLinesThatNobodyReads(t *testing.T) {
	w := start(t, func(c *Config) {
		c.watches = defaultWatchLimits()
		c.watches.slow = time.Second
	})
	w.deaf(t)
	other := w.watchLines(t, http.DefaultClient, `{"namespace":"a"}`)
	other.next()
	eventually(t, "both watch", func() bool { return w.feed.subscribers() == 2 })
	w.flood()
	for range 60 {
		other.next()
	}
	eventually(t, "it was cut off", func() bool { return w.feed.subscribers() == 1 })
	w.metric(t, "dualcheck_watch_slow_total 1")
	w.feed.tell(feed.Batch{Progress: true})
	other.next()
}

// The same over HTTP/2, which keeps streams apart itself.
func TestLinesThatNobodyReadsOverHTTP2(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	pool := issue(t, certFile, keyFile, 1)
	w := start(t, func(c *Config) {
		c.TLS = must(TLS(certFile, keyFile, slog.New(slog.DiscardHandler)))
		c.watches = defaultWatchLimits()
		c.watches.slow = time.Second
	})
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}}
	defer client.CloseIdleConnections()
	w.watchLines(t, client, `{"namespace":"a","includeValues":true}`)
	other := w.watchLines(t, client, `{"namespace":"a"}`)
	other.next()
	eventually(t, "both watch", func() bool { return w.feed.subscribers() == 2 })
	w.flood()
	for range 60 {
		other.next()
	}
	eventually(t, "it was cut off", func() bool { return w.feed.subscribers() == 1 })
	eventually(t, "it was counted", func() bool { return strings.Contains(w.scrape(t, client), "dualcheck_watch_slow_total 1") })
	w.feed.tell(feed.Batch{Progress: true})
	other.next()
}

// scrape reads the metrics by a client.
func (w *world) scrape(t *testing.T, client *http.Client) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return string(must(io.ReadAll(resp.Body)))
}

// A reader that never reads does not hold up a stop.
func TestLinesThatNobodyReadsAtAStop(t *testing.T) {
	w := start(t)
	w.deaf(t)
	eventually(t, "it watches", func() bool { return w.feed.subscribers() == 1 })
	w.flood()
	stopped := w.stopping(t, 30*time.Second)
	if took, err := stopped(); err != nil || took > lastLine+3*time.Second {
		t.Errorf("it took %v, %v", took, err)
	}
}

// A client that goes away is noticed though there is nothing to tell it.
func TestLinesOfAClientThatGoes(t *testing.T) {
	w := start(t)
	conn := w.deaf(t)
	eventually(t, "it watches", func() bool { return w.feed.subscribers() == 1 })
	conn.Close()
	eventually(t, "the subscription is closed", func() bool { return w.feed.subscribers() == 0 })
	w.metric(t, "dualcheck_watch_slow_total 0")
}

// The connection serves other calls after the lines have ended.
func TestAConnectionAfterItsLines(t *testing.T) {
	w := start(t)
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answers := bufio.NewReader(conn)
	ask := func(path, body string) {
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
	}
	answer := func() (int, string) {
		resp, err := http.ReadResponse(answers, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.StatusCode, string(must(io.ReadAll(resp.Body)))
	}
	ask("/v1/watch", `{"namespace":"a"}`)
	eventually(t, "it watches", func() bool { return w.feed.subscribers() == 1 })
	w.feed.tell(feed.Batch{Events: []feed.Event{{}}}) // panics, which ends it
	if code, body := answer(); code != http.StatusOK || !strings.Contains(body, "INTERNAL") {
		t.Fatalf("%d %s", code, body)
	}
	ask("/v1/dedup:begin", `{"namespace":"a","key":"k"}`)
	if code, body := answer(); code != http.StatusOK {
		t.Errorf("%d %s", code, body)
	}
}

// The OpenAPI document says how lines are written.
func TestOpenAPITellsOfLines(t *testing.T) {
	w := start(t)
	_, text := w.get("/openapi.json")
	var doc struct {
		Paths map[string]map[string]struct {
			Responses map[string]struct {
				Schema struct {
					Title      string
					AllOf      []map[string]string
					Properties map[string]any
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatal(err)
	}
	schema := doc.Paths["/v1/watch"]["post"].Responses["200"].Schema
	if len(schema.AllOf) != 1 || schema.AllOf[0]["$ref"] != "#/definitions/WatchResponse" || len(schema.Properties) != 1 || schema.Properties["error"] == nil {
		t.Errorf("%+v", schema)
	}
	if strings.Contains(text, "Stream result of") {
		t.Error("a stream is told of as the gateway would write it")
	}
}
