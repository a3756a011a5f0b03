package fingerprint

import "strings"

// Pointer is a JSON Pointer (RFC 6901): "" is the whole document, "/a/0" the
// first element of member a; "~0" and "~1" stand for "~" and "/".
type Pointer string

// ParsePointer checks that text is a JSON Pointer. The error is an *Error with
// ErrPointer.
func ParsePointer(text string) (Pointer, error) {
	p := Pointer(text)
	if err := p.check(); err != nil {
		return "", err
	}
	return p, nil
}

// Append is the pointer to member (or, in decimal, element) token of p.
func (p Pointer) Append(token string) Pointer {
	return p + "/" + Pointer(escapeToken.Replace(token))
}

var escapeToken = strings.NewReplacer("~", "~0", "/", "~1")

func (p Pointer) check() error {
	wrong := func(detail string) error {
		return &Error{Reason: ErrPointer, Pointer: p, Offset: -1, Detail: detail}
	}
	if p != "" && p[0] != '/' {
		return wrong(`it must begin with "/"`)
	}
	for i, c := range p {
		if c == '~' && !strings.HasPrefix(string(p[i+1:]), "0") && !strings.HasPrefix(string(p[i+1:]), "1") {
			return wrong(`"~" must be written "~0"`)
		}
	}
	return nil
}
