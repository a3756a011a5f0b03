package claim

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
)

// Sealer turns claim ids into tokens and back: a token is the claim id and an
// HMAC-SHA-256 over namespace, key and claim id, so that a token for one key is
// none for another and nobody can make one up. The HMAC is cut to 128 bits
// (NIST SP 800-107, section 5.1).
type Sealer struct{ secret []byte }

// NewSealer makes a Sealer of the cluster's secret.
func NewSealer(secret []byte) Sealer { return Sealer{secret} }

// NewID draws a claim id.
func NewID() ID {
	var id ID
	rand.Read(id[:]) // never fails
	return id
}

// Seal returns the token of a claim, in unpadded URL-safe base64.
func (s Sealer) Seal(namespace, key string, id ID) string {
	return base64.RawURLEncoding.EncodeToString(append(id[:], s.mac(namespace, key, id)...))
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
			if hmac.Equal(raw[len(id):], s.mac(namespace, key, id)) {
				return id, nil
			}
		}
	}
	return ID{}, invalid(TokenInvalid, "token", "this is no token of this namespace and key: send the claim.token that Begin answered for this very namespace and key")
}

func (s Sealer) mac(namespace, key string, id ID) []byte {
	p := parts{hmac.New(sha256.New, s.secret)}
	p.text(namespace)
	p.text(key)
	p.add(id[:])
	return p.h.Sum(nil)[:len(id)]
}

// Tag authenticates what is kept outside etcd: HMAC-SHA-256 over the purpose and the
// data, each with its length. A purpose has a space in it, which no namespace has, so
// that no tag is a token.
func (s Sealer) Tag(purpose string, data ...[]byte) [sha256.Size]byte {
	p := parts{hmac.New(sha256.New, s.secret)}
	p.text(purpose)
	for _, d := range data {
		p.add(d)
	}
	return [sha256.Size]byte(p.h.Sum(nil))
}
