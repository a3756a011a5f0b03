package fingerprint

import (
	"strings"
	"unicode/utf8"
)

// firstInvalid is the offset of the first byte that is not UTF-8, or -1.
func firstInvalid(raw []byte) int64 {
	for at := 0; at < len(raw); {
		r, size := utf8.DecodeRune(raw[at:])
		if r == utf8.RuneError && size <= 1 {
			return int64(at)
		}
		at += size
	}
	return -1
}

// surrogateAt says whether an escape of a surrogate begins at offset.
func surrogateAt(raw []byte, offset int64) bool {
	if offset < 0 || offset+4 > int64(len(raw)) {
		return false
	}
	escape := strings.ToLower(string(raw[offset : offset+4]))
	return strings.HasPrefix(escape, `\ud`) && strings.ContainsRune("89abcdef", rune(escape[3]))
}
