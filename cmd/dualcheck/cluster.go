package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

func newClusterCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Show the nodes, the clock and etcd",
		Long: `Show the nodes, the clock and etcd, as one node knows them. If no etcd answers it,
it shows what it knows and the exit status is 10.`,
		Args: arguments(),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return server.with(cmd, 0, func(ctx context.Context, to *client) error {
			answer, err := to.admin.GetCluster(ctx, &dualcheckv1.GetClusterRequest{})
			if err != nil {
				return err
			}
			if err := printMessage(cmd, answer, func(p *page) { printCluster(p, answer) }); err != nil {
				return err
			}
			for _, m := range answer.GetEtcdMembers() {
				if m.GetError() == "" {
					return nil
				}
			}
			return &exitError{code: exitUnavailable, err: fmt.Errorf("no etcd answers node %s", answer.GetNode())}
		})
	}
	return cmd
}

func printCluster(p *page, c *dualcheckv1.GetClusterResponse) {
	p.line("NODE", "VERSION", "GRPC", "STARTED", "ROLE")
	for _, n := range c.GetNodes() {
		var notes []string
		if n.GetId() == c.GetNode() {
			notes = append(notes, "answers")
		}
		if n.GetTicks() {
			notes = append(notes, "ticks")
		}
		p.line(printable(n.GetId()), dash(printable(n.GetVersion())), dash(printable(n.GetGrpcAddr())), dash(clockTime(n.GetStartedAt())), dash(strings.Join(notes, ", ")))
	}
	p.line("")
	p.line("ETCD", "VERSION", "SIZE", "IN USE", "QUOTA", "NOTE")
	for _, m := range c.GetEtcdMembers() {
		if m.GetError() != "" {
			p.line(printable(m.GetEndpoint()), "-", "-", "-", "-", printable(oneLine(m.GetError())))
			continue
		}
		var notes []string
		if m.GetLeader() {
			notes = append(notes, "leader")
		}
		notes = append(notes, m.GetAlarms()...)
		p.line(printable(m.GetEndpoint()), dash(printable(m.GetVersion())), size(m.GetDbSizeBytes()), size(m.GetDbInUseBytes()),
			size(m.GetQuotaBytes()), dash(printable(strings.Join(notes, ", "))))
	}
	p.line("")
	if c.GetClock() == nil {
		p.field("cluster time", "not known to this node")
		p.field("applied revision", fmt.Sprint(c.GetAppliedRevision()))
		return
	}
	p.field("cluster time", fmt.Sprintf("%s, tick %d, %s ago", shortDuration(c.GetClock().GetTime().AsDuration()),
		c.GetClock().GetTickVersion(), shortDuration(c.GetClock().GetAge().AsDuration())))
	p.field("guard", fmt.Sprint(c.GetGuardRevision()))
	p.field("epoch", printable(c.GetEpoch()))
	p.field("fence base", fmt.Sprint(c.GetFenceBase()))
	p.field("applied revision", fmt.Sprint(c.GetAppliedRevision()))
}

// size is a number of bytes for people.
func size(n int64) string {
	if n <= 0 {
		return "-"
	}
	return humanize.IBytes(uint64(n))
}
