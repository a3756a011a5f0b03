package fingerprint

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
)

// FuzzCanonical: the canonical form of a canonical form is itself, says the
// same as the document, and two spellings of one value share a fingerprint.
func FuzzCanonical(f *testing.F) {
	for _, seed := range []string{
		`{"b":[1.0,-0,1e21,9007199254740993],"a":{"\u00e9":"\ud83d\ude00"}}`,
		`[999999999999999700000,1e23,5e-324,0.1,1e400]`,
		`"\ud800"`, `{"a":1,"a":2}`, ` null `, `123456789012345678901234567890`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		canonical, err := Canonical(raw)
		if err != nil {
			return
		}
		again, err := Canonical(canonical)
		if err != nil || !bytes.Equal(again, canonical) {
			t.Fatalf("%q: the canonical form %q became %q, %v", raw, canonical, again, err)
		}
		var given, kept any
		if err := json.Unmarshal(raw, &given); err != nil {
			t.Fatalf("%q is accepted, and not JSON: %v", raw, err)
		}
		if err := json.Unmarshal(canonical, &kept); err != nil || !reflect.DeepEqual(given, kept) {
			t.Fatalf("%q says something else than %q (%v)", canonical, raw, err)
		}
		other, err := json.MarshalIndent(given, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		one, _ := OfJSON(raw)
		two, err := OfJSON(other)
		if err != nil || one != two {
			t.Fatalf("%q and %q have different fingerprints (%v)", raw, other, err)
		}
	})
}
