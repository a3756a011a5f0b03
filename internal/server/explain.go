package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/contractjson"
)

// What protojson says of a body that it cannot read is short, and names no field
// but at the end of a path. Here the body is looked at again, member by member, to
// say which is wrong and how it is written. It costs a second reading of a body that
// is refused anyway.

// explain returns the error of a body that protojson refused with err.
func explain(body []byte, m proto.Message, err error) *claim.Error {
	message := m.ProtoReflect()
	if wrong := lookInto(body, message.Type(), place{}); wrong != nil {
		return wrong
	}
	return refuse(claim.RequestInvalid, "", fmt.Sprintf("the body is not a %s as JSON: %s", message.Descriptor().Name(), tidy(err)))
}

// place is where in a body a value stands: as the caller wrote it, and by the names
// of the contract.
type place struct{ written, field string }

func (p place) member(written string, fd protoreflect.FieldDescriptor) place {
	join := func(path, name string) string {
		if path == "" {
			return name
		}
		return path + "." + name
	}
	return place{join(p.written, written), join(p.field, string(fd.Name()))}
}

func (p place) element(i int) place {
	index := "[" + strconv.Itoa(i) + "]"
	return place{p.written + index, p.field + index}
}

func (p place) entry(name string) place {
	key := fmt.Sprintf("[%.40q]", name)
	return place{p.written + key, p.field + key}
}

func (p place) wrong(format string, args ...any) *claim.Error {
	what := fmt.Sprintf(format, args...)
	if p.written == "" {
		return refuse(claim.RequestInvalid, "", "the body "+what)
	}
	return refuse(claim.RequestInvalid, p.field, p.written+" "+what)
}

// lookInto returns what is wrong with an object as a message of this type; nil if
// nothing was found.
func lookInto(object []byte, t protoreflect.MessageType, at place) *claim.Error {
	all, err := members(object)
	if err != nil {
		if kindOf(object) != '{' && json.Valid(object) {
			return at.wrong("must be an object, {...}, and is %s", shown(object))
		}
		return nil // not JSON: the decoder says where
	}
	d := t.Descriptor()
	seen := map[protoreflect.FullName]string{}
	for _, m := range all {
		fd := d.Fields().ByJSONName(m.name)
		if fd == nil {
			fd = d.Fields().ByTextName(m.name)
		}
		if fd == nil {
			return unknownMember(d, m.name, at)
		}
		here := at.member(m.name, fd)
		if _, twice := seen[fd.FullName()]; twice {
			return here.wrong("is there twice: send it once")
		}
		seen[fd.FullName()] = m.name
		if kindOf(m.value) == 'n' { // null is as if it were left out
			continue
		}
		if one := fd.ContainingOneof(); one != nil && !one.IsSynthetic() {
			if other := seen[one.FullName()]; other != "" {
				return here.wrong("and %s exclude each other: send one of them", other)
			}
			seen[one.FullName()] = m.name
		}
		if wrong := lookAt(m.value, t, fd, here); wrong != nil {
			return wrong
		}
	}
	return nil
}

// lookAt returns what is wrong with one member's value.
func lookAt(value []byte, t protoreflect.MessageType, fd protoreflect.FieldDescriptor, at place) *claim.Error {
	// What this decides is right; the rest only finds words for it.
	try := func(value []byte) error {
		return contractjson.Unmarshal(fmt.Appendf(nil, "{%q:%s}", fd.JSONName(), value), t.New().Interface())
	}
	err := try(value)
	if err == nil {
		return nil
	}
	empty := t.New().NewField(fd)
	switch {
	case fd.IsMap():
		all, none := members(value)
		if none != nil {
			return at.wrong(`must be an object, {"name": value}, and is %s`, shown(value))
		}
		for _, m := range all {
			name, _ := json.Marshal(m.name) // a string always can be
			if err := try(fmt.Appendf(nil, "{%s:%s}", name, m.value)); err != nil {
				return words(m.value, fd.MapValue(), empty.Map().NewValue, at.entry(m.name), err)
			}
		}
	case fd.IsList():
		var all []json.RawMessage
		if json.Unmarshal(value, &all) != nil || all == nil {
			return at.wrong("must be a list, [...], and is %s", shown(value))
		}
		for i, v := range all {
			if err := try(fmt.Appendf(nil, "[%s]", v)); err != nil {
				return words(v, fd, empty.List().NewElement, at.element(i), err)
			}
		}
	default:
		return words(value, fd, func() protoreflect.Value { return empty }, at, err)
	}
	return at.wrong("cannot be read: %s", withoutLine(err))
}

// words says what is wrong with a single value, of which err tells that something
// is. made makes an empty one.
func words(value []byte, fd protoreflect.FieldDescriptor, made func() protoreflect.Value, at place, err error) *claim.Error {
	switch fd.Kind() {
	case protoreflect.EnumKind:
		return at.wrong("must be one of %s, and is %s", strings.Join(namesOf(fd.Enum()), ", "), shown(value))
	case protoreflect.BytesKind:
		return at.wrong("must be bytes, which are written as base64 in quotes, and is %s", shown(value))
	case protoreflect.BoolKind:
		return at.wrong("must be true or false, and is %s", shown(value))
	case protoreflect.StringKind:
		if kindOf(value) != '"' {
			return at.wrong("must be text in quotes, and is %s", shown(value))
		}
	case protoreflect.MessageKind:
		switch d := fd.Message(); {
		case d.FullName() == "google.protobuf.Duration":
			return at.wrong(`must be a duration, which is written as seconds with an s, in quotes, like "30s" or "0.5s", and is %s`, shown(value))
		case d.FullName() == "google.protobuf.Timestamp":
			return at.wrong(`must be a time, which is written like "2031-01-31T12:00:00Z", and is %s`, shown(value))
		case d.ParentFile().Package() == dualcheckv1.File_dualcheck_v1_dedup_proto.Package():
			if wrong := lookInto(value, made().Message().Type(), at); wrong != nil {
				return wrong
			}
		}
	}
	return at.wrong("cannot be read: %s", withoutLine(err))
}

// unknownMember names what the message has.
func unknownMember(d protoreflect.MessageDescriptor, name string, at place) *claim.Error {
	var all []string
	for i := range d.Fields().Len() {
		all = append(all, d.Fields().Get(i).JSONName())
	}
	where := ""
	if at.written != "" {
		where = " of " + at.written
	}
	field := cut(name)
	if at.field != "" {
		field = at.field + "." + field
	}
	return refuse(claim.RequestInvalid, field, fmt.Sprintf("there is no field %q%s; the fields of a %s are %s", cut(name), where, d.Name(), strings.Join(all, ", ")))
}

// namesOf lists an enum's values, but for that which stands for none.
func namesOf(d protoreflect.EnumDescriptor) []string {
	var all []string
	for i := range d.Values().Len() {
		if v := d.Values().Get(i); v.Number() != 0 {
			all = append(all, string(v.Name()))
		}
	}
	return all
}

// member is a name and its value in an object.
type member struct {
	name  string
	value json.RawMessage
}

// members takes an object apart, in its order, with names that are there twice.
func members(object []byte) ([]member, error) {
	in := json.NewDecoder(bytes.NewReader(object))
	if first, err := in.Token(); err != nil {
		return nil, err
	} else if first != json.Delim('{') {
		return nil, errors.New("no object")
	}
	var all []member
	for in.More() {
		name, err := in.Token()
		if err != nil {
			return nil, err
		}
		m := member{name: fmt.Sprint(name)} // the decoder takes nothing but a string
		if err := in.Decode(&m.value); err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	_, err := in.Token()
	return all, err
}

// kindOf is a value's first character, which tells what it is.
func kindOf(value []byte) byte {
	if value = bytes.TrimSpace(value); len(value) > 0 {
		return value[0]
	}
	return 0
}

// shown is a value as it was sent, or its beginning.
func shown(value []byte) string {
	switch kindOf(value) {
	case '{':
		return "an object"
	case '[':
		return "a list"
	}
	return cut(string(bytes.TrimSpace(value)))
}

// cut is the beginning of what may be very long.
func cut(s string) string { return cutTo(40, s) }

func cutTo(most int, s string) string {
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "\ufffd")
}

// withoutLine is the text of a decoder's error without its place, which is of
// something that was made here.
func withoutLine(err error) string { return inLine.ReplaceAllString(tidy(err), "") }

var inLine = regexp.MustCompile(`^\(line \d+:\d+\): | \(line \d+:\d+\)`)
