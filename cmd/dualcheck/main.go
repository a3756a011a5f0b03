// Command dualcheck runs the service and speaks to it.
//
// What the program says on its standard output is data; everything else is on
// its standard error. Its exit status is one of the table in exit.go, and no
// command leaves it another way.
package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() { os.Exit(execute(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// execute runs one command line and returns its exit status. The first interrupt
// cancels the command's context, the second ends the process.
func execute(args []string, in io.Reader, out, talk io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)

	root := newRoot()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(talk)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	return reportError(talk, err, wantsJSON(cmd) || asksJSON(args))
}

// calledAs is how the program was called; a test says otherwise.
var calledAs = os.Args[0]

// program is the program as it was called, for lines that are to be pasted.
func program() string {
	if calledAs == "" {
		return "dualcheck"
	}
	return shellWord(calledAs)
}
