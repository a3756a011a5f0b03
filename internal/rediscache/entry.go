package rediscache

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// An entry is a header of fixed size and the record's bytes. The scripts know the
// offsets too.
//
//	 0   2  kind: "m1" mark, "s1" staged, "c1" confirmed; the digit is the format
//	 2  16  nonce: which write this entry is
//	18  32  digest: SHA-256 of the record's bytes
//	50  19  revision, in decimal digits; zeros while staged
//	69  32  HMAC over the above and the Redis key; zeros while staged
//	101     the bytes that etcd holds
//
// A mark is its kind alone.
const (
	markKind      = "m1"
	stagedKind    = "s1"
	confirmedKind = "c1"

	kindSize     = 2
	nonceSize    = 16
	revisionSize = 19 // digits of the largest revision: Lua's numbers cannot hold it

	nonceAt    = kindSize
	digestAt   = nonceAt + nonceSize
	revisionAt = digestAt + sha256.Size
	tagAt      = revisionAt + revisionSize
	headerSize = tagAt + sha256.Size
	// mostEntry is more than any entry has: a result has 1 MiB at most.
	mostEntry = 2 << 20
)

// purpose keeps the tags of entries apart from whatever else the secret signs.
const purpose = "dualcheck redis entry"

// keyOf names a record's entry under the epochs of a view. Slot and hash are cut
// from a SHA-256: no byte that a user chose is in it, and the hash tag that places it
// in a Redis Cluster is ours.
func keyOf(v *claim.View, name layout.Name) string {
	b := make([]byte, 0, 96)
	b = append(b, "dc:{"...)
	b = strconv.AppendInt(b, int64(name.Slot), 10)
	b = append(b, "}:"...)
	b = hex.AppendEncode(b, v.Epoch[:])
	b = append(b, ':')
	b = strconv.AppendInt(b, v.SlotEpoch(name.Slot), 10)
	b = append(b, ':')
	b = append(b, name.Hash()...)
	return string(b)
}

// stagedEntry makes the entry of bytes that are about to be proposed.
func stagedEntry(value []byte) []byte {
	e := make([]byte, headerSize, headerSize+len(value))
	copy(e, stagedKind)
	rand.Read(e[nonceAt:digestAt]) // never fails
	digest := sha256.Sum256(value)
	copy(e[digestAt:], digest[:])
	copy(e[revisionAt:], fmt.Sprintf("%0*d", revisionSize, 0))
	return append(e, value...)
}

// stamp turns a header into that of a confirmed entry of this key and revision.
func stamp(header []byte, s claim.Sealer, key string, revision int64) {
	copy(header, confirmedKind)
	copy(header[revisionAt:], fmt.Sprintf("%0*d", revisionSize, revision))
	tag := s.Tag(purpose, []byte(key), header[:tagAt])
	copy(header[tagAt:], tag[:])
}

// readEntry tells what an entry of this key is. The record is set if it is authentic:
// whether it may answer is the epochs' and the clock's business.
func readEntry(entry []byte, s claim.Sealer, key, namespace, name string) (*claim.Record, Finding) {
	if string(entry) == markKind {
		return nil, Marked
	}
	if len(entry) < headerSize {
		return nil, Garbage
	}
	switch string(entry[:kindSize]) {
	case stagedKind:
		return nil, Staged
	case confirmedKind:
	default:
		return nil, Garbage
	}
	revision, err := strconv.ParseInt(string(entry[revisionAt:tagAt]), 10, 64)
	if err != nil || revision <= 0 {
		return nil, Revision
	}
	tag := s.Tag(purpose, []byte(key), entry[:tagAt])
	if !hmac.Equal(tag[:], entry[tagAt:headerSize]) {
		return nil, HMAC
	}
	value := entry[headerSize:]
	if digest := sha256.Sum256(value); !bytes.Equal(digest[:], entry[digestAt:revisionAt]) {
		return nil, Digest
	}
	rec, err := layout.DecodeRecord(value, revision, namespace, name)
	if err != nil || !rec.State.Finished() || rec.Forgotten != nil {
		return nil, Unreadable
	}
	return rec, Hit
}
