package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// version and commit are set by the linker in a release; else the build's own
// information is used.
var version, commit string

// build says what this program is.
type build struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go_version"`
	// Proto is the package of the contract, Storage the format of what etcd
	// holds.
	Proto   string `json:"proto_package"`
	Storage int    `json:"storage_format"`
}

func buildInfo() build {
	b := build{
		Version: version,
		Commit:  commit,
		Go:      runtime.Version(),
		Proto:   string(dualcheckv1.File_dualcheck_v1_dedup_proto.Package()),
		Storage: layout.Format,
	}
	info, ok := debug.ReadBuildInfo()
	if ok && b.Version == "" {
		b.Version = info.Main.Version
	}
	if ok && b.Commit == "" {
		for _, setting := range info.Settings {
			if setting.Key == "vcs.revision" {
				b.Commit = setting.Value
			}
		}
	}
	if b.Version == "" {
		b.Version = "(devel)"
	}
	if b.Commit == "" {
		b.Commit = "unknown"
	}
	return b
}

func newVersionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the version of this program and of its formats",
		Args:  arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := buildInfo()
			return printValue(cmd, b, func(p *page) {
				p.line("dualcheck", b.Version)
				p.line("commit", b.Commit)
				p.line("go", b.Go)
				p.line("contract", b.Proto)
				p.line("storage", fmt.Sprintf("format %d", b.Storage))
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}
