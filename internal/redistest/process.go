package redistest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"
)

// patience is how long anything may take before its test fails. It is far more than
// is needed, for machines that are busy.
const patience = 30 * time.Second

// process is a running redis-server.
type process struct {
	os   *os.Process
	done chan struct{} // closed once it has ended and was waited for
}

// launch starts redis-server in a directory; what it says goes to a file there.
func launch(binary, dir string, args []string) (*process, error) {
	out, err := os.OpenFile(filepath.Join(dir, logName), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(binary, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
	dieWithParent(cmd)
	p := &process{done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The child dies with the thread that starts it: this one stays until then.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.done)
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait() //nolint:errcheck // servers here end by being killed
		}
	}()
	if err := <-started; err != nil {
		<-p.done
		return nil, err
	}
	p.os = cmd.Process
	return p, nil
}

// kill ends the process, a stopped one too, and waits for its end.
func (p *process) kill() {
	p.os.Kill() //nolint:errcheck // it may have ended already
	<-p.done
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

var ports struct {
	sync.Mutex
	given map[int]bool
}

// freePort finds a port that is free now and was not given out before. It is below
// those that systems take for outgoing connections: a killed server's port is still
// free when the server is started again.
func freePort() (int, error) {
	ports.Lock()
	defer ports.Unlock()
	if ports.given == nil {
		ports.given = map[int]bool{}
	}
	for range 1000 {
		port := 10000 + rand.IntN(20000)
		if ports.given[port] {
			continue
		}
		l, err := net.Listen("tcp", loopback(port))
		if err != nil {
			continue
		}
		ports.given[port] = true
		return port, l.Close()
	}
	return 0, fmt.Errorf("no free port from 10000 to 29999")
}

func loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
