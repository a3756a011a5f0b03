// Command dualcheck-bench measures dualcheck beside what would be used instead of it.
// `dualcheck bench` runs it.
//
// Its standard output is the figures; everything else is on its standard error.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// The exit status.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() { os.Exit(execute(os.Args[1:], os.Stdout, os.Stderr)) }

func execute(args []string, out, talk io.Writer) int {
	// A terminal's interrupt comes twice, from it and from `dualcheck bench`: the second
	// must not keep servers from being stopped and their directory from being removed.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(args) > 0 && (args[0] == rig.ServeEtcd || args[0] == rig.ServeEmpty) {
		log := slog.New(slog.NewTextHandler(talk, &slog.HandlerOptions{Level: slog.LevelWarn}))
		if err := rig.Serve(ctx, args, out, log); err != nil && ctx.Err() == nil {
			fmt.Fprintln(talk, err)
			return exitFailure
		}
		return exitOK
	}
	ran := false
	cmd := newCommand(&ran)
	cmd.SetArgs(args)
	cmd.SetOut(out)
	cmd.SetErr(talk)
	err := cmd.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitOK
	case ctx.Err() != nil:
		fmt.Fprintln(talk, "dualcheck bench: interrupted")
		return exitInterrupted
	}
	fmt.Fprintln(talk, "dualcheck bench:", err)
	if !ran {
		return exitUsage
	}
	return exitFailure
}
