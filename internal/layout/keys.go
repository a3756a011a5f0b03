// Package layout is how etcd is laid out: the names of keys and the bytes of
// values. Nothing else knows either.
//
// No byte that a user chose is in a key: names are hashed, and the plain ones are
// in the value and compared on every read, so that a collision is an error and
// never a merge. What cannot be read is RECORD_UNREADABLE, never "no record".
package layout

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// Keys and prefixes below the root.
const (
	Root     = "/dualcheck/v1"
	Records  = Root + "/r/"
	Policies = Root + "/p/"
	Meta     = Root + "/m/"

	Tick   = Meta + "tick"
	Guard  = Meta + "guard"
	Epoch  = Meta + "epoch"
	Secret = Meta + "secret"
	Nodes  = Meta + "n/"

	// Switches are the keys that end in a switch's name, which is one of policy's own.
	Switches = Meta + "s/"

	// SlotEpochs are the keys whose ModRevisions are the slots' epochs.
	SlotEpochs = Meta + "e/"
)

// Name is where a record is kept.
type Name struct {
	// Key is /r/<slot>/<namespace>/<hash>: 3, 16 and 32 hexadecimal digits.
	Key string
	// SlotEpoch is /m/e/<slot>.
	SlotEpoch string
	// Slot is 0 ... claim.Slots-1, and Hash the last part of Key.
	Slot int
	Hash string
}

// NameOf places a key: slot and hash are cut from SHA-256 over the
// length-prefixed namespace and key.
func NameOf(namespace, key string) Name {
	h := sha256.New()
	prefixed(h.Write, namespace)
	prefixed(h.Write, key)
	sum := h.Sum(nil)
	digits := hex.EncodeToString(sum)
	return Name{
		Key:       Records + digits[:3] + "/" + NamespaceID(namespace) + "/" + digits[3:35],
		SlotEpoch: SlotEpoch(digits[:3]),
		Slot:      int(sum[0])<<4 | int(sum[1])>>4,
		Hash:      digits[3:35],
	}
}

// NamespaceID is 64 bits of the namespace's hash as 16 hexadecimal digits.
func NamespaceID(namespace string) string {
	sum := sha256.Sum256([]byte(namespace))
	return hex.EncodeToString(sum[:8])
}

// RecordsOf is the prefix of a namespace's records in one slot, 0 ... claim.Slots-1.
func RecordsOf(slot int, namespace string) string {
	return fmt.Sprintf("%s%03x/%s/", Records, slot, NamespaceID(namespace))
}

// PolicyOf is the key of a namespace's policy.
func PolicyOf(namespace string) string { return Policies + NamespaceID(namespace) }

// SlotEpoch is the key whose ModRevision is the epoch of a slot, given as its
// three hexadecimal digits.
func SlotEpoch(slot string) string { return SlotEpochs + slot }

// SlotOf reads the slot of a slot epoch's key; false if it is none.
func SlotOf(key string) (int, bool) {
	digits, ok := strings.CutPrefix(key, SlotEpochs)
	slot, err := strconv.ParseUint(digits, 16, 12)
	return int(slot), ok && err == nil && len(digits) == 3
}

// SwitchOf is the key of a switch.
func SwitchOf(name string) string { return Switches + name }

// NodeOf is the key of a node's registration.
func NodeOf(id string) string { return Nodes + id }

func prefixed(write func([]byte) (int, error), s string) {
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], uint64(len(s)))
	write(n[:])      //nolint:errcheck // a hash never fails
	write([]byte(s)) //nolint:errcheck // a hash never fails
}
