package rediscache_test

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	storagev1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/storage/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/rediscache"
)

const (
	someNamespace = "orders"
	someKey       = "k-1"
)

// someView is a view of a cluster of its own.
func someView() *claim.View {
	secret := make([]byte, 32)
	rand.Read(secret)
	return &claim.View{Epoch: claim.NewID(), SlotEpochs: new([claim.Slots]int64), Sealer: claim.NewSealer(secret), Believed: true}
}

// finished is a finished record of someKey.
func finished(body string) *claim.Record {
	return &claim.Record{
		Namespace: someNamespace, Key: someKey, Operation: "order.place", State: claim.Succeeded, Attempt: 1,
		ClaimID: claim.NewID(), Previous: claim.PreviousNone, Fingerprint: bytes.Repeat([]byte{7}, 32),
		ResultUntil: claim.Instant(time.Hour), KeyUntil: claim.Instant(2 * time.Hour),
		CreatedAt: time.Unix(1, 0).UTC(), FinishedAt: time.Unix(2, 0).UTC(),
		Result: &claim.Result{Code: 200, Body: []byte(body)}, Digest: bytes.Repeat([]byte{9}, 32),
	}
}

func encoded(t testing.TB, rec *claim.Record) []byte {
	t.Helper()
	value, err := layout.EncodeRecord(rec)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// confirmed is the entry that a node with this view would confirm for someKey.
func confirmed(t testing.TB, v *claim.View, rec *claim.Record, revision int64) []byte {
	t.Helper()
	return confirmedBytes(v, encoded(t, rec), revision)
}

func confirmedBytes(v *claim.View, value []byte, revision int64) []byte {
	e := rediscache.StagedEntry(value)
	rediscache.Stamp(e[:rediscache.HeaderSize], v.Sealer, someName(v), revision)
	return e
}

func someName(v *claim.View) string {
	return rediscache.KeyOf(v, layout.NameOf(someNamespace, someKey))
}

// readAs reads an entry of someKey as a node with this view does.
func readAs(v *claim.View, entry []byte) (*claim.Record, rediscache.Finding) {
	return rediscache.ReadEntry(entry, v.Sealer, someName(v), someNamespace, someKey)
}

func wantFinding(t *testing.T, v *claim.View, entry []byte, want ...rediscache.Finding) {
	t.Helper()
	rec, got := readAs(v, entry)
	if !slices.Contains(want, got) {
		t.Errorf("found %q, want %q", got, want)
	}
	if (rec != nil) != (got == rediscache.Hit) {
		t.Errorf("found %q with the record %v", got, rec)
	}
}

// retagged is an entry whose HMAC is right for what it says, whatever that is.
func retagged(v *claim.View, entry []byte) []byte {
	e := bytes.Clone(entry)
	tag := v.Sealer.Tag(rediscache.TagPurpose, []byte(someName(v)), e[:rediscache.TagAt])
	copy(e[rediscache.TagAt:], tag[:])
	return e
}

func TestEntryIsReadBack(t *testing.T) {
	v, rec := someView(), finished("r")
	value := encoded(t, rec)
	got, found := readAs(v, confirmed(t, v, rec, 77))
	if found != rediscache.Hit {
		t.Fatalf("found %q", found)
	}
	if again := encoded(t, got); !bytes.Equal(again, value) || got.Revision != 77 {
		t.Errorf("read back as %+v of revision %d", got, got.Revision)
	}
	failed := finished("")
	failed.State, failed.Result, failed.Failure = claim.Failed, nil, &claim.Failure{Class: claim.Terminal, Message: "m"}
	wantFinding(t, v, confirmed(t, v, failed, 1<<62), rediscache.Hit)
}

// G5: whatever bit of a confirmed entry flips, it is not believed.
func TestG5EveryBitFlip(t *testing.T) {
	v := someView()
	good := confirmed(t, v, finished("r"), 77)
	for at := range good {
		for bit := range 8 {
			e := bytes.Clone(good)
			e[at] ^= 1 << bit
			want := []rediscache.Finding{rediscache.HMAC}
			switch {
			case at < 2: // one flip makes a stage of it
				want = []rediscache.Finding{rediscache.Garbage}
				if string(e[:2]) == "s1" {
					want[0] = rediscache.Staged
				}
			case at >= rediscache.HeaderSize:
				want[0] = rediscache.Digest
			case at >= rediscache.RevisionAt && at < rediscache.TagAt:
				if e[at] < '0' || e[at] > '9' {
					want[0] = rediscache.Revision
				}
			}
			if rec, got := readAs(v, e); got != want[0] || rec != nil {
				t.Errorf("byte %d, bit %d: %q, want %q", at, bit, got, want[0])
			}
		}
	}
}

// G5: an entry that was cut short anywhere, or that something was added to.
func TestG5EveryTruncation(t *testing.T) {
	v := someView()
	good := confirmed(t, v, finished("r"), 77)
	for n := range len(good) {
		want := rediscache.Garbage
		if n >= rediscache.HeaderSize {
			want = rediscache.Digest
		}
		if rec, got := readAs(v, good[:n]); got != want || rec != nil {
			t.Errorf("the first %d bytes: %q, want %q", n, got, want)
		}
	}
	for n := 1; n < 200; n++ {
		wantFinding(t, v, append(bytes.Clone(good), make([]byte, n)...), rediscache.Digest)
		wantFinding(t, v, append(bytes.Clone(good), good[:n]...), rediscache.Digest)
		wantFinding(t, v, append(make([]byte, n), good...), rediscache.Garbage)
	}
}

// G5, H08: what one key, slot epoch, epoch or cluster has confirmed counts for no
// other.
func TestG5EntryOfAnotherPlace(t *testing.T) {
	v := someView()
	rec := finished("r")
	value := encoded(t, rec)
	stampedFor := func(s claim.Sealer, key string) []byte {
		e := rediscache.StagedEntry(value)
		rediscache.Stamp(e[:rediscache.HeaderSize], s, key, 77)
		return e
	}
	wantFinding(t, v, stampedFor(v.Sealer, someName(v)), rediscache.Hit)

	other := *v
	other.Epoch = claim.NewID()
	later := *v
	later.SlotEpochs = new([claim.Slots]int64)
	later.SlotEpochs[layout.NameOf(someNamespace, someKey).Slot] = 5
	for what, e := range map[string][]byte{
		"another key":        stampedFor(v.Sealer, rediscache.KeyOf(v, layout.NameOf(someNamespace, "k-2"))),
		"another namespace":  stampedFor(v.Sealer, rediscache.KeyOf(v, layout.NameOf("invoices", someKey))),
		"another epoch":      stampedFor(v.Sealer, someName(&other)),
		"another slot epoch": stampedFor(v.Sealer, someName(&later)),
		"no key":             stampedFor(v.Sealer, ""),
		"another cluster":    stampedFor(someView().Sealer, someName(v)),
		"no secret":          stampedFor(claim.NewSealer(nil), someName(v)),
	} {
		if rec, got := readAs(v, e); got != rediscache.HMAC || rec != nil {
			t.Errorf("of %s: %q", what, got)
		}
	}
	// A collision of names: all is right but for the plain name inside.
	for _, name := range [][2]string{{someNamespace, "k-2"}, {"invoices", someKey}} {
		e := stampedFor(v.Sealer, someName(v))
		if rec, got := rediscache.ReadEntry(e, v.Sealer, someName(v), name[0], name[1]); got != rediscache.Unreadable || rec != nil {
			t.Errorf("read for %v: %q", name, got)
		}
	}
}

// G5: a stage is never believed, nor is one that somebody calls confirmed.
func TestG5StageIsNotConfirmed(t *testing.T) {
	v := someView()
	stage := rediscache.StagedEntry(encoded(t, finished("r")))
	wantFinding(t, v, stage, rediscache.Staged)
	called := append([]byte("c1"), stage[2:]...)
	wantFinding(t, v, called, rediscache.Revision)
	copy(called[rediscache.RevisionAt:], fmt.Sprintf("%0*d", rediscache.RevisionSize, 77))
	wantFinding(t, v, called, rediscache.HMAC)
	// With the body of another stage under a stamped header.
	good := confirmed(t, v, finished("r1"), 77)
	swapped := slices.Concat(good[:rediscache.HeaderSize], encoded(t, finished("r2")))
	wantFinding(t, v, swapped, rediscache.Digest)
	// And with that stage's digest put into the header.
	digest := sha256.Sum256(encoded(t, finished("r2")))
	copy(swapped[rediscache.DigestAt:], digest[:])
	wantFinding(t, v, swapped, rediscache.HMAC)
	wantFinding(t, v, []byte(rediscache.MarkKind), rediscache.Marked)
	wantFinding(t, v, []byte(rediscache.MarkKind+"x"), rediscache.Garbage)
}

// G5: a revision that is none, though the HMAC is right for it.
func TestG5RevisionIsOne(t *testing.T) {
	v := someView()
	good := confirmed(t, v, finished("r"), 77)
	for digits, want := range map[string]rediscache.Finding{
		"0000000000000000001":       rediscache.Hit,
		"9223372036854775807":       rediscache.Hit,
		"9223372036854775808":       rediscache.Revision,
		"9999999999999999999":       rediscache.Revision,
		"0000000000000000000":       rediscache.Revision,
		"-000000000000000001":       rediscache.Revision,
		"-9223372036854775807"[:19]: rediscache.Revision,
		"000000000000000007x":       rediscache.Revision,
		"0x00000000000000077":       rediscache.Revision,
		"00000000000_0000077":       rediscache.Revision,
		"                 77":       rediscache.Revision,
		"77                 ":       rediscache.Revision,
		"0000000000000077.00":       rediscache.Revision,
		strings.Repeat("\x00", 19):  rediscache.Revision,
		strings.Repeat("z", 19):     rediscache.Revision,
		strings.Repeat("\xff", 19):  rediscache.Revision,
	} {
		e := bytes.Clone(good)
		copy(e[rediscache.RevisionAt:rediscache.TagAt], digits)
		if rec, got := readAs(v, retagged(v, e)); got != want || (rec != nil) != (want == rediscache.Hit) {
			t.Errorf("%q: %q, want %q", digits, got, want)
		}
		if want == rediscache.Hit {
			want = rediscache.HMAC
		}
		if rec, got := readAs(v, e); got != want || rec != nil {
			t.Errorf("%q, its HMAC not made for it: %q, want %q", digits, got, want)
		}
	}
}

// G5: an authentic entry of anything but a finished record answers nobody.
func TestG5OnlyFinishedRecordsAnswer(t *testing.T) {
	v := someView()
	for what, change := range map[string]func(r *claim.Record){
		"pending":  func(r *claim.Record) { r.State, r.LeaseUntil = claim.Pending, claim.Instant(time.Minute) },
		"released": func(r *claim.Record) { r.State = claim.Released },
		"unknown":  func(r *claim.Record) { r.State = claim.Unknown },
		"held":     func(r *claim.Record) { r.Forgotten = &claim.Forgotten{At: time.Unix(3, 0)} },
		"opened":   func(r *claim.Record) { r.Forgotten = &claim.Forgotten{Opened: true} },
		"other":    func(r *claim.Record) { r.Key = "k-2" },
	} {
		rec := finished("r")
		change(rec)
		if rec, got := readAs(v, confirmed(t, v, rec, 77)); got != rediscache.Unreadable || rec != nil {
			t.Errorf("%s: %q", what, got)
		}
	}
	// Bytes that no version, or only a newer one, can read.
	var m storagev1.Record
	if err := proto.Unmarshal(encoded(t, finished("r")), &m); err != nil {
		t.Fatal(err)
	}
	m.Format = layout.Format + 1
	newer, err := proto.Marshal(&m)
	if err != nil {
		t.Fatal(err)
	}
	for what, value := range map[string][]byte{"newer": newer, "empty": nil, "no record": []byte("\xff\xff\xff"), "text": []byte("hello, world")} {
		if rec, got := readAs(v, confirmedBytes(v, value, 77)); got != rediscache.Unreadable || rec != nil {
			t.Errorf("%s: %q", what, got)
		}
	}
}

// G5: what is no entry.
func TestG5Garbage(t *testing.T) {
	v := someView()
	good := confirmed(t, v, finished("r"), 77)
	for _, kind := range []string{"c2", "c0", "s2", "m2", "C1", "x1", "\x00\x00", "m1"} {
		wantFinding(t, v, append([]byte(kind), good[2:]...), rediscache.Garbage)
		wantFinding(t, v, retagged(v, append([]byte(kind), good[2:]...)), rediscache.Garbage)
	}
	for _, e := range []string{"", "m", "c", "c1", "s1", "OK", "null", `{"state":"done"}`, strings.Repeat("\x00", 500), strings.Repeat("\xff", 500), strings.Repeat("c1", 40)} {
		wantFinding(t, v, []byte(e), rediscache.Garbage)
	}
	wantFinding(t, v, nil, rediscache.Garbage)
	wantFinding(t, v, []byte(strings.Repeat("c1", 400)), rediscache.Revision)
	wantFinding(t, v, []byte("c1"+strings.Repeat("1", 400)), rediscache.HMAC)
}

// Names hold no byte of a user's, are placed by the slot alone, and move with each
// epoch.
func TestNameOfAnEntry(t *testing.T) {
	v := someView()
	names := map[string]string{}
	for _, key := range []string{"k-1", "k-2", "{0}", "}:{7}", "a\nb", "*", strings.Repeat("é", 100)} {
		for _, ns := range []string{"orders", "invoices"} {
			place := layout.NameOf(ns, key)
			name := rediscache.KeyOf(v, place)
			if want := fmt.Sprintf("dc:{%d}:%x:0:%s", place.Slot, v.Epoch, place.Hash()); name != want {
				t.Errorf("%q, want %q", name, want)
			}
			if strings.Trim(name, "{:}0123456789abcdef") != "" || strings.Count(name, "{") != 1 {
				t.Errorf("%q has a user's bytes in it", name)
			}
			if who, taken := names[name]; taken {
				t.Errorf("%s/%s and %s are both %q", ns, key, who, name)
			}
			names[name] = ns + "/" + key
		}
	}
	moved := *v
	moved.SlotEpochs = new([claim.Slots]int64)
	moved.SlotEpochs[layout.NameOf(someNamespace, someKey).Slot] = 12
	if someName(&moved) == someName(v) || !strings.Contains(someName(&moved), ":12:") {
		t.Errorf("the slot's epoch moved and the name is %q", someName(&moved))
	}
	elsewhere := *v
	elsewhere.SlotEpochs = new([claim.Slots]int64)
	elsewhere.SlotEpochs[(layout.NameOf(someNamespace, someKey).Slot+1)%claim.Slots] = 12
	if someName(&elsewhere) != someName(v) {
		t.Error("another slot's epoch moved the name")
	}
	raised := *v
	raised.Epoch = claim.NewID()
	if someName(&raised) == someName(v) {
		t.Error("the epoch was raised and the name is the same")
	}
}

// G5: nobody who lacks the secret makes an entry that answers, and no bytes make a
// node panic.
func FuzzRead(f *testing.F) {
	v := someView()
	good := confirmed(f, v, finished("r"), 77)
	f.Add([]byte(nil))
	f.Add([]byte(rediscache.MarkKind))
	f.Add(good)
	f.Add(good[:rediscache.HeaderSize])
	f.Add(append(bytes.Clone(good), 'x'))
	f.Add(confirmed(f, someView(), finished("r"), 77))
	f.Add(rediscache.StagedEntry(encoded(f, finished("r"))))
	f.Fuzz(func(t *testing.T, e []byte) {
		rec, found := readAs(v, e)
		if (found == rediscache.Hit || rec != nil) && !bytes.Equal(e, good) {
			t.Errorf("%q was believed: %+v", e, rec)
		}
		// With the right HMAC over it, it may be read, and then its bytes are those of the
		// digest and a finished record's.
		if len(e) < rediscache.HeaderSize {
			return
		}
		rec, found = readAs(v, retagged(v, e))
		if found != rediscache.Hit {
			return
		}
		if digest := sha256.Sum256(e[rediscache.HeaderSize:]); !bytes.Equal(digest[:], e[rediscache.DigestAt:rediscache.RevisionAt]) || !rec.State.Finished() || rec.Revision <= 0 {
			t.Errorf("%q was believed: %+v", e, rec)
		}
	})
}
