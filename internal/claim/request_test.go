package claim_test

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// check compares an error with a reason, "" for none.
func check(t *testing.T, what string, err error, want claim.Reason) {
	t.Helper()
	if got := claim.ReasonOf(err); got != want {
		t.Errorf("%s: %v, want %q", what, err, want)
	}
	if e, ok := err.(*claim.Error); ok && (e.Field == "" || e.Message == "") {
		t.Errorf("%s: blames field %q, says %q", what, e.Field, e.Message)
	}
}

func long(n int) string { return strings.Repeat("x", n) }

func labels(n int) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprint("label", i)] = ""
	}
	return m
}

// Each limit of a Begin, reached and passed by one.
func TestLimitsOfBegin(t *testing.T) {
	lease := func(d time.Duration) func(*claim.BeginRequest) {
		return func(r *claim.BeginRequest) { r.Lease = &d }
	}
	for _, c := range []struct {
		what     string
		at, over func(r *claim.BeginRequest)
		want     claim.Reason
	}{
		{"namespace 63 B", func(r *claim.BeginRequest) { r.Namespace = long(63) }, func(r *claim.BeginRequest) { r.Namespace = long(64) }, claim.NamespaceInvalid},
		{"namespace 1 B", func(r *claim.BeginRequest) { r.Namespace = "7" }, func(r *claim.BeginRequest) { r.Namespace = "" }, claim.NamespaceInvalid},
		{"key 255 B", func(r *claim.BeginRequest) { r.Key = long(255) }, func(r *claim.BeginRequest) { r.Key = long(256) }, claim.KeyInvalid},
		{"key 255 B, not characters", func(r *claim.BeginRequest) { r.Key = long(1) + strings.Repeat("é", 127) }, func(r *claim.BeginRequest) { r.Key = strings.Repeat("é", 128) }, claim.KeyInvalid},
		{"key 1 B", func(r *claim.BeginRequest) { r.Key = "1" }, func(r *claim.BeginRequest) { r.Key = "" }, claim.KeyInvalid},
		{"operation 128 B", func(r *claim.BeginRequest) { r.Operation = long(128) }, func(r *claim.BeginRequest) { r.Operation = long(129) }, claim.OperationInvalid},
		{"fingerprint 32 B", func(r *claim.BeginRequest) { r.Fingerprint = make([]byte, 32) }, func(r *claim.BeginRequest) { r.Fingerprint = make([]byte, 33) }, claim.FingerprintInvalid},
		{"fingerprint 0 B", func(r *claim.BeginRequest) { r.Fingerprint = []byte{} }, func(r *claim.BeginRequest) { r.Fingerprint = make([]byte, 31) }, claim.FingerprintInvalid},
		{"request_id 128 B", func(r *claim.BeginRequest) { r.RequestID = long(128) }, func(r *claim.BeginRequest) { r.RequestID = long(129) }, claim.RequestIDInvalid},
		{"owner 128 B", func(r *claim.BeginRequest) { r.Owner = long(128) }, func(r *claim.BeginRequest) { r.Owner = long(129) }, claim.RequestInvalid},
		{"lease above 0", lease(1), lease(0), claim.LeaseInvalid},
		{"lease not negative", lease(time.Hour), lease(-time.Hour), claim.LeaseInvalid},
		{"wait 30 s", func(r *claim.BeginRequest) { r.Wait = 30 * time.Second }, func(r *claim.BeginRequest) { r.Wait = 30*time.Second + 1 }, claim.WaitInvalid},
		{"wait not negative", func(r *claim.BeginRequest) { r.Wait = 0 }, func(r *claim.BeginRequest) { r.Wait = -1 }, claim.WaitInvalid},
		{"16 labels", func(r *claim.BeginRequest) { r.Labels = labels(16) }, func(r *claim.BeginRequest) { r.Labels = labels(17) }, claim.LabelsInvalid},
		{"label name 64 B", func(r *claim.BeginRequest) { r.Labels = map[string]string{long(64): ""} }, func(r *claim.BeginRequest) { r.Labels = map[string]string{long(65): ""} }, claim.LabelsInvalid},
		{"label name 1 B", func(r *claim.BeginRequest) { r.Labels = map[string]string{"a": ""} }, func(r *claim.BeginRequest) { r.Labels = map[string]string{"": "a"} }, claim.LabelsInvalid},
		{"label value 256 B", func(r *claim.BeginRequest) { r.Labels = map[string]string{"a": long(256)} }, func(r *claim.BeginRequest) { r.Labels = map[string]string{"a": long(257)} }, claim.LabelsInvalid},
		{"label UTF-8", func(r *claim.BeginRequest) { r.Labels = map[string]string{"é": "é"} }, func(r *claim.BeginRequest) { r.Labels = map[string]string{"a": "\xff"} }, claim.LabelsInvalid},
		{"label name UTF-8", func(r *claim.BeginRequest) { r.Labels = nil }, func(r *claim.BeginRequest) { r.Labels = map[string]string{"\xff": ""} }, claim.LabelsInvalid},
		{"request_id UTF-8", func(r *claim.BeginRequest) { r.RequestID = "é" }, func(r *claim.BeginRequest) { r.RequestID = "\xff" }, claim.RequestIDInvalid},
		{"owner UTF-8", func(r *claim.BeginRequest) { r.Owner = "é" }, func(r *claim.BeginRequest) { r.Owner = "\xff" }, claim.RequestInvalid},
	} {
		r := asks("r")
		c.at(r)
		check(t, c.what+", reached", r.Validate(), "")
		c.over(r)
		check(t, c.what+", passed", r.Validate(), c.want)
	}
}

// Each limit of a finish, reached and passed by one.
func TestLimitsOfFinish(t *testing.T) {
	metadata := func(m map[string]string) claim.FinishRequest {
		return claim.FinishRequest{Result: &claim.Result{Metadata: m}}
	}
	failure := func(f claim.Failure) claim.FinishRequest {
		if f.Class == 0 {
			f.Class = claim.Terminal
		}
		return claim.FinishRequest{Failure: &f}
	}
	for _, c := range []struct {
		what     string
		at, over claim.FinishRequest
		want     claim.Reason
	}{
		{"metadata 8 KiB, names and values", metadata(map[string]string{long(4096): long(4095), "a": ""}), metadata(map[string]string{long(4096): long(4095), "a": "b"}), claim.ResultInvalid},
		{"metadata 8 KiB, dropped headers apart", metadata(map[string]string{"Cookie": long(9000)}), metadata(map[string]string{"Cookies": long(9000)}), claim.ResultInvalid},
		{"metadata UTF-8", metadata(map[string]string{"é": "é"}), metadata(map[string]string{"a": "\xff"}), claim.ResultInvalid},
		{"metadata name UTF-8", metadata(nil), metadata(map[string]string{"\xff": "a"}), claim.ResultInvalid},
		{"metadata name 1 B", metadata(map[string]string{"a": ""}), metadata(map[string]string{"": "a"}), claim.ResultInvalid},
		{"metadata names once", metadata(map[string]string{"ETag": "1", "Etagg": "2"}), metadata(map[string]string{"ETag": "1", "etag": "1"}), claim.ResultInvalid},
		{"content_type 256 B", claim.FinishRequest{Result: &claim.Result{ContentType: long(256)}}, claim.FinishRequest{Result: &claim.Result{ContentType: long(257)}}, claim.ResultInvalid},
		{"content_type UTF-8", claim.FinishRequest{Result: &claim.Result{ContentType: "é"}}, claim.FinishRequest{Result: &claim.Result{ContentType: "\xff"}}, claim.ResultInvalid},
		{"any body", claim.FinishRequest{Result: &claim.Result{Body: make([]byte, 2<<20)}}, claim.FinishRequest{Result: &claim.Result{Body: make([]byte, 2<<20), ContentType: "\xff"}}, claim.ResultInvalid},
		{"omitted digest 32 B", claim.FinishRequest{Omitted: &claim.Omitted{Digest: make([]byte, 32)}}, claim.FinishRequest{Omitted: &claim.Omitted{Digest: make([]byte, 33)}}, claim.ResultInvalid},
		{"omitted digest given", claim.FinishRequest{Omitted: &claim.Omitted{Digest: make([]byte, 32), Size: 9e18}}, claim.FinishRequest{Omitted: &claim.Omitted{}}, claim.ResultInvalid},
		{"omitted size", claim.FinishRequest{Omitted: &claim.Omitted{Digest: make([]byte, 32)}}, claim.FinishRequest{Omitted: &claim.Omitted{Digest: make([]byte, 32), Size: -1}}, claim.ResultInvalid},
		{"failure message 4 KiB", failure(claim.Failure{Message: long(4096)}), failure(claim.Failure{Message: long(4097)}), claim.FailureInvalid},
		{"failure message UTF-8", failure(claim.Failure{Message: "é"}), failure(claim.Failure{Message: "\xff"}), claim.FailureInvalid},
		{"failure details 8 KiB", failure(claim.Failure{Details: []claim.Detail{{TypeURL: long(92), Value: make([]byte, 8000)}, {TypeURL: long(100)}}}), failure(claim.Failure{Details: []claim.Detail{{TypeURL: long(93), Value: make([]byte, 8000)}, {TypeURL: long(100)}}}), claim.FailureInvalid},
		{"failure detail UTF-8", failure(claim.Failure{Details: []claim.Detail{{TypeURL: "a", Value: []byte{255}}}}), failure(claim.Failure{Details: []claim.Detail{{TypeURL: "\xff"}}}), claim.FailureInvalid},
		{"failure class", failure(claim.Failure{Class: claim.UnknownOutcome}), claim.FinishRequest{Failure: &claim.Failure{}}, claim.FailureInvalid},
		{"failure class known", failure(claim.Failure{Class: claim.Retryable}), failure(claim.Failure{Class: 4}), claim.FailureInvalid},
		{"name", claim.FinishRequest{}, claim.FinishRequest{Namespace: "Pay"}, claim.NamespaceInvalid},
		{"key", claim.FinishRequest{}, claim.FinishRequest{Key: " k"}, claim.KeyInvalid},
	} {
		for _, r := range []*claim.FinishRequest{&c.at, &c.over} {
			if r.Namespace == "" {
				r.Namespace = "pay"
			}
			if r.Key == "" {
				r.Key = "k"
			}
		}
		check(t, c.what+", reached", c.at.Validate(), "")
		check(t, c.what+", passed", c.over.Validate(), c.want)
	}
}

// Each limit of the other requests, reached and passed by one.
func TestLimitsOfExtendResolveAndForget(t *testing.T) {
	type request interface{ Validate() error }
	resolve := func(state claim.State, result *claim.Result, failure *claim.Failure) request {
		return &claim.ResolveRequest{Namespace: "pay", Key: "k", State: state, Result: result, Failure: failure, Reason: "asked"}
	}
	because := func(reason string) request {
		return &claim.ResolveRequest{Namespace: "pay", Key: "k", State: claim.Released, Reason: reason}
	}
	forget := func(reason string) request {
		return &claim.ForgetRequest{Namespace: "pay", Key: "k", Reason: reason}
	}
	for _, c := range []struct {
		what string
		req  request
		want claim.Reason
	}{
		{"extend", &claim.ExtendRequest{Namespace: "pay", Key: "k"}, ""},
		{"extend by 1 ns", &claim.ExtendRequest{Namespace: "pay", Key: "k", Lease: new(time.Nanosecond)}, ""},
		{"extend by 0", &claim.ExtendRequest{Namespace: "pay", Key: "k", Lease: new(time.Duration(0))}, claim.LeaseInvalid},
		{"extend by less", &claim.ExtendRequest{Namespace: "pay", Key: "k", Lease: new(-time.Second)}, claim.LeaseInvalid},
		{"extend no key", &claim.ExtendRequest{Namespace: "pay"}, claim.KeyInvalid},
		{"succeeded", resolve(claim.Succeeded, nil, nil), ""},
		{"succeeded, with a result", resolve(claim.Succeeded, bankResult, nil), ""},
		{"succeeded, with a bad result", resolve(claim.Succeeded, &claim.Result{ContentType: "\xff"}, nil), claim.ResultInvalid},
		{"succeeded, with a failure", resolve(claim.Succeeded, nil, blocked), claim.RequestInvalid},
		{"failed", resolve(claim.Failed, nil, blocked), ""},
		{"failed, without a class", resolve(claim.Failed, nil, &claim.Failure{}), ""},
		{"failed, with a bad failure", resolve(claim.Failed, nil, &claim.Failure{Message: "\xff"}), claim.FailureInvalid},
		{"failed, but retryable", resolve(claim.Failed, nil, passing), claim.FailureInvalid},
		{"failed, but unknown", resolve(claim.Failed, nil, unsure), claim.FailureInvalid},
		{"failed, with nothing", resolve(claim.Failed, nil, nil), claim.FailureInvalid},
		{"failed, with a result", resolve(claim.Failed, bankResult, blocked), claim.FailureInvalid},
		{"released", resolve(claim.Released, nil, nil), ""},
		{"released, with a result", resolve(claim.Released, bankResult, nil), claim.RequestInvalid},
		{"released, with a failure", resolve(claim.Released, nil, blocked), claim.RequestInvalid},
		{"as pending", resolve(claim.Pending, nil, nil), claim.RequestInvalid},
		{"as unknown", resolve(claim.Unknown, nil, nil), claim.RequestInvalid},
		{"as nothing", resolve(0, nil, nil), claim.RequestInvalid},
		{"reason 1 KiB", because(long(1024)), ""},
		{"reason over 1 KiB", because(long(1025)), claim.RequestInvalid},
		{"no reason", because(""), claim.RequestInvalid},
		{"reason not UTF-8", because("\xff"), claim.RequestInvalid},
		{"resolve no key", &claim.ResolveRequest{Namespace: "pay", State: claim.Released, Reason: "x"}, claim.KeyInvalid},
		{"forget", forget(long(1024)), ""},
		{"forget, reason over 1 KiB", forget(long(1025)), claim.RequestInvalid},
		{"forget, no reason", forget(""), claim.RequestInvalid},
		{"forget no namespace", &claim.ForgetRequest{Key: "k", Reason: "x"}, claim.NamespaceInvalid},
	} {
		check(t, c.what, c.req.Validate(), c.want)
	}
}

// A namespace is [a-z0-9][a-z0-9._-]{0,62}.
func TestNamespaces(t *testing.T) {
	for _, good := range []string{"a", "0", "pay", "pay.eu-1_x", "a..b", "a-", long(63)} {
		check(t, good, claim.ValidateNamespace(good), "")
	}
	for _, bad := range []string{"", "UPPER", "a/b", "-a", ".a", "_a", "a b", "../x", "é", "a\x00", "a:b", "a{b}", long(64), "a\n", "ａ"} {
		check(t, bad, claim.ValidateNamespace(bad), claim.NamespaceInvalid)
	}
}

// An operation is made of [A-Za-z0-9._:/-].
func TestOperations(t *testing.T) {
	r := asks("")
	for c := range rune(0x250) {
		r.Operation = "a" + string(c)
		want := claim.OperationInvalid
		if strings.ContainsRune("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/-", c) {
			want = ""
		}
		check(t, r.Operation, r.Validate(), want)
	}
}

func TestC50EveryBadKeyIsRefusedWithItsReason(t *testing.T) {
	messages := map[string]string{}
	for _, c := range []struct{ key, kind string }{
		{"", "empty"},
		{long(256), "long"}, {long(300), "long"}, {long(10 << 20), "long"},
		{"a\xff", "utf-8"}, {"\xc3", "utf-8"}, {"\xed\xa0\x80", "utf-8"},
		{"a\x00b", "control"}, {"a\nb", "control"}, {"a\tb", "control"}, {"\t", "control"}, {"a\x7f", "control"}, {"a\u0085b", "control"},
		{"a\u200bb", "control"}, {"\ufeffa", "control"}, {"a\u202eb", "control"}, {"a\u00adb", "control"}, {"a\U000e0041", "control"},
		{" ", "space"}, {"a ", "space"}, {" a", "space"}, {"a\u00a0", "space"}, {"\u3000a", "space"}, {"\u2028a", "space"},
		{"null", "broken"}, {"undefined", "broken"}, {"None", "broken"}, {"nil", "broken"}, {"NaN", "broken"}, {"00000000-0000-0000-0000-000000000000", "broken"},
	} {
		r := asks("")
		r.Key = c.key
		err := r.Validate()
		check(t, fmt.Sprintf("%.40q", c.key), err, claim.KeyInvalid)
		// Keys that are bad alike are told alike, others otherwise.
		kind := firstWords(err)
		if known, ok := messages[kind]; ok && known != c.kind {
			t.Errorf("%.40q (%s): %v, as for %s", c.key, c.kind, err, known)
		}
		messages[kind] = c.kind
	}
	if len(messages) != 6 {
		t.Errorf("%d reasons for 6 kinds of bad keys: %v", len(messages), messages)
	}
	for _, good := range []string{"1", "a b", "order-1", "Null", "NULL", "none", "nan", "Undefined", "null-1", "é", "日本", "{a}", "a|b%c/d", "00000000-0000-0000-0000-000000000001", long(255)} {
		r := asks("")
		r.Key = good
		check(t, good, r.Validate(), "")
	}
}

// firstWords tells the kinds of messages about keys apart: the words that do not
// depend on the key.
func firstWords(err error) string {
	message := err.(*claim.Error).Message
	for _, words := range []string{"is empty", "at most 255 bytes", "not valid UTF-8", "no control or format characters", "no white space at its ends", "a client sends that has no key"} {
		if strings.Contains(message, words) {
			return words
		}
	}
	return message
}

// A lease outside 1 s ... max_lease is brought inside; one left out is the
// default, which is cut to max_lease.
func TestLeaseIsBroughtInsideItsBounds(t *testing.T) {
	p := claim.Policy{DefaultLease: 30 * time.Second, MaxLease: time.Hour}
	short := claim.Policy{DefaultLease: 30 * time.Second, MaxLease: 10 * time.Second}
	for _, c := range []struct {
		policy claim.Policy
		asked  *time.Duration
		want   time.Duration
	}{
		{p, nil, 30 * time.Second}, {short, nil, 10 * time.Second},
		{p, new(time.Nanosecond), time.Second}, {p, new(time.Second - 1), time.Second}, {p, new(time.Second), time.Second}, {p, new(time.Second + 1), time.Second + 1},
		{p, new(time.Hour), time.Hour}, {p, new(time.Hour + 1), time.Hour}, {p, new(1 << 62 * time.Nanosecond), time.Hour}, {short, new(time.Minute), 10 * time.Second},
	} {
		got, err := c.policy.Lease(c.asked)
		if got != c.want || err != nil {
			t.Errorf("%v asked of %+v: %v, %v, want %v", c.asked, c.policy, got, err, c.want)
		}
	}
}

// A batch and a message have the documented limits.
func TestLimitsOfMessages(t *testing.T) {
	same(t, "members of a batch", claim.MaxBatch, 1000)
	same(t, "bytes of a batch", claim.MaxBatchBytes, 8<<20)
	same(t, "bytes of a message", claim.MaxMessage, 16<<20)
	same(t, "bytes of a result", claim.MaxResult, 1<<20)
	same(t, "wait", claim.MaxWait, 30*time.Second)
}

// A fingerprint of the wrong length is told what was probably sent in its place.
func TestFingerprintsThatWereWrittenWrong(t *testing.T) {
	digits := strings.Repeat("0aF", 21) + "9"
	asBase64, err := base64.StdEncoding.DecodeString(digits)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		sent []byte
		says string
	}{
		"hexadecimal as base64": {asBase64, "not 48: this looks like hexadecimal sent as base64"},
		"hexadecimal as bytes":  {[]byte(digits), "not 64: this looks like hexadecimal sent as bytes"},
		"48 other bytes":        {bytes.Repeat([]byte{0xff}, 48), "or none, not 48"},
		"64 other bytes":        {bytes.Repeat([]byte{'x'}, 64), "or none, not 64"},
		"MD5":                   {make([]byte, 16), "32 raw bytes (SHA-256; in JSON the base64 of them), or none, not 16"},
	} {
		err := (&claim.BeginRequest{Namespace: "a", Key: "k", Fingerprint: c.sent}).Validate()
		if claim.ReasonOf(err) != claim.FingerprintInvalid || !strings.HasSuffix(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		err = (&claim.FinishRequest{Namespace: "a", Key: "k", Omitted: &claim.Omitted{Digest: c.sent}}).Validate()
		if looks := strings.Contains(c.says, "looks like"); looks != strings.Contains(err.Error(), "looks like hexadecimal") {
			t.Errorf("%s as a digest: %v", name, err)
		}
	}
}
