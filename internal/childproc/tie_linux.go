package childproc

import (
	"os/exec"
	"syscall"
)

// tie has a command that has not begun killed when the thread that starts it ends.
func tie(cmd *exec.Cmd, apart bool) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: apart}
}
