//go:build !linux

package redistest

import (
	"os/exec"
	"strconv"

	"github.com/dualcheck/dualcheck/internal/childproc"
)

// The numbers of these signals differ between systems; kill knows them.
func suspend(p *childproc.Process) error {
	return exec.Command("kill", "-STOP", strconv.Itoa(p.Pid())).Run()
}

func resume(p *childproc.Process) error {
	return exec.Command("kill", "-CONT", strconv.Itoa(p.Pid())).Run()
}
