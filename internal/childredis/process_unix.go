//go:build unix && !linux

package childredis

import (
	"os/exec"
	"syscall"
)

// bind keeps an interrupt at the terminal from a command that has not begun, as it is
// needed until this process has drained. If this process is killed, the command is left:
// it holds nothing but a port that the next start does not ask for.
func bind(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}
