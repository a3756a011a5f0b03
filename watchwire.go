package dualcheck

import (
	"math"
	"time"
)

// request encodes a WatchRequest.
func (w *Watch) request() []byte {
	b := appendString(nil, 1, w.ns)
	b = appendVarint(b, 2, eventRecord)
	b = appendString(b, 3, w.cfg.prefix)
	b = appendString(b, 4, w.token)
	if w.token == "" {
		b = appendVarint(b, 5, 1)
	}
	if w.cfg.values {
		b = appendVarint(b, 6, 1)
	}
	return b
}

// The contract's EventType and EventKind.
const (
	eventPut    = 1
	eventDelete = 2
	eventRecord = 1
)

// incoming is what a message says, and what was said before on the same stream.
type incoming struct {
	begun bool // a snapshot was begun on this stream

	token                string
	cause                string
	progress, begin, end bool
	events               []event
}

type event struct {
	*item
	deleted bool
}

// decode reads a WatchResponse; false if it cannot.
func (in *incoming) decode(b []byte) bool {
	in.token, in.cause, in.progress, in.begin, in.end = "", "", false, false, false
	clear(in.events)
	in.events = in.events[:0]
	c := walk(b)
	for c.next() {
		switch c.num {
		case 1:
			in.token = string(c.data)
		case 2:
			it, typ, kind, ok := decodeEvent(c.data)
			if !ok {
				return false
			}
			// What a later version tells besides is not for this copy.
			if kind <= eventRecord && (typ == eventPut || typ == eventDelete) {
				in.events = append(in.events, event{it, typ == eventDelete})
			}
		case 3:
			in.progress = c.v != 0
		case 4:
			r := walk(c.data)
			for r.next() {
				switch r.num {
				case 1:
					in.begin = r.v != 0
				case 2:
					in.end = r.v != 0
				case 3:
					in.cause = string(r.data)
				}
			}
			c.bad = c.bad || r.bad
		}
	}
	return !c.bad
}

// decodeEvent reads an Event into memory of its own.
func decodeEvent(b []byte) (it *item, typ, kind uint64, ok bool) {
	it = &item{at: -1}
	var digest, record []byte
	c := walk(b)
	for c.next() {
		switch c.num {
		case 1:
			typ = c.v
		case 2:
			kind = c.v
		case 4:
			it.key = string(c.data)
		case 5:
			it.state = State(c.v)
		case 7:
			it.revision = int64(c.v)
		case 8:
			digest = c.data
		case 9:
			it.until = nanos(c.data)
		case 10:
			record = c.data
		}
	}
	if c.bad || len(digest) > math.MaxUint8 {
		return nil, 0, 0, false
	}
	if n := len(digest) + len(record); n > 0 {
		it.data = append(append(make([]byte, 0, n), digest...), record...)
		it.digest = uint8(len(digest))
	}
	return it, typ, kind, true
}

// nanos reads a Timestamp as Unix time in nanoseconds, 0 for none: a time that is too far
// away to be written so never comes.
func nanos(timestamp []byte) int64 {
	seconds, nanos := pair(timestamp)
	switch {
	case seconds == 0 && nanos == 0:
		return 0 // an empty Timestamp is none
	case seconds <= 0:
		return 1
	case seconds >= math.MaxInt64/int64(time.Second):
		return 0
	}
	return seconds*int64(time.Second) + nanos
}
