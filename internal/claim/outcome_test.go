package claim_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// digestOf is the documented digest: SHA-256 over parts, each preceded by its
// length as 8 bytes, big endian. Written anew from the words of record.proto.
func digestOf(parts ...string) []byte {
	var all bytes.Buffer
	for _, p := range parts {
		n := uint64(len(p))
		for shift := 56; shift >= 0; shift -= 8 {
			all.WriteByte(byte(n >> shift))
		}
		all.WriteString(p)
	}
	sum := sha256.Sum256(all.Bytes())
	return sum[:]
}

// resultDigest takes a result whose metadata is as it is kept.
func resultDigest(r *claim.Result) []byte {
	names := []string{}
	for name := range r.Metadata {
		names = append(names, name)
	}
	slices.Sort(names)
	parts := []string{"result", fmt.Sprint(r.Code), r.ContentType, fmt.Sprint(len(names))}
	for _, name := range names {
		parts = append(parts, name, r.Metadata[name])
	}
	return digestOf(append(parts, string(r.Body))...)
}

func failureDigest(f *claim.Failure) []byte {
	parts := []string{"failure", fmt.Sprint(f.Code), f.Message, fmt.Sprint(len(f.Details))}
	for _, d := range f.Details {
		parts = append(parts, d.TypeURL, string(d.Value))
	}
	return digestOf(parts...)
}

// finished ends a new key and returns its record.
func finished(t *testing.T, req *claim.FinishRequest, maxBytes int64) *claim.Record {
	t.Helper()
	w := newWorld()
	w.policy.MaxResultBytes = maxBytes
	id := w.first(t, asks("")).ID
	must(t)(w.finish(id, req))
	return w.rec
}

// The digest is what records in etcd and callers' own sums are compared with: it
// must never change.
func TestDigestIsStable(t *testing.T) {
	for _, c := range []struct {
		req  *claim.FinishRequest
		want string
	}{
		{&claim.FinishRequest{Result: bankResult}, "fd9eb09fe96209701db8f839057c1b9780e758fc0c17069df823cdda4ca22ddc"},
		{&claim.FinishRequest{Failure: blocked}, "33306612af896aa70500183650d0e29bd18d2182c5cbf3d3f7888fdd727dd7d0"},
		{&claim.FinishRequest{}, "b2de3ef499082bfbafb4d136c44c2fb4f9f30d0c5842fd8bfdab7d3084615c0a"},
	} {
		if got := hex.EncodeToString(finished(t, c.req, 1<<20).Digest); got != c.want {
			t.Errorf("%+v: %s, want %s", c.req, got, c.want)
		}
	}
}

// The digest follows the algorithm that record.proto documents.
func TestDigestIsTheDocumentedOne(t *testing.T) {
	for _, r := range []*claim.Result{
		{}, bankResult, otherResult,
		{Code: -7, ContentType: "text/plain; charset=utf-8", Body: []byte{0, 255, 10}},
		{Metadata: map[string]string{"b": "2", "a": "1", "z": "", "é": "ü"}},
		{Body: bytes.Repeat([]byte("0123456789"), 1000)},
	} {
		if got := finished(t, &claim.FinishRequest{Result: r}, 1<<20).Digest; !bytes.Equal(got, resultDigest(r)) {
			t.Errorf("%+v: %x, want %x", r, got, resultDigest(r))
		}
	}
	for _, f := range []*claim.Failure{blocked, refused, {Class: claim.Terminal}, {Class: claim.Terminal, Code: -1, Details: []claim.Detail{{}, {TypeURL: "a"}, {Value: []byte("a")}}}} {
		if got := finished(t, &claim.FinishRequest{Failure: f}, 1<<20).Digest; !bytes.Equal(got, failureDigest(f)) {
			t.Errorf("%+v: %x, want %x", f, got, failureDigest(f))
		}
	}
}

// No two outcomes that differ anywhere share a digest, however their parts are cut.
func TestDigestTellsOutcomesApart(t *testing.T) {
	seen := map[string]string{}
	note := func(what string, req *claim.FinishRequest) {
		digest := string(finished(t, req, 1<<20).Digest)
		if other, ok := seen[digest]; ok {
			t.Errorf("%s has the digest of %s", what, other)
		}
		seen[digest] = what
	}
	for _, r := range []*claim.Result{
		{}, {Code: 1}, {Code: -1}, {ContentType: "1"}, {Body: []byte("1")}, {ContentType: "1", Body: []byte("1")}, {ContentType: "11"}, {Body: []byte("11")},
		{Metadata: map[string]string{"a": "b"}}, {Metadata: map[string]string{"ab": ""}}, {Metadata: map[string]string{"b": "a"}},
		{Metadata: map[string]string{"a": "bc"}}, {Metadata: map[string]string{"a": "b"}, Body: []byte("c")}, {Metadata: map[string]string{"a": "b", "c": ""}},
	} {
		note(fmt.Sprintf("%+v", r), &claim.FinishRequest{Result: r})
	}
	for _, f := range []*claim.Failure{
		{}, {Code: 1}, {Message: "1"}, {Details: []claim.Detail{{}}}, {Details: []claim.Detail{{}, {}}},
		{Details: []claim.Detail{{TypeURL: "ab"}}}, {Details: []claim.Detail{{TypeURL: "a", Value: []byte("b")}}}, {Details: []claim.Detail{{Value: []byte("ab")}}},
	} {
		f.Class = claim.Terminal
		note(fmt.Sprintf("%+v", f), &claim.FinishRequest{Failure: f})
	}
}

// Metadata is told apart by value, not by the case of its names, and headers that
// are dropped do not count.
func TestDigestIgnoresCaseOfNamesAndDroppedHeaders(t *testing.T) {
	plain := &claim.Result{Metadata: map[string]string{"etag": `"A"`}}
	loud := &claim.Result{Metadata: map[string]string{"ETag": `"A"`, "Set-Cookie": "s=1", "AUTHORIZATION": "Bearer x"}}
	changed := &claim.Result{Metadata: map[string]string{"etag": `"a"`}}
	w := newWorld()
	id := w.first(t, asks("")).ID
	must(t)(w.complete(id, plain))
	must(t)(w.complete(id, loud))
	if _, err := w.complete(id, changed); claim.ReasonOf(err) != claim.AlreadyFinished {
		t.Errorf("another value: %v", err)
	}
	same(t, "digest", finished(t, &claim.FinishRequest{Result: loud}, 1<<20).Digest, resultDigest(plain))
}

// A body over the limit is dropped after the digest is taken, and the rest is kept.
func TestBodyOverTheLimitIsDroppedAndTheKeyIsFinished(t *testing.T) {
	for _, c := range []struct {
		size    int
		omitted bool
	}{{0, false}, {1, false}, {99, false}, {100, false}, {101, true}, {6 << 20, true}} {
		r := &claim.Result{Code: 200, ContentType: "text/plain", Body: []byte(strings.Repeat("x", c.size)), Metadata: map[string]string{"etag": "1"}}
		rec := finished(t, &claim.FinishRequest{Result: r}, 100)
		if rec.State != claim.Succeeded || rec.ResultOmitted != c.omitted || rec.ResultSize != int64(c.size) || !bytes.Equal(rec.Digest, resultDigest(r)) {
			t.Errorf("%d bytes: %v, omitted %v, size %d, digest %x", c.size, rec.State, rec.ResultOmitted, rec.ResultSize, rec.Digest)
		}
		want := *r
		if c.omitted {
			want.Body = nil
		}
		same(t, "the result kept", rec.Result, &want)
	}
}
