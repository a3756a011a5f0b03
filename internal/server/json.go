package server

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/contractjson"
)

// showable reports FAILURE_INVALID for details that could not be written as JSON:
// what is stored is replayed over both ways. Their size has been looked at before.
func showable(details []*anypb.Any) error {
	bad := func(format string, args ...any) error {
		return refuse(claim.FailureInvalid, "failure.details", fmt.Sprintf(format, args...))
	}
	for _, d := range details {
		if d.GetTypeUrl() == "" {
			return bad("a detail has no type: set its type_url (in JSON @type)")
		}
		if err := contractjson.Check(d); err != nil {
			return bad("a detail is no %s: %s; send the bytes of its type, or another type", d.GetTypeUrl(), tidy(err))
		}
	}
	return nil
}

// codec is contractjson as the gateway wants it.
type codec struct{}

func (codec) ContentType(any) string { return "application/json" }

func (codec) Marshal(v any) ([]byte, error) {
	switch v := v.(type) {
	case proto.Message:
		return contractjson.Marshal(v)
	case map[string]proto.Message: // how the gateway ends a stream in error
		if e, ok := v["error"]; ok && len(v) == 1 {
			return contractjson.Marshal(e)
		}
	}
	return nil, fmt.Errorf("%T is no message", v)
}

func (codec) Unmarshal(b []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", v)
	}
	return contractjson.Unmarshal(b, m)
}

func (c codec) NewDecoder(r io.Reader) runtime.Decoder {
	return runtime.DecoderFunc(func(v any) error {
		err := c.decode(r, v)
		if b, ok := r.(*body); ok && !errors.Is(err, io.EOF) {
			b.err = err // the gateway keeps no more than its text
		}
		return err
	})
}

// body is a request's body, and what was wrong with it.
type body struct {
	io.ReadCloser
	err error
}

func (c codec) decode(r io.Reader, v any) error {
	b, err := io.ReadAll(r)
	if err != nil {
		if over, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return &claim.Error{Reason: claim.RequestInvalid, Err: over, Message: fmt.Sprintf(
				"the body is larger than %s, the most that is read: send less at once, or store a large result elsewhere and send its digest and size (omitted)", size(over.Limit))}
		}
		return refuse(claim.RequestInvalid, "", fmt.Sprintf("the body could not be read to its end: send the call again (%v)", err))
	}
	if len(bytes.TrimSpace(b)) == 0 {
		return io.EOF // an empty message
	}
	if crowdJSON(b) {
		return crowded()
	}
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", v)
	}
	if err := contractjson.Unmarshal(b, m); err != nil {
		return explain(b, m, err)
	}
	return nil
}

// size tells bytes as people do.
func size(bytes int64) string {
	if bytes%(1<<20) == 0 {
		return fmt.Sprintf("%d MiB", bytes>>20)
	}
	return fmt.Sprintf("%d bytes", bytes)
}

func (c codec) NewEncoder(w io.Writer) runtime.Encoder {
	return runtime.EncoderFunc(func(v any) error {
		b, err := c.Marshal(v)
		if err != nil {
			return err
		}
		_, err = w.Write(append(b, '\n'))
		return err
	})
}

// tidy returns the text of an error of the protobuf library, which takes care to
// look different each time.
func tidy(err error) string {
	return strings.TrimPrefix(strings.ReplaceAll(err.Error(), "\u00a0", " "), "proto: ")
}
