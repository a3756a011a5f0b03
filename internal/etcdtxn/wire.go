package etcdtxn

import (
	"context"
	"errors"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// A batch is written to etcd as bytes, and its answer is read where it lies: with the
// generated messages, fourteen of them for each member, this was a fifth of what a Begin
// costs a node (docs/performance.md). All but the members goes by the generated code, and
// a test compares the two.

// The fields, as etcd numbers them.
// Source: etcd api/etcdserverpb/rpc.proto.
const (
	txnSuccess, txnCompare, txnFailure = 2, 1, 3    // TxnRequest
	opRange, opPut, opDelete, opTxn    = 1, 2, 3, 4 // RequestOp, and ResponseOp
	compareTarget, compareKey          = 2, 3       // Compare
	compareModRevision                 = 6          // Compare
	keyField, valueField               = 1, 2       // RangeRequest, PutRequest, DeleteRangeRequest
	txnHeader, txnSucceeded            = 1, 2       // TxnResponse
	txnResponses                       = 3          // TxnResponse
	headerRevision                     = 3          // ResponseHeader
)

// appendBatch appends the rest of a TxnRequest: its members, as nested transactions.
func appendBatch(b []byte, members []member) []byte {
	for _, m := range members {
		b = protowire.AppendTag(b, txnSuccess, protowire.BytesType)
		n := m.txnSize()
		b = protowire.AppendVarint(b, uint64(sizeOf(n)))
		b = appendLength(b, opTxn, n)
		b = m.appendTxn(b)
	}
	return b
}

// sizeOf is the size of a field of n bytes whose number is below 16.
func sizeOf(n int) int { return 1 + protowire.SizeBytes(n) }

// appendLength appends the tag and the length of a field of n bytes.
func appendLength(b []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(n))
}

func (m member) compareSize() int {
	return 1 + protowire.SizeVarint(uint64(pb.Compare_MOD)) + sizeOf(len(m.key)) + 1 + protowire.SizeVarint(uint64(m.revision))
}

func (m member) txnSize() int {
	n := sizeOf(m.compareSize()) + sizeOf(sizeOf(sizeOf(len(m.key))))
	for _, p := range m.puts {
		n += sizeOf(sizeOf(p.requestSize()))
	}
	return n
}

// appendTxn appends the member's TxnRequest.
func (m member) appendTxn(b []byte) []byte {
	b = appendLength(b, txnCompare, m.compareSize())
	b = protowire.AppendVarint(protowire.AppendTag(b, compareTarget, protowire.VarintType), uint64(pb.Compare_MOD))
	b = append(appendLength(b, compareKey, len(m.key)), m.key...)
	b = protowire.AppendVarint(protowire.AppendTag(b, compareModRevision, protowire.VarintType), uint64(m.revision)) // an absent key has 0
	for _, p := range m.puts {
		n := p.requestSize()
		b = appendLength(b, txnSuccess, sizeOf(n))
		b = p.appendRequest(b, n)
	}
	b = appendLength(b, txnFailure, sizeOf(sizeOf(len(m.key))))
	b = appendLength(b, opRange, sizeOf(len(m.key)))
	return append(appendLength(b, keyField, len(m.key)), m.key...)
}

// requestSize is the size of the PutRequest or DeleteRangeRequest.
func (p put) requestSize() int {
	n := sizeOf(len(p.key))
	if !p.remove && len(p.value) > 0 {
		n += sizeOf(len(p.value))
	}
	return n
}

// appendRequest appends the request, of n bytes, as its field of RequestOp.
func (p put) appendRequest(b []byte, n int) []byte {
	if p.remove {
		b = appendLength(b, opDelete, n)
		return append(appendLength(b, keyField, len(p.key)), p.key...)
	}
	b = appendLength(b, opPut, n)
	b = append(appendLength(b, keyField, len(p.key)), p.key...)
	if len(p.value) > 0 {
		b = append(appendLength(b, valueField, len(p.value)), p.value...)
	}
	return b
}

// batchRequest is a TxnRequest, encoded; batchAnswer is one's TxnResponse.
type batchRequest []byte

type batchAnswer struct {
	revision  int64
	succeeded bool
	// responses are ResponseOps, encoded.
	responses [][]byte
}

var errAnswer = errors.New("etcd's answer to a transaction cannot be read")

func (a *batchAnswer) decode(b []byte) error {
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return errAnswer
		}
		b = b[n:]
		switch {
		case field == txnHeader && kind == protowire.BytesType:
			header, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return errAnswer
			}
			var h pb.ResponseHeader
			if err := proto.Unmarshal(header, &h); err != nil {
				return err
			}
			a.revision, b = h.GetRevision(), b[n:]
		case field == txnSucceeded && kind == protowire.VarintType:
			v, n := protowire.ConsumeVarint(b)
			if n < 0 {
				return errAnswer
			}
			a.succeeded, b = v != 0, b[n:]
		case field == txnResponses && kind == protowire.BytesType:
			op, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return errAnswer
			}
			a.responses, b = append(a.responses, op), b[n:]
		default:
			if n = protowire.ConsumeFieldValue(field, kind, b); n < 0 {
				return errAnswer
			}
			b = b[n:]
		}
	}
	return nil
}

// nestedSucceeded reports whether a ResponseOp is that of a nested transaction whose
// compare held.
func nestedSucceeded(op []byte) bool {
	field, kind, n := protowire.ConsumeTag(op)
	if n < 0 || field != opTxn || kind != protowire.BytesType {
		return false
	}
	b, n := protowire.ConsumeBytes(op[n:])
	if n < 0 {
		return false
	}
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return false
		}
		b = b[n:]
		if field == txnSucceeded && kind == protowire.VarintType {
			v, n := protowire.ConsumeVarint(b)
			return n > 0 && v != 0
		}
		if n = protowire.ConsumeFieldValue(field, kind, b); n < 0 {
			return false
		}
		b = b[n:]
	}
	return false
}

// responseOps decodes ResponseOps.
func responseOps(encoded [][]byte) ([]*pb.ResponseOp, error) {
	ops := make([]*pb.ResponseOp, len(encoded))
	for i, b := range encoded {
		ops[i] = new(pb.ResponseOp)
		if err := proto.Unmarshal(b, ops[i]); err != nil {
			return nil, err
		}
	}
	return ops, nil
}

// batchCodec is gRPC's own but for batches.
type batchCodec struct{ encoding.CodecV2 }

func (c batchCodec) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.(batchRequest); ok {
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c batchCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if a, ok := v.(*batchAnswer); ok {
		return a.decode(data.Materialize())
	}
	return c.CodecV2.Unmarshal(data, v)
}

// callOptions are the client's own for its transactions.
// Source: etcd client/v3/options.go.
var (
	callOptions  = []grpc.CallOption{grpc.WaitForReady(true), grpc.MaxCallSendMsgSize(2 << 20), grpc.MaxCallRecvMsgSize(math.MaxInt32)}
	batchOptions = append([]grpc.CallOption{grpc.ForceCodecV2(batchCodec{encoding.GetCodecV2(protocodec.Name)})}, callOptions...)
)

// encodeBatch encodes a transaction of members with rest around them, its compares and its
// other branch, and after, what is read after the members.
func encodeBatch(rest *pb.TxnRequest, members []member, after *pb.RequestOp) (batchRequest, error) {
	size := 256
	for _, m := range members {
		size += m.size()
	}
	// Encoded messages that stand behind each other are one message, whose lists are
	// appended. Source: protobuf.dev/programming-guides/encoding, "Last One Wins".
	b, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 0, size), rest)
	if err != nil {
		return nil, err
	}
	return proto.MarshalOptions{}.MarshalAppend(appendBatch(b, members), &pb.TxnRequest{Success: []*pb.RequestOp{after}})
}

// sendBatch sends what encodeBatch makes of its arguments.
func (s *Store) sendBatch(ctx context.Context, rest *pb.TxnRequest, members []member, after *pb.RequestOp) (*batchAnswer, error) {
	b, err := encodeBatch(rest, members, after)
	if err != nil {
		return nil, err
	}
	var a batchAnswer
	return &a, s.cfg.Client.ActiveConnection().Invoke(ctx, pb.KV_Txn_FullMethodName, b, &a, batchOptions...)
}
