package fingerprint

import (
	"encoding/hex"
	"errors"
	"math"
	"strconv"
	"strings"
	"testing"
)

// same fails the test unless every document has one fingerprint.
func same(t *testing.T, documents ...string) {
	t.Helper()
	first := of(t, documents[0])
	for _, d := range documents[1:] {
		if got := of(t, d); got != first {
			t.Errorf("%s and %s have different fingerprints", documents[0], d)
		}
	}
}

// different fails the test if any two documents have one fingerprint.
func different(t *testing.T, documents ...string) {
	t.Helper()
	seen := map[[Size]byte]string{}
	for _, d := range documents {
		f := of(t, d)
		if other, known := seen[f]; known {
			t.Errorf("%s and %s have the same fingerprint", other, d)
		}
		seen[f] = d
	}
}

func of(t *testing.T, document string, exclude ...Pointer) [Size]byte {
	t.Helper()
	f, err := OfJSON([]byte(document), exclude...)
	if err != nil {
		t.Fatalf("%s: %v", document, err)
	}
	return f
}

func TestC42MemberOrderIsNotSignificantArrayOrderIs(t *testing.T) {
	same(t,
		`{"a":1,"b":{"y":2,"x":1}}`,
		`{"b":{"x":1,"y":2},"a":1}`,
		" { \"b\" :\n{\"x\":1,\t\"y\":2} , \"a\":1 } \r\n",
	)
	same(t, `[{"a":1,"b":[{"c":1,"d":2}]}]`, `[{"b":[{"d":2,"c":1}],"a":1}]`)
	different(t, `{"a":[1,2]}`, `{"a":[2,1]}`, `{"a":[1,2,2]}`, `{"a":{"0":1,"1":2}}`)
}

func TestC42MembersAreSortedByUTF16(t *testing.T) {
	canonical(t,
		`{"\u20ac":"Euro Sign","\r":"Carriage Return","\ufb33":"Hebrew Letter Dalet With Dagesh",`+
			`"1":"One","\ud83d\ude00":"Emoji: Grinning Face","\u0080":"Control","\u00f6":"Latin Small Letter O With Diaeresis"}`,
		`{"\r":"Carriage Return","1":"One","`+"\u0080"+`":"Control","ö":"Latin Small Letter O With Diaeresis",`+
			`"€":"Euro Sign","😀":"Emoji: Grinning Face","`+"\ufb33"+`":"Hebrew Letter Dalet With Dagesh"}`)
}

func canonical(t *testing.T, document, want string) {
	t.Helper()
	got, err := Canonical([]byte(document))
	if err != nil {
		t.Fatalf("%s: %v", document, err)
	}
	if string(got) != want {
		t.Errorf("%s:\n got %s\nwant %s", document, got, want)
	}
}

func TestC43NumberAndUnicodeForms(t *testing.T) {
	same(t, `1`, `1.0`, `1e0`, `10e-1`, `0.1e1`, `1E+00`)
	same(t, `0`, `-0`, `0.0`, `-0e5`, `0e999999999999999999999`)
	same(t, `1e21`, `1000000000000000000000`, `1.0E+21`)
	same(t, `9007199254740992`, `9007199254740992.0`, `9.007199254740992e15`)
	same(t, `"é"`, `"\u00e9"`, `"\u00E9"`)
	same(t, `"/"`, `"\/"`, `"\u002f"`)
	same(t, `"😀"`, `"\ud83d\ude00"`)
	different(t, `"\u00e9"`, `"e\u0301"`, `"e"`, `"É"`)
	different(t, "\"\u00e9\"", "\"e\u0301\"")
	different(t, `1`, `"1"`, `true`, `null`, `[1]`, `1.0000000000000002`)
}

func TestC43RFC8785Example(t *testing.T) {
	canonical(t, `{
  "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
  "literals": [null, true, false]
}`, `{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}`)
}

func TestC43RFC8785NumberVectors(t *testing.T) {
	vectors := map[uint64]string{
		0x0000000000000000: "0",
		0x0000000000000001: "5e-324",
		0x8000000000000001: "-5e-324",
		0x7fefffffffffffff: "1.7976931348623157e+308",
		0xffefffffffffffff: "-1.7976931348623157e+308",
		0x4340000000000000: "9007199254740992",
		0xc340000000000000: "-9007199254740992",
		0x4430000000000000: "295147905179352830000",
		0x44b52d02c7e14af5: "9.999999999999997e+22",
		0x44b52d02c7e14af6: "1e+23",
		0x44b52d02c7e14af7: "1.0000000000000001e+23",
		0x444b1ae4d6e2ef4e: "999999999999999700000",
		0x444b1ae4d6e2ef4f: "999999999999999900000",
		0x444b1ae4d6e2ef50: "1e+21",
		0x3eb0c6f7a0b5ed8c: "9.999999999999997e-7",
		0x3eb0c6f7a0b5ed8d: "0.000001",
		0x41b3de4355555553: "333333333.3333332",
		0x41b3de4355555554: "333333333.33333325",
		0x41b3de4355555555: "333333333.3333333",
		0x41b3de4355555556: "333333333.3333334",
		0x41b3de4355555557: "333333333.33333343",
		0xbecbf647612f3696: "-0.0000033333333333333333",
		0x43143ff3c1cb0959: "1424953923781206.2",
	}
	for bits, want := range vectors {
		double := math.Float64frombits(bits)
		canonical(t, strconv.FormatFloat(double, 'e', -1, 64), want)
		canonical(t, want, want)
	}
	canonical(t, "-0", "0")
}

func TestC43WhatCanonicalisationWouldMergeIsRefused(t *testing.T) {
	cases := []struct {
		document string
		reason   error
		pointer  Pointer
		offset   int64
	}{
		{`{"id":9007199254740993}`, ErrNumber, "/id", 6},
		{`[0,-9007199254740993]`, ErrNumber, "/1", 3},
		{`9007199254740993.0`, ErrNumber, "", 0},
		{`9.007199254740993e15`, ErrNumber, "", 0},
		{`12345678901234567890`, ErrNumber, "", 0},
		{`1152921504606846976`, ErrNumber, "", 0},
		{`{"a":[{"b": 1e400}]}`, ErrNumber, "/a/0/b", 12},
		{`-1e400`, ErrNumber, "", 0},
		{`1e999999999999999999999`, ErrNumber, "", 0},
		{`123456789012345678.25`, ErrNumber, "", 0},
		{`1.00000000000000001`, ErrNumber, "", 0},
		{`1e-400`, ErrNumber, "", 0},
		{`{"a":1,"a":1}`, ErrDuplicateMember, "/a", 7},
		{`[1,{"a":1,"\u0061":2}]`, ErrDuplicateMember, "/1/a", 10},
		{"{\"a\":\"x\xff\"}", ErrText, "", 7},
		{"\"\xed\xa0\x80\"", ErrText, "", 1},
		{`{"a":"xx\ud800"}`, ErrText, "/a", 8},
		{`{"a":"\ud800\u0041"}`, ErrText, "/a", 6},
		{`["\uDC00 and more"]`, ErrText, "/0", 2},
		{`{"x\ud800":1}`, ErrText, "", 3},
		{``, ErrSyntax, "", 0},
		{`  `, ErrSyntax, "", 2},
		{`{"a":`, ErrSyntax, "/a", 5},
		{`NaN`, ErrSyntax, "", 0},
		{`[01]`, ErrSyntax, "", 2},
		{`{'a':1}`, ErrSyntax, "", 1},
		{`1 2`, ErrSyntax, "", 3},
		{strings.Repeat("[", 20000) + strings.Repeat("]", 20000), ErrSyntax, "", -2},
	}
	for _, c := range cases {
		_, err := OfJSON([]byte(c.document))
		fault, ok := errors.AsType[*Error](err)
		if !ok || !errors.Is(err, c.reason) {
			t.Errorf("%.40s: got %v, want %v", c.document, err, c.reason)
			continue
		}
		if c.offset != -2 && (fault.Pointer != c.pointer || fault.Offset != c.offset) {
			t.Errorf("%s: at %q, byte %d; want %q, byte %d (%v)", c.document, fault.Pointer, fault.Offset, c.pointer, c.offset, err)
		}
	}
}

func TestC46VolatileMembersMayBeExcluded(t *testing.T) {
	volatile := []Pointer{"/sent_at", "/trace/id", "/tries/0"}
	one := of(t, `{"sent_at":"10:00","trace":{"id":1,"flags":0},"tries":[1,"x"],"amount":5}`, volatile...)
	two := of(t, `{"amount":5,"sent_at":"10:01","trace":{"flags":0,"id":12345678901234567890},"tries":[{"n":2},"x"]}`, volatile...)
	if one != two {
		t.Error("an excluded member changed the fingerprint")
	}
	if one == of(t, `{"sent_at":"10:00","trace":{"id":1,"flags":0},"tries":[1,"x"],"amount":6}`, volatile...) {
		t.Error("a member that was not excluded did not change the fingerprint")
	}
	escaped := of(t, `{"a/b":{"m~n":1,"x":2}}`, "/a~1b/m~0n")
	if escaped != of(t, `{"a/b":{"x":2}}`) {
		t.Error("an escaped pointer did not lead to its member")
	}
}

func TestC46ASelectorThatSelectsNothingIsAnError(t *testing.T) {
	cases := []struct {
		document string
		exclude  []Pointer
		reason   error
	}{
		{`{"a":1}`, []Pointer{"/b"}, ErrNoMatch},
		{`{"a":1}`, []Pointer{"/a/b"}, ErrNoMatch},
		{`{"a":[1,2]}`, []Pointer{"/a/2"}, ErrNoMatch},
		{`{"a":[1,2]}`, []Pointer{"/a/01"}, ErrNoMatch},
		{`{"a":[1,2]}`, []Pointer{"/a/-"}, ErrNoMatch},
		{`{"a":{"b":1},"c":2}`, []Pointer{"/a", "/a/b"}, ErrNoMatch},
		{`{"a":1}`, []Pointer{""}, ErrNothingLeft},
		{`{"a":1}`, []Pointer{"/a"}, ErrNothingLeft},
		{`{"a":1,"b":{"c":[2]}}`, []Pointer{"/a", "/b/c/0"}, ErrNothingLeft},
		{`{"a":1}`, []Pointer{"a"}, ErrPointer},
		{`{"a":1}`, []Pointer{"/a~"}, ErrPointer},
		{`{"a":1}`, []Pointer{"/a~2"}, ErrPointer},
		{`{"a":1,"b":[}`, []Pointer{"/b"}, ErrSyntax},
	}
	for _, c := range cases {
		if _, err := OfJSON([]byte(c.document), c.exclude...); !errors.Is(err, c.reason) {
			t.Errorf("%s without %q: got %v, want %v", c.document, c.exclude, err, c.reason)
		}
	}
	for _, wrong := range []string{"a", "/~", "~0"} {
		if _, err := ParsePointer(wrong); !errors.Is(err, ErrPointer) {
			t.Errorf("ParsePointer(%q): %v", wrong, err)
		}
	}
}

func TestTheDocumentIsNotChanged(t *testing.T) {
	raw := []byte(`{ "b": 1.0, "a": 2 }`)
	before := string(raw)
	if _, err := Canonical(raw, "/b"); err != nil {
		t.Fatal(err)
	}
	if string(raw) != before {
		t.Errorf("it became %s", raw)
	}
}

func TestKnownFingerprint(t *testing.T) {
	// printf '{"a":1,"b":[true,"x"]}' | sha256sum
	f := of(t, `{"b":[true,"x"],"a":1.0}`)
	const want = "63e8063d9dc6f0fd5a24b4706818a165fd57c3531b74466cf5dea62bff09b0b6"
	if got := hex.EncodeToString(f[:]); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
