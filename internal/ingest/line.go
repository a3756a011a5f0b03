package ingest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// maxLine is how long a line may be, in bytes.
const maxLine = 16 << 20

// name names a piece of work.
type name struct{ namespace, key string }

// line is one line of the input.
type line struct {
	// number counts from 1, empty lines included; size is its bytes with the
	// line feed.
	number, size int
	name         name
	operation    string
	body         []byte
	// err says why it cannot be judged.
	err error
}

// readLines sends each line that is not empty, in order, until the input ends
// (then it returns nil), fails, or ctx is done.
func readLines(ctx context.Context, input io.Reader, lines chan<- line) error {
	in := bufio.NewReaderSize(input, 1<<16)
	more := true
	for number := 1; more && ctx.Err() == nil; number++ {
		raw, size, err := readLine(in)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("read line %d: %w", number, err)
		}
		more = err == nil
		ln := line{err: fmt.Errorf("the line is longer than %d MiB", maxLine>>20)}
		if size <= maxLine {
			if len(bytes.TrimSpace(raw)) == 0 {
				continue
			}
			ln = parseLine(raw)
		}
		ln.number, ln.size = number, size
		select {
		case lines <- ln:
		case <-ctx.Done():
		}
	}
	return nil
}

// readLine reads up to and including the next line feed. size is how much that
// was; of a line longer than maxLine only a part is kept.
func readLine(in *bufio.Reader) (raw []byte, size int, err error) {
	for {
		part, err := in.ReadSlice('\n')
		size += len(part)
		if size <= maxLine {
			raw = append(raw, part...)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return raw, size, err
		}
	}
}

// parseLine reads one line: an object with namespace, key and body, and it may
// have operation. Members with other names are the sender's own.
func parseLine(raw []byte) line {
	var members struct {
		Namespace string         `json:"namespace"`
		Key       string         `json:"key"`
		Operation string         `json:"operation"`
		Body      jsontext.Value `json:"body"`
	}
	if err := json.Unmarshal(raw, &members); err != nil {
		return line{err: fmt.Errorf("not a line of JSON: %w", plainError(err))}
	}
	ln := line{
		name:      name{members.Namespace, members.Key},
		operation: members.Operation,
		body:      members.Body,
	}
	var missing []string
	if members.Namespace == "" {
		missing = append(missing, "namespace")
	}
	if members.Key == "" {
		missing = append(missing, "key")
	}
	if members.Body == nil {
		missing = append(missing, "body")
	}
	if missing != nil {
		ln.err = fmt.Errorf("it has no %s", strings.Join(missing, ", no "))
	}
	return ln
}

// plainError leaves out the names of Go's types and packages.
func plainError(err error) error {
	if syntax, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		at := ""
		if syntax.JSONPointer != "" {
			at = fmt.Sprintf(" at %q", string(syntax.JSONPointer))
		}
		return fmt.Errorf("%w%s (byte %d)", syntax.Err, at, syntax.ByteOffset)
	}
	if semantic, ok := errors.AsType[*json.SemanticError](err); ok {
		if semantic.JSONPointer == "" {
			return errors.New("it is not an object")
		}
		return fmt.Errorf("%s must be a string", semantic.JSONPointer.LastToken())
	}
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return errors.New("it ends too soon")
	}
	return err
}
