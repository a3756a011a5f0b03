package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc/metadata"
)

// used returns metrics each of which has a value.
func used() *Metrics {
	m := NewMetrics(Build{Version: "v1", Commit: "abc", Node: "n1"})
	m.Watch(func() error { return nil }, func() Following { return Following{TickAge: 1500 * time.Millisecond, Applied: 42, Restored: 3} })
	m.Begin("a", "VERDICT_FIRST", "SOURCE_ETCD")
	m.Finish("complete", "OK")
	m.Request("dualcheck.v1.DedupService/Begin", "OK", 3*time.Millisecond)
	m.InFlight()
	m.Waiting()()
	m.Groups(1)
	m.Asked("change", 3)
	m.Checked(100)
	m.Woken(time.Millisecond)
	m.Session()()
	m.Retried("dualcheck.v1.DedupService/Begin")
	m.Error("KEY_INVALID")
	m.Panic()
	m.Call("begin", "ok", time.Millisecond)
	m.Settled("begin")
	m.Refused("guard")
	m.Undated()
	r := m.Redis(func() Pool { return Pool{Total: 5, Idle: 3, Waits: 1} })
	r.Looked("hit")
	r.Wrote("stage", "ok")
	r.Pipeline("ask", 3, time.Millisecond, true)
	r.Breaker("", "closed")
	r.Breaker("closed", "open")
	remembered := m.Memory(func() MemorySize { return MemorySize{Bytes: 100, Entries: 2, Evictions: 1} })
	remembered.Remembered("hit")
	remembered.Remembered("epoch")
	remembered.Absent("read")
	return m
}

func TestMetricsAreNamedAsPrometheusWants(t *testing.T) {
	problems, err := testutil.GatherAndLint(used().registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	families, err := used().registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) != 48 {
		t.Errorf("%d metrics have a value", len(families))
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "dualcheck_") {
			t.Errorf("%s has no prefix", f.GetName())
		}
	}
}

func TestMetricsTogetherWithTheDefaultRegistry(t *testing.T) {
	w := httptest.NewRecorder()
	used().Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, line := range []string{
		`dualcheck_begin_verdicts_total{namespace="a",source="SOURCE_ETCD",verdict="VERDICT_FIRST"} 1`,
		"dualcheck_tick_age_seconds 1.5", "dualcheck_applied_revision 42", "dualcheck_ready 1", "dualcheck_requests_in_flight 1", "dualcheck_begins_waiting 0", "go_goroutines",
	} {
		if !strings.Contains(w.Body.String(), line) {
			t.Errorf("no %s", line)
		}
	}
}

func TestNamespacesAreBounded(t *testing.T) {
	m := NewMetrics(Build{})
	for i := range 3 * maxNamespaces {
		m.Begin(fmt.Sprintf("n%d", i), "v", "s")
	}
	m.Begin("n0", "v", "s")
	if n := testutil.CollectAndCount(m.verdicts); n != maxNamespaces+1 {
		t.Errorf("%d series", n)
	}
	if got := testutil.ToFloat64(m.verdicts.WithLabelValues(other, "v", "s")); got != 2*maxNamespaces {
		t.Errorf("%v others", got)
	}
	if got := testutil.ToFloat64(m.verdicts.WithLabelValues("n0", "v", "s")); got != 2 {
		t.Errorf("n0 has %v", got)
	}
}

func TestLogger(t *testing.T) {
	var buf bytes.Buffer
	log, err := NewLogger(&buf, LogJSON, "warn")
	if err != nil {
		t.Fatal(err)
	}
	log.Info("no")
	log.Warn("yes", Key("k", false), slog.Group("plain", Key("k", true)))
	var line struct {
		Msg     string
		KeyHash string `json:"key_hash"`
		Plain   struct{ Key string }
	}
	if err := json.Unmarshal(buf.Bytes(), &line); err != nil || line.Msg != "yes" || line.KeyHash != "8254c329a928" || line.Plain.Key != "k" {
		t.Errorf("%v %s", err, buf.String())
	}
	for _, c := range []struct {
		format LogFormat
		level  string
	}{{"xml", "info"}, {LogText, "loud"}, {LogText, "info+2"}, {"", "info"}} {
		if _, err := NewLogger(io.Discard, c.format, c.level); err == nil {
			t.Errorf("%v was accepted", c)
		}
	}
}

func TestATerseLoggerTellsOfActs(t *testing.T) {
	for level, want := range map[string]string{"debug": "chatter act warning ", "info": "chatter act warning ", "warn": "act warning ", "error": "act "} {
		var buf bytes.Buffer
		log, err := NewTerseLogger(&buf, LogText, level)
		if err != nil {
			t.Fatal(err)
		}
		log = log.With(FieldNode, "n1")
		log.Info("chatter")
		log.Info("act", FieldAct, "forget record")
		log.Warn("warning")
		got := ""
		for line := range strings.Lines(buf.String()) {
			_, said, _ := strings.Cut(line, "msg=")
			said, _, _ = strings.Cut(said, " ")
			got += said + " "
			if !strings.Contains(line, "node=n1") {
				t.Errorf("%s: no attributes in %s", level, line)
			}
		}
		if got != want {
			t.Errorf("%s: %q, want %q", level, got, want)
		}
	}
	if _, err := NewTerseLogger(io.Discard, LogText, "loud"); err == nil {
		t.Error("a level that does not exist is accepted")
	}
}

// Who reads a metric's help learns what its labels say.
func TestHelpExplainsOutcomes(t *testing.T) {
	families, err := used().registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != metricEtcdCalls {
			continue
		}
		for _, outcome := range []string{"ok;", "lost (", "refused (", "ambiguous (", "full (", "busy (", "denied ("} {
			if !strings.Contains(f.GetHelp(), outcome) {
				t.Errorf("no %s in %q", outcome, f.GetHelp())
			}
		}
	}
}

func TestZapWritesToSlog(t *testing.T) {
	var buf bytes.Buffer
	log, err := NewLogger(&buf, LogText, "debug")
	if err != nil {
		t.Fatal(err)
	}
	z := Zap(log, zapcore.WarnLevel).With(zap.String("member", "m0"))
	z.Info("no")
	z.Named("raft").Warn("slow", zap.Duration("took", time.Second), zap.Error(io.EOF))
	z.Error("bad")
	if err := z.Sync(); err != nil {
		t.Error(err)
	}
	got := buf.String()
	for _, part := range []string{"level=WARN msg=slow", "member=m0", "logger=raft", "took=1s", "error=EOF", "level=ERROR msg=bad"} {
		if !strings.Contains(got, part) {
			t.Errorf("no %q in\n%s", part, got)
		}
	}
	if strings.Contains(got, "msg=no") {
		t.Errorf("what is below the level is written:\n%s", got)
	}
	quiet, err := NewLogger(&buf, LogText, "error")
	if err != nil {
		t.Fatal(err)
	}
	if Zap(quiet, zapcore.WarnLevel).Core().Enabled(zapcore.WarnLevel) {
		t.Error("slog's own level is passed by")
	}
}

func TestTracingIsOffUnlessAskedFor(t *testing.T) {
	for _, value := range []string{"", "none"} {
		t.Setenv("OTEL_TRACES_EXPORTER", value)
		tracing, err := StartTracing(t.Context(), Build{}, slog.New(slog.DiscardHandler))
		if err != nil || tracing.On() {
			t.Errorf("%q: %v, on: %v", value, err, tracing.On())
		}
		if err := tracing.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
	t.Setenv("OTEL_TRACES_EXPORTER", "pigeon")
	if _, err := StartTracing(t.Context(), Build{}, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("an exporter that does not exist is accepted")
	}
}

func TestTracingSendsSpans(t *testing.T) {
	var got atomic.Int64
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/traces" {
			got.Add(1)
		}
	}))
	defer collector.Close()
	t.Setenv("OTEL_TRACES_EXPORTER", "otlp")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	before := otel.GetTracerProvider()
	defer otel.SetTracerProvider(before)
	tracing, err := StartTracing(t.Context(), Build{Version: "v1", Node: "n1"}, slog.New(slog.DiscardHandler))
	if err != nil || !tracing.On() {
		t.Fatal(err)
	}
	ctx, span := otel.Tracer("test").Start(t.Context(), "call")
	id := span.SpanContext().TraceID()
	if !bytes.Equal(TraceID(ctx), id[:]) {
		t.Errorf("trace id %x, want %s", TraceID(ctx), id)
	}
	span.End()
	if err := tracing.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got.Load() == 0 {
		t.Error("nothing was sent")
	}
}

func TestTraceIDOfACall(t *testing.T) {
	const id, parent = "0af7651916cd43dd8448eb211c80319c", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for name, c := range map[string]struct {
		md   metadata.MD
		want string
	}{
		"none":        {nil, ""},
		"traceparent": {metadata.Pairs("traceparent", parent), id},
		"broken":      {metadata.Pairs("traceparent", "00-zz"), ""},
	} {
		ctx := t.Context()
		if c.md != nil {
			ctx = metadata.NewIncomingContext(ctx, c.md)
		}
		got := TraceID(ctx)
		if c.want == "" && got == nil {
			continue
		}
		if len(got) != 16 || trace.TraceID(got).String() != c.want {
			t.Errorf("%s: %x", name, got)
		}
	}
	if TraceID(context.Background()) != nil {
		t.Error("a trace id from nothing")
	}
}
