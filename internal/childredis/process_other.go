//go:build !unix

package childredis

import "os/exec"

// bind does nothing: here a command is ended by Close alone.
func bind(*exec.Cmd) {}
