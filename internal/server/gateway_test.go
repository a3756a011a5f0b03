package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

func TestJSONIsAsProtojsonWritesIt(t *testing.T) {
	w := start(t)
	code, headers, body := w.post("/v1/dedup:begin", `{"namespace":"a","key":"k","lease":"20s","requestId":"r"}`, "Content-Type", "application/json", "X-Request-Id", "call-7")
	var got struct {
		Verdict   string
		KeyAction string
		Enforced  bool
		Revision  string
		Claim     struct {
			Token, Fence, LeaseLeft, ExpiresAt, Previous string
			Attempt                                      int
		}
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil || code != 200 {
		t.Fatalf("%d %v %s", code, err, body)
	}
	if got.Verdict != "VERDICT_FIRST" || got.KeyAction != "KEY_ACTION_PROCEED" || !got.Enforced || got.Revision != "1" || got.Claim.Fence != "1" ||
		!strings.HasSuffix(got.Claim.LeaseLeft, "s") || got.Claim.Attempt != 1 || got.Claim.Previous != "PREVIOUS_NONE" {
		t.Errorf("got %s", body)
	}
	for _, unpopulated := range []string{"repeat", "stale", "record", "detail", "observed"} {
		if strings.Contains(body, `"`+unpopulated+`"`) {
			t.Errorf("%s is shown: %s", unpopulated, body)
		}
	}
	if headers.Get("Content-Type") != "application/json" || headers.Get("Cache-Control") != "no-store" || headers.Get("X-Request-Id") != "call-7" {
		t.Errorf("headers %v", headers)
	}
	for name := range headers {
		if strings.HasPrefix(name, "Grpc-") {
			t.Errorf("header %s", name)
		}
	}
	if !strings.Contains(w.logs.String(), "x_request_id=call-7") {
		t.Error("the log does not name the call")
	}
}

func TestGatewayErrors(t *testing.T) {
	w := start(t)
	post := http.MethodPost
	for name, c := range map[string]struct {
		method, path, body string
		status             int
		reason             string
	}{
		"bad JSON":            {post, "/v1/dedup:begin", `{`, 400, "REQUEST_INVALID"},
		"no object":           {post, "/v1/dedup:begin", `[]`, 400, "REQUEST_INVALID"},
		"two objects":         {post, "/v1/dedup:begin", `{} {}`, 400, "REQUEST_INVALID"},
		"unknown member":      {post, "/v1/dedup:begin", `{"namespace":"a","key":"k","ttl":3}`, 400, "REQUEST_INVALID"},
		"a member twice":      {post, "/v1/dedup:begin", `{"namespace":"a","key":"k","key":"l"}`, 400, "REQUEST_INVALID"},
		"wrong type":          {post, "/v1/dedup:begin", `{"namespace":"a","key":7}`, 400, "REQUEST_INVALID"},
		"unknown enum":        {post, "/v1/dedup:fail", `{"failure":{"class":"NO"}}`, 400, "REQUEST_INVALID"},
		"duration":            {post, "/v1/dedup:begin", `{"namespace":"a","key":"k","lease":"10"}`, 400, "REQUEST_INVALID"},
		"lone surrogate":      {post, "/v1/dedup:begin", `{"namespace":"a","key":"\ud800"}`, 400, "REQUEST_INVALID"},
		"raw lone surrogate":  {post, "/v1/dedup:begin", "{\"namespace\":\"a\",\"key\":\"\xed\xa0\x80\"}", 400, "REQUEST_INVALID"},
		"invalid UTF-8":       {post, "/v1/dedup:begin", "{\"namespace\":\"a\",\"key\":\"\xc3\x28\"}", 400, "REQUEST_INVALID"},
		"invalid UTF-8 label": {post, "/v1/dedup:begin", "{\"namespace\":\"a\",\"key\":\"k\",\"labels\":{\"\xff\":\"\"}}", 400, "REQUEST_INVALID"},
		"body too large":      {post, "/v1/dedup:begin", `{"key":"` + strings.Repeat("k", maxBody) + `"}`, 413, "REQUEST_INVALID"},
		"message too large":   {post, "/v1/dedup:begin", `{"key":"` + strings.Repeat("k", claim.MaxMessage+1) + `"}`, 400, "REQUEST_INVALID"},
		"empty body":          {post, "/v1/dedup:begin", ``, 400, "NAMESPACE_INVALID"},
		"wrong path":          {post, "/v1/dedup:guess", `{}`, 404, "UNIMPLEMENTED"},
		"no path":             {post, "/v2", `{}`, 404, "UNIMPLEMENTED"},
		"wrong method":        {http.MethodGet, "/v1/dedup:begin", ``, 405, "UNIMPLEMENTED"},
		"put":                 {http.MethodPut, "/v1/dedup:begin", `{}`, 405, "UNIMPLEMENTED"},
		"a row of the table":  {post, "/v1/dedup:begin", `{"namespace":"a","key":""}`, 400, "KEY_INVALID"},
		"not found":           {post, "/v1/dedup:get", `{"namespace":"a","key":"none"}`, 404, "RECORD_NOT_FOUND"},
		"not served":          {post, "/v1/status:apply", `{}`, 501, "UNIMPLEMENTED"},
		"stream not served":   {post, "/v1/admin/calibrate", `{}`, 501, "UNIMPLEMENTED"},
		"lines, bad JSON":     {post, "/v1/watch", `{`, 400, "REQUEST_INVALID"},
		"lines, unknown":      {post, "/v1/watch", `{"namespace":"a","ttl":3}`, 400, "REQUEST_INVALID"},
		"lines, too large":    {post, "/v1/watch", `{"key":"` + strings.Repeat("k", maxBody) + `"}`, 413, "REQUEST_INVALID"},
		"lines, empty body":   {post, "/v1/watch", ``, 400, "NAMESPACE_INVALID"},
		"lines, wrong method": {http.MethodGet, "/v1/watch", ``, 405, "UNIMPLEMENTED"},
	} {
		t.Run(name, func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), c.method, w.url+c.path, strings.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			code, headers, body := w.do(req)
			e := parseError(t, body)
			if code != c.status || e.reason() != c.reason || e.Message == "" || e.Code == 0 {
				t.Errorf("got %d %.300s", code, body)
			}
			if e.Code != int(table[claim.Reason(c.reason)]) {
				t.Errorf("code %d is not that of %s", e.Code, c.reason)
			}
			if headers.Get("Content-Type") != "application/json" {
				t.Errorf("Content-Type %q", headers.Get("Content-Type"))
			}
			if code == 405 && headers.Get("Allow") != "POST" {
				t.Errorf("Allow %q", headers.Get("Allow"))
			}
			if strings.ContainsRune(e.Message, '\u00a0') {
				t.Errorf("message %q", e.Message)
			}
		})
	}
	if n := w.store.begins.Load(); n != 0 {
		t.Errorf("the store was asked %d times", n)
	}
}

func TestRetryAfterHeader(t *testing.T) {
	w := start(t)
	w.store.before(func(context.Context, *claim.BeginRequest) error {
		return &claim.Error{Reason: claim.Overloaded, Message: "busy", RetryAfter: 1200 * time.Millisecond}
	})
	code, headers, body := w.post("/v1/dedup:begin", `{"namespace":"a","key":"k"}`)
	if code != 429 || headers.Get("Retry-After") != "2" || !strings.Contains(body, `"retryDelay"`) {
		t.Errorf("%d %v %s", code, headers, body)
	}
}

func TestJSONTakesTheWayThroughTheInterceptors(t *testing.T) {
	w := start(t)
	w.store.before(func(ctx context.Context, req *claim.BeginRequest) error {
		if _, ok := ctx.Deadline(); !ok {
			t.Error("no deadline")
		}
		if len(req.TraceID) != 16 {
			t.Errorf("trace id %x", req.TraceID)
		}
		panic("a bug")
	})
	code, _, body := w.post("/v1/dedup:begin", `{"namespace":"a","key":"k"}`, "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")
	if e := parseError(t, body); code != 500 || e.reason() != "INTERNAL" || strings.Contains(body, "a bug") {
		t.Errorf("%d %s", code, body)
	}
	if _, metrics := w.get("/metrics"); !strings.Contains(metrics, `dualcheck_request_duration_seconds_count{code="Internal",method="dualcheck.v1.DedupService/Begin"} 1`) {
		t.Error("the call was not counted")
	}
}

func TestGrpcTimeoutHeader(t *testing.T) {
	w := start(t)
	w.store.before(func(ctx context.Context, _ *claim.BeginRequest) error {
		if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > 10*time.Second {
			return fmt.Errorf("deadline %v", deadline)
		}
		return nil
	})
	if code, _, body := w.post("/v1/dedup:begin", `{"namespace":"a","key":"k"}`, "Grpc-Timeout", "10S"); code != http.StatusOK {
		t.Errorf("%d %s\n%s", code, body, w.logs)
	}
	code, _, body := w.post("/v1/dedup:begin", `{"namespace":"a","key":"k"}`, "Grpc-Timeout", "soon")
	if e := parseError(t, body); code != http.StatusBadRequest || e.reason() != "REQUEST_INVALID" {
		t.Errorf("%d %s", code, body)
	}
}

func TestPages(t *testing.T) {
	w := start(t)
	for path, has := range map[string]string{
		"/":                "/v1/dedup:begin",
		"/livez":           "ok",
		"/healthz":         "ok",
		"/readyz":          "ok",
		"/readyz?verbose":  "[+] cluster ok",
		"/metrics":         "dualcheck_build_info",
		"/openapi.json":    `"/v1/dedup:begin"`,
		"/readyz?verbose=": "[+] serving ok",
	} {
		if code, body := w.get(path); code != 200 || !strings.Contains(body, has) {
			t.Errorf("%s: %d %.200s", path, code, body)
		}
	}
}

func TestABodyOverTheLimitIsToldSo(t *testing.T) {
	w := start(t)
	code, _, body := w.post("/v1/dedup:complete", `{"key":"`+strings.Repeat("k", maxBody)+`"}`)
	if e := parseError(t, body); code != http.StatusRequestEntityTooLarge || e.reason() != "REQUEST_INVALID" || !strings.Contains(e.Message, "larger than 24 MiB") {
		t.Errorf("%d %s", code, body)
	}
	code, _, body = w.post("/v1/dedup:begin", `{"key":"`+strings.Repeat("k", claim.MaxMessage+1)+`"}`)
	if e := parseError(t, body); code != http.StatusBadRequest || e.reason() != "REQUEST_INVALID" || !strings.Contains(e.Message, "at most 16 MiB") {
		t.Errorf("%d %s", code, body)
	}
}

// What is refused says what to do, in the words of the contract.
func TestErrorsOverJSONSayWhatToDo(t *testing.T) {
	w := start(t)
	token := w.first("k").GetToken()
	if code, _, body := w.post("/v1/dedup:complete", `{"namespace":"a","key":"k","token":"`+token+`"}`); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	free := w.first("free").GetToken()
	if code, _, body := w.post("/v1/dedup:fail", `{"namespace":"a","key":"free","token":"`+free+`","failure":{"class":"FAILURE_CLASS_RETRYABLE"}}`); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	for name, c := range map[string]struct{ path, body, reason, says string }{
		"token":       {"/v1/dedup:complete", `{"namespace":"a","key":"other","token":"` + token + `"}`, "TOKEN_INVALID", "send the claim.token that Begin answered for this very namespace and key"},
		"no token":    {"/v1/dedup:complete", `{"namespace":"a","key":"k"}`, "TOKEN_INVALID", "send the claim.token that Begin answered"},
		"finished":    {"/v1/dedup:complete", `{"namespace":"a","key":"k","token":"` + token + `","result":{"code":7}}`, "ALREADY_FINISHED", "Get tells what is stored"},
		"lost":        {"/v1/dedup:extend", `{"namespace":"a","key":"free","token":"` + free + `"}`, "CLAIM_LOST", "ask Get what became of the key"},
		"not found":   {"/v1/dedup:get", `{"namespace":"a","key":"none"}`, "RECORD_NOT_FOUND", "only a new Begin makes it known"},
		"fingerprint": {"/v1/dedup:begin", `{"namespace":"a","key":"f","fingerprint":"` + strings.Repeat("0aF1", 16) + `"}`, "FINGERPRINT_INVALID", "this looks like hexadecimal sent as base64"},
		"not served":  {"/v1/status:apply", `{}`, "UNIMPLEMENTED", "do without it"},
	} {
		_, _, body := w.post(c.path, c.body)
		if e := parseError(t, body); e.reason() != c.reason || !strings.Contains(e.Message, c.says) {
			t.Errorf("%s: %s", name, body)
		}
	}
}

// What the OpenAPI document says of itself is right: it holds the contract alone, and
// the methods that say so are those that are not served.
func TestOpenAPI(t *testing.T) {
	w := start(t)
	_, text := w.get("/openapi.json")
	var doc struct {
		Info        struct{ Title, Description, Version string }
		Paths       map[string]map[string]struct{ Summary, Description string }
		Definitions map[string]any
	}
	if err := json.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatal(err)
	}
	if doc.Info.Title != "dualcheck" || doc.Info.Version != "v1" || !strings.Contains(doc.Info.Description, "Has this piece of work been done") {
		t.Errorf("info %+v", doc.Info)
	}
	for name := range doc.Definitions {
		if slices.Contains([]string{"Forgotten", "Guard", "Epoch", "Secret", "Tick"}, name) || strings.Contains(name, ".") {
			t.Errorf("it tells of %s", name)
		}
	}
	if strings.Contains(text, "storage") || strings.Contains(text, `Ns": {`) {
		t.Error("it tells of what etcd holds")
	}
	if len(doc.Paths) != len(methods)-1 { // all but Session
		t.Errorf("%d paths", len(doc.Paths))
	}
	for path, verbs := range doc.Paths {
		code, _, _ := w.post(path, `{}`)
		says := strings.Contains(verbs["post"].Summary+verbs["post"].Description, "Not served yet")
		if says != (code == http.StatusNotImplemented) {
			t.Errorf("%s: HTTP %d, %q", path, code, verbs["post"].Summary)
		}
	}
}
