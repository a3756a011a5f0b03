package server

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// known holds the types whose values JSON shows field by field: google.rpc's error
// details and the well-known types. None of them holds an Any, so that there is
// nothing within a known one that is not known. A value of any other type is its
// bytes in base64.
var known = func() *protoregistry.Types {
	types := new(protoregistry.Types)
	for _, m := range []proto.Message{
		&errdetails.ErrorInfo{}, &errdetails.RetryInfo{}, &errdetails.DebugInfo{}, &errdetails.QuotaFailure{},
		&errdetails.PreconditionFailure{}, &errdetails.BadRequest{}, &errdetails.RequestInfo{},
		&errdetails.ResourceInfo{}, &errdetails.Help{}, &errdetails.LocalizedMessage{},
		&durationpb.Duration{}, &timestamppb.Timestamp{}, &emptypb.Empty{}, &fieldmaskpb.FieldMask{},
		&structpb.Struct{}, &structpb.Value{}, &structpb.ListValue{},
		&wrapperspb.BoolValue{}, &wrapperspb.BytesValue{}, &wrapperspb.StringValue{},
		&wrapperspb.DoubleValue{}, &wrapperspb.FloatValue{}, &wrapperspb.Int32Value{},
		&wrapperspb.Int64Value{}, &wrapperspb.UInt32Value{}, &wrapperspb.UInt64Value{},
	} {
		if err := types.RegisterMessage(m.ProtoReflect().Type()); err != nil {
			panic(err) // the same type twice in the list above
		}
	}
	return types
}()

func isKnown(url string) bool {
	_, err := known.FindMessageByURL(url)
	return err == nil
}

// opaque resolves what is known, and says of every other URL that it is a
// BytesValue: protojson writes one as {"@type": URL, "value": base64}.
type opaque struct{ *protoregistry.Types }

func (o opaque) FindMessageByURL(url string) (protoreflect.MessageType, error) {
	if t, err := o.Types.FindMessageByURL(url); err == nil {
		return t, nil
	}
	return (&wrapperspb.BytesValue{}).ProtoReflect().Type(), nil
}

var (
	encoder = protojson.MarshalOptions{Resolver: opaque{known}}
	decoder = protojson.UnmarshalOptions{Resolver: opaque{known}}
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
		if !isKnown(d.GetTypeUrl()) {
			continue
		}
		if _, err := encoder.Marshal(d); err != nil {
			return bad("a detail is no %s: %s; send the bytes of its type, or another type", d.GetTypeUrl(), tidy(err))
		}
	}
	return nil
}

// marshalJSON writes a message as protojson does; see opaque for what is in an Any.
func marshalJSON(m proto.Message) ([]byte, error) {
	if mayHoldAny(m.ProtoReflect().Descriptor()) {
		own := m
		cloned := false
		err := eachAny(m.ProtoReflect(), func(a *anypb.Any) error {
			if !isKnown(a.GetTypeUrl()) {
				cloned = true
			}
			return nil
		})
		if err == nil && cloned {
			own = proto.Clone(m)
			err = eachAny(own.ProtoReflect(), wrap)
		}
		if err != nil {
			return nil, err
		}
		m = own
	}
	return encoder.Marshal(m)
}

// unmarshalJSON reads what marshalJSON writes; fields that are not known are refused.
func unmarshalJSON(b []byte, m proto.Message) error {
	if err := decoder.Unmarshal(b, m); err != nil {
		return err
	}
	if !mayHoldAny(m.ProtoReflect().Descriptor()) {
		return nil
	}
	return eachAny(m.ProtoReflect(), unwrap)
}

// wrap puts the bytes of an unknown Any into a BytesValue; unwrap takes them out.
func wrap(a *anypb.Any) error {
	if a.GetTypeUrl() == "" || isKnown(a.GetTypeUrl()) {
		return nil
	}
	b, err := proto.Marshal(wrapperspb.Bytes(a.GetValue()))
	a.Value = b
	return err
}

func unwrap(a *anypb.Any) error {
	if a.GetTypeUrl() == "" || isKnown(a.GetTypeUrl()) {
		return nil
	}
	var v wrapperspb.BytesValue
	if err := proto.Unmarshal(a.GetValue(), &v); err != nil {
		return err
	}
	a.Value = v.GetValue()
	return nil
}

var anyName = (&anypb.Any{}).ProtoReflect().Descriptor().FullName()

// eachAny calls f for every Any in m, m itself included.
func eachAny(m protoreflect.Message, f func(*anypb.Any) error) (err error) {
	if a, ok := m.Interface().(*anypb.Any); ok {
		return f(a)
	}
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			if holdsAny(fd.MapValue()) {
				v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
					err = eachAny(v.Message(), f)
					return err == nil
				})
			}
		case !holdsAny(fd):
		case fd.IsList():
			for i := 0; i < v.List().Len() && err == nil; i++ {
				err = eachAny(v.List().Get(i).Message(), f)
			}
		default:
			err = eachAny(v.Message(), f)
		}
		return err == nil
	})
	return err
}

func holdsAny(fd protoreflect.FieldDescriptor) bool {
	return fd.Message() != nil && mayHoldAny(fd.Message())
}

var anyHolders sync.Map // protoreflect.FullName → bool

// mayHoldAny reports whether a message of this type can hold an Any at any depth.
func mayHoldAny(d protoreflect.MessageDescriptor) bool {
	if held, ok := anyHolders.Load(d.FullName()); ok {
		return held.(bool)
	}
	held := searchAny(d, map[protoreflect.FullName]bool{})
	anyHolders.Store(d.FullName(), held)
	return held
}

func searchAny(d protoreflect.MessageDescriptor, met map[protoreflect.FullName]bool) bool {
	if d.FullName() == anyName {
		return true
	}
	if met[d.FullName()] {
		return false
	}
	met[d.FullName()] = true
	for i := range d.Fields().Len() {
		if m := d.Fields().Get(i).Message(); m != nil && searchAny(m, met) {
			return true
		}
	}
	return false
}

// codec is marshalJSON and unmarshalJSON as the gateway wants them.
type codec struct{}

func (codec) ContentType(any) string { return "application/json" }

func (codec) Marshal(v any) ([]byte, error) {
	switch v := v.(type) {
	case proto.Message:
		return marshalJSON(v)
	case map[string]proto.Message: // how the gateway ends a stream in error
		if e, ok := v["error"]; ok && len(v) == 1 {
			return marshalJSON(e)
		}
	}
	return nil, fmt.Errorf("%T is no message", v)
}

func (codec) Unmarshal(b []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", v)
	}
	return unmarshalJSON(b, m)
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
	if err := unmarshalJSON(b, m); err != nil {
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
