package target

import (
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// watched is a node of which only Watch is there.
type watched struct {
	dualcheckv1.UnimplementedWatchServiceServer
	subscribers atomic.Int64
	tell        chan struct{} // closed: each is told its messages
	messages    []*dualcheckv1.WatchResponse
	end         error // after these; nil: it goes on
}

func (w *watched) Watch(m *dualcheckv1.WatchRequest, s grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error {
	if err := s.Send(&dualcheckv1.WatchResponse{Progress: true}); err != nil {
		return err
	}
	w.subscribers.Add(1)
	defer w.subscribers.Add(-1)
	select {
	case <-w.tell:
	case <-s.Context().Done():
		return nil
	}
	if m.GetNamespace() == namespace {
		for _, m := range w.messages {
			if err := s.Send(m); err != nil {
				return err
			}
		}
	}
	if w.end != nil {
		return w.end
	}
	<-s.Context().Done()
	return nil
}

func serve(t *testing.T, w *watched) rig.Node {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	dualcheckv1.RegisterWatchServiceServer(s, w)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return rig.Node{GRPC: l.Addr().String()}
}

func events(keys ...string) *dualcheckv1.WatchResponse {
	m := &dualcheckv1.WatchResponse{ResumeToken: "t"}
	for _, key := range keys {
		m.Events = append(m.Events, &dualcheckv1.Event{Type: dualcheckv1.EventType_EVENT_TYPE_PUT, Namespace: namespace, Key: key, Revision: 7})
	}
	return m
}

func TestReadersTellWhatTheyWereTold(t *testing.T) {
	again := &dualcheckv1.WatchResponse{Resync: &dualcheckv1.Resync{Begin: true, Cause: "x"}}
	w := &watched{tell: make(chan struct{}), messages: []*dualcheckv1.WatchResponse{
		events("k-100", "k-101", "other-102"), events("k-101"), again, {Resync: &dualcheckv1.Resync{End: true}},
	}}
	const reading, silent = 12, 2 // two of them look at keys
	r, err := OpenReaders(t.Context(), serve(t, w), ReadersSpec{Reading: reading, Silent: silent, Keys: "k-", First: 100, Most: 3})
	if err != nil {
		t.Fatal(err)
	}
	if n := w.subscribers.Load(); n != reading+silent {
		t.Errorf("%d are subscribed", n)
	}
	r.Count(time.Now(), time.Now().Add(time.Minute))
	for key := uint64(100); key < 102; key++ {
		r.Asked(key)
		r.Answered(key)
	}
	r.Answered(103) // more than there were to be
	close(w.tell)
	told, err := r.Finish(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if told.Latency.Ops != 4 || told.Latency.Errors != 0 || told.Whole.Ops != 4 || told.Ended != 0 {
		t.Errorf("%+v", told)
	}
	// Those who do not look at keys may have been ended before they were told all.
	if told.Events < 2*2 || told.Events > 4*reading || told.Resyncs > reading {
		t.Errorf("%+v", told)
	}
}

func TestAnEventThatDoesNotComeIsTold(t *testing.T) {
	w := &watched{tell: make(chan struct{}), messages: []*dualcheckv1.WatchResponse{events("k-0")}, end: status.Error(codes.ResourceExhausted, "too slow")}
	r, err := OpenReaders(t.Context(), serve(t, w), ReadersSpec{Reading: 1, Keys: "k-", Most: 2})
	if err != nil {
		t.Fatal(err)
	}
	r.Count(time.Now(), time.Now().Add(time.Minute))
	for key := range uint64(2) {
		r.Asked(key)
		r.Answered(key)
	}
	close(w.tell)
	r.group.Wait()                     // its stream was ended
	told, err := r.Finish(t.Context()) // and so it does not wait for what will not come
	if err != nil || told.Events != 1 || told.Latency.Ops != 1 || told.Latency.Errors != 1 || told.Ended != 1 {
		t.Errorf("%+v %v", told, err)
	}
}

func TestReadersElsewhereAreToldNothing(t *testing.T) {
	w := &watched{tell: make(chan struct{}), messages: []*dualcheckv1.WatchResponse{events("k-0")}}
	close(w.tell)
	r, err := OpenReaders(t.Context(), serve(t, w), ReadersSpec{Reading: 2, Elsewhere: true})
	if err != nil {
		t.Fatal(err)
	}
	r.Count(time.Now(), time.Now().Add(time.Minute))
	if told, err := r.Finish(t.Context()); err != nil || told.Events != 0 || told.Latency.Ops != 0 {
		t.Errorf("%+v %v", told, err)
	}
}

func TestReadersThatAreRefused(t *testing.T) {
	s := grpc.NewServer() // it has no Watch
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(l)
	t.Cleanup(s.Stop)
	if _, err := OpenReaders(t.Context(), rig.Node{GRPC: l.Addr().String()}, ReadersSpec{Reading: 30}); status.Code(err) != codes.Unimplemented {
		t.Error(fmt.Errorf("subscribed: %w", err))
	}
}
