package redistest

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/dualcheck/dualcheck/internal/childproc"
)

// suspend stops a process and returns once it stands still: the signal alone may be
// sent before the process has noticed it.
func suspend(p *childproc.Process) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); <-tick.C {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid()))
		if err != nil {
			return err
		}
		// The state follows the name, which stands in brackets.
		if i := bytes.LastIndexByte(stat, ')'); i >= 0 && bytes.HasPrefix(stat[i:], []byte(") T")) {
			return nil
		}
	}
	return fmt.Errorf("process %d does not stop", p.Pid())
}

func resume(p *childproc.Process) error { return p.Signal(syscall.SIGCONT) }
