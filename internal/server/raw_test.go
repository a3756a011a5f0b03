package server

import (
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
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
