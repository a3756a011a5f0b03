package main

import "google.golang.org/grpc/codes"

// advice says, for each reason, what to do about it.
var advice = map[string]string{
	"NAMESPACE_INVALID":    "a namespace is 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit",
	"KEY_INVALID":          "take the id that the producer gave the work, the same in every retry",
	"OPERATION_INVALID":    "an operation is at most 128 of A-Z a-z 0-9 . _ : / -",
	"FINGERPRINT_INVALID":  "a fingerprint is the SHA-256 of the canonical request; --fingerprint-of FILE makes one",
	"FINGERPRINT_REQUIRED": "add --fingerprint or --fingerprint-of FILE",
	"LEASE_INVALID":        "give a --lease above zero",
	"WAIT_INVALID":         "give a --wait between 0 and 30s",
	"TOKEN_INVALID":        "take the token that begin printed for this very key",
	"FAILURE_INVALID":      "a failure needs --class retryable, terminal or unknown",
	"CLAIM_LOST":           "another claim decides now: stop, and ask begin what became of the key",
	"POLICY_STALE":         "somebody changed the policy: read it again and put it with its new revision",
	"ALREADY_FINISHED":     "the first finish stands: dualcheck get shows it",
	"REQUEST_ID_SPENT":     "the claim of that call was released: ask with a new --request-id",
	"CLAIM_LIVE":           "wait until the claim has ended; forget can --force it",
	"NAMESPACE_NOT_EMPTY":  "forget its records, or add --force to forget all of them",
	"RECORD_NOT_FOUND":     "nothing is known of this key: it was never begun, or was forgotten, or has expired",
	"NAMESPACE_NOT_FOUND":  "nobody declared it: dualcheck namespace put declares it",
	"STORE_UNAVAILABLE":    "etcd cannot decide now: repeat the same call, with the same --request-id for begin",
	"STORE_RESTORED":       "etcd was restored from a snapshot: an operator must open the namespace",
	"DRAINING":             "this node is stopping: repeat the call",
	"STORE_FULL":           "etcd is full: no new claims until there is room again",
	"OVERLOADED":           "too much at once: try again a little later",
	"RECORD_UNREADABLE":    "a newer version wrote this record: ask a node of that version",
}

// adviceFor is the advice for a reason or, without one, for a code.
func adviceFor(reason string, code codes.Code) string {
	if text, ok := advice[reason]; ok {
		return text
	}
	switch {
	case reason != "":
		return ""
	case code == codes.DeadlineExceeded:
		return "the outcome is not known and the same call may be repeated, or be given more --timeout"
	case code == codes.Unimplemented:
		return "this server does not have it yet"
	}
	return ""
}
