package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// newManCommand writes the manual pages; `make man` runs it.
func newManCommand() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "man --dir DIR",
		Short: "Write the manual pages into a folder",
		Args:  arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return fmt.Errorf("make --dir: %w", err)
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true
			// Without a title each page has its command's.
			header := &doc.GenManHeader{Section: "1", Source: "dualcheck " + buildInfo().Version, Manual: "dualcheck"}
			if err := doc.GenManTree(root, header, dir); err != nil {
				return fmt.Errorf("write the manual pages: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "the folder; made if it is not there (required)")
	required(cmd, "dir")
	return cmd
}
