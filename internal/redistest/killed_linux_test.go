package redistest_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/dualcheck/dualcheck/internal/redistest"
)

// child tells a second process of this test to start a server and wait for its death.
const child = "REDISTEST_CHILD"

func TestServerDiesWithKilledTest(t *testing.T) {
	if os.Getenv(child) != "" {
		fmt.Printf("pid %s\n", field(redistest.Start(t).Do("INFO", "server").(string), "process_id:"))
		select {}
	}
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run=^TestServerDiesWithKilledTest$")
	cmd.Env = append(os.Environ(), child+"=1", "TMPDIR="+t.TempDir())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscanf(line, "pid %d", &pid); err != nil {
		t.Fatalf("the child says %q", line)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("the server does not run: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	await(t, 0, func() bool { return gone(pid) })
}

// gone tells whether a process has ended; nobody may have waited for it yet.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func field(info, name string) string {
	_, after, _ := strings.Cut(info, name)
	value, _, _ := strings.Cut(after, "\r\n")
	return value
}
