package main

import "github.com/spf13/cobra"

// serverCommands are the commands that run the service.
func serverCommands() []*cobra.Command {
	return []*cobra.Command{newDevCommand(), newServeCommand(), newConfigCommand()}
}
