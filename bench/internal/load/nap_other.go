//go:build !linux

package load

import "time"

// systemNap may wake up to a millisecond late.
func systemNap(d time.Duration) { <-time.After(d) }
