package layout_test

import (
	"bytes"
	"encoding/hex"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	storagev1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/storage/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/policy"
)

var wall = time.Date(2031, 5, 6, 7, 8, 9, 10, time.UTC)

func id(b byte) claim.ID {
	var id claim.ID
	for i := range id {
		id[i] = b + byte(i)
	}
	return id
}

// finished is a record as most are: done, with a result of 200 bytes.
func finished() *claim.Record {
	return &claim.Record{
		Namespace: "invoices", Key: "order-0001-4711", Operation: "invoice.issue", State: claim.Succeeded,
		Fingerprint: bytes.Repeat([]byte{0xF1}, 32), Owner: "erp-eu-1", Attempt: 1, ClaimID: id(1), Previous: claim.PreviousNone,
		ResultRetention: 24 * time.Hour, KeyRetention: 72 * time.Hour,
		ResultUntil: claim.Instant(100 * time.Hour), KeyUntil: claim.Instant(148 * time.Hour),
		CreatedAt: wall, ClaimedAt: wall, FinishedAt: wall.Add(time.Second),
		Result:     &claim.Result{Code: 200, ContentType: "application/json", Body: bytes.Repeat([]byte("x"), 200)},
		ResultSize: 200, Digest: bytes.Repeat([]byte{0xD1}, 32), TraceID: bytes.Repeat([]byte{0x71}, 16),
	}
}

// full is a record with every field set; no real one is.
func full() *claim.Record {
	r := finished()
	r.Attempt, r.AttemptsForgiven, r.ReleasedClaimID, r.Previous = 7, 3, id(2), claim.PreviousLapsed
	r.RequestID, r.Spent, r.TakeoverNever = "r", []uint64{1, math.MaxUint64}, true
	r.Claimed, r.LeaseUntil = 5, 6
	r.Result.Metadata = map[string]string{"etag": `"1"`, "location": "/7"}
	r.ResultOmitted, r.ClaimRevision, r.FinishRevision, r.FenceBase = true, 8, 9, 1<<41
	r.Failure = &claim.Failure{Class: claim.Terminal, Code: -8, Message: "no", Details: []claim.Detail{{TypeURL: "type.googleapis.com/x.Y", Value: []byte{255}}, {TypeURL: "z"}}}
	r.Labels = map[string]string{"plant": "7", "erp": "eu"}
	return r
}

func records() map[string]*claim.Record {
	return map[string]*claim.Record{
		"finished": finished(),
		"full":     full(),
		"pending": {
			Namespace: "pay", Key: "k", State: claim.Pending, Attempt: 1, ClaimID: id(3), Previous: claim.PreviousNone, RequestID: "r", Owner: "o",
			ResultRetention: time.Minute, KeyRetention: time.Hour, Claimed: 1, LeaseUntil: 2, KeyUntil: 3, CreatedAt: wall, ClaimedAt: wall,
		},
		"released": {Namespace: "pay", Key: "k", State: claim.Released, Attempt: 1, Spent: []uint64{5}, KeyUntil: claim.Never, CreatedAt: wall, ClaimedAt: wall, FinishedAt: wall},
		"failed":   {Namespace: "pay", Key: "k", State: claim.Failed, Attempt: 2, ClaimID: id(4), Failure: &claim.Failure{Class: claim.Terminal, Code: 5}, Digest: bytes.Repeat([]byte{1}, 32)},
		"unknown":  {Namespace: "pay", Key: "k", State: claim.Unknown, Attempt: 2, ClaimID: id(4), Failure: &claim.Failure{Class: claim.UnknownOutcome}},
		"empty":    {Namespace: "pay", Key: "k", State: claim.Succeeded, Attempt: 1, Result: &claim.Result{}},
		"held":     {Namespace: "pay", Key: "k", KeyUntil: 9, Forgotten: &claim.Forgotten{At: wall}},
		"opened":   {Namespace: "pay", Key: "k", KeyUntil: 9, Forgotten: &claim.Forgotten{Opened: true, At: wall}},
	}
}

func encode(t *testing.T, r *claim.Record) []byte {
	t.Helper()
	b, err := layout.EncodeRecord(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRecordsComeBackAsTheyWere(t *testing.T) {
	for name, r := range records() {
		b := encode(t, r)
		for range 20 { // maps are walked in another order each time
			if again := encode(t, r); !bytes.Equal(again, b) {
				t.Fatalf("%s: encoded as %x and as %x", name, b, again)
			}
		}
		got, err := layout.DecodeRecord(b, 42, r.Namespace, r.Key)
		want := *r
		want.Revision = 42
		if err != nil || !reflect.DeepEqual(got, &want) {
			t.Errorf("%s, %v:\n got %+v\nwant %+v", name, err, got, &want)
		}
		if wherever, err := layout.DecodeRecord(b, 42, "", ""); err != nil || !reflect.DeepEqual(wherever, &want) {
			t.Errorf("%s, read wherever it was found: %v", name, err)
		}
	}
}

// Every field of claim.Record is stored, apart from Revision, which is etcd's, and Encoded,
// which is a cache's.
func TestNoFieldOfARecordIsLeftOut(t *testing.T) {
	v := reflect.ValueOf(*full())
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		if stored := name != "Revision" && name != "Forgotten" && name != "Encoded"; stored == v.Field(i).IsZero() {
			t.Errorf("the test's full record has %s = %v", name, v.Field(i))
		}
	}
}

// The bytes in etcd must be readable by every later version: they never change.
func TestRecordBytesAreStable(t *testing.T) {
	for name, want := range goldenRecords {
		if got := hex.EncodeToString(encode(t, records()[name])); got != want {
			t.Errorf("%s is stored as\n%s, was\n%s", name, got, want)
		}
		b, _ := hex.DecodeString(want)
		if r, err := layout.DecodeRecord(b, 0, "", ""); err != nil || !reflect.DeepEqual(r, records()[name]) {
			t.Errorf("%s, as it was stored: %+v, %v", name, r, err)
		}
	}
	if len(goldenRecords) != 4 {
		t.Fatal("the golden bytes are incomplete")
	}
}

// Revision is etcd's, and does not go into the bytes.
func TestRevisionIsNotStored(t *testing.T) {
	r := finished()
	b := encode(t, r)
	r.Revision = 99
	if !bytes.Equal(encode(t, r), b) {
		t.Error("the revision is stored")
	}
}

// marshal changes the stored message of a finished record.
func marshal(t *testing.T, change func(m *storagev1.Record)) []byte {
	t.Helper()
	var m storagev1.Record
	if err := proto.Unmarshal(encode(t, finished()), &m); err != nil {
		t.Fatal(err)
	}
	change(&m)
	b, err := proto.Marshal(&m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What this version cannot read is RECORD_UNREADABLE: never no record, and never
// another state than was meant.
func TestUnreadableRecords(t *testing.T) {
	good := encode(t, finished())
	for what, value := range map[string][]byte{
		"nothing":               {},
		"garbage":               []byte("not a record"),
		"zeros":                 make([]byte, 40),
		"cut short":             good[:len(good)-1],
		"cut to half":           good[:len(good)/2],
		"a newer format":        marshal(t, func(m *storagev1.Record) { m.Format = layout.Format + 1 }),
		"a far newer format":    marshal(t, func(m *storagev1.Record) { m.Format = math.MaxUint32 }),
		"no format":             marshal(t, func(m *storagev1.Record) { m.Format = 0 }),
		"no state":              marshal(t, func(m *storagev1.Record) { m.State = 0 }),
		"a newer state":         marshal(t, func(m *storagev1.Record) { m.State = 6 }),
		"a state of nine bits":  marshal(t, func(m *storagev1.Record) { m.State = 256 + uint32(claim.Released) }),
		"a newer previous":      marshal(t, func(m *storagev1.Record) { m.Previous = 4 }),
		"a previous, nine bits": marshal(t, func(m *storagev1.Record) { m.Previous = 257 }),
		"a newer failure class": marshal(t, func(m *storagev1.Record) { m.Failure = &storagev1.Failure{Class: 4} }),
		"a class of nine bits":  marshal(t, func(m *storagev1.Record) { m.Failure = &storagev1.Failure{Class: 258} }),
		"a short claim id":      marshal(t, func(m *storagev1.Record) { m.ClaimId = m.ClaimId[:15] }),
		"a long claim id":       marshal(t, func(m *storagev1.Record) { m.ReleasedClaimId = make([]byte, 17) }),
		"attempts without end":  marshal(t, func(m *storagev1.Record) { m.Attempt = math.MaxUint32 }),
		"forgiven without end":  marshal(t, func(m *storagev1.Record) { m.AttemptsForgiven = 1 << 31 }),
		"results kept backward": marshal(t, func(m *storagev1.Record) { m.ResultRetentionNs = 1 << 63 }),
		"keys kept backward":    marshal(t, func(m *storagev1.Record) { m.KeyRetentionNs = math.MaxUint64 }),
		"text that is no UTF-8": bytes.Replace(good, []byte("erp-eu-1"), []byte("erp-eu-\xff"), 1),
	} {
		if r, err := layout.DecodeRecord(value, 1, "invoices", "order-0001-4711"); claim.ReasonOf(err) != claim.RecordUnreadable || r != nil {
			t.Errorf("%s: %+v, %v", what, r, err)
		}
	}
}

// Another key's record where this one's belongs is a collision, never a merge.
func TestOtherNamesAreACollision(t *testing.T) {
	b := encode(t, finished())
	for _, other := range [][2]string{{"invoices", "order-0001-4712"}, {"invoice", "order-0001-4711"}, {"invoices", ""}, {"", "order-0001-4711"}, {"order-0001-4711", "invoices"}} {
		if r, err := layout.DecodeRecord(b, 1, other[0], other[1]); claim.ReasonOf(err) != claim.KeyCollision || r != nil {
			t.Errorf("%q: %+v, %v", other, r, err)
		}
	}
	mark := encode(t, records()["held"])
	if _, err := layout.DecodeRecord(mark, 1, "pay", "other"); claim.ReasonOf(err) != claim.KeyCollision {
		t.Errorf("a mark: %v", err)
	}
}

// A record of 200 bytes of result takes at most twice the sum of its own bytes.
func TestSizeOfASmallRecord(t *testing.T) {
	r := finished()
	const times, numbers = 7 * 8, 3 * 4 // deadlines, wall clock and retentions; state, attempt, code
	own := len(r.Namespace) + len(r.Key) + len(r.Operation) + len(r.Owner) + len(r.Fingerprint) + len(r.ClaimID) + len(r.Digest) + len(r.TraceID) +
		len(r.Result.Body) + len(r.Result.ContentType) + times + numbers
	value := len(encode(t, r))
	key := len(layout.NameOf(r.Namespace, r.Key).Key)
	t.Logf("value %d bytes and key %d, of %d bytes of its own (%d of result)", value, key, own, len(r.Result.Body))
	if value > own+own/8 || value+key > 2*own {
		t.Errorf("value %d bytes and key %d, of %d bytes of its own", value, key, own)
	}
	if bare := len(encode(t, &claim.Record{Namespace: "pay", Key: "k", State: claim.Succeeded, Attempt: 1})); bare > 16 {
		t.Errorf("a record of nothing takes %d bytes: what has its default must not be stored", bare)
	}
}

func namespaces() map[string]policy.Namespace {
	return map[string]policy.Namespace{
		"bare": {Name: "pay"},
		"full": {Name: "pay", Deleting: true, Policy: policy.Policy{
			DefaultLease: new(time.Second), MaxLease: new(2 * time.Second), Class: policy.Ledger,
			ResultRetention: new(3 * time.Second), KeyRetention: new(4 * time.Second), Takeover: policy.NeverTakeOver,
			MaxAttempts: 5, RequireFingerprint: true, MaxResultBytes: 6,
			CacheTTLMin: new(7 * time.Second), CacheTTLMax: new(8 * time.Second), WithoutEtcd: policy.ReplayOnly,
		}},
	}
}

func TestPoliciesComeBackAsTheyWere(t *testing.T) {
	for name, n := range namespaces() {
		b, err := layout.EncodePolicy(n)
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(b); got != goldenPolicies[name] {
			t.Errorf("%s is stored as\n%s, was\n%s", name, got, goldenPolicies[name])
		}
		got, err := layout.DecodePolicy(b, 42)
		n.Revision = 42
		if err != nil || !reflect.DeepEqual(got, n) {
			t.Errorf("%s, %v:\n got %+v\nwant %+v", name, err, got, n)
		}
	}
	v := reflect.ValueOf(namespaces()["full"].Policy)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			t.Errorf("the test's full policy has no %s", v.Type().Field(i).Name)
		}
	}
}

// Nothing may be decided by a policy that is half understood.
func TestUnreadablePolicies(t *testing.T) {
	good := storagev1.Policy{Format: layout.Format, Namespace: "pay"}
	if b, _ := proto.Marshal(&good); b != nil {
		if _, err := layout.DecodePolicy(b, 1); err != nil {
			t.Fatal(err)
		}
	}
	for what, m := range map[string]*storagev1.Policy{
		"a newer format":       {Format: layout.Format + 1, Namespace: "pay"},
		"no format":            {Namespace: "pay"},
		"no name":              {Format: layout.Format},
		"a newer class":        {Format: layout.Format, Namespace: "pay", RetentionClass: 4},
		"a class of nine bits": {Format: layout.Format, Namespace: "pay", RetentionClass: 257},
		"a newer takeover":     {Format: layout.Format, Namespace: "pay", Takeover: 3},
		"takeover, nine bits":  {Format: layout.Format, Namespace: "pay", Takeover: 257},
		"newer without_etcd":   {Format: layout.Format, Namespace: "pay", WithoutEtcd: 258},
		"a lease backward":     {Format: layout.Format, Namespace: "pay", DefaultLeaseNs: 1 << 63},
		"attempts backward":    {Format: layout.Format, Namespace: "pay", MaxAttempts: 1 << 31},
		"bytes without end":    {Format: layout.Format, Namespace: "pay", MaxResultBytes: math.MaxUint64},
		"a contradiction":      {Format: layout.Format, Namespace: "pay", ResultRetentionNs: 2e9, KeyRetentionNs: 1e9},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := layout.DecodePolicy(b, 1); err == nil {
			t.Errorf("%s was read as %+v", what, n)
		}
	}
	if n, err := layout.DecodePolicy([]byte("garbage"), 1); err == nil {
		t.Errorf("garbage was read as %+v", n)
	}
}

func TestSwitchesComeBackAsTheyWere(t *testing.T) {
	for name, sw := range map[string]policy.Switch{
		"off":  {Name: policy.BypassRedis},
		"full": {Name: policy.BypassRedis, On: true, Reason: "moved", ChangedAt: wall},
	} {
		value, err := layout.EncodeSwitch(sw)
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString([]byte(value)); got != goldenSwitches[name] {
			t.Errorf("%s is stored as\n%s, was\n%s", name, got, goldenSwitches[name])
		}
		if got, err := layout.DecodeSwitch(sw.Name, []byte(value)); err != nil || got != sw {
			t.Errorf("%s, %v:\n got %+v\nwant %+v", name, err, got, sw)
		}
	}
}

// A switch that is on and not understood must stop a node: it could not obey it. One
// that is off governs nothing.
func TestUnreadableSwitches(t *testing.T) {
	for what, c := range map[string]struct {
		name string
		m    *storagev1.Switch
	}{
		"a newer format": {policy.BypassRedis, &storagev1.Switch{Format: layout.Format + 1}},
		"no format":      {policy.BypassRedis, &storagev1.Switch{On: true}},
		"a newer switch": {"read-only", &storagev1.Switch{Format: layout.Format, On: true}},
		"no name":        {"", &storagev1.Switch{Format: layout.Format, On: true}},
	} {
		b, err := proto.Marshal(c.m)
		if err != nil {
			t.Fatal(err)
		}
		if sw, err := layout.DecodeSwitch(c.name, b); err == nil {
			t.Errorf("%s was read as %+v", what, sw)
		}
	}
	if sw, err := layout.DecodeSwitch(policy.BypassRedis, []byte("garbage")); err == nil {
		t.Errorf("garbage was read as %+v", sw)
	}
	off, err := layout.EncodeSwitch(policy.Switch{})
	if err != nil {
		t.Fatal(err)
	}
	if sw, err := layout.DecodeSwitch("read-only", []byte(off)); err != nil || sw.On {
		t.Errorf("a newer switch that is off: %+v, %v", sw, err)
	}
}

func TestMetaRoundTrips(t *testing.T) {
	value, err := layout.EncodeTick(77)
	if err != nil {
		t.Fatal(err)
	}
	seen, err := layout.See(claim.Seen{}, []*mvccpb.KeyValue{
		{Key: []byte(layout.Tick), Value: []byte(value), Version: 3, ModRevision: 9},
		{Key: []byte(layout.Guard), ModRevision: 4},
	})
	if want := (claim.Seen{Guard: 4, Tick: claim.Tick{Time: 77, Version: 3, Revision: 9}}); err != nil || seen != want {
		t.Errorf("seen %+v, %v", seen, err)
	}
	if _, err := layout.See(claim.Seen{}, []*mvccpb.KeyValue{{Key: []byte(layout.Tick), Value: []byte("\xff")}}); err == nil || !strings.Contains(err.Error(), "Tick") {
		t.Errorf("a damaged tick: %v", err)
	}
	id := claim.NewID()
	epoch, err := layout.EncodeEpoch(id, 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	if got, base, err := layout.DecodeEpoch([]byte(epoch)); err != nil || got != id || base != 1<<40 {
		t.Errorf("epoch %x, %d, %v", got, base, err)
	}
	if _, _, err := layout.DecodeEpoch(nil); err == nil {
		t.Error("an epoch without an id was read")
	}
	node := layout.Node{ID: "n", Version: "v", GRPCAddr: "a:1", StartedAt: time.Unix(1, 2).UTC()}
	registered, err := layout.EncodeNode(node)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := layout.DecodeNode([]byte(registered)); err != nil || got != node {
		t.Errorf("node %+v, %v", got, err)
	}
}

// FuzzDecodeRecord: whatever is in etcd is read, or is RECORD_UNREADABLE or
// KEY_COLLISION; what is read is written back as the same record.
func FuzzDecodeRecord(f *testing.F) {
	for _, r := range records() {
		b, err := layout.EncodeRecord(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, r.Namespace, r.Key)
		f.Add(b, "", "")
		f.Add(b[:len(b)/2], "", "")
	}
	f.Fuzz(func(t *testing.T, value []byte, namespace, key string) {
		r, err := layout.DecodeRecord(value, 42, namespace, key)
		if err != nil {
			if reason := claim.ReasonOf(err); r != nil || reason != claim.RecordUnreadable && reason != claim.KeyCollision {
				t.Fatalf("%+v, %v", r, err)
			}
			return
		}
		if (namespace != "" || key != "") && (r.Namespace != namespace || r.Key != key) {
			t.Fatalf("the record of (%q, %q) was read for (%q, %q)", r.Namespace, r.Key, namespace, key)
		}
		b, err := layout.EncodeRecord(r)
		if err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
		again, err := layout.DecodeRecord(b, 42, r.Namespace, r.Key)
		if err != nil {
			t.Fatalf("read back: %v", err)
		}
		if c, err := layout.EncodeRecord(again); err != nil || !bytes.Equal(b, c) {
			t.Fatalf("%+v came back as %+v, %v", r, again, err)
		}
	})
}
