package server

import (
	"bytes"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// An empty message takes two bytes on the wire, three in JSON, and over a hundred in
// memory. So parts are counted before they are decoded: a request of a few KiB,
// compressed, must not cost this node a GiB.
const (
	// mostParts is how many parts a request may hold at any depth: messages, entries of
	// maps (which are messages on the wire) and elements of lists. It is a limit of its
	// own: of a batch of 1,000 members each has room for nearly 200, where an ordinary
	// one has 20.
	mostParts = 200_000
	// crowdFrom is the size in bytes from which on a request can be a crowd: a part
	// takes two.
	crowdFrom = 2 * mostParts
)

func crowded() *claim.Error {
	return &claim.Error{Reason: claim.RequestInvalid, Message: fmt.Sprintf("a request has at most %d parts (messages, entries of maps, elements of lists): send less at once", mostParts)}
}

// crowd reports whether an encoded message of this type holds more than mostParts.
func crowd(d protoreflect.MessageDescriptor, b []byte) bool {
	return len(b) >= crowdFrom && countParts(d, b, mostParts) < 0
}

// countParts returns what is left of the parts, less than 0 if they do not suffice.
// Where the bytes are no message it stops: decoding will say so.
func countParts(d protoreflect.MessageDescriptor, b []byte, left int) int {
	for len(b) > 0 && left >= 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return left
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return left
		}
		if f := d.Fields().ByNumber(number); f != nil && kind == protowire.BytesType {
			if f.Message() != nil || f.IsList() {
				left--
			}
			if f.Message() != nil {
				inner, _ := protowire.ConsumeBytes(b)
				left = countParts(f.Message(), inner, left)
			}
		}
		b = b[n:]
	}
	return left
}

// crowdJSON reports whether a JSON body opens more than mostParts objects and lists.
// Braces within strings count too: that only refuses what nobody sends.
func crowdJSON(b []byte) bool {
	return len(b) >= crowdFrom && bytes.Count(b, []byte("{"))+bytes.Count(b, []byte("[")) > mostParts
}
