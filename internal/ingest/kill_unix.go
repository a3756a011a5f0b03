//go:build unix

package ingest

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// killGroup kills a command that has begun and everything in its group; it may be
// asked also after Wait. os.ErrProcessDone: nothing of the group is left.
func killGroup(cmd *exec.Cmd) error {
	err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) {
		return os.ErrProcessDone
	}
	return err
}

// groupLeft says whether anything is left of a command's group, ended and not
// reaped included.
func groupLeft(cmd *exec.Cmd) bool {
	return !errors.Is(syscall.Kill(-cmd.Process.Pid, 0), syscall.ESRCH)
}
