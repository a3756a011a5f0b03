// Package contractjson writes and reads the contract's messages as JSON, for the
// server and for its clients alike. What it lets in (see Check) it can always show,
// and what it shows it reads back as it was: an Any of a type that it knows field by
// field, one of any other type as its bytes.
package contractjson

import (
	"sync"

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

// Check returns why a detail could not be written as JSON, nil if it can. It is for
// whoever stores details that came as protobuf.
func Check(detail *anypb.Any) error {
	if !isKnown(detail.GetTypeUrl()) {
		return nil
	}
	_, err := encoder.Marshal(detail)
	return err
}

// Marshal writes a message as protojson does; see opaque for what is in an Any.
func Marshal(m proto.Message) ([]byte, error) {
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

// Unmarshal reads what Marshal writes; fields that are not known are refused.
func Unmarshal(b []byte, m proto.Message) error {
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
