//go:build !unix

package childproc

import "os/exec"

// tie does nothing: here a command is ended by Kill alone.
func tie(*exec.Cmd, bool) {}
