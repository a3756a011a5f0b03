package ingest

import (
	"os/exec"
	"syscall"
)

// ownGroup gives a command that has not begun a process group of its own, which
// an interrupt at the terminal does not reach, and which is killed as a whole.
// The command is killed too when this process dies.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return killGroup(cmd) }
}
