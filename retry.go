package dualcheck

import (
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
)

// whether says whether a call is sent again, and where.
type whether uint8

const (
	// never: the same call would be told the same.
	never whether = iota
	// here: the server said when to come back.
	here
	// elsewhere: another server may answer what this one cannot.
	elsewhere
)

// retried is the one table of what is sent again. A reason that is in no row goes by
// its code.
var retried = map[Reason]whether{
	ErrStoreUnavailable: elsewhere,
	ErrDraining:         elsewhere,
	ErrConnectionLost:   elsewhere,
	ErrUnreachable:      elsewhere,
	ErrOverloaded:       here,
	ErrRateLimited:      here,

	ErrStoreRestored: never, // until an operator has opened the namespace
	ErrStoreFull:     never, // until somebody has made room
	ErrQuotaExceeded: never,
	ErrClosed:        never,
	ErrAnswerInvalid: never,
}

// again says whether a call that met e is sent again.
func again(e *Error) whether {
	if e.local == refusedTogether {
		return here // by itself this time, see refusedTogether
	}
	if w, ok := retried[e.Reason]; ok {
		return w
	}
	switch {
	case e.Code == codes.Unavailable:
		return elsewhere
	case e.Code == codes.ResourceExhausted && e.RetryAfter > 0:
		return here
	}
	return never
}

const (
	firstPause  = 100 * time.Millisecond
	longestWait = 5 * time.Second
)

// ceiling is the longest that may be waited after n tries that failed.
func ceiling(n int) time.Duration {
	if n > 6 {
		return longestWait
	}
	return min(firstPause<<max(n-1, 0), longestWait)
}

// pause is how long to wait after n tries that failed: at random up to the ceiling, so
// that callers who failed together do not come back together, and on top of what the
// server asked for.
func pause(n int, after time.Duration) time.Duration {
	return max(after, 0) + rand.N(ceiling(n)) + 1
}

// Retry tells of a call that is about to be sent again.
type Retry struct {
	// Method is Begin, Complete, Fail, Extend or Get.
	Method string
	Key    Key
	// Tries is how often it was tried so far.
	Tries int
	// Wait is how long is waited first.
	Wait time.Duration
	// Err is what the last try met.
	Err *Error
}

// Observer is told what a Client does by itself, for metrics. Its methods are called
// by many at once and return soon.
type Observer interface {
	// Retrying is called before the wait.
	Retrying(Retry)
}
