package robustness

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dualcheck/dualcheck"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// op is what was called.
type op string

const (
	begin  op = "Begin"
	finish op = "Finish"
	extend op = "Extend"
	get    op = "Get"
	forget op = "Forget"
)

// call is one call: what was asked, and what was told.
type call struct {
	who        string
	node       int
	op         op
	key        string
	start, end time.Duration

	// Asked.
	request string // request id and owner
	token   string
	sent    string             // the outcome that a finish sends, as tell writes it
	class   claim.FailureClass // of a Fail; 0 of a Complete

	// Told. No reason: it went well.
	reason   claim.Reason
	message  string
	verdict  claim.Verdict
	repeat   bool
	given    string // token
	attempt  int32
	fence    int64
	left     time.Duration
	previous claim.Previous
	state    claim.State
	shown    string // the outcome of a record
	digest   string
	finished int64 // its FinishRevision
	revision int64
	source   claim.Source
	stale    bool

	// retries is how often the SDK sent it again by itself: an answer may be one to a
	// repeat, and what was sent before may yet arrive.
	retries int
	// never: the SDK says that it surely was not carried out.
	never bool
}

// by names who was asked: a node, or one of the SDK's clients.
func (c *call) by() string {
	if c.node < nodes {
		return fmt.Sprintf("n%d", c.node)
	}
	return fmt.Sprintf("c%d", c.node-nodes)
}

// unanswered tells that a call had no answer.
func (c *call) unanswered() bool {
	return c.reason == claim.StoreUnavailable || c.reason == claim.Draining
}

// unsure tells that it had none and may have done what it was to do, or may yet do it.
func (c *call) unsure() bool { return c.unanswered() && !c.never }

// late tells that something of it may be carried out after its answer, or have been
// before what it was told.
func (c *call) late() bool {
	return c.unsure() || !c.never && (c.retries > 0 || c.end-c.start >= slow)
}

// slow is how long a call takes at most that met no trouble on its way. One that took
// longer may have sent its write twice: what it was told in the end may be what became
// of its own first try.
const slow = 200 * time.Millisecond

// without tells that a refused call surely did nothing.
func (c *call) without() bool { return c.reason != "" && !c.late() }

// release tells that it is a Fail that frees its key.
func (c *call) release() bool { return c.op == finish && c.class == claim.Retryable }

// shows tells that it was told a finished record.
func (c *call) shows() bool { return c.reason == "" && c.state.Finished() }

func (c *call) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%10.4f %10.4f %-5s %s %-6s", c.start.Seconds(), c.end.Seconds(), c.who, c.by(), c.op)
	if c.retries > 0 {
		fmt.Fprintf(&b, " (sent %d times)", 1+c.retries)
	}
	switch c.op {
	case begin:
		fmt.Fprintf(&b, " %s", c.request)
	case finish:
		fmt.Fprintf(&b, " %s of %s", c.sent, short(c.token))
	case extend:
		fmt.Fprintf(&b, " %s", short(c.token))
	}
	b.WriteString(" -> ")
	switch {
	case c.reason != "":
		fmt.Fprintf(&b, "%s", c.reason)
		if c.unanswered() {
			fmt.Fprintf(&b, " (%.80s)", c.message)
		}
		if c.never {
			b.WriteString(" and surely not carried out")
		}
		if c.digest != "" {
			fmt.Fprintf(&b, " digest %.8s", c.digest)
		}
		return b.String()
	case c.op == forget:
		fmt.Fprintf(&b, "forgotten at %d", c.revision)
	case c.verdict != 0:
		fmt.Fprintf(&b, "%s", verdictNames[c.verdict])
	default:
		fmt.Fprintf(&b, "ok")
	}
	if c.given != "" {
		fmt.Fprintf(&b, " %s attempt %d fence %d left %v after %d", short(c.given), c.attempt, c.fence, c.left, c.previous)
	}
	if c.repeat {
		b.WriteString(" repeat")
	}
	if c.state != 0 {
		fmt.Fprintf(&b, " %v", c.state)
	}
	if c.shown != "" {
		fmt.Fprintf(&b, " %s digest %.8s finished at %d", c.shown, c.digest, c.finished)
	}
	if c.revision != 0 && c.op != forget {
		fmt.Fprintf(&b, " revision %d", c.revision)
	}
	if c.source != 0 {
		fmt.Fprintf(&b, " from %s", sourceNames[c.source])
	}
	return b.String()
}

func short(token string) string { return token[:min(len(token), 8)] }

var verdictNames = map[claim.Verdict]string{
	claim.First: "FIRST", claim.InProgress: "IN_PROGRESS", claim.Replay: "REPLAY", claim.ReplayFailure: "REPLAY_FAILURE",
	claim.Conflict: "CONFLICT", claim.Expired: "EXPIRED", claim.OutcomeUnknown: "UNKNOWN_OUTCOME",
}

var sourceNames = map[claim.Source]string{claim.SourceEtcd: "etcd", claim.SourceRedis: "Redis", claim.SourceMemory: "memory"}

// tell names an outcome by how its text begins, which says who sent it, and a hash of
// every byte of it.
func tell(r *claim.Result, f *claim.Failure) string {
	switch {
	case f != nil:
		return name(f.Message, fmt.Sprintf("failure %d %d %q %q", f.Class, f.Code, f.Message, f.Details))
	case r != nil:
		var metadata []string
		for _, k := range slices.Sorted(maps.Keys(r.Metadata)) {
			metadata = append(metadata, k, r.Metadata[k])
		}
		return name(string(r.Body), fmt.Sprintf("result %d %q %q %q", r.Code, r.ContentType, r.Body, metadata))
	}
	return "nothing"
}

func name(text, whole string) string {
	id, _, _ := strings.Cut(text, " ")
	sum := sha256.Sum256([]byte(whole))
	return fmt.Sprintf("%.40s/%x", id, sum[:12])
}

// toldRecord takes over what a record shows.
func (c *call) toldRecord(r *claim.Record, revision int64) {
	if r == nil {
		return
	}
	c.state, c.revision = r.State, revision
	if !r.State.Finished() {
		return
	}
	c.shown, c.digest, c.finished = tell(r.Result, r.Failure), fmt.Sprintf("%x", r.Digest), r.FinishRevision
	if r.Failure != nil && r.State != claim.Failed || r.Result != nil && r.State != claim.Succeeded {
		c.shown = "neither"
	}
}

// toldGrant takes over a claim that is held for so long from when the call was sent.
func (c *call) toldGrant(g *claim.Grant, left time.Duration) {
	c.given, c.attempt, c.fence, c.left, c.previous = g.Token, g.Attempt, g.Fence, left, g.Previous
}

// toldError takes over an error.
func (c *call) toldError(err error) {
	c.reason = claim.ReasonOf(err)
	if err != nil {
		c.message = err.Error()
	}
	if e, ok := errors.AsType[*dualcheck.Error](err); ok {
		c.never = c.unanswered() && !e.MaybeAccepted
	}
}
