package claim_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Begins that are judged together are told what they would be told one after another, in
// every state and at every instant.
func TestTogetherIsOneAfterAnother(t *testing.T) {
	all := fixtures(t)
	var requests []*claim.BeginRequest
	beginRequests(func(req *claim.BeginRequest, _ func(begins) string) { requests = append(requests, req) })
	for state, f := range all {
		instants := f.instants()
		rapid.Check(t, func(t *rapid.T) {
			now := rapid.SampledFrom(instants).Draw(t, "now")
			reqs := rapid.SliceOfN(rapid.SampledFrom(requests), 1, 6).Draw(t, "requests")
			m := f.moment(now)
			begun, write, writer := claim.Together(f.rec, reqs, m)
			if (write == nil) != (writer == len(reqs)) {
				t.Fatalf("%s: number %d of %d writes %v", state, writer, len(reqs), write)
			}
			rec := f.rec
			for i, req := range reqs {
				answer, next, err := claim.Begin(rec, req, m)
				if next != nil {
					rec = next
					if i != writer {
						t.Fatalf("%s: number %d is given the claim, want %d", state, i, writer)
					}
				}
				got, want := tell(begun[i].Answer, nil, begun[i].Err), tell(answer, nil, err)
				if got != want || fmt.Sprint(begun[i].Answer.Record) != fmt.Sprint(answer.Record) {
					t.Fatalf("%s: number %d is told %s, alone %s", state, i, got, want)
				}
			}
			if writer < len(reqs) && fmt.Sprint(*rec) != fmt.Sprint(*write) {
				t.Fatalf("%s: together %+v is written, alone %+v", state, write, rec)
			}
		})
	}
}

// C38, H26: the same key thrice in a batch, the third with another payload.
func TestC38TheSameKeyInOneBatch(t *testing.T) {
	w := newWorld()
	other := asks("r2")
	other.Fingerprint = otherPrint
	begun, write, writer := claim.Together(nil, []*claim.BeginRequest{asks("r1"), asks("r1"), other, asks("r3")}, w.moment())
	var told string
	for _, b := range begun {
		told += tell(b.Answer, write, b.Err) + "; "
	}
	if told != "FIRST 1 NONE; REPEAT 1; CONFLICT; IN_PROGRESS; " || writer != 0 {
		t.Errorf("told %s writer %d", told, writer)
	}
	// Those who come back do so one by one.
	w.first(t, asks("r1"))
	begun, _, _ = claim.Together(w.rec, []*claim.BeginRequest{asks("a"), asks("b"), asks("c")}, w.moment())
	if begun[0].Answer.RetryAfter == begun[1].Answer.RetryAfter || begun[1].Answer.RetryAfter == begun[2].Answer.RetryAfter {
		t.Errorf("all are sent away for %v", begun[0].Answer.RetryAfter)
	}
}
