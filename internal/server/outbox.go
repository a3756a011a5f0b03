package server

import (
	"fmt"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/dualcheck/dualcheck/internal/claim"
)

// Answers are encoded as soon as they are there, each on the goroutine of its call, and
// kept as the bytes of the frame that will tell them. So what waits to be sent is
// counted exactly, and sending it costs next to nothing.

const (
	// frameBytes and claim.MaxBatch bound a frame of answers; one alone may be larger.
	frameBytes = 1 << 20
	// smallAnswer is the size in bytes up to which an answer is kept whatever is waiting
	// to be sent.
	smallAnswer = 4 << 10
	// firstChunk and chunkBytes are the capacities of a frame's chunks.
	firstChunk = 4 << 10
	chunkBytes = 32 << 10
)

// answerNumber is a field of SessionAnswer.
type answerNumber = protowire.Number

// The fields of the messages, as the contract numbers them.
const (
	answersField  protowire.Number = 1
	drainingField protowire.Number = 2
	degradedField protowire.Number = 3
	idField       answerNumber     = 1
	errorField    answerNumber     = 6
)

// answerField is which field answers a call of a kind.
var answerField = [kinds]answerNumber{kindNone: errorField, kindBegin: 2, kindComplete: 3, kindFail: 3, kindExtend: 4, kindGet: 5}

// outFrame is a SessionResponse, encoded.
type outFrame struct {
	chunks  mem.BufferSlice
	open    *[]byte // the chunk that is being filled; nil if there is none
	bytes   int
	answers int
}

// grow makes room for n bytes more.
func (f *outFrame) grow(n int) {
	if f.open != nil && cap(*f.open)-len(*f.open) >= n {
		return
	}
	want := max(n, chunkBytes)
	if f.bytes == 0 {
		want = max(n, firstChunk)
	}
	f.seal()
	f.open = mem.DefaultBufferPool().Get(want)
	*f.open = (*f.open)[:0]
}

// seal ends the chunk that is being filled.
func (f *outFrame) seal() {
	if f.open != nil {
		f.chunks = append(f.chunks, mem.NewBuffer(f.open, mem.DefaultBufferPool()))
		f.open = nil
	}
}

// tell adds what goes with a frame's answers, and seals it.
func (f *outFrame) tell(draining bool, degraded string) {
	if draining || degraded != "" {
		f.grow(2 + 2 + protowire.SizeBytes(len(degraded)))
		b := *f.open
		if draining {
			b = protowire.AppendVarint(protowire.AppendTag(b, drainingField, protowire.VarintType), 1)
		}
		if degraded != "" {
			b = protowire.AppendString(protowire.AppendTag(b, degradedField, protowire.BytesType), degraded)
		}
		*f.open = b
	}
	f.seal()
}

// outbox is the answers that wait to be sent.
type outbox struct {
	full           []*outFrame
	filling        *outFrame
	answers, bytes int
	// reserved is for answers that are about to be put.
	reserved int
	// due: a frame is to be sent even without answers.
	due bool
}

// put adds an answer of n bytes, whose size has just been taken.
func (o *outbox) put(id uint64, field answerNumber, m proto.Message, n int) error {
	inner := protowire.SizeTag(idField) + protowire.SizeVarint(id) + protowire.SizeTag(field) + protowire.SizeBytes(n)
	whole := protowire.SizeTag(answersField) + protowire.SizeBytes(inner)
	f := o.filling
	if f != nil && (f.answers >= claim.MaxBatch || f.bytes+whole > frameBytes) {
		o.full = append(o.full, f)
		f = nil
	}
	if f == nil {
		f = new(outFrame)
		o.filling = f
	}
	f.grow(whole)
	b := *f.open
	b = protowire.AppendVarint(protowire.AppendTag(b, answersField, protowire.BytesType), uint64(inner))
	b = protowire.AppendVarint(protowire.AppendTag(b, idField, protowire.VarintType), id)
	b = protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(n))
	b, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(b, m)
	if err != nil {
		return fmt.Errorf("encode an answer: %w", err)
	}
	*f.open = b
	f.bytes += whole
	f.answers++
	o.bytes += whole
	o.answers++
	return nil
}

// take takes the next frame out, nil if there is none.
func (o *outbox) take() *outFrame {
	var f *outFrame
	switch {
	case len(o.full) > 0:
		f, o.full = o.full[0], o.full[1:]
	case o.filling != nil && o.filling.answers > 0:
		f, o.filling = o.filling, nil
	case o.due:
		f = new(outFrame)
	default:
		return nil
	}
	o.due = false
	o.bytes -= f.bytes
	o.answers -= f.answers
	return f
}
