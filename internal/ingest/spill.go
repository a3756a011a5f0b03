package ingest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// spill keeps what is written to it: up to limit bytes in memory, more in a
// temporary file.
type spill struct {
	limit int
	size  int64
	head  bytes.Buffer
	file  *os.File
	// err is why not all of it was kept.
	err error
}

// Write never fails: the command that writes must not die of it. What comes
// after err is discarded.
func (s *spill) Write(p []byte) (int, error) {
	if s.err == nil {
		s.err = s.keep(p)
	}
	return len(p), nil
}

func (s *spill) keep(p []byte) error {
	if s.file == nil && s.head.Len()+len(p) > s.limit {
		file, err := os.CreateTemp("", "dualcheck-output-")
		if err != nil {
			return err
		}
		s.file = file
		if _, err := s.file.Write(s.head.Bytes()); err != nil {
			return err
		}
		s.head = bytes.Buffer{}
	}
	var n int
	var err error
	if s.file != nil {
		n, err = s.file.Write(p)
	} else {
		n, err = s.head.Write(p)
	}
	s.size += int64(n)
	return err
}

// close drops what was kept.
func (s *spill) close() {
	if s.file != nil {
		// Best effort: the file is in the system's temporary directory.
		_ = s.file.Close()
		_ = os.Remove(s.file.Name())
	}
}

// result is the output as a result: whole, or, if it went to a file, its size
// and the digest that a record of the whole would have.
func (s *spill) result(contentType string) (Output, error) {
	if s.file == nil {
		return Output{Result: &dualcheckv1.Result{ContentType: contentType, Body: s.head.Bytes()}}, nil
	}
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return Output{}, fmt.Errorf("read the command's output again: %w", err)
	}
	digest, err := digestResult(contentType, s.file, s.size)
	if err != nil {
		return Output{}, fmt.Errorf("read the command's output again: %w", err)
	}
	return Output{Omitted: &dualcheckv1.Omitted{Digest: digest, Size: s.size}}, nil
}

// digestResult is Record.digest of a result with code 0, no metadata, and the
// size bytes of body.
func digestResult(contentType string, body io.Reader, size int64) ([]byte, error) {
	h := sha256.New()
	for _, part := range []string{"result", "0", contentType, "0"} {
		addLength(h, int64(len(part)))
		h.Write([]byte(part))
	}
	addLength(h, size)
	n, err := io.Copy(h, body)
	if err == nil && n != size {
		err = errors.New("it changed while it was read")
	}
	return h.Sum(nil), err
}

func addLength(h hash.Hash, n int64) {
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(n))
	h.Write(length[:])
}
