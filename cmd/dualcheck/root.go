package main

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// newRoot builds the whole command tree.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "dualcheck",
		Short: "Has this piece of work been done, and what came of it?",
		Long: `dualcheck answers one question for any service: has this piece of work been
done, and what came of it?

Ask with begin before the work. FIRST gives the claim: do the work, then say
what came of it with complete or fail. Everyone else is told that the work is
in progress, or what came of it.`,
		Example: `  dualcheck dev
  dualcheck begin payments order-4711 --operation payment.capture
  dualcheck ingest deliveries.jsonl`,
		SilenceUsage:               true,
		SilenceErrors:              true,
		SuggestionsMinimumDistance: 2,
	}
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	root.AddGroup(
		&cobra.Group{ID: "server", Title: "Server:"},
		&cobra.Group{ID: "work", Title: "Work:"},
		&cobra.Group{ID: "operate", Title: "Operate:"},
	)
	for _, cmd := range serverCommands() {
		cmd.GroupID = "server"
		root.AddCommand(cmd)
	}
	for _, cmd := range []*cobra.Command{
		newBeginCommand(), newCompleteCommand(), newFailCommand(), newExtendCommand(), newGetCommand(), newWatchCommand(), newIngestCommand(),
	} {
		cmd.GroupID = "work"
		root.AddCommand(cmd)
	}
	for _, cmd := range []*cobra.Command{
		newRecordsCommand(), newResolveCommand(), newForgetCommand(), newNamespaceCommand(), newSwitchCommand(), newEpochCommand(), newClusterCommand(),
	} {
		cmd.GroupID = "operate"
		root.AddCommand(cmd)
	}
	root.AddCommand(newBenchCommand(), newVersionCommand(), newManCommand(), newExitCodesTopic())
	root.SetHelpCommand(newHelpCommand())
	root.Version = buildInfo().Version
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	markRun(root)
	return root
}

// ranError is an error of a command that had its arguments and flags in order;
// every other error is a mistake in the command line.
type ranError struct{ err error }

func (e ranError) Error() string { return e.err.Error() }
func (e ranError) Unwrap() error { return e.err }

// markRun makes every command of the tree mark its errors as its own.
func markRun(cmd *cobra.Command) {
	if inner := cmd.RunE; inner != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			if err := inner(cmd, args); err != nil {
				return ranError{err}
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		markRun(sub)
	}
}

// commandGroup makes cmd one that only holds others: named alone or with a word
// that is none of them, it says what it has.
func commandGroup(cmd *cobra.Command, subs ...*cobra.Command) *cobra.Command {
	cmd.AddCommand(subs...)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var names []string
		for _, sub := range cmd.Commands() {
			names = append(names, sub.Name())
		}
		if len(args) == 0 {
			return usageErrorf("%s needs one of: %s", cmd.CommandPath(), strings.Join(names, ", "))
		}
		if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
			return usageErrorf("unknown command %q for %q: did you mean %s", args[0], cmd.CommandPath(), strings.Join(near, " or "))
		}
		return usageErrorf("unknown command %q for %q; it has: %s", args[0], cmd.CommandPath(), strings.Join(names, ", "))
	}
	cmd.SuggestionsMinimumDistance = 2
	return cmd
}

// newHelpCommand shows the help of a command or of a topic; one that is not there
// is a mistake.
func newHelpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Show the help of a command or topic",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
			var names []string
			if about, _, err := cmd.Root().Find(args); err == nil {
				for _, sub := range about.Commands() {
					if (sub.IsAvailableCommand() || sub.IsAdditionalHelpTopicCommand()) && strings.HasPrefix(sub.Name(), begun) {
						names = append(names, cobra.CompletionWithDesc(sub.Name(), sub.Short))
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return usageErrorf("there is no command or topic %q", strings.Join(args, " "))
			}
			about.InitDefaultHelpFlag()
			about.InitDefaultVersionFlag()
			return about.Help()
		},
	}
}

// arguments checks that exactly the named ones are given.
func arguments(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == len(names) {
			for i, name := range names {
				if name != "FILE" && !utf8.ValidString(args[i]) {
					return fmt.Errorf("%s is not valid UTF-8: give text, or the hexadecimal or base64 of bytes", name)
				}
			}
			return nil
		}
		wants := strings.Join(names, " ")
		if wants == "" {
			wants = "no arguments"
		}
		return fmt.Errorf("%s takes %s; %d were given", cmd.CommandPath(), wants, len(args))
	}
}

// usageErrorf is a mistake in the command line that was found by a command
// itself.
func usageErrorf(format string, args ...any) error {
	return &exitError{code: exitUsage, err: fmt.Errorf(format, args...), help: true}
}

// inputErrorf is a mistake in what a command was given to read, of which its help
// says nothing.
func inputErrorf(format string, args ...any) error {
	return &exitError{code: exitUsage, err: fmt.Errorf(format, args...)}
}

// isUsage says whether an error is a mistake in the command line.
func isUsage(err error) bool {
	if own, ok := errors.AsType[*exitError](err); ok {
		return own.code == exitUsage
	}
	_, ran := errors.AsType[ranError](err)
	return !ran
}
