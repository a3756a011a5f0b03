package claim

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// dropped are the headers that are never kept: they are credentials, or set them.
var dropped = map[string]bool{
	"set-cookie": true, "cookie": true, "authorization": true, "proxy-authorization": true,
	"www-authenticate": true, "proxy-authenticate": true,
}

// outcome is how a key ends, ready to be stored.
type outcome struct {
	state   State
	result  *Result
	omitted bool
	size    int64
	failure *Failure
	digest  []byte
}

// succeeded prepares a result: names of metadata lower-cased, credentials
// dropped, the digest taken, and only then a body over the limit dropped. It
// trusts validate to have been called.
func succeeded(r *Result, omitted *Omitted, maxBytes int64) outcome {
	if omitted != nil {
		return outcome{state: Succeeded, omitted: true, size: omitted.Size, digest: slices.Clone(omitted.Digest)}
	}
	if r == nil {
		r = &Result{}
	}
	kept := &Result{Code: r.Code, ContentType: r.ContentType, Body: r.Body}
	for name, value := range r.Metadata {
		if name = strings.ToLower(name); !dropped[name] {
			if kept.Metadata == nil {
				kept.Metadata = make(map[string]string, len(r.Metadata))
			}
			kept.Metadata[name] = value
		}
	}
	out := outcome{state: Succeeded, result: kept, size: int64(len(r.Body)), digest: digestResult(kept)}
	if out.size > maxBytes {
		kept.Body, out.omitted = nil, true
	}
	return out
}

func failed(f *Failure) outcome {
	kept := *f
	kept.Class = Terminal
	return outcome{state: Failed, failure: &kept, digest: digestFailure(&kept)}
}

func (r *Result) validate() error {
	if err := validateText(ResultInvalid, "result.content_type", r.ContentType, MaxContentType); err != nil {
		return err
	}
	total := 0
	seen := make(map[string]bool, len(r.Metadata))
	for name, value := range r.Metadata {
		lower := strings.ToLower(name)
		if name == "" || !utf8.ValidString(name) || !utf8.ValidString(value) {
			return invalid(ResultInvalid, "result.metadata", "metadata names and values are UTF-8, and no name is empty")
		}
		if seen[lower] {
			return invalid(ResultInvalid, "result.metadata", "metadata names %q twice in different case: send one", lower)
		}
		seen[lower] = true
		if !dropped[lower] {
			total += len(name) + len(value)
		}
	}
	if total > MaxMetadata {
		return invalid(ResultInvalid, "result.metadata", "metadata has at most %d bytes in all, this has %d: leave some out", MaxMetadata, total)
	}
	return nil
}

func (o *Omitted) validate() error {
	if len(o.Digest) != sha256.Size {
		return invalid(ResultInvalid, "omitted.digest", "the digest of an omitted result is 32 raw bytes (SHA-256; in JSON the base64 of them), not %d%s", len(o.Digest), looksLike(o.Digest))
	}
	if o.Size < 0 {
		return invalid(ResultInvalid, "omitted.size", "a size is 0 or more, not %d", o.Size)
	}
	return nil
}

func (f *Failure) validate() error {
	if f.Class < Retryable || f.Class > UnknownOutcome {
		return invalid(FailureInvalid, "failure.class", "say what the failure means: FAILURE_CLASS_RETRYABLE (nothing happened), FAILURE_CLASS_TERMINAL (failed for good) or FAILURE_CLASS_UNKNOWN (it may have happened)")
	}
	if err := validateText(FailureInvalid, "failure.message", f.Message, MaxFailureMessage); err != nil {
		return err
	}
	total := 0
	for _, d := range f.Details {
		if !utf8.ValidString(d.TypeURL) {
			return invalid(FailureInvalid, "failure.details", "a detail's type URL is UTF-8")
		}
		total += len(d.TypeURL) + len(d.Value)
	}
	if total > MaxFailureDetails {
		return invalid(FailureInvalid, "failure.details", "details have at most %d bytes in all, these have %d: leave some out", MaxFailureDetails, total)
	}
	return nil
}

// parts hashes length-prefixed parts, so that no two lists of parts hash alike.
type parts struct{ h hash.Hash }

func (p parts) add(b []byte) {
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], uint64(len(b)))
	p.h.Write(n[:]) // a hash never fails
	p.h.Write(b)
}

func (p parts) text(s string) { p.add([]byte(s)) }

func (p parts) number(n int) { p.text(strconv.Itoa(n)) }

func digestResult(r *Result) []byte {
	p := parts{sha256.New()}
	p.text("result")
	p.number(int(r.Code))
	p.text(r.ContentType)
	p.number(len(r.Metadata))
	for _, name := range slices.Sorted(maps.Keys(r.Metadata)) {
		p.text(name)
		p.text(r.Metadata[name])
	}
	p.add(r.Body)
	return p.h.Sum(nil)
}

func digestFailure(f *Failure) []byte {
	p := parts{sha256.New()}
	p.text("failure")
	p.number(int(f.Code))
	p.text(f.Message)
	p.number(len(f.Details))
	for _, d := range f.Details {
		p.text(d.TypeURL)
		p.add(d.Value)
	}
	return p.h.Sum(nil)
}

// spentHash names a request id of an owner in 64 bits. It only ever refuses: a
// collision costs one caller a new request id.
func spentHash(owner, requestID string) uint64 {
	p := parts{sha256.New()}
	p.text(owner)
	p.text(requestID)
	return binary.BigEndian.Uint64(p.h.Sum(nil))
}
