// Package feedtest judges what subscribers were told, by what etcd was written. Every
// test that records a stream uses it.
//
// What it holds a stream to (G9): each key's changes come in order, each once, none is
// left out; unless the stream says that it begins anew, and tells what is there. Nothing
// of a key comes after its forget but what was written after it. At the end, a reader who
// kept what he was told has what etcd has.
package feedtest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Event is one change of a key as a reader was told of it.
type Event struct {
	Key      string
	Deleted  bool
	Revision int64
	State    string
	Digest   string
}

// Message is what a reader was told at once: events, or a mark.
type Message struct {
	Token              string
	Events             []Event
	Progress           bool
	Begin, End         bool
	Cause              string
	Reconnected, Again bool // made by the test: a stream that goes on by a token, or without
}

// Stream is a reader who keeps what he is told, and checks it as it comes.
type Stream struct {
	// Have is his copy.
	Have map[string]Event
	// Errors is what was wrong.
	Errors []error
	// Resyncs, Deletes and Events count.
	Resyncs, Deletes, Events int

	truth  *History
	newest map[string]Event // of each key, deleted ones too
	told   map[string]bool  // keys that were told of since the last Begin
	at     int64            // the newest revision of this stretch
	amid   bool             // between Begin and End
}

// NewStream makes a reader of a stream, judged by a history.
func NewStream(truth *History) *Stream {
	return &Stream{Have: map[string]Event{}, newest: map[string]Event{}, told: map[string]bool{}, truth: truth}
}

func (s *Stream) fail(format string, args ...any) {
	if len(s.Errors) < 20 {
		s.Errors = append(s.Errors, fmt.Errorf(format, args...))
	}
}

// Take takes a message.
func (s *Stream) Take(m Message) {
	switch {
	case m.Reconnected:
		return // it goes on
	case m.Begin:
		s.Resyncs++
		s.amid, s.at = true, 0
		s.Have, s.told = map[string]Event{}, map[string]bool{}
		return
	case m.End:
		if !s.amid {
			s.fail("an end without a beginning")
		}
		s.amid = false
		return
	case m.Progress && s.amid:
		s.fail("progress amid a snapshot: not everything before it was told")
	}
	if m.Token == "" && len(m.Events) > 0 && !m.Again {
		s.fail("events without a token")
	}
	for _, e := range m.Events {
		s.event(e)
	}
}

func (s *Stream) event(e Event) {
	s.Events++
	if !s.amid {
		if e.Revision < s.at {
			s.fail("%s at %d, after a change at %d: out of order", e.Key, e.Revision, s.at)
		}
		s.at = e.Revision
	}
	last, known := s.newest[e.Key]
	switch {
	case !known:
	case e.Revision < last.Revision:
		s.fail("%s at %d, and it was told of at %d before", e.Key, e.Revision, last.Revision)
	case !s.told[e.Key]: // a snapshot may have been of any time in between
	case e.Revision == last.Revision:
		s.fail("%s at %d twice", e.Key, e.Revision)
	default: // nothing may be left out between two changes of a key
		if missing, ok := s.truth.between(e.Key, last.Revision, e.Revision); ok {
			s.fail("%s was told of at %d and at %d, and not of what was at %d", e.Key, last.Revision, e.Revision, missing)
		}
	}
	if real, ok := s.truth.at(e.Key, e.Revision); !ok {
		s.fail("%s at %d: nothing of it was written then", e.Key, e.Revision)
	} else if real.Deleted != e.Deleted || real.State != e.State || real.Digest != e.Digest {
		s.fail("%s at %d was told as %+v, and is %+v", e.Key, e.Revision, e, real)
	}
	s.newest[e.Key], s.told[e.Key] = e, true
	if e.Deleted {
		s.Deletes++
		delete(s.Have, e.Key)
		return
	}
	s.Have[e.Key] = e
}

// Newest is the newest revision that the reader was told of.
func (s *Stream) Newest() int64 {
	newest := int64(0)
	for _, e := range s.newest {
		newest = max(newest, e.Revision)
	}
	return newest
}

// Finish compares the copy with what the history ends with, for the keys with a prefix,
// and returns all that was wrong.
func (s *Stream) Finish(prefix string) []error {
	if s.amid {
		s.fail("it ends amid a snapshot")
	}
	want := s.truth.Last(prefix)
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if got, ok := s.Have[key]; !ok {
			s.fail("%s at %d is missing", key, want[key].Revision)
		} else if got.Revision != want[key].Revision {
			s.fail("%s is known as of %d, and is at %d", key, got.Revision, want[key].Revision)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(s.Have)) {
		if _, ok := want[key]; !ok {
			s.fail("%s at %d is a ghost", key, s.Have[key].Revision)
		}
		if !strings.HasPrefix(key, prefix) {
			s.fail("%s was not asked for", key)
		}
	}
	return s.Errors
}

// Complete reports whether the reader has what the history has now, for the keys with a
// prefix.
func (s *Stream) Complete(prefix string) bool {
	want := s.truth.Last(prefix)
	if s.amid || len(want) != len(s.Have) {
		return false
	}
	for key, e := range want {
		if s.Have[key].Revision != e.Revision {
			return false
		}
	}
	return true
}

// Amid reports whether a snapshot is being told.
func (s *Stream) Amid() bool { return s.amid }
