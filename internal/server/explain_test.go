package server

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/contractjson"
)

// blamed is the field that an error in JSON blames.
func (e jsonError) blamed() string {
	for _, d := range e.Details {
		if all, ok := d["fieldViolations"].([]any); ok {
			field, _ := all[0].(map[string]any)["field"].(string)
			return field
		}
	}
	return ""
}

func TestABodyThatCannotBeReadSaysWhatToWrite(t *testing.T) {
	w := start(t)
	const begin, complete, fail = "/v1/dedup:begin", "/v1/dedup:complete", "/v1/dedup:fail"
	for name, c := range map[string]struct{ path, body, says, field string }{
		"a duration as a number":      {begin, `{"namespace":"a","lease":30}`, `lease must be a duration, which is written as seconds with an s, in quotes, like "30s" or "0.5s", and is 30`, "lease"},
		"a duration without its unit": {begin, `{"lease":"10"}`, `like "30s" or "0.5s", and is "10"`, "lease"},
		"a duration in minutes":       {begin, `{"wait":"1m"}`, `wait must be a duration`, "wait"},
		"bytes that are no base64":    {begin, `{"fingerprint":"not base64!"}`, `fingerprint must be bytes, which are written as base64 in quotes, and is "not base64!"`, "fingerprint"},
		"bytes as a list":             {complete, `{"result":{"body":[1,2]}}`, `result.body must be bytes, which are written as base64 in quotes, and is a list`, "result.body"},
		"an enum":                     {fail, `{"failure":{"class":"NO"}}`, `failure.class must be one of FAILURE_CLASS_RETRYABLE, FAILURE_CLASS_TERMINAL, FAILURE_CLASS_UNKNOWN, and is "NO"`, "failure.class"},
		"an unknown member":           {begin, `{"namespace":"a","ttl":3}`, `there is no field "ttl"; the fields of a BeginRequest are namespace, key, operation, fingerprint, requestId,`, "ttl"},
		"an unknown member within":    {complete, `{"result":{"status":3}}`, `there is no field "status" of result; the fields of a Result are code, contentType, body, metadata`, "result.status"},
		"text as a number":            {begin, `{"namespace":"a","key":7}`, `key must be text in quotes, and is 7`, "key"},
		"the contract's own spelling": {begin, `{"request_id":7}`, `request_id must be text in quotes, and is 7`, "request_id"},
		"JSON's spelling":             {begin, `{"requestId":7}`, `requestId must be text in quotes, and is 7`, "request_id"},
		"a truth":                     {"/v1/dedup:get", `{"cached":"yes"}`, `cached must be true or false, and is "yes"`, "cached"},
		"a member twice":              {begin, `{"key":"k","key":"l"}`, `key is there twice: send it once`, "key"},
		"a member in two spellings":   {begin, `{"requestId":"k","request_id":"l"}`, `request_id is there twice`, "request_id"},
		"two of which one is allowed": {complete, `{"result":{},"omitted":{}}`, `omitted and result exclude each other: send one of them`, "omitted"},
		"no object within":            {complete, `{"result":"ok"}`, `result must be an object, {...}, and is "ok"`, "result"},
		"no object":                   {begin, `[]`, `the body must be an object, {...}, and is a list`, ""},
		"a map's value":               {begin, `{"labels":{"ok":"x","n":7}}`, `labels["n"] must be text in quotes, and is 7`, `labels["n"]`},
		"no map":                      {begin, `{"labels":["a"]}`, `labels must be an object, {"name": value}, and is a list`, "labels"},
		"a member of a batch":         {"/v1/dedup:batchBegin", `{"requests":[{"key":"k"},{"key":"l","lease":5}]}`, `requests[1].lease must be a duration`, "requests[1].lease"},
		"nothing in a batch":          {"/v1/dedup:batchBegin", `{"requests":[null]}`, `requests[0] must be an object, {...}, and is null`, "requests[0]"},
		"no list":                     {"/v1/dedup:batchBegin", `{"requests":{}}`, `requests must be a list, [...], and is an object`, "requests"},
		"a number":                    {complete, `{"result":{"code":"x"}}`, `result.code cannot be read: invalid value for int32`, "result.code"},
		"a detail":                    {fail, `{"failure":{"class":1,"details":[{"value":"x"}]}}`, `failure.details[0] cannot be read: `, "failure.details[0]"},
		"a member of a detail":        {fail, `{"failure":{"details":[{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reasons":"x"}]}}`, `failure.details[0] cannot be read: `, "failure.details[0]"},
		"not JSON":                    {begin, `{`, `the body is not a BeginRequest as JSON: `, ""},
		"two objects":                 {begin, `{} {}`, `the body is not a BeginRequest as JSON: `, ""},
		"a very long value":           {begin, `{"key":` + strings.Repeat("1", 100) + `}`, `key must be text in quotes, and is ` + strings.Repeat("1", 40) + "...", "key"},
		"invalid UTF-8":               {begin, "{\"key\":\"\xc3\x28\"}", `key cannot be read: `, "key"},
	} {
		code, _, body := w.post(c.path, c.body)
		e := parseError(t, body)
		if code != http.StatusBadRequest || e.reason() != "REQUEST_INVALID" || !strings.Contains(e.Message, c.says) || e.blamed() != c.field {
			t.Errorf("%s: %d, blames %q: %s", name, code, e.blamed(), e.Message)
		}
		if strings.Contains(e.Message, "(line") && c.field != "" {
			t.Errorf("%s: a line of something else: %s", name, e.Message)
		}
	}
}

// Null is as if the member were left out, here as there.
func TestNullBlamesNobody(t *testing.T) {
	err := explain([]byte(`{"lease":null,"labels":null,"fingerprint":null,"key":7}`), &dualcheckv1.BeginRequest{}, errTest)
	if err.Field != "key" {
		t.Errorf("blames %q: %v", err.Field, err)
	}
}

// A body of any kind gets an error that says something, and nothing that is in order
// is blamed before what is not.
func FuzzExplain(f *testing.F) {
	for _, body := range []string{`{"lease":"x"}`, `{"labels":{"a":1}}`, `{"requests":[{"key":1}]}`, `{`, `[]`, `{"failure":{"details":[{"@type":"x/y"}]}}`} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, m := range []proto.Message{&dualcheckv1.BeginRequest{}, &dualcheckv1.BatchFinishRequest{}, &dualcheckv1.PutNamespaceRequest{}} {
			if contractjson.Unmarshal(body, m) == nil {
				if wrong := lookInto(body, m.ProtoReflect().Type(), place{}); wrong != nil && json.Valid(body) {
					t.Errorf("%s is in order, and is blamed: %v", body, wrong)
				}
				continue
			}
			if e := explain(body, m, errTest); e.Message == "" || e.Reason != claim.RequestInvalid {
				t.Errorf("%s: %v", body, e)
			}
		}
	})
}
