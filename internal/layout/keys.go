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
	Statuses = Root + "/s/"
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
	// Slot is 0 ... claim.Slots-1.
	Slot int
}

// Hash is the last part of the key.
func (n Name) Hash() string { return n.Key[len(n.Key)-hashDigits:] }

// SlotEpoch is /m/e/<slot>.
func (n Name) SlotEpoch() string { return SlotEpoch(n.Key[len(Records) : len(Records)+slotDigits]) }

const (
	slotDigits      = 3
	namespaceDigits = 16
	hashDigits      = 32
)

// NameOf places a key: slot and hash are cut from SHA-256 over the
// length-prefixed namespace and key.
func NameOf(namespace, key string) Name {
	var room [1 << 10]byte
	sum := sha256.Sum256(prefixed(prefixed(room[:0], namespace), key))
	var digits [2 * sha256.Size]byte
	hex.Encode(digits[:], sum[:])
	name := append(room[:0], Records...)
	name = append(append(name, digits[:slotDigits]...), '/')
	name = append(appendNamespaceID(name, namespace), '/')
	name = append(name, digits[slotDigits:slotDigits+hashDigits]...)
	return Name{Key: string(name), Slot: int(sum[0])<<4 | int(sum[1])>>4}
}

// NamespaceID is 64 bits of the namespace's hash as 16 hexadecimal digits.
func NamespaceID(namespace string) string { return string(appendNamespaceID(nil, namespace)) }

func appendNamespaceID(to []byte, namespace string) []byte {
	sum := sha256.Sum256([]byte(namespace))
	return hex.AppendEncode(to, sum[:namespaceDigits/2])
}

// RecordsOf is the prefix of a namespace's records in one slot, 0 ... claim.Slots-1.
func RecordsOf(slot int, namespace string) string {
	return fmt.Sprintf("%s%03x/%s/", Records, slot, NamespaceID(namespace))
}

// NamespaceIn is the NamespaceID in a record's key; false if it is no record's key.
func NamespaceIn(key string) (string, bool) {
	const at = len(Records) + slotDigits + 1
	if len(key) != at+namespaceDigits+1+hashDigits || !strings.HasPrefix(key, Records) {
		return "", false
	}
	return key[at : at+namespaceDigits], true
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

func prefixed(to []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint64(to, uint64(len(s))), s...)
}
