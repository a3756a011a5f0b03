// Package fingerprint makes the SHA-256 of a request's canonical JSON
// (RFC 8785), by which two deliveries of one request are known to be the same.
//
// The invariant it keeps: equal fingerprints mean equal requests. Members in
// another order, other white space and other spellings of one number or string
// give the same fingerprint; whatever canonicalisation would merge with
// something else is refused with an error instead:
//
//   - an integer whose double is another number: 9007199254740993 (2^53 + 1)
//     would become 9007199254740992. The rule: a number without a fractional
//     part must be written by its canonical form without loss, which every
//     integer up to 2^53 is. Greater identifiers belong in strings;
//   - a number too large for a double, such as 1e400, and one that is not zero
//     but too small for one, such as 1e-400;
//   - a number with a fractional part and more than 17 significant digits, which
//     no double needs: an amount such as 123456789012345678.25 belongs in a string;
//   - an object that names a member twice;
//   - text that is not UTF-8, and escapes of lone surrogates.
//
// Numbers with a fractional part are doubles, as in RFC 8785: two that are the same
// double are one number. Strings are not
// normalised: "é" in one code point and in two are two requests.
package fingerprint

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// Size is the length of a fingerprint in bytes.
const Size = sha256.Size

// What can be wrong with a document or its selectors; for errors.Is.
var (
	// ErrSyntax: the document is not one JSON value.
	ErrSyntax = errors.New("not valid JSON")
	// ErrDuplicateMember: an object names a member twice.
	ErrDuplicateMember = errors.New("duplicate member")
	// ErrText: invalid UTF-8, or an escape of a lone surrogate.
	ErrText = errors.New("text is not valid Unicode")
	// ErrNumber: a double cannot hold the number, and canonical JSON would make
	// another number of it.
	ErrNumber = errors.New("number is not kept by canonical JSON")
	// ErrPointer: an exclusion is not a JSON Pointer (RFC 6901).
	ErrPointer = errors.New("not a JSON pointer")
	// ErrNoMatch: an exclusion matches nothing in the document.
	ErrNoMatch = errors.New("exclusion matches nothing")
	// ErrNothingLeft: the exclusions leave no value to tell requests apart.
	ErrNothingLeft = errors.New("exclusions leave nothing")
)

// Error says what is wrong and where.
type Error struct {
	// Reason is one of the errors above.
	Reason error
	// Pointer leads to the value (RFC 6901); empty is the whole document.
	Pointer Pointer
	// Offset is where in the document, in bytes from its start; -1 if the
	// fault is not at one place.
	Offset int64
	// Detail says more; may be empty.
	Detail string
}

// Error is one line: reason, detail, pointer, offset.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Reason.Error())
	if e.Detail != "" {
		b.WriteString(": ")
		b.WriteString(e.Detail)
	}
	if e.Pointer != "" {
		fmt.Fprintf(&b, " at %q", string(e.Pointer))
	}
	if e.Offset >= 0 {
		fmt.Fprintf(&b, " (byte %d)", e.Offset)
	}
	return b.String()
}

// Unwrap gives the reason.
func (e *Error) Unwrap() error { return e.Reason }

// OfJSON is the SHA-256 of Canonical.
func OfJSON(raw []byte, exclude ...Pointer) ([Size]byte, error) {
	canonical, err := Canonical(raw, exclude...)
	if err != nil {
		return [Size]byte{}, err
	}
	return sha256.Sum256(canonical), nil
}

// Canonical is the canonical JSON (RFC 8785) of one JSON value without the
// members and elements that exclude points to; an element that is left out
// moves the later ones up. Each exclusion must match something that no other
// one has taken away, and at least one string, number, boolean or null must be
// left. What is excluded is checked for syntax alone. raw is not changed.
// Errors are *Error.
func Canonical(raw []byte, exclude ...Pointer) ([]byte, error) {
	if !utf8.Valid(raw) {
		return nil, &Error{Reason: ErrText, Offset: firstInvalid(raw), Detail: "invalid UTF-8"}
	}
	var kept bytes.Buffer
	kept.Grow(len(raw))
	s := scan{
		raw:      raw,
		in:       jsontext.NewDecoder(bytes.NewReader(raw)),
		out:      jsontext.NewEncoder(&kept),
		excluded: make(map[Pointer]bool, len(exclude)),
	}
	for _, p := range exclude {
		if err := p.check(); err != nil {
			return nil, err
		}
		if p == "" {
			return nil, &Error{Reason: ErrNothingLeft, Offset: -1, Detail: `"" is the whole document`}
		}
		s.excluded[p] = false
	}
	if err := s.value(""); err != nil {
		return nil, err
	}
	switch _, err := s.in.ReadToken(); {
	case err == nil:
		return nil, &Error{Reason: ErrSyntax, Offset: s.in.InputOffset(), Detail: "more than one value"}
	case !errors.Is(err, io.EOF):
		return nil, s.fault(err)
	}
	for _, p := range exclude {
		if !s.excluded[p] {
			return nil, &Error{Reason: ErrNoMatch, Pointer: p, Offset: -1}
		}
	}
	if len(exclude) > 0 && s.leaves == 0 {
		return nil, &Error{Reason: ErrNothingLeft, Offset: -1}
	}
	value := jsontext.Value(bytes.TrimSpace(kept.Bytes()))
	if err := value.Canonicalize(); err != nil {
		return nil, s.fault(err)
	}
	return value, nil
}

// scan copies a document from in to out, leaving out what is excluded and
// refusing what canonicalisation would merge.
type scan struct {
	raw []byte
	in  *jsontext.Decoder
	out *jsontext.Encoder
	// excluded says of each exclusion whether it has matched.
	excluded map[Pointer]bool
	// leaves counts the scalars that were copied.
	leaves int
}

// value copies the next value. at is where it is; only kept up to date while
// there are exclusions.
func (s *scan) value(at Pointer) error {
	token, err := s.in.ReadToken()
	if err != nil {
		return s.fault(err)
	}
	switch token.Kind() {
	case jsontext.KindBeginObject:
		return s.object(at)
	case jsontext.KindBeginArray:
		return s.array(at)
	case jsontext.KindNumber:
		literal := token.String()
		if detail := numberFault(literal); detail != "" {
			return &Error{
				Reason:  ErrNumber,
				Pointer: Pointer(s.in.StackPointer()),
				Offset:  s.in.InputOffset() - int64(len(literal)),
				Detail:  detail,
			}
		}
	}
	s.leaves++
	return s.write(token)
}

// object copies the members and the end of an object that has just begun.
func (s *scan) object(at Pointer) error {
	if err := s.write(jsontext.BeginObject); err != nil {
		return err
	}
	for {
		token, err := s.in.ReadToken()
		if err != nil {
			return s.fault(err)
		}
		if token.Kind() == jsontext.KindEndObject {
			return s.write(jsontext.EndObject)
		}
		member := at
		if len(s.excluded) > 0 {
			member = at.Append(token.String())
			if skipped, err := s.skip(member); skipped || err != nil {
				if err != nil {
					return err
				}
				continue
			}
		}
		if err := s.write(token); err != nil {
			return err
		}
		if err := s.value(member); err != nil {
			return err
		}
	}
}

// array copies the elements and the end of an array that has just begun.
func (s *scan) array(at Pointer) error {
	if err := s.write(jsontext.BeginArray); err != nil {
		return err
	}
	for i := 0; s.in.PeekKind() != jsontext.KindEndArray; i++ {
		element := at
		if len(s.excluded) > 0 {
			element = at.Append(fmt.Sprint(i))
			if skipped, err := s.skip(element); skipped || err != nil {
				if err != nil {
					return err
				}
				continue
			}
		}
		if err := s.value(element); err != nil {
			return err
		}
	}
	if _, err := s.in.ReadToken(); err != nil {
		return s.fault(err)
	}
	return s.write(jsontext.EndArray)
}

// skip reads past the next value if its place is excluded.
func (s *scan) skip(at Pointer) (bool, error) {
	if _, excluded := s.excluded[at]; !excluded {
		return false, nil
	}
	s.excluded[at] = true
	if err := s.in.SkipValue(); err != nil {
		return false, s.fault(err)
	}
	return true, nil
}

func (s *scan) write(token jsontext.Token) error {
	if err := s.out.WriteToken(token); err != nil {
		return s.fault(err)
	}
	return nil
}

// fault gives a reader's error its reason and place.
func (s *scan) fault(err error) error {
	e := &Error{Reason: ErrSyntax, Offset: s.in.InputOffset(), Detail: err.Error()}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		e.Offset, e.Detail = int64(len(s.raw)), "it ends too soon"
	}
	syntax, ok := errors.AsType[*jsontext.SyntacticError](err)
	if !ok {
		return e
	}
	e.Pointer = Pointer(syntax.JSONPointer)
	if e.Detail != "it ends too soon" {
		e.Offset = syntax.ByteOffset
		if syntax.Err != nil {
			e.Detail = syntax.Err.Error()
		}
	}
	switch {
	case errors.Is(err, jsontext.ErrDuplicateName):
		e.Reason, e.Detail = ErrDuplicateMember, ""
	case surrogateAt(s.raw, e.Offset):
		e.Reason, e.Detail = ErrText, "lone surrogate"
	}
	return e
}
