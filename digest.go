package dualcheck

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

// mostResult is how large a result may be to be sent: what the server takes, less room
// for what is around it.
const mostResult = 16<<20 - 64<<10

// dropped are the names of metadata that no server keeps.
var dropped = map[string]bool{
	"set-cookie": true, "cookie": true, "authorization": true, "proxy-authorization": true,
	"www-authenticate": true, "proxy-authenticate": true,
}

// digest is the result's as Record.digest has it.
func (r *Result) digest() []byte {
	kept := make(map[string]string, len(r.Metadata))
	for name, value := range r.Metadata {
		if name = strings.ToLower(name); !dropped[name] {
			kept[name] = value
		}
	}
	p := parts{sha256.New()}
	p.add([]byte("result"))
	p.add(strconv.AppendInt(nil, int64(r.Code), 10))
	p.add([]byte(r.ContentType))
	p.add(strconv.AppendInt(nil, int64(len(kept)), 10))
	for _, name := range slices.Sorted(maps.Keys(kept)) {
		p.add([]byte(name))
		p.add([]byte(kept[name]))
	}
	p.add(r.Body)
	return p.Sum(nil)
}

// parts hashes length-prefixed parts.
type parts struct{ hash.Hash }

func (p parts) add(b []byte) {
	p.Write(binary.BigEndian.AppendUint64(nil, uint64(len(b))))
	p.Write(b)
}

// cut makes a failure's message one that the contract allows.
func cut(s string) string {
	s = strings.ToValidUTF8(s, "\ufffd")
	if len(s) <= mostFailureMessage {
		return s
	}
	n := mostFailureMessage
	for !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
