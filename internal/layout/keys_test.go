package layout_test

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

// Where a key is kept must never change: a moved key is a forgotten one.
func TestNamesAreStable(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{layout.NameOf("pay", "order-1").Key, "/dualcheck/v1/r/b11/9350872d712a127c/776ea103199217df5ae66685b55482b0"},
		{layout.NameOf("pay", "order-1").SlotEpoch(), "/dualcheck/v1/m/e/b11"},
		{layout.NamespaceID("pay"), "9350872d712a127c"},
		{layout.RecordsOf(0, "pay"), "/dualcheck/v1/r/000/9350872d712a127c/"},
		{layout.RecordsOf(4095, "pay"), "/dualcheck/v1/r/fff/9350872d712a127c/"},
		{layout.PolicyOf("pay"), "/dualcheck/v1/p/9350872d712a127c"},
		{layout.NodeOf("n1"), "/dualcheck/v1/m/n/n1"},
		{layout.SlotEpoch("0af"), "/dualcheck/v1/m/e/0af"},
		{layout.Tick, "/dualcheck/v1/m/tick"},
		{layout.Guard, "/dualcheck/v1/m/guard"},
		{layout.Epoch, "/dualcheck/v1/m/epoch"},
		{layout.SwitchOf(policy.BypassRedis), "/dualcheck/v1/m/s/bypass-redis"},
		{layout.SwitchOf(policy.BypassMemory), "/dualcheck/v1/m/s/bypass-memory"},
		{layout.Secret, "/dualcheck/v1/m/secret"},
	} {
		if c.got != c.want {
			t.Errorf("%s, want %s", c.got, c.want)
		}
	}
}

// Slot and hash are cut from SHA-256 over the length-prefixed namespace and key,
// and ns is 64 bits of the namespace's own hash; computed anew here.
func TestNamesAreTheDocumentedHashes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		namespace, key := rapid.String().Draw(t, "namespace"), rapid.String().Draw(t, "key")
		prefixed := binary.BigEndian.AppendUint64(nil, uint64(len(namespace)))
		prefixed = append(prefixed, namespace...)
		prefixed = binary.BigEndian.AppendUint64(prefixed, uint64(len(key)))
		prefixed = append(prefixed, key...)
		sum, ns := sha256.Sum256(prefixed), sha256.Sum256([]byte(namespace))
		slot := int(sum[0])<<4 | int(sum[1])>>4
		name := layout.NameOf(namespace, key)
		want := layout.RecordsOf(slot, namespace)
		if !strings.HasPrefix(name.Key, want) || !strings.HasPrefix(want, fmt.Sprintf("/dualcheck/v1/r/%03x/%s/", slot, hex.EncodeToString(ns[:8]))) {
			t.Fatalf("%s is not in slot %03x: %s", name.Key, slot, want)
		}
		if hash := strings.TrimPrefix(name.Key, want); hash != hex.EncodeToString(sum[:])[3:35] {
			t.Fatalf("the hash is %s of %x", hash, sum)
		}
		if name.SlotEpoch() != layout.SlotEpoch(fmt.Sprintf("%03x", slot)) {
			t.Fatalf("slot %03x has its epoch at %s", slot, name.SlotEpoch())
		}
	})
}

func TestC48NoUserByteIsInAKeyAndNoTwoPairsShareOne(t *testing.T) {
	shape := regexp.MustCompile(`^/dualcheck/v1/r/[0-9a-f]{3}/[0-9a-f]{16}/[0-9a-f]{32}$`)
	pieces := []string{"a", "b", "c", ":", "/", "|", "%", "\x00", "{", "}", "..", "é", "e\u0301", "ns", ""}
	seen := map[string]string{}
	for _, x := range pieces {
		for _, y := range pieces {
			for _, z := range pieces {
				whole := x + y + z
				for cut := range len(whole) + 1 {
					pair := fmt.Sprintf("(%q, %q)", whole[:cut], whole[cut:])
					name := layout.NameOf(whole[:cut], whole[cut:])
					if !shape.MatchString(name.Key) {
						t.Fatalf("%s is kept at %s", pair, name.Key)
					}
					if other, ok := seen[name.Key]; ok && other != pair {
						t.Fatalf("%s and %s are both kept at %s", pair, other, name.Key)
					}
					seen[name.Key] = pair
				}
			}
		}
	}
	if layout.NameOf("a:b", "c").Key == layout.NameOf("a", "b:c").Key {
		t.Fatal(`("a:b", "c") and ("a", "b:c") share a key`)
	}
}

func TestC48ListingANamespaceNeverSeesAnother(t *testing.T) {
	for _, other := range []string{"a:b", "ab", "a.b", "a-", "b", "aa"} {
		for slot := range claim.Slots {
			if strings.HasPrefix(layout.RecordsOf(slot, other), layout.RecordsOf(slot, "a")) {
				t.Fatalf("slot %d of %q is inside that of %q", slot, other, "a")
			}
		}
		if strings.HasPrefix(layout.PolicyOf(other), layout.PolicyOf("a")) {
			t.Fatalf("the policy of %q is inside that of %q", other, "a")
		}
	}
}

// Keys spread over the slots: of 40,960 hardly a slot is empty and none has ten
// times its share.
func TestKeysSpreadOverTheSlots(t *testing.T) {
	counts := map[string]int{}
	for i := range 10 * claim.Slots {
		counts[layout.NameOf("pay", fmt.Sprint("order-", i)).SlotEpoch()]++
	}
	most := 0
	for _, n := range counts {
		most = max(most, n)
	}
	if len(counts) < claim.Slots-8 || most > 100 {
		t.Errorf("%d of %d slots are used, one %d times", len(counts), claim.Slots, most)
	}
}
