package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
)

// choice is a flag that takes one of a few words.
type choice struct {
	value string
	of    []string
}

func (c *choice) String() string { return c.value }

// Type is how help shows it: a|b|c.
func (c *choice) Type() string { return strings.Join(c.of, "|") }

// Set takes a word in any case.
func (c *choice) Set(s string) error {
	word := strings.ToLower(s)
	if !slices.Contains(c.of, word) {
		return fmt.Errorf("it must be one of: %s", strings.Join(c.of, ", "))
	}
	c.value = word
	return nil
}

// choiceFlag adds a choice without a default and its completions.
func choiceFlag(cmd *cobra.Command, name, usage string, of ...string) *choice {
	c := &choice{of: of}
	cmd.Flags().Var(c, name, usage)
	completeWith(cmd, name, of...)
	return c
}

// completeWith makes the shell complete a flag with words.
func completeWith(cmd *cobra.Command, name string, words ...string) {
	// It fails only for a flag that was not added.
	_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// fileFlag makes the shell complete a flag with file names.
func fileFlag(cmd *cobra.Command, name string) {
	_ = cmd.RegisterFlagCompletionFunc(name, func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return nil, cobra.ShellCompDirectiveDefault
	})
}

// changedDuration is a duration flag's value; nil if it was not given.
func changedDuration(cmd *cobra.Command, name string, value time.Duration) *durationpb.Duration {
	if !cmd.Flags().Changed(name) {
		return nil
	}
	return durationpb.New(value)
}

// parsePairs reads name=value words of a flag.
func parsePairs(flag string, words []string) (map[string]string, error) {
	if len(words) == 0 {
		return nil, nil
	}
	pairs := make(map[string]string, len(words))
	for _, word := range words {
		name, value, found := strings.Cut(word, "=")
		if !found || name == "" {
			return nil, usageErrorf("--%s %q is not name=value", flag, word)
		}
		if _, twice := pairs[name]; twice {
			return nil, usageErrorf("--%s names %q twice", flag, name)
		}
		pairs[name] = value
	}
	return pairs, nil
}

// parseDigest reads a SHA-256 of a flag: 64 hexadecimal digits, or base64 in any
// of its forms.
func parseDigest(flag, text string) ([]byte, error) {
	if text == "" {
		return nil, nil
	}
	if raw, err := hex.DecodeString(text); err == nil && len(raw) == sha256.Size {
		return raw, nil
	}
	plain := strings.NewReplacer("-", "+", "_", "/").Replace(strings.TrimRight(text, "="))
	if raw, err := base64.RawStdEncoding.DecodeString(plain); err == nil && len(raw) == sha256.Size {
		return raw, nil
	}
	return nil, usageErrorf("--%s is not a SHA-256: 64 hexadecimal digits, or base64 of 32 bytes", flag)
}

// readFile reads a file that a flag names; "-" is the standard input.
func readFile(cmd *cobra.Command, flag, path string) ([]byte, error) {
	var raw []byte
	var err error
	if path == "-" {
		raw, err = io.ReadAll(cmd.InOrStdin())
	} else {
		raw, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, inputErrorf("read --%s: %w", flag, err)
	}
	return raw, nil
}

// inputName is what a file that a flag names is called in a sentence.
func inputName(flag, path string) string {
	if path == "-" {
		return "the standard input"
	}
	return strings.TrimSpace(flag + " " + path)
}

// oneStdin refuses a command line that takes the standard input for more than
// one thing.
func oneStdin(cmd *cobra.Command, flags ...string) error {
	var taking []string
	for _, name := range flags {
		if flag := cmd.Flags().Lookup(name); flag != nil && flag.Value.String() == "-" {
			taking = append(taking, "--"+name)
		}
	}
	if len(taking) > 1 {
		return usageErrorf("%s cannot all read the standard input", strings.Join(taking, " and "))
	}
	return nil
}

// tokenFlags are the flags that give a claim's token.
type tokenFlags struct{ token, file string }

// addTokenFlags gives a command --token and --token-file, one of which is needed.
func addTokenFlags(cmd *cobra.Command) *tokenFlags {
	t := &tokenFlags{}
	cmd.Flags().StringVar(&t.token, "token", "", "the claim's token, as begin gave it")
	cmd.Flags().StringVar(&t.file, "token-file", "", "read the token from this file; - is the standard input")
	cmd.MarkFlagsMutuallyExclusive("token", "token-file")
	cmd.MarkFlagsOneRequired("token", "token-file")
	fileFlag(cmd, "token-file")
	return t
}

// read is the token that the flags give.
func (t *tokenFlags) read(cmd *cobra.Command) (string, error) {
	if t.file == "" {
		return t.token, nil
	}
	raw, err := readFile(cmd, "token-file", t.file)
	return string(bytes.TrimSpace(raw)), err
}
