package etcdtest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Main runs a package's tests and then looks for goroutines of this module that
// nobody waited for. Those of a killed etcd are its own business: a process would
// have taken them with it.
func Main(m *testing.M) int {
	code := m.Run()
	if code != 0 {
		return code
	}
	var left []string
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(50 * time.Millisecond) {
		if left = ours(); len(left) == 0 {
			return 0
		}
		if time.Now().After(deadline) {
			fmt.Fprintf(os.Stderr, "goroutines that nobody waited for:\n\n%s\n", strings.Join(left, "\n\n"))
			return 1
		}
	}
}

// ours returns the stacks of this module's goroutines but for the caller's.
func ours() []string {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	var left []string
	for _, stack := range strings.Split(string(buf), "\n\n") {
		if strings.Contains(stack, "github.com/dualcheck/dualcheck/") && !strings.Contains(stack, "etcdtest.ours") {
			left = append(left, stack)
		}
	}
	return left
}
