package server

import (
	"bytes"
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// rawMessage is sent as the bytes it is.
type rawMessage []byte

type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) {
	m, ok := v.(rawMessage)
	if !ok {
		return nil, fmt.Errorf("%T is not raw", v)
	}
	return m, nil
}

func (rawCodec) Unmarshal(b []byte, v any) error {
	*v.(*rawMessage) = append(rawMessage(nil), b...)
	return nil
}

var (
	_        encoding.Codec = rawCodec{}
	forceRaw                = grpc.ForceCodec(rawCodec{})
)

// appendCall appends a call of Begin to an encoded SessionRequest.
func appendCall(b []byte, id uint64, begin []byte) []byte {
	n := protowire.SizeTag(1) + protowire.SizeVarint(id) + protowire.SizeTag(2) + protowire.SizeBytes(len(begin))
	b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.BytesType), uint64(n))
	b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.VarintType), id)
	return protowire.AppendBytes(protowire.AppendTag(b, 2, protowire.BytesType), begin)
}

var beginTemplate, beginAt = func() ([]byte, [2]int) {
	b, err := proto.Marshal(newKey(0))
	if err != nil {
		panic(err)
	}
	id := []byte(newKey(0).GetKey())
	first := bytes.Index(b, id)
	return b, [2]int{first, first + 1 + bytes.Index(b[first+1:], id)}
}()

// newKeyBytes is newKey, encoded; good until the next.
func newKeyBytes(i int) []byte {
	for _, at := range beginAt {
		for d, n := len(newKey0)-1, i; d >= len(newKey0)-12; d, n = d-1, n/10 {
			beginTemplate[at+d] = byte('0' + n%10)
		}
	}
	return beginTemplate
}

const newKey0 = "supplier-000000000000"

// countAnswers is how many answers to Begin are in an encoded SessionResponse.
func countAnswers(t testing.TB, b []byte) (answers int) {
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		m := protowire.ConsumeFieldValue(field, kind, b[n:])
		if n < 0 || m < 0 || field != 1 {
			t.Fatalf("field %d of an answer", field)
		}
		inner, _ := protowire.ConsumeBytes(b[n:])
		if _, _, skip := protowire.ConsumeField(inner); inner[skip] != 2<<3|byte(protowire.BytesType) {
			t.Fatalf("an answer that is none to Begin: %x", inner)
		}
		answers++
		b = b[n+m:]
	}
	return answers
}
