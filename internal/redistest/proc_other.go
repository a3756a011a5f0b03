//go:build !linux

package redistest

import (
	"os"
	"os/exec"
	"strconv"
)

// dieWithParent does nothing: only Linux ends children with their parents.
func dieWithParent(*exec.Cmd) {}

// The numbers of these signals differ between systems; kill knows them.
func suspend(p *os.Process) error {
	return exec.Command("kill", "-STOP", strconv.Itoa(p.Pid)).Run()
}

func resume(p *os.Process) error {
	return exec.Command("kill", "-CONT", strconv.Itoa(p.Pid)).Run()
}
