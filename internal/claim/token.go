package claim

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"hash"
	"sync"
)

// Sealer turns claim ids into tokens and back: a token is the claim id and an
// HMAC-SHA-256 over namespace, key and claim id, so that a token for one key is
// none for another and nobody can make one up. The HMAC is cut to 128 bits
// (NIST SP 800-107, section 5.1).
type Sealer struct{ macs *sync.Pool }

// NewSealer makes a Sealer of the cluster's secret. It keeps keyed hashes: to key one is
// half of what a token costs.
func NewSealer(secret []byte) Sealer {
	return Sealer{&sync.Pool{New: func() any { return &mac{h: hmac.New(sha256.New, secret)} }}}
}

// mac is a keyed hash with room for what goes into it and comes out.
type mac struct {
	h   hash.Hash
	in  []byte
	out [sha256.Size]byte
}

// part adds data with its length, and hashes all there is.
func part[T string | []byte](m *mac, data T) {
	m.in = binary.BigEndian.AppendUint64(m.in[:0], uint64(len(data)))
	if len(data) > len(m.out)*16 { // too much to copy
		m.h.Write(m.in)
		m.h.Write([]byte(data))
		return
	}
	m.in = append(m.in, data...)
	m.h.Write(m.in) // a hash never fails
}

func (s Sealer) mac() *mac {
	m := s.macs.Get().(*mac)
	m.h.Reset()
	return m
}

func (s Sealer) sum(m *mac) [sha256.Size]byte {
	m.h.Sum(m.out[:0])
	sum := m.out
	s.macs.Put(m)
	return sum
}

// NewID draws a claim id.
func NewID() ID {
	var id ID
	rand.Read(id[:]) // never fails
	return id
}

// Seal returns the token of a claim, in unpadded URL-safe base64.
func (s Sealer) Seal(namespace, key string, id ID) string {
	return base64.RawURLEncoding.EncodeToString(append(id[:], s.half(namespace, key, id)...))
}

// Open returns the claim of a token, or TOKEN_INVALID.
func (s Sealer) Open(namespace, key, token string) (ID, error) {
	var id ID
	if token == "" {
		return id, invalid(TokenInvalid, "token", "the token is missing: send the claim.token that Begin answered")
	}
	if len(token) == base64.RawURLEncoding.EncodedLen(2*len(id)) { // the decoder skips line breaks
		raw, err := base64.RawURLEncoding.Strict().DecodeString(token)
		if err == nil && len(raw) == 2*len(id) {
			copy(id[:], raw)
			if hmac.Equal(raw[len(id):], s.half(namespace, key, id)) {
				return id, nil
			}
		}
	}
	return ID{}, invalid(TokenInvalid, "token", "this is no token of this namespace and key: send the claim.token that Begin answered for this very namespace and key")
}

func (s Sealer) half(namespace, key string, id ID) []byte {
	m := s.mac()
	part(m, namespace)
	part(m, key)
	part(m, id[:])
	sum := s.sum(m)
	return sum[:len(id)]
}

// Tag authenticates what is kept outside etcd: HMAC-SHA-256 over the purpose and the
// data, each with its length. A purpose has a space in it, which no namespace has, so
// that no tag is a token.
func (s Sealer) Tag(purpose string, data ...[]byte) [sha256.Size]byte {
	m := s.mac()
	part(m, purpose)
	for _, d := range data {
		part(m, d)
	}
	return s.sum(m)
}
