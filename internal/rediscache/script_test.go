package rediscache_test

import (
	"bytes"
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// desk does by hand to someKey's entry what a node's cache does to it.
type desk struct {
	t      testing.TB
	client *redis.Client
	view   *claim.View
	name   string
}

func newDesk(t testing.TB) desk {
	t.Helper()
	v := someView()
	return desk{t: t, client: redistest.Start(t).Client(), view: v, name: someName(v)}
}

// run sends a script the way the cache does: by its hash, and whole if that is not
// known.
func (d desk) run(script *redis.Script, entry []byte, ttl time.Duration) string {
	d.t.Helper()
	args := []any{entry}
	if ttl > 0 {
		args = append(args, ttl.Milliseconds())
	}
	answer, err := script.Run(nodetest.Within(d.t, 10*time.Second), d.client, []string{d.name}, args...).Text()
	if err != nil {
		d.t.Fatal(err)
	}
	return answer
}

func (d desk) stage(e []byte) string { return d.run(rediscache.StageScript, e, 40*time.Second) }

func (d desk) confirm(e []byte, revision int64) string {
	return d.run(rediscache.ConfirmScript, d.header(e, revision), time.Hour)
}

// header is the confirmed header of a stage.
func (d desk) header(stage []byte, revision int64) []byte {
	h := bytes.Clone(stage[:rediscache.HeaderSize])
	rediscache.Stamp(h, d.view.Sealer, d.name, revision)
	return h
}

func (d desk) fill(rec *claim.Record, revision int64) string {
	return d.run(rediscache.FillScript, confirmed(d.t, d.view, rec, revision), time.Hour)
}

func (d desk) discard(e []byte) string { return d.run(rediscache.DiscardScript, e, 0) }

func (d desk) do(args ...any) any {
	d.t.Helper()
	v, err := d.client.Do(context.Background(), args...).Result()
	if err != nil && err != redis.Nil {
		d.t.Fatalf("%v: %v", args[0], err)
	}
	return v
}

// holds tells what is there, and fails the test if that never expires.
func (d desk) holds() (rec *claim.Record, found rediscache.Finding) {
	d.t.Helper()
	entry, ok := d.do("GET", d.name).(string)
	if !ok {
		return nil, rediscache.Absent
	}
	if left := d.do("PTTL", d.name).(int64); left <= 0 {
		d.t.Errorf("C66: an entry expires in %d ms", left)
	}
	return readAs(d.view, []byte(entry))
}

func (d desk) want(body string) {
	d.t.Helper()
	if rec, found := d.holds(); found != rediscache.Hit || string(rec.Result.Body) != body {
		d.t.Errorf("%q: %v, want %q", found, rec, body)
	}
}

func (d desk) wantFound(want rediscache.Finding) {
	d.t.Helper()
	if _, found := d.holds(); found != want {
		d.t.Errorf("found %q, want %q", found, want)
	}
}

func answers(t *testing.T, got ...string) {
	t.Helper()
	for i := 0; i < len(got); i += 2 {
		if got[i] != got[i+1] {
			t.Errorf("answer %d: %q, want %q", i/2, got[i], got[i+1])
		}
	}
}

// What was written is what is read, and each write may be sent twice.
func TestScriptsMayBeSentTwice(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	s := rediscache.StagedEntry(encoded(t, finished("r")))
	answers(t, d.stage(s), "ok", d.stage(s), "ok")
	d.wantFound(rediscache.Staged)
	answers(t, d.confirm(s, 7), "ok", d.confirm(s, 7), "ok")
	d.want("r")
	answers(t, d.stage(s), "kept")
	d.want("r")
	answers(t, d.fill(finished("r"), 8), "ok", d.fill(finished("r"), 8), "kept", d.confirm(s, 7), "lost")
	d.want("r")
	e := []byte(d.do("GET", d.name).(string))
	answers(t, d.discard(e[:rediscache.HeaderSize]), "ok", d.discard(e[:rediscache.HeaderSize]), "kept")
	d.wantFound(rediscache.Absent)
}

// H01: a confirm stamps the stage of its own nonce and digest alone.
func TestH01ConfirmStampsItsOwnStageAlone(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	r1, r2 := rediscache.StagedEntry(encoded(t, finished("r1"))), rediscache.StagedEntry(encoded(t, finished("r2")))
	answers(t, d.confirm(r1, 7), "lost")
	d.wantFound(rediscache.Absent)
	answers(t, d.stage(r1), "ok", d.stage(r2), "ok", d.confirm(r1, 7), "lost")
	d.wantFound(rediscache.Staged)
	// The same nonce and other bytes; the same bytes and another nonce.
	mixed := bytes.Clone(r2)
	copy(mixed[2:rediscache.DigestAt], r1[2:rediscache.DigestAt])
	answers(t, d.stage(mixed), "ok", d.confirm(r1, 7), "lost", d.confirm(r2, 7), "lost")
	d.wantFound(rediscache.Staged)
	twin := bytes.Clone(r1)
	twin[2]++
	answers(t, d.stage(twin), "ok", d.confirm(r1, 7), "lost")
	d.wantFound(rediscache.Staged)
	// A mark is nobody's stage.
	d.do("SET", d.name, rediscache.MarkKind, "PX", 10000)
	answers(t, d.confirm(r1, 7), "lost")
	d.wantFound(rediscache.Marked)
	// A confirmed entry is stamped by no other confirm, whichever is newer.
	answers(t, d.stage(r1), "ok", d.confirm(r1, 7), "ok", d.confirm(r1, 9), "lost", d.confirm(r1, 5), "lost", d.confirm(r2, 9), "lost")
	if rec, _ := d.holds(); rec == nil || rec.Revision != 7 {
		t.Errorf("holds %v", rec)
	}
	// Nor one cut short.
	d.do("SET", d.name, string(r1[:60]), "PX", 10000)
	answers(t, d.confirm(r1, 7), "ok")
	d.wantFound(rediscache.Digest)
}

// A stage replaces no confirmed entry; a fill none that is as new.
func TestScriptsReplaceNothingNewer(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	s := rediscache.StagedEntry(encoded(t, finished("stage")))
	for _, c := range []struct {
		revision int64
		want     string
	}{{1, "ok"}, {1, "kept"}, {9, "ok"}, {8, "kept"}, {10, "ok"}, {9, "kept"}, {99, "ok"}, {100, "ok"}, {11, "kept"}, {1 << 53, "ok"}, {1<<53 + 1, "ok"}, {1 << 53, "kept"}, {1<<63 - 2, "ok"}, {1<<63 - 1, "ok"}, {1<<63 - 2, "kept"}, {1<<63 - 1, "kept"}} {
		body := strconv.FormatInt(c.revision, 10)
		answers(t, d.fill(finished(body), c.revision), c.want, d.stage(s), "kept", d.confirm(s, c.revision), "lost")
		if c.want == "ok" {
			d.want(body)
		}
	}
	d.want(strconv.FormatInt(1<<63-1, 10))
	// Over a stage and a mark a fill goes.
	d.do("DEL", d.name)
	answers(t, d.stage(s), "ok", d.fill(finished("r"), 7), "ok", d.confirm(s, 7), "lost")
	d.want("r")
	d.do("SET", d.name, rediscache.MarkKind, "PX", 10000)
	answers(t, d.fill(finished("r"), 7), "ok")
	d.want("r")
	d.do("SET", d.name, rediscache.MarkKind, "PX", 10000)
	answers(t, d.stage(s), "ok")
	d.wantFound(rediscache.Staged)
}

// A key of another type, or one that never expires, is replaced or left alone, and
// what is written expires.
func TestScriptsOverWhatOthersPut(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	s := rediscache.StagedEntry(encoded(t, finished("r")))
	for _, put := range [][]any{
		{"RPUSH", d.name, "x"}, {"HSET", d.name, "f", "x"}, {"SADD", d.name, "x"}, {"ZADD", d.name, 1, "x"}, {"XADD", d.name, "*", "f", "x"},
	} {
		again := func() { d.do("DEL", d.name); d.do(put...) }
		again()
		answers(t, d.confirm(s, 7), "lost", d.discard([]byte("x")), "kept", d.discard(nil), "ok")
		d.wantFound(rediscache.Absent)
		again()
		answers(t, d.stage(s), "ok", d.confirm(s, 7), "ok")
		d.want("r")
		again()
		answers(t, d.fill(finished("r"), 7), "ok")
		d.want("r")
	}
	for _, there := range []string{"", "x", "c", "m1", "s1", strings.Repeat("\x00", 300), string(s)} {
		again := func() { d.do("SET", d.name, there) }
		again()
		answers(t, d.stage(s), "ok")
		d.wantFound(rediscache.Staged)
		again()
		answers(t, d.fill(finished("r"), 7), "ok")
		d.want("r")
		again()
		answers(t, d.discard([]byte("another")), "kept", d.discard([]byte(there)[:min(len(there), rediscache.HeaderSize)]), "ok")
		d.wantFound(rediscache.Absent)
	}
	// A stage whose expiry somebody took away gets one with its confirm.
	d.do("SET", d.name, string(s))
	answers(t, d.confirm(s, 7), "ok")
	d.want("r")
}

// A discard removes what was found to be damaged and nothing that came after it.
func TestDiscardRemovesWhatItSaw(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	bad := confirmed(t, someView(), finished("r"), 1<<62)
	d.do("SET", d.name, string(bad), "PX", 10000)
	d.wantFound(rediscache.HMAC)
	d.do("DEL", d.name)
	answers(t, d.fill(finished("r"), 7), "ok", d.discard(bad[:rediscache.HeaderSize]), "kept")
	d.want("r")
	s := rediscache.StagedEntry(encoded(t, finished("r")))
	d.do("DEL", d.name)
	answers(t, d.stage(s), "ok", d.discard(bad[:rediscache.HeaderSize]), "kept", d.confirm(s, 7), "ok")
	d.want("r")
}

// A server that has lost its scripts is told them, and the result is the same.
func TestScriptsAreForgotten(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	s := rediscache.StagedEntry(encoded(t, finished("r")))
	flush := func() string { return d.do("SCRIPT", "FLUSH").(string) }
	answers(t, d.stage(s), "ok", flush(), "OK", d.confirm(s, 7), "ok", flush(), "OK", d.confirm(s, 7), "ok", flush(), "OK", d.stage(s), "kept")
	d.want("r")
	answers(t, flush(), "OK", d.fill(finished("r2"), 8), "ok", flush(), "OK", d.fill(finished("r2"), 8), "kept")
	d.want("r2")
}

// A confirm costs its header, not its body.
func TestConfirmIsSmallOnTheWire(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	body := strings.Repeat("x", 100<<10)
	received := func() int64 {
		info, _ := d.do("INFO", "stats").(string)
		for line := range strings.Lines(info) {
			if v, ok := strings.CutPrefix(line, "total_net_input_bytes:"); ok {
				n, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
		}
		t.Fatalf("INFO: %q", info)
		return 0
	}
	warm := rediscache.StagedEntry(encoded(t, finished("warm")))
	answers(t, d.stage(warm), "ok", d.confirm(warm, 1), "ok") // the scripts are known
	d.do("DEL", d.name)
	s := rediscache.StagedEntry(encoded(t, finished(body)))
	before := received()
	answers(t, d.stage(s), "ok")
	staged := received()
	answers(t, d.confirm(s, 7), "ok")
	cost := received() - staged
	t.Logf("a confirm of a result of 100 KiB took %d bytes on the wire", cost)
	if cost >= 500 {
		t.Errorf("a confirm cost %d bytes, its stage %d", cost, staged-before)
	}
	d.want(body)
}
