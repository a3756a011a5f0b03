package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"regexp"
	"sync"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/dualcheck/dualcheck/api/gen"
	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/contractjson"
)

const (
	// lineWindow is how many bytes of messages the gateway takes ahead of a reader of
	// lines. Left to itself, gRPC would let it grow to 16 MiB each.
	lineWindow = 64 << 10
	// linesWindow is the same of all readers together, of what is on its way to them.
	linesWindow = 1 << 20
	// lastLine is how long the last line may take when the server stops.
	lastLine = time.Second
)

// watchLines is Watch as lines of JSON: each a message, or the error that ends them. The
// gateway's own streams wrap every message, and have the server's one deadline for all
// that is written.
func (s *Server) watchLines(gateway *runtime.ServeMux) http.HandlerFunc {
	client := dualcheckv1.NewWatchServiceClient(s.lines)
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		ctx, err := runtime.AnnotateContext(ctx, gateway, r, dualcheckv1.WatchService_Watch_FullMethodName)
		if err != nil {
			s.gatewayError(ctx, nil, nil, w, r, err)
			return
		}
		var req dualcheckv1.WatchRequest
		if err := (codec{}).NewDecoder(r.Body).Decode(&req); err != nil && !errors.Is(err, io.EOF) {
			s.gatewayError(ctx, nil, nil, w, r, status.Error(codes.InvalidArgument, err.Error()))
			return
		}
		to := newLines(w, s.watched.limits.slow)
		defer to.close()
		defer context.AfterFunc(s.ending, to.hurry)()
		stream, err := client.Watch(ctx, &req)
		var m *dualcheckv1.WatchResponse
		if err == nil {
			m, err = stream.Recv()
		}
		if err != nil {
			to.deadline(true)
			s.gatewayError(ctx, nil, nil, w, r, err)
			return
		}
		w.Header().Set("Content-Type", "application/x-ndjson")
		w.Header().Set("X-Accel-Buffering", "no") // nginx would keep lines back
		for ; err == nil; m, err = stream.Recv() {
			began := time.Now()
			if failed := to.message(m); failed != nil {
				// Every protocol has an error of its own for a deadline.
				if time.Since(began) >= s.watched.limits.slow {
					s.cfg.Metrics.Slow()
				}
				return // nobody is there to be told
			}
		}
		to.end(complete(status.Convert(err)))
	}
}

// lines writes JSON to one reader, a line each, and each with a deadline of its own.
type lines struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	mu   sync.Mutex    // of what follows; its connection may be another's once it is closed
	most time.Duration // how long a line may take
	over bool
}

func newLines(w http.ResponseWriter, most time.Duration) *lines {
	l := &lines{w: w, rc: http.NewResponseController(w), most: most}
	// What the request may take to be read is no bound to the stream: a deadline that
	// comes while nobody writes looks like a client that has gone.
	_ = l.rc.SetReadDeadline(time.Time{}) // fails only where there is no connection
	l.deadline(false)
	return l
}

// deadline sets the deadline for what is written next, or takes it away: over HTTP/2 one
// that comes while nothing is written ends the stream.
func (l *lines) deadline(set bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bound(set)
}

// bound is deadline; mu is held.
func (l *lines) bound(set bool) {
	var at time.Time
	if set {
		at = time.Now().Add(l.most)
	}
	if !l.over {
		_ = l.rc.SetWriteDeadline(at) // as above
	}
}

// hurry lets no line take long any more, the one that is being written included.
func (l *lines) hurry() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.most = min(l.most, lastLine)
	l.bound(true)
}

// close leaves the connection to whoever uses it next.
func (l *lines) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
}

func (l *lines) message(m proto.Message) error {
	b, err := contractjson.Marshal(m)
	if err != nil {
		return err
	}
	if err := l.line(b); err != nil {
		return err
	}
	l.deadline(false)
	return nil
}

// end writes why there are no more lines.
func (l *lines) end(s *status.Status) {
	b, err := contractjson.Marshal(s.Proto())
	if err != nil { // a detail of ours that JSON cannot show; there is none
		return
	}
	_ = l.line(bytes.Join([][]byte{[]byte(`{"error":`), b, []byte(`}`)}, nil)) // the caller may have gone
}

func (l *lines) line(b []byte) error {
	l.deadline(true)
	if _, err := l.w.Write(append(b, '\n')); err != nil {
		return err
	}
	return l.rc.Flush()
}

// streamed is how the OpenAPI document tells of a stream: as the gateway would write it.
var streamed = regexp.MustCompile(`"properties": \{\s*"result": (\{[^}]*\}),\s*("error": \{[^}]*\})\s*\},\s*"title": "Stream result of (\w+)"`)

// openAPI is the contract's document with streams as they are: a line is a message, or the
// error that is the last.
var openAPI = sync.OnceValue(func() []byte {
	return streamed.ReplaceAll(gen.OpenAPI, []byte(`"allOf": [$1], "properties": {$2}, "title": "A line: $3, or the error that ends the stream"`))
})
