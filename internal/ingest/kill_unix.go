//go:build unix

package ingest

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// killGroup kills a command that has begun and everything in its group.
func killGroup(cmd *exec.Cmd) error {
	err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) {
		return os.ErrProcessDone
	}
	return err
}
