package claim_test

import (
	"bytes"
	"encoding/base64"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/dualcheck/dualcheck/internal/claim"
)

var secret = bytes.Repeat([]byte{0x5E}, 32)

// A token is the claim id and 128 bits of HMAC-SHA-256; tokens that callers hold
// must open for as long as the secret lives.
func TestTokenIsStable(t *testing.T) {
	id := claim.ID{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	const want = "AAECAwQFBgcICQoLDA0OD7_0u4HHry54IhYGTmvjGls"
	s := claim.NewSealer(secret)
	if got := s.Seal("pay", "k", id); got != want {
		t.Errorf("sealed as %s, want %s", got, want)
	}
	if got, err := s.Open("pay", "k", want); got != id || err != nil {
		t.Errorf("opened as %x, %v", got, err)
	}
}

// A token opens under its own secret, namespace and key only, and only whole (G11).
func TestTokenOpensNothingElse(t *testing.T) {
	s := claim.NewSealer(secret)
	token := s.Seal("a", "b:c", holder)
	for _, other := range []struct {
		sealer         claim.Sealer
		namespace, key string
	}{{s, "a:b", "c"}, {s, "a", "b:d"}, {s, "b", "b:c"}, {s, "ab:c", ""}, {s, "", "ab:c"}, {claim.NewSealer(secret[:31]), "a", "b:c"}, {claim.NewSealer(nil), "a", "b:c"}} {
		if id, err := other.sealer.Open(other.namespace, other.key, token); claim.ReasonOf(err) != claim.TokenInvalid || id != (claim.ID{}) {
			t.Errorf("(%q, %q): %x, %v", other.namespace, other.key, id, err)
		}
	}
	raw, _ := base64.RawURLEncoding.DecodeString(token)
	for i := range raw {
		for bit := range 8 {
			forged := bytes.Clone(raw)
			forged[i] ^= 1 << bit
			if _, err := s.Open("a", "b:c", base64.RawURLEncoding.EncodeToString(forged)); claim.ReasonOf(err) != claim.TokenInvalid {
				t.Errorf("bit %d of byte %d: %v", bit, i, err)
			}
		}
	}
	for _, bad := range []string{"", token[:42], token[1:], token + "A", token + "=", token + "\n", token[:20] + "\r\n" + token[20:], " " + token, base64.StdEncoding.EncodeToString(raw), strings.Repeat(token, 2), "\xff", strings.Repeat("A", 43)} {
		if _, err := s.Open("a", "b:c", bad); claim.ReasonOf(err) != claim.TokenInvalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// Claim ids are random: none comes twice.
func TestClaimIDsAreDistinct(t *testing.T) {
	seen := map[claim.ID]bool{{}: true}
	for range 1000 {
		id := claim.NewID()
		if seen[id] {
			t.Fatalf("%x came twice", id)
		}
		seen[id] = true
	}
}

// FuzzTokenOpen: whatever is sent opens only if it is exactly what was sealed.
func FuzzTokenOpen(f *testing.F) {
	s := claim.NewSealer(secret)
	f.Add("pay", "k", s.Seal("pay", "k", holder))
	f.Add("pay", "k", s.Seal("pay", "k", holder)+"\n")
	f.Add("", "", "")
	f.Add("a", "b", strings.Repeat("_", 43))
	f.Fuzz(func(t *testing.T, namespace, key, token string) {
		id, err := s.Open(namespace, key, token)
		if err == nil && s.Seal(namespace, key, id) != token {
			t.Fatalf("%q opened as %x, which is sealed otherwise", token, id)
		}
		if err != nil && (claim.ReasonOf(err) != claim.TokenInvalid || id != (claim.ID{})) {
			t.Fatalf("%q: %x, %v", token, id, err)
		}
	})
}

// FuzzValidateName: what passes keeps every rule of keys and namespaces.
func FuzzValidateName(f *testing.F) {
	for _, seed := range [][2]string{{"pay", "k"}, {"", ""}, {"a.b_c-d", "é"}, {"Pay", "null"}, {"-", " k"}, {"x", "\u200b"}, {"x", "\xff"}, {"x", strings.Repeat("k", 256)}} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, namespace, key string) {
		err := claim.ValidateName(namespace, key)
		if reason := claim.ReasonOf(err); err != nil && reason != claim.NamespaceInvalid && reason != claim.KeyInvalid {
			t.Fatalf("%q, %q: %v", namespace, key, err)
		}
		goodNamespace := len(namespace) >= 1 && len(namespace) <= 63 && !strings.ContainsAny(namespace[:1], "._-")
		goodNamespace = goodNamespace && !strings.ContainsFunc(namespace, func(c rune) bool { return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789._-", c) })
		broken := map[string]bool{"null": true, "undefined": true, "None": true, "nil": true, "NaN": true, "00000000-0000-0000-0000-000000000000": true}
		goodKey := len(key) >= 1 && len(key) <= 255 && utf8.ValidString(key) && !broken[key] && strings.TrimFunc(key, unicode.IsSpace) == key &&
			!strings.ContainsFunc(key, func(c rune) bool { return unicode.Is(unicode.Cc, c) || unicode.Is(unicode.Cf, c) })
		if good := goodNamespace && goodKey; good != (err == nil) {
			t.Fatalf("%q, %q: %v", namespace, key, err)
		}
	})
}
