package childredis

import (
	"os/exec"
	"syscall"
)

// bind ties a command that has not begun to this process alone: it is killed when the
// thread that starts it ends, and an interrupt at the terminal does not reach it, as it
// is needed until this process has drained.
func bind(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
