package main

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// advice says, for reasons whose remedy on the command line is always the same,
// what it is. It adds to what the server says itself, and does not repeat it.
var advice = map[string]string{
	"FINGERPRINT_INVALID":  "--fingerprint-of FILE makes one",
	"FINGERPRINT_REQUIRED": "--fingerprint-of FILE makes one",
	"REQUEST_ID_SPENT":     "without --request-id it has a new one",
	"NAMESPACE_NOT_EMPTY":  "--force forgets all of them",
}

// adviceFor is the advice for an error that the server gave for a call; empty if
// there is nothing to add.
func adviceFor(call *callError, p problem) string {
	if text, ok := advice[p.Reason]; ok {
		return text
	}
	state := trimEnum(p.Metadata["state"], "STATE_")
	line := func(command string, more ...string) string {
		return commandLine(command, call.names, call.given, more...)
	}
	switch p.Reason {
	case "CLAIM_LOST":
		return lostAdvice(state, line)
	case "ALREADY_FINISHED":
		if state != "" {
			return "it is " + state + ": " + line("get")
		}
		return line("get")
	case "CLAIM_LIVE":
		if call.command == "forget" && state == "UNKNOWN" {
			return line("resolve", resolveChoices...)
		}
	case "POLICY_STALE":
		return commandLine("namespace get", call.names, call.given) + " shows its revision now"
	case "NAMESPACE_NOT_FOUND":
		if call.command == "delete" {
			return commandLine("namespace list", nil, call.given) + " shows those that are declared"
		}
		if len(call.names) > 0 {
			return commandLine("namespace put", call.names[:1], call.given)
		}
	case "STORE_UNAVAILABLE", "DRAINING":
		if call.requestID == "" && p.Advice == "" && !strings.Contains(p.Message, "same call") {
			return "the same call may be repeated"
		}
	}
	if p.Code == int(codes.Unimplemented) && p.Reason == codeName(codes.Unimplemented) && !strings.Contains(p.Message, "version") {
		return "this server does not have it yet"
	}
	return ""
}

// lostAdvice says what became of a claim that decides no more.
func lostAdvice(state string, line func(command string, more ...string) string) string {
	switch state {
	case "SUCCEEDED", "FAILED":
		return "the claim has ended (" + state + "): " + line("get")
	case "RELEASED":
		return "the claim has ended (RELEASED): the next begin is FIRST"
	case "UNKNOWN":
		return "the claim has ended (UNKNOWN): find out what happened, then: " + line("resolve", resolveChoices...)
	}
	return "another claim decides now: " + line("get")
}

// resolveChoices are the flags of resolve that somebody must choose.
var resolveChoices = []string{"--state=succeeded|failed|released", "--reason=WHY"}

// mayBeRepeated says whether the very call may be sent again after an error with
// this code.
func mayBeRepeated(code int) bool {
	return slices.Contains([]codes.Code{codes.Unavailable, codes.DeadlineExceeded, codes.Canceled}, codes.Code(code))
}
