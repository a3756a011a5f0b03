package redistest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/childproc"
)

// patience is how long anything may take before its test fails. It is far more than
// is needed, for machines that are busy.
const patience = 30 * time.Second

// launch starts redis-server in a directory; what it says goes to a file there.
func launch(binary, dir string, args []string) (*childproc.Process, error) {
	out, err := os.OpenFile(filepath.Join(dir, logName), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(binary, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
	return childproc.Start(cmd)
}

// until asks every few milliseconds and fails the test when the answer stays an error.
func until(t testing.TB, what string, ask func() error) {
	t.Helper()
	if err := eventually(ask, nil); err != nil {
		t.Fatalf("%s: not so after %s: %v", what, patience, err)
	}
}

// eventually asks until there is no error, patience ends or stop is closed; it
// returns the last error.
func eventually(ask func() error, stop <-chan struct{}) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; {
		err := ask()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		select {
		case <-tick.C:
		case <-stop:
			return err
		}
	}
}

func loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
