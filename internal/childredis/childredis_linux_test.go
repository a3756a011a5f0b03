package childredis

import (
	"syscall"
	"testing"
	"time"
)

// A child that does not act on SIGTERM is killed.
func TestCloseOfAChildThatHangs(t *testing.T) {
	s, _ := mustStart(t, t.TempDir())
	pid := answers(t, s)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	s.Close()
	if took := time.Since(began); took < stopTimeout {
		t.Errorf("it was given %v to end, not %v", took, stopTimeout)
	}
	gone(t, pid)
}

// What the terminal sends to this process's group does not reach the child.
func TestItsOwnProcessGroup(t *testing.T) {
	s, _ := mustStart(t, t.TempDir())
	pid := answers(t, s)
	if group, err := syscall.Getpgid(pid); err != nil || group != pid {
		t.Errorf("process %d is in group %d, %v", pid, group, err)
	}
}
