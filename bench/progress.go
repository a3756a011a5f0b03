package main

import (
	"fmt"
	"io"
	"os"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// progress tells what goes on: a bar on a terminal, else a line a slice if that is asked
// for.
type progress struct {
	to      io.Writer
	verbose bool
	bar     *progressbar.ProgressBar // nil without a terminal
}

func newProgress(to io.Writer, verbose bool) *progress {
	p := &progress{to: to, verbose: verbose}
	if f, ok := to.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.bar = progressbar.NewOptions(1, progressbar.OptionSetWriter(to), progressbar.OptionClearOnFinish(),
			progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true))
	}
	return p
}

func (p *progress) Expect(slices int) {
	if p.bar != nil {
		p.bar.ChangeMax(slices)
	}
}

func (p *progress) Slice(text string) {
	if p.verbose {
		p.clear()
		fmt.Fprintln(p.to, text)
	}
	if p.bar != nil {
		_ = p.bar.Add(1) // it is only shown
	}
}

func (p *progress) Say(format string, args ...any) {
	p.clear()
	fmt.Fprintf(p.to, format+"\n", args...)
}

func (p *progress) clear() {
	if p.bar != nil {
		_ = p.bar.Clear() // it is only shown
	}
}

// done takes the bar away; it may be called more than once.
func (p *progress) done() {
	p.clear()
	p.bar = nil
}
