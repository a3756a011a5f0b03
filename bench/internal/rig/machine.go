package rig

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Machine is what figures were taken on.
type Machine struct {
	Time     time.Time         `json:"time"`
	CPU      string            `json:"cpu"`
	Cores    int               `json:"cores"`
	Memory   int64             `json:"memory_bytes"`
	OS       string            `json:"os"`
	Kernel   string            `json:"kernel"`
	Go       string            `json:"go"`
	Sync     float64           `json:"sync_us"` // a 4 KiB write and its sync, p50
	Versions map[string]string `json:"versions"`
}

// Machine looks at the machine, and at the versions of the programs that may be used.
func (r *Rig) Machine(ctx context.Context) Machine {
	m := Machine{
		Time: time.Now().UTC().Truncate(time.Second), Cores: runtime.NumCPU(), Go: runtime.Version(), OS: runtime.GOOS + "/" + runtime.GOARCH,
		CPU: procLine("/proc/cpuinfo", "model name"), Sync: r.sync(), Versions: map[string]string{},
	}
	if kb, _, ok := strings.Cut(procLine("/proc/meminfo", "MemTotal"), " "); ok {
		if n, err := strconv.ParseInt(kb, 10, 64); err == nil {
			m.Memory = n << 10
		}
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(b))
	}
	for name, args := range map[string][]string{
		"dualcheck": {r.cfg.Dualcheck, "--version"}, "redis": {"redis-server", "--version"},
		"mariadb": {"mariadbd", "--version"}, "postgresql": {"postgres", "--version"},
	} {
		bin := args[0]
		if name != "dualcheck" {
			bin, _ = find(args[0], "", "/usr/sbin", "/usr/lib/postgresql/*/bin") // "" if it is not there
		}
		if bin == "" {
			continue
		}
		if out, err := exec.CommandContext(ctx, bin, args[1:]...).Output(); err == nil {
			m.Versions[name] = strings.TrimSpace(string(out))
		}
	}
	return m
}

// procLine is the value of a line "name : value" of a file of Linux; "" elsewhere.
func procLine(file, name string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if n, v, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(n) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// sync is how long the disk takes, in microseconds; 0 if that cannot be told.
func (r *Rig) sync() float64 {
	f, err := os.Create(filepath.Join(r.dir, "sync"))
	if err != nil {
		return 0
	}
	defer f.Close() // it goes with the directory
	var took []time.Duration
	for range 101 {
		began := time.Now()
		if _, err := f.Write(make([]byte, 4096)); err != nil {
			return 0
		}
		if err := f.Sync(); err != nil {
			return 0
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return float64(took[len(took)/2].Nanoseconds()) / 1e3
}
