package main

import (
	"os"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/dualcheck/dualcheck/internal/telemetry"
)

func newServeCommand() *cobra.Command {
	checkOnly := false
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run a server on an etcd cluster of your own",
		Long: `Runs one node on the etcd cluster that --etcd-endpoints names. Any number of
nodes may run on one etcd; they are equal, and any of them serves any key.

Every setting can be given as a flag, in the environment (--grpc-addr is
DUALCHECK_GRPC_ADDR) or in a YAML file (grpc-addr: ...); flags go before the
environment, and that before the file. Settings that do not exist are refused.
config print shows what comes of it.

The first interrupt stops it in order: health says no, new work is refused,
what is under way ends. The second ends it at once.`,
		Example: `  dualcheck serve --etcd-endpoints 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379
  DUALCHECK_ETCD_ENDPOINTS=localhost:2379 dualcheck serve --log-format json
  dualcheck serve --config /etc/dualcheck.yaml --check-config`,
		Args: arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if checkOnly {
				return checkConfig(cmd)
			}
			l, err := loadSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return lineByLine(cmd, err)
			}
			log, err := telemetry.NewLogger(cmd.ErrOrStderr(), telemetry.LogFormat(l.LogFormat), l.LogLevel)
			if err != nil {
				return err
			}
			e, err := l.listen()
			if err != nil {
				return err
			}
			collectLess()
			return runServer(cmd.Context(), l.settings, e, log, func() error { return nil })
		},
	}
	settingsFlags(cmd)
	cmd.Flags().BoolVar(&checkOnly, "check-config", false, "look at the settings and the files they name, and do nothing else")
	return cmd
}

// collectLess has a node collect garbage a quarter as often as Go would: little of what a
// call makes lives longer than it, and at Go's own pace a fifth of the processor goes into
// collecting it (docs/performance.md). GOGC says otherwise, and GOMEMLIMIT bounds what it
// costs in memory.
func collectLess() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
}
