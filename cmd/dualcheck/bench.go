package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/spf13/cobra"
)

// benchProgram is a program of its own, so that the drivers of databases that dualcheck
// is measured against are no part of it.
const benchProgram = "dualcheck-bench"

func newBenchCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "bench [ARGS]",
		Short: "Measure dualcheck beside what would be used instead of it",
		Long: `Runs ` + benchProgram + `, which is beside this program or in PATH, with the same
arguments; bench --help is its help. It is built by: make bench`,
		Example: `  dualcheck bench --suite goals
  dualcheck bench --target dualcheck-life --keys zipf --in-flight 256`,
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			bin, err := findBench()
			if err != nil {
				return err
			}
			run := exec.CommandContext(cmd.Context(), bin, args...)
			run.Stdin, run.Stdout, run.Stderr = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
			// An interrupt is passed on, so that it can stop what it has started.
			run.Cancel = func() error { return run.Process.Signal(syscall.SIGTERM) }
			if err := run.Run(); err != nil {
				if ended, ok := errors.AsType[*exec.ExitError](err); ok && ended.ExitCode() >= 0 {
					return &exitError{code: ended.ExitCode()} // it has said why
				}
				return fmt.Errorf("run %s: %w", bin, err)
			}
			return nil
		},
	}
}

// findBench finds it beside this program, or in PATH.
func findBench() (string, error) {
	var beside []string
	if self, err := os.Executable(); err == nil {
		beside = append(beside, filepath.Join(filepath.Dir(self), benchProgram))
	}
	for _, bin := range slices.Concat(beside, []string{benchProgram}) {
		if found, err := exec.LookPath(bin); err == nil {
			return found, nil
		}
	}
	return "", fmt.Errorf("%s is neither beside this program nor in PATH: make bench builds it", benchProgram)
}
