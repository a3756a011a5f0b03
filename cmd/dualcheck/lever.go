package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/policy"
)

func newSwitchCommand() *cobra.Command {
	return commandGroup(&cobra.Command{
		Use:   "switch",
		Short: "Turn switches that all nodes obey",
	}, newSwitchListCommand(), newSwitchPutCommand("on", true), newSwitchPutCommand("off", false))
}

// switchMeanings are lines that say what each switch does.
func switchMeanings() string {
	var lines strings.Builder
	for _, name := range policy.SwitchNames() {
		fmt.Fprintf(&lines, "\n  %s: %s", name, policy.SwitchMeaning(name))
	}
	return lines.String()
}

func newSwitchListCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List all switches by name",
		Args:  arguments(),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return server.with(cmd, 0, func(ctx context.Context, to *client) error {
			answer, err := to.admin.ListSwitches(ctx, &dualcheckv1.ListSwitchesRequest{})
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				p.line("NAME", "STATE", "CHANGED", "REASON")
				for _, sw := range answer.GetSwitches() {
					p.line(printable(sw.GetName()), onOrOff(sw.GetOn()), dash(clockTime(sw.GetChangedAt())), dash(printable(sw.GetReason())))
				}
			})
		})
	}
	return cmd
}

func newSwitchPutCommand(word string, on bool) *cobra.Command {
	sw := &dualcheckv1.Switch{On: on}
	cmd := &cobra.Command{
		Use:   word + " NAME --reason WHY",
		Short: "Turn a switch " + word,
		Long: `Turn a switch ` + word + `. It takes 3 seconds: afterwards no node acts by what was
before. What a switch does while it is on:
` + switchMeanings(),
		Args:              arguments("NAME"),
		ValidArgsFunction: firstArgument(policy.SwitchNames()),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	cmd.Flags().StringVar(&sw.Reason, "reason", "", "why; kept with the switch and in the log (required)")
	required(cmd, "reason")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		sw.Name = args[0]
		return server.with(cmd, actMost(cmd), func(ctx context.Context, to *client) error {
			answer, err := to.admin.PutSwitch(ctx, &dualcheckv1.PutSwitchRequest{Switch: sw})
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				p.head(onOrOff(answer.GetSwitch().GetOn()), green, "every node obeys")
				p.field("name", printable(answer.GetSwitch().GetName()))
				p.field("changed", clockTime(answer.GetSwitch().GetChangedAt()))
				p.field("reason", printable(answer.GetSwitch().GetReason()))
			})
		})
	}
	return cmd
}

func newEpochCommand() *cobra.Command {
	return commandGroup(&cobra.Command{
		Use:   "epoch",
		Short: "Drop everything that is cached",
	}, newEpochRaiseCommand())
}

func newEpochRaiseCommand() *cobra.Command {
	request := &dualcheckv1.RaiseEpochRequest{}
	cmd := &cobra.Command{
		Use:   "raise --reason WHY",
		Short: "Drop everything that is cached, on all nodes and in Redis",
		Long: `Raise the epoch, which drops everything that is cached, on all nodes and in Redis.
Records stay as they are, and claims given before can be finished. It takes 3
seconds: afterwards no node acts by what was before. Raised again, it only costs
what was cached since.`,
		Args: arguments(),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	cmd.Flags().StringVar(&request.Reason, "reason", "", "why; kept in the log (required)")
	required(cmd, "reason")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return server.with(cmd, actMost(cmd), func(ctx context.Context, to *client) error {
			answer, err := to.admin.RaiseEpoch(ctx, request)
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				p.head("RAISED", green, "nothing that was cached before is believed any more")
				p.field("epoch", printable(answer.GetEpoch()))
			})
		})
	}
	return cmd
}

// actMost is what an act that waits for all nodes may take on top of the usual.
func actMost(cmd *cobra.Command) time.Duration {
	if cmd.Flags().Changed("timeout") {
		return 0
	}
	return claim.BelievedFor
}

func onOrOff(on bool) string {
	if on {
		return "ON"
	}
	return "OFF"
}

// firstArgument makes the shell complete a command's first argument with words.
func firstArgument(words []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}
