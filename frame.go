package dualcheck

import (
	"encoding/hex"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// What is sent is encoded by hand into buffers that are used again, and what comes is
// walked where it lies. Field numbers are those of dedup.proto and record.proto;
// TestFramesAreTheContract compares both ways with the generated code.

// kind is a method, by its field number in SessionCall.
type kind = protowire.Number

const (
	kindBegin    kind = 2
	kindComplete kind = 3
	kindFail     kind = 4
	kindExtend   kind = 5
	kindGet      kind = 6
	kindCancel   kind = 7
)

// Answers, by their field number in SessionAnswer.
const (
	answerBegin  protowire.Number = 2
	answerFinish protowire.Number = 3
	answerExtend protowire.Number = 4
	answerGet    protowire.Number = 5
	answerError  protowire.Number = 6
)

// methods are those of the contract.
var methods = [...]struct {
	name   string
	answer protowire.Number
}{
	kindBegin:    {"Begin", answerBegin},
	kindComplete: {"Complete", answerFinish},
	kindFail:     {"Fail", answerFinish},
	kindExtend:   {"Extend", answerExtend},
	kindGet:      {"Get", answerGet},
}

const service = "/dualcheck.v1.DedupService/"

// buffers holds those of frames. gRPC's own pool clears what it gives, which a frame
// that is written in full does not need.
var buffers = &bufferPool{}

// bufferPool is a mem.BufferPool.
type bufferPool struct{ pool sync.Pool }

const (
	leastBuffer = 4 << 10
	mostBuffer  = 2 << 20
)

func (p *bufferPool) Get(n int) *[]byte {
	if b, ok := p.pool.Get().(*[]byte); ok && cap(*b) >= n {
		*b = (*b)[:n]
		return b
	}
	// To a power of two, so that buffers soon fit most frames.
	b := make([]byte, n, 1<<bits.Len(uint(max(n, leastBuffer)-1)))
	return &b
}

func (p *bufferPool) Put(b *[]byte) {
	if cap(*b) <= mostBuffer {
		p.pool.Put(b)
	}
}

// packet is a message as bytes, on its way through gRPC.
type packet struct{ data mem.Buffer }

// packetCodec hands packets over as they are.
type packetCodec struct{}

func (packetCodec) Name() string { return proto.Name }

func (packetCodec) Marshal(v any) (mem.BufferSlice, error) {
	p, ok := v.(*packet)
	if !ok {
		return nil, fmt.Errorf("dualcheck: sending %T", v)
	}
	return mem.BufferSlice{p.data}, nil
}

func (packetCodec) Unmarshal(data mem.BufferSlice, v any) error {
	p, ok := v.(*packet)
	if !ok {
		return fmt.Errorf("dualcheck: receiving %T", v)
	}
	p.data = data.MaterializeToBuffer(buffers)
	return nil
}

// Encoding.

func appendString(b []byte, n protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	return protowire.AppendString(protowire.AppendTag(b, n, protowire.BytesType), s)
}

func appendBytes(b []byte, n protowire.Number, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return protowire.AppendBytes(protowire.AppendTag(b, n, protowire.BytesType), v)
}

func appendVarint(b []byte, n protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), v)
}

func sizeVarint(v uint64) int {
	if v == 0 {
		return 0
	}
	return 1 + protowire.SizeVarint(v)
}

// appendDuration appends a Duration, also one of 0: that it is there counts.
func appendDuration(b []byte, n protowire.Number, d time.Duration) []byte {
	b = protowire.AppendVarint(protowire.AppendTag(b, n, protowire.BytesType), uint64(sizeDuration(d)))
	b = appendVarint(b, 1, uint64(int64(d/time.Second)))
	return appendVarint(b, 2, uint64(int64(d%time.Second)))
}

func sizeDuration(d time.Duration) int {
	return sizeVarint(uint64(int64(d/time.Second))) + sizeVarint(uint64(int64(d%time.Second)))
}

func appendMap(b []byte, n protowire.Number, m map[string]string) []byte {
	for k, v := range m {
		size := protowire.SizeBytes(len(k)) + protowire.SizeBytes(len(v)) + 2
		b = protowire.AppendVarint(protowire.AppendTag(b, n, protowire.BytesType), uint64(size))
		b = protowire.AppendString(protowire.AppendTag(b, 1, protowire.BytesType), k)
		b = protowire.AppendString(protowire.AppendTag(b, 2, protowire.BytesType), v)
	}
	return b
}

// appendName appends what every request begins with.
func appendName(b []byte, key *Key) []byte {
	return appendString(appendString(b, 1, key.Namespace), 2, key.Key)
}

func appendBegin(b []byte, key *Key, owner string, o *callOptions) []byte {
	b = appendName(b, key)
	b = appendString(b, 3, key.Operation)
	b = appendBytes(b, 4, key.Fingerprint)
	if o.requestID != "" {
		b = appendString(b, 5, o.requestID)
	} else {
		b = protowire.AppendVarint(protowire.AppendTag(b, 5, protowire.BytesType), 36)
		b = appendUUID(b)
	}
	b = appendString(b, 6, owner)
	if o.leased {
		b = appendDuration(b, 7, o.lease)
	}
	if o.waits && o.wait != 0 {
		b = appendDuration(b, 8, o.wait)
	}
	return appendMap(b, 9, o.labels)
}

// appendUUID appends a random UUID, version 4.
func appendUUID(b []byte) []byte {
	var u [16]byte
	for i, v := range [2]uint64{rand.Uint64(), rand.Uint64()} {
		for j := range 8 {
			u[8*i+j] = byte(v >> (8 * j))
		}
	}
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
	b = append(hex.AppendEncode(b, u[:4]), '-')
	b = append(hex.AppendEncode(b, u[4:6]), '-')
	b = append(hex.AppendEncode(b, u[6:8]), '-')
	b = append(hex.AppendEncode(b, u[8:10]), '-')
	return hex.AppendEncode(b, u[10:])
}

func appendComplete(b []byte, c *Claim, r *Result) []byte {
	b = appendString(appendName(b, &c.Key), 3, c.Token)
	if r.Omitted {
		size := sizeVarint(uint64(r.Size)) + 1 + protowire.SizeBytes(len(r.Digest))
		b = protowire.AppendVarint(protowire.AppendTag(b, 5, protowire.BytesType), uint64(size))
		b = protowire.AppendBytes(protowire.AppendTag(b, 1, protowire.BytesType), r.Digest)
		return appendVarint(b, 2, uint64(r.Size))
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, 4, protowire.BytesType), uint64(r.wireSize()))
	b = appendVarint(b, 1, uint64(int64(r.Code)))
	b = appendString(b, 2, r.ContentType)
	b = appendBytes(b, 3, r.Body)
	return appendMap(b, 4, r.Metadata)
}

func (r *Result) wireSize() int {
	n := sizeVarint(uint64(int64(r.Code)))
	if r.ContentType != "" {
		n += 1 + protowire.SizeBytes(len(r.ContentType))
	}
	if len(r.Body) > 0 {
		n += 1 + protowire.SizeBytes(len(r.Body))
	}
	for k, v := range r.Metadata {
		n += 1 + protowire.SizeBytes(protowire.SizeBytes(len(k))+protowire.SizeBytes(len(v))+2)
	}
	return n
}

func appendExtend(b []byte, c *Claim, lease time.Duration) []byte {
	b = appendString(appendName(b, &c.Key), 3, c.Token)
	if lease != 0 {
		b = appendDuration(b, 4, lease)
	}
	return b
}

func appendGet(b []byte, key *Key, cached bool) []byte {
	b = appendName(b, key)
	if cached {
		b = appendVarint(b, 3, 1)
	}
	return b
}

// inner is the size of a call as SessionCall, and the timeout it carries.
func (cl *call) inner(now time.Time) (size int, timeout time.Duration) {
	size = 1 + protowire.SizeVarint(cl.id) + 1 + protowire.SizeBytes(len(cl.body)) + sizeVarint(uint64(cl.retries))
	if !cl.deadline.IsZero() {
		timeout = max(cl.deadline.Sub(now), time.Millisecond)
		size += 1 + protowire.SizeBytes(sizeDuration(timeout))
	}
	if cl.traced {
		size += 1 + protowire.SizeBytes(len(cl.trace))
	}
	return size, timeout
}

// appendCall appends a call as one of SessionRequest's.
func appendCall(b []byte, c *call, now time.Time) []byte {
	size, timeout := c.inner(now)
	b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.BytesType), uint64(size))
	b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.VarintType), c.id)
	b = protowire.AppendBytes(protowire.AppendTag(b, c.kind, protowire.BytesType), c.body)
	if timeout > 0 {
		b = appendDuration(b, 8, timeout)
	}
	b = appendVarint(b, 9, uint64(c.retries))
	if c.traced {
		b = protowire.AppendBytes(protowire.AppendTag(b, 10, protowire.BytesType), c.trace[:])
	}
	return b
}

// roomForCancel is the most that appendCancel appends.
const roomForCancel = 16

func appendCancel(b []byte, id uint64) []byte {
	b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.BytesType), uint64(1+protowire.SizeVarint(id)+2))
	b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.VarintType), id)
	return protowire.AppendBytes(protowire.AppendTag(b, kindCancel, protowire.BytesType), nil)
}

// Decoding.

// cursor walks the fields of a message. A field that is no varint and not
// length-delimited is passed over.
type cursor struct {
	left []byte
	num  protowire.Number
	v    uint64 // of a varint, else 0
	data []byte // of a length-delimited field, else nil
	bad  bool
}

func walk(b []byte) cursor { return cursor{left: b} }

// next goes to the next field; false at the end, or when bad is set.
func (c *cursor) next() bool {
	if len(c.left) == 0 {
		return false
	}
	num, typ, n := protowire.ConsumeTag(c.left)
	if n < 0 {
		c.bad = true
		return false
	}
	c.left = c.left[n:]
	c.num, c.v, c.data = num, 0, nil
	switch typ {
	case protowire.VarintType:
		c.v, n = protowire.ConsumeVarint(c.left)
	case protowire.BytesType:
		c.data, n = protowire.ConsumeBytes(c.left)
	default:
		n = protowire.ConsumeFieldValue(num, typ, c.left)
	}
	if n < 0 {
		c.bad = true
		return false
	}
	c.left = c.left[n:]
	return true
}

// pair reads a message of two varints, which Duration and Timestamp are.
func pair(b []byte) (seconds, nanos int64) {
	for c := walk(b); c.next(); {
		switch c.num {
		case 1:
			seconds = int64(c.v)
		case 2:
			nanos = int64(int32(c.v))
		}
	}
	return seconds, nanos
}

func duration(b []byte) time.Duration {
	seconds, nanos := pair(b)
	if seconds > math.MaxInt64/int64(time.Second)-1 {
		return math.MaxInt64
	}
	if seconds < 0 {
		return 0
	}
	return time.Duration(seconds)*time.Second + time.Duration(nanos)
}

func timestamp(b []byte) time.Time { return time.Unix(pair(b)) }

// entry reads an entry of a map of strings.
func entry(b []byte) (k, v string) {
	for c := walk(b); c.next(); {
		switch c.num {
		case 1:
			k = string(c.data)
		case 2:
			v = string(c.data)
		}
	}
	return k, v
}

func decodeError(b []byte) *Error {
	e := &Error{}
	c := walk(b)
	for c.next() {
		switch c.num {
		case 1:
			e.Code = grpcCode(c.v)
		case 2:
			e.Reason = Reason(c.data)
		case 3:
			e.Message = string(c.data)
		case 4:
			if e.Metadata == nil {
				e.Metadata = make(map[string]string)
			}
			k, v := entry(c.data)
			e.Metadata[k] = v
		case 5:
			e.RetryAfter = duration(c.data)
		case 6:
			e.Field = string(c.data)
		}
	}
	if c.bad {
		return unreadable("an error")
	}
	return e
}

// text refuses what is not UTF-8: a frame that holds it could not be decoded, and would
// fail every call in it.
func text(reason Reason, field, s string) *Error {
	if utf8.ValidString(s) {
		return nil
	}
	return invalid(reason, field, "%s is not UTF-8", field)
}

func texts(reason Reason, field string, m map[string]string) *Error {
	for k, v := range m {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return invalid(reason, field, "%s are not UTF-8", field)
		}
	}
	return nil
}
