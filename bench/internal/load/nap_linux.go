package load

import (
	"syscall"
	"time"
)

// systemNap waits to some 60 µs. A timer of Go's would wake up to a millisecond late on
// an idle machine, and that would be taken for latency.
func systemNap(d time.Duration) {
	ts := syscall.NsecToTimespec(d.Nanoseconds())
	_ = syscall.Nanosleep(&ts, nil) // woken early, the caller looks at the clock
}
