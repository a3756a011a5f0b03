// Package childproc starts servers as children of this process, and finds ports for
// them.
//
// What always holds: a child does not outlive its parent, however that ends. Only Linux
// sees to it; elsewhere the child of a parent that was killed is left.
package childproc

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
)

// Process is a child that was started. Once it ends it is waited for.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// Start starts a command. What the terminal sends, such as an interrupt, reaches it too.
func Start(cmd *exec.Cmd) (*Process, error) { return start(cmd, false) }

// StartApart starts a command in a process group of its own: what the terminal sends
// does not reach it, for it is needed until this process has drained.
func StartApart(cmd *exec.Cmd) (*Process, error) { return start(cmd, true) }

func start(cmd *exec.Cmd, apart bool) (*Process, error) {
	tie(cmd, apart)
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		defer close(p.done)
		// Linux kills the child when the thread that started it ends, not only when the
		// process does: so the thread stays until the child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // Status tells how it ended
		}
	}()
	if err := <-started; err != nil {
		<-p.done
		return nil, err
	}
	return p, nil
}

// Pid is its process ID.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed once it has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Status is how it ended, once it has.
func (p *Process) Status() string { return p.cmd.ProcessState.String() }

// Signal sends it a signal.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Kill ends it, a stopped one too, and waits for its end.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // fails if it has ended already
	<-p.done
}

var ports struct {
	sync.Mutex
	given map[int]bool
}

// FreePort finds a port of loopback that is free now and was not given out before. It
// is below those that systems take for outgoing connections, so that a server that died
// finds it free again.
func FreePort() (int, error) {
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
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		ports.given[port] = true
		return port, l.Close()
	}
	return 0, errors.New("no free port from 10000 to 29999")
}
