//go:build !unix

package ingest

import (
	"os"
	"os/exec"
)

// ownGroup does nothing: here a command is killed alone.
func ownGroup(*exec.Cmd) {}

// killGroup kills a command that has begun; os.ErrProcessDone: it has ended. What
// it started is not known here.
func killGroup(cmd *exec.Cmd) error {
	if cmd.ProcessState != nil {
		return os.ErrProcessDone
	}
	return cmd.Process.Kill()
}

// groupLeft is false: what a command started is not known here.
func groupLeft(*exec.Cmd) bool { return false }
