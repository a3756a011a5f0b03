package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/protobuf/proto"

	"github.com/dualcheck/dualcheck/internal/contractjson"
)

// addOutputFlag gives a command -o.
func addOutputFlag(cmd *cobra.Command) {
	cmd.Flags().VarP(&choice{value: "text", of: []string{"text", "json"}}, "output", "o", "text or json; with json, errors too are JSON, on the standard error")
	completeWith(cmd, "output", "text", "json")
}

// wantsJSON says whether a command was asked for JSON.
func wantsJSON(cmd *cobra.Command) bool {
	if cmd == nil {
		return false
	}
	flag := cmd.Flags().Lookup("output")
	return flag != nil && flag.Value.String() == "json"
}

// asksJSON says whether a command line asks for JSON, also one that could not be
// read to its end.
func asksJSON(args []string) bool {
	for i, arg := range args {
		switch arg {
		case "--":
			return false
		case "-o=json", "-ojson", "--output=json":
			return true
		case "-o", "--output":
			if i+1 < len(args) && args[i+1] == "json" {
				return true
			}
		}
	}
	return false
}

// warn tells on the standard error of something that is no error.
func warn(cmd *cobra.Command, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if wantsJSON(cmd) {
		enc := json.NewEncoder(cmd.ErrOrStderr())
		enc.SetEscapeHTML(false)
		// Nobody can be told of a standard error that cannot be written to.
		_ = enc.Encode(map[string]string{"warning": text})
		return
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "warning: "+printable(text))
}

// printNone prints a list of nothing: an empty one as JSON, a word to people.
func printNone(cmd *cobra.Command, name string) error {
	if wantsJSON(cmd) {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "{%q:[]}\n", name)
		return err
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "no "+name)
	return nil
}

// printMessage writes an answer: as JSON if that was asked for, else by text.
func printMessage(cmd *cobra.Command, m proto.Message, text func(p *page)) error {
	if wantsJSON(cmd) {
		raw, err := messageJSON(m)
		if err != nil {
			return err
		}
		_, err = cmd.OutOrStdout().Write(append(raw, '\n'))
		return err
	}
	p := newPage(cmd.OutOrStdout())
	text(p)
	return p.flush()
}

// printValue is printMessage for what is not a message of the contract.
func printValue(cmd *cobra.Command, v any, text func(p *page)) error {
	if wantsJSON(cmd) {
		enc := json.NewEncoder(cmd.OutOrStdout())
		enc.SetEscapeHTML(false)
		return enc.Encode(v)
	}
	p := newPage(cmd.OutOrStdout())
	text(p)
	return p.flush()
}

// messageJSON is a message as the contract's JSON, on one line.
func messageJSON(m proto.Message) ([]byte, error) {
	raw, err := contractjson.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("write the answer as JSON: %w", err)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, raw); err != nil {
		return nil, fmt.Errorf("write the answer as JSON: %w", err)
	}
	return compact.Bytes(), nil
}

// page is text for people.
type page struct {
	to    *tabwriter.Writer
	color bool
}

func newPage(w io.Writer) *page {
	file, ok := w.(*os.File)
	return &page{
		to:    tabwriter.NewWriter(w, 0, 8, 2, ' ', 0),
		color: ok && term.IsTerminal(int(file.Fd())) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb",
	}
}

func (p *page) flush() error { return p.to.Flush() }

// line writes one line; cells are aligned with those of the lines around it.
func (p *page) line(cells ...string) {
	fmt.Fprintln(p.to, strings.Join(cells, "\t"))
}

// field writes a name and its value, if it has one.
func (p *page) field(name, value string) {
	if value != "" {
		p.line("  "+name, value)
	}
}

// head writes a verdict or state and what it means.
func (p *page) head(word, color, meaning string) {
	if p.color {
		word = "\x1b[" + color + "m" + word + "\x1b[0m"
	}
	p.line(word + ": " + meaning)
}

// Colours of heads.
const (
	green  = "1;32"
	yellow = "1;33"
	red    = "1;31"
)

// printable writes control characters as escapes, so that nothing that a stranger
// stored moves the cursor.
func printable(s string) string {
	clean := func(r rune) bool { return unicode.IsPrint(r) || r == ' ' }
	if utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return !clean(r) }) < 0 {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		if clean(r) && (r != utf8.RuneError || size > 1) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteToASCII(s[:size]), `"`))
		}
		s = s[size:]
	}
	return b.String()
}

// shellWord quotes a word for a POSIX shell, if it needs it.
func shellWord(s string) string {
	plain := func(r rune) bool {
		return r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("@%+=:,./_-", r))
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
