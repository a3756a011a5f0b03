package rig

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// processOf is the file that says which process a server is.
func processOf(dir string) string { return dir + ".process" }

func noteProcess(dir string, pid int) error {
	return os.WriteFile(processOf(dir), []byte(strconv.Itoa(pid)), 0o600)
}

// Busy is how much processor time the site's node and its etcd have had since they
// started; 0 where the system does not tell.
func (r *Rig) Busy() (node, etcd time.Duration) {
	of := func(name string) time.Duration {
		pid, err := os.ReadFile(processOf(filepath.Join(r.dir, r.own(name))))
		if err != nil {
			return 0
		}
		stat, err := os.ReadFile(filepath.Join("/proc", string(pid), "stat"))
		if err != nil {
			return 0
		}
		return processorTime(string(stat))
	}
	return of("dualcheck"), of("etcd")
}

// processorTime reads utime and stime, the 14th and 15th of what Linux tells of a process,
// in hundredths of a second. The second, a name, may hold spaces.
func processorTime(stat string) time.Duration {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const utime, stime = 14 - 3, 15 - 3
	if len(fields) <= stime {
		return 0
	}
	sum := time.Duration(0)
	for _, field := range fields[utime : stime+1] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0
		}
		sum += time.Duration(n) * 10 * time.Millisecond
	}
	return sum
}
