//go:build unix && !linux

package childproc

import (
	"os/exec"
	"syscall"
)

// tie cannot have a command killed with this process here.
func tie(cmd *exec.Cmd, apart bool) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: apart}
}
