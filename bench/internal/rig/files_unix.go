//go:build unix

package rig

import (
	"fmt"
	"syscall"
)

// RaiseFiles lets this process and its children have so many files open, or says what is
// missing.
func RaiseFiles(n uint64) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("the limit of open files: %w", err)
	}
	had := limit
	limit.Cur, limit.Max = max(limit.Cur, n), max(limit.Max, n)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		// Said anyway, so that children have the soft limit that this process has.
		had.Cur = had.Max
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &had)
		return fmt.Errorf("%d open files are needed, %d are allowed (ulimit -n): %w", n, had.Max, err)
	}
	return nil
}
