package server

import (
	"bytes"
	"context"
	"encoding/json"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/contractjson"
)

// encodes is a Store that tells of finished records as a cache does that keeps them as
// they are sent, while it is on.
type encodes struct {
	claim.Store
	on   atomic.Bool
	told atomic.Int64 // encoded records
}

func (e *encodes) record(r *claim.Record) *claim.Record {
	if !e.on.Load() || r == nil || !r.State.Finished() || r.Key == "" {
		return r
	}
	e.told.Add(1)
	light := *r.At(0)
	light.Encoded = EncodeRecord(&light)
	light.Result, light.Failure = nil, nil
	return &light
}

func (e *encodes) Begin(ctx context.Context, req *claim.BeginRequest) (claim.Answer, error) {
	a, err := e.Store.Begin(ctx, req)
	a.Record = e.record(a.Record)
	return a, err
}

func (e *encodes) BeginTogether(ctx context.Context, reqs []*claim.BeginRequest) []claim.Begun {
	begun := e.Store.BeginTogether(ctx, reqs)
	for i := range begun {
		begun[i].Answer.Record = e.record(begun[i].Answer.Record)
	}
	return begun
}

func (e *encodes) Get(ctx context.Context, req *claim.GetRequest) (claim.Found, error) {
	f, err := e.Store.Get(ctx, req)
	f.Record = e.record(f.Record)
	return f, err
}

// A record that a cache keeps as it is sent comes to the caller as any other, over each way
// there is: field by field, result and failure byte for byte.
func TestEncodedRecordsAreToldAsAnyOther(t *testing.T) {
	e := &encodes{}
	w := start(t, func(c *Config) { e.Store = c.Store; c.Store = e })
	ctx := t.Context()
	known, err := anypb.New(durationpb.New(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	failure := &dualcheckv1.Failure{Class: dualcheckv1.FailureClass_FAILURE_CLASS_TERMINAL, Code: 7, Message: "no", Details: []*anypb.Any{known}}
	unknown := proto.CloneOf(failure)
	unknown.Details = append(unknown.Details, &anypb.Any{TypeUrl: "example.org/unknown", Value: []byte{0xff, 1, 2}})
	finish := map[string]func(token string) error{
		"full": func(token string) error {
			result := &dualcheckv1.Result{Code: 201, ContentType: "application/octet-stream", Body: bytes.Repeat([]byte{0, 0xff, 'x'}, 1000), Metadata: map[string]string{"location": "/1", "etag": "é"}}
			_, err := w.Complete(ctx, &dualcheckv1.CompleteRequest{Namespace: "a", Key: "full", Token: token, Outcome: &dualcheckv1.CompleteRequest_Result{Result: result}})
			return err
		},
		"empty": func(token string) error {
			_, err := w.Complete(ctx, &dualcheckv1.CompleteRequest{Namespace: "a", Key: "empty", Token: token})
			return err
		},
		"omitted": func(token string) error {
			_, err := w.Complete(ctx, &dualcheckv1.CompleteRequest{Namespace: "a", Key: "omitted", Token: token, Outcome: &dualcheckv1.CompleteRequest_Omitted{Omitted: &dualcheckv1.Omitted{Digest: make([]byte, 32), Size: 5 << 20}}})
			return err
		},
		"failed": func(token string) error {
			_, err := w.Fail(ctx, &dualcheckv1.FailRequest{Namespace: "a", Key: "failed", Token: token, Failure: failure})
			return err
		},
		"failed with the unknown": func(token string) error {
			_, err := w.Fail(ctx, &dualcheckv1.FailRequest{Namespace: "a", Key: "failed with the unknown", Token: token, Failure: unknown})
			return err
		},
	}
	for key, end := range finish {
		a, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: key, Operation: "pay", Owner: "o", Fingerprint: bytes.Repeat([]byte{3}, 32), Labels: map[string]string{"b": "2", "a": "1"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := end(a.GetClaim().GetToken()); err != nil {
			t.Fatalf("%s: %v", key, err)
		}
	}
	ways := map[string]func(key string) proto.Message{
		"Begin": func(key string) proto.Message {
			m, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: key})
			check(t, err)
			return m
		},
		"Begin with a wait": func(key string) proto.Message {
			m, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: key, Wait: durationpb.New(time.Second)})
			check(t, err)
			return m
		},
		"Get": func(key string) proto.Message {
			m, err := w.Get(ctx, &dualcheckv1.GetRequest{Namespace: "a", Key: key})
			check(t, err)
			return m
		},
		"BatchBegin": func(key string) proto.Message {
			one := &dualcheckv1.BeginRequest{Namespace: "a", Key: key}
			m, err := w.BatchBegin(ctx, &dualcheckv1.BatchBeginRequest{Requests: []*dualcheckv1.BeginRequest{one, one}})
			check(t, err)
			return m
		},
		"a session's Begin": func(key string) proto.Message { return inSession(t, w, begin(1, key)) },
		"a session's Get":   func(key string) proto.Message { return inSession(t, w, look(1, key)) },
		"JSON": func(key string) proto.Message {
			m := &dualcheckv1.BeginResponse{}
			asJSON(t, w, "/v1/dedup:begin", key, m)
			return m
		},
		"a Get as JSON": func(key string) proto.Message {
			m := &dualcheckv1.GetResponse{}
			asJSON(t, w, "/v1/dedup:get", key, m)
			return m
		},
	}
	for name, ask := range ways {
		for key := range finish {
			e.on.Store(false)
			want := ask(key)
			e.on.Store(true)
			before := e.told.Load()
			got := ask(key)
			if e.told.Load() == before {
				t.Errorf("%s: nothing was encoded", name)
			}
			a, b := records(want), records(got)
			if len(a) == 0 || len(a) != len(b) {
				t.Fatalf("%s of %q: %d records, want %d", name, key, len(b), len(a))
			}
			for i := range a {
				for _, d := range []struct {
					want, got interface{ AsTime() time.Time }
				}{{a[i].GetResultUntil(), b[i].GetResultUntil()}, {a[i].GetKeyUntil(), b[i].GetKeyUntil()}} {
					if off := d.got.AsTime().Sub(d.want.AsTime()).Abs(); off > time.Minute || d.want.AsTime().Unix() == 0 {
						t.Errorf("%s of %q: a deadline is %v, want %v", name, key, d.got, d.want)
					}
				}
				a[i].ResultUntil, a[i].KeyUntil, b[i].ResultUntil, b[i].KeyUntil = nil, nil, nil, nil
				if len(b[i].ProtoReflect().GetUnknown()) != 0 {
					t.Errorf("%s of %q: unknown bytes came out", name, key)
				}
			}
			if !proto.Equal(want, got) {
				t.Errorf("%s of %q:\n%v\nwant\n%v", name, key, got, want)
			}
		}
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// inSession asks one thing on a session of its own.
func inSession(t *testing.T, w *world, call *dualcheckv1.SessionCall) proto.Message {
	t.Helper()
	k := w.open(t, t.Context())
	k.send(call)
	a := k.answer(1)
	k.close()
	if _, err := k.rest(); err != nil {
		t.Error(err)
	}
	return a
}

// asJSON asks over JSON; an Any of a type that nobody knows is as it was.
func asJSON(t *testing.T, w *world, path, key string, m proto.Message) {
	t.Helper()
	code, _, body := w.post(path, `{"namespace":"a","key":"`+key+`"}`)
	if code != 200 || !json.Valid([]byte(body)) {
		t.Fatalf("%d %s", code, body)
	}
	if err := contractjson.Unmarshal([]byte(body), m); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
}

// records are all that an answer tells.
func records(m proto.Message) (all []*dualcheckv1.Record) {
	switch m := m.(type) {
	case *dualcheckv1.BeginResponse:
		return append(all, m.GetRecord())
	case *dualcheckv1.GetResponse:
		return append(all, m.GetRecord())
	case *dualcheckv1.BatchBeginResponse:
		for _, r := range m.GetResponses() {
			all = append(all, r.GetBegin().GetRecord())
		}
	case *dualcheckv1.SessionAnswer:
		if m.GetGet() != nil {
			return append(all, m.GetGet().GetRecord())
		}
		return append(all, m.GetBegin().GetRecord())
	}
	return all
}

// What is in a batch counts by its bytes, encoded or not: the answer fits a message.
func TestEncodedRecordsCountAsTheyAre(t *testing.T) {
	rec := &claim.Record{Namespace: "a", Key: "k", State: claim.Succeeded, ResultUntil: 5, KeyUntil: 9, Result: &claim.Result{Body: make([]byte, 100_000)}}
	plain := recordMessage(rec, 1, time.Unix(1, 0))
	light := *rec
	light.Encoded = EncodeRecord(rec)
	light.Result = nil
	encoded := recordMessage(&light, 1, time.Unix(1, 0))
	if a, b := proto.Size(plain), proto.Size(encoded); a != b {
		t.Errorf("%d bytes, want %d", b, a)
	}
	if testing.AllocsPerRun(10, func() { recordMessage(&light, 1, time.Unix(1, 0)) }) > 5 {
		t.Error("a message of an encoded record costs more than its deadlines")
	}
	if EncodeRecord(&claim.Record{Namespace: "\xff"}) != nil {
		t.Error("what cannot be sent was encoded")
	}
}

// What an encoded record costs to tell, against one with a result of 10 KiB.
func BenchmarkRecordMessage(b *testing.B) {
	rec := &claim.Record{
		Namespace: "a", Key: "k", Operation: "pay", State: claim.Succeeded, ResultUntil: 5, KeyUntil: 9, CreatedAt: time.Unix(1, 0), ClaimedAt: time.Unix(1, 0), FinishedAt: time.Unix(2, 0),
		Digest: make([]byte, 32), Labels: map[string]string{"a": "b"},
		Result: &claim.Result{Body: make([]byte, 10<<10), ContentType: "text/plain", Metadata: map[string]string{"a": "b", "c": "d"}},
	}
	light := *rec
	light.Encoded = EncodeRecord(rec)
	light.Result = nil
	buf := make([]byte, 0, 16<<10)
	for name, r := range map[string]*claim.Record{"Plain": rec, "Encoded": &light} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := (proto.MarshalOptions{}).MarshalAppend(buf, recordMessage(r, 1, time.Unix(1, 0))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
