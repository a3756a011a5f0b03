package childproc

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// roleEnv makes the test binary run as one of the processes of a test.
const roleEnv = "CHILDPROC_TEST_ROLE"

// patience bounds every wait for something that must come.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	switch os.Getenv(roleEnv) {
	case "":
		os.Exit(m.Run())
	case "parent":
		cmd := as("child")
		cmd.Stdout = os.Stdout
		if _, err := Start(cmd); err != nil {
			panic(err)
		}
	case "child":
		os.Stdout.WriteString("the child runs\n")
	case "fails":
		os.Exit(3)
	}
	<-time.After(10 * patience) // it is killed long before
}

// as is this test's binary in a role.
func as(role string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	return cmd
}

func mustStart(t *testing.T, start func(*exec.Cmd) (*Process, error), role string) *Process {
	t.Helper()
	p, err := start(as(role))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return p
}

func TestKillWaits(t *testing.T) {
	p := mustStart(t, Start, "child")
	select {
	case <-p.Done():
		t.Fatalf("it ended: %s", p.Status())
	default:
	}
	p.Kill()
	if err := p.Signal(os.Kill); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("it was not waited for: %v", err)
	}
	p.Kill() // again is no harm
}

func TestEndsByItself(t *testing.T) {
	p := mustStart(t, Start, "fails")
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatal("its end is not told")
	}
	if p.Status() != "exit status 3" {
		t.Errorf("it ended with %q", p.Status())
	}
}

func TestDoesNotStart(t *testing.T) {
	if _, err := Start(exec.Command(filepath.Join(t.TempDir(), "none"))); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want %v", err, fs.ErrNotExist)
	}
}

func TestNoPortTwice(t *testing.T) {
	given := map[int]bool{}
	for range 100 {
		port, err := FreePort()
		if err != nil || given[port] {
			t.Fatalf("port %d: given before: %v, %v", port, given[port], err)
		}
		given[port] = true
	}
}
