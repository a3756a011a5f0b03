package feed

import (
	"encoding/base64"
	"encoding/binary"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// position is where a subscriber was: it has been told everything up to a revision, in
// an epoch.
type position struct {
	epoch    claim.ID
	feed     uint64 // who told it
	revision int64
	// partial: it was amid a snapshot, and has to begin anew.
	partial bool
}

const (
	tokenVersion = 1
	tokenSize    = 2 + len(claim.ID{}) + 8 + 8
)

// token writes a position: version, flags, epoch, feed, revision.
func (p position) token() string {
	b := make([]byte, 2, tokenSize)
	b[0] = tokenVersion
	if p.partial {
		b[1] = 1
	}
	b = append(b, p.epoch[:]...)
	b = binary.BigEndian.AppendUint64(b, p.feed)
	b = binary.BigEndian.AppendUint64(b, uint64(p.revision))
	return base64.RawURLEncoding.EncodeToString(b)
}

// parseToken reads a position; REQUEST_INVALID if it is none.
func parseToken(token string) (position, error) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err != nil || len(b) != tokenSize || b[0] != tokenVersion || b[1] > 1 {
		return position{}, &claim.Error{Reason: claim.RequestInvalid, Field: "resume_token", Message: "this is no resume token: send the last one that was received as it was, or none to begin anew"}
	}
	p := position{partial: b[1] == 1, epoch: claim.ID(b[2 : 2+len(claim.ID{})])}
	p.feed = binary.BigEndian.Uint64(b[2+len(p.epoch):])
	p.revision = int64(binary.BigEndian.Uint64(b[2+len(p.epoch)+8:]))
	if p.revision < 0 {
		p.revision, p.partial = 0, true
	}
	return p, nil
}
