package etcdtxn

import (
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"
)

// A batch is, byte by byte of its meaning, what the generated code would write.
func TestABatchIsWhatTheGeneratedCodeWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var members []member
		rest := &pb.TxnRequest{Compare: terms{guard: 7, newest: 9, oldest: 8}.compares(), Failure: []*pb.RequestOp{get([]byte("guard"))}}
		want := proto.CloneOf(rest)
		text := rapid.StringN(0, 300, -1)
		for range rapid.IntRange(0, 5).Draw(t, "members") {
			m := member{key: text.Draw(t, "key"), revision: rapid.Int64().Draw(t, "revision")}
			nested := &pb.TxnRequest{
				Compare: []*pb.Compare{{Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, Key: []byte(m.key), TargetUnion: &pb.Compare_ModRevision{ModRevision: m.revision}}},
				Failure: []*pb.RequestOp{get([]byte(m.key))},
			}
			for range rapid.IntRange(0, 3).Draw(t, "puts") {
				p := put{key: text.Draw(t, "key"), remove: rapid.Bool().Draw(t, "remove")}
				op := &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte(p.key)}}}
				if !p.remove {
					p.value = []byte(text.Draw(t, "value"))
					op = &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(p.key), Value: p.value}}}
				}
				m.puts = append(m.puts, p)
				nested.Success = append(nested.Success, op)
			}
			members = append(members, m)
			want.Success = append(want.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: nested}})
			if b := m.appendTxn(nil); len(b) != m.txnSize() {
				t.Fatalf("a member of %d bytes is said to have %d", len(b), m.txnSize())
			}
		}
		tick := get([]byte("tick"))
		want.Success = append(want.Success, tick)
		b, err := encodeBatch(rest, members, tick)
		if err != nil {
			t.Fatal(err)
		}
		var got pb.TxnRequest
		if err := proto.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(&got, want) {
			t.Fatalf("got %v\nwant %v", &got, want)
		}
	})
}

// An answer is read as the generated code reads it.
func TestABatchsAnswerIsWhatTheGeneratedCodeReads(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		answer := &pb.TxnResponse{
			Header:    &pb.ResponseHeader{ClusterId: 1, Revision: rapid.Int64().Draw(t, "revision"), RaftTerm: 3},
			Succeeded: rapid.Bool().Draw(t, "succeeded"),
		}
		var held []bool
		for range rapid.IntRange(0, 5).Draw(t, "responses") {
			nested := &pb.TxnResponse{Header: &pb.ResponseHeader{Revision: 5}, Succeeded: rapid.Bool().Draw(t, "held")}
			if nested.Succeeded {
				nested.Responses = []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{}}}}
			} else {
				nested.Responses = []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponseRange{ResponseRange: &pb.RangeResponse{Kvs: []*mvccpb.KeyValue{{Key: []byte("k"), Value: []byte("v")}}}}}}
			}
			held = append(held, nested.Succeeded)
			answer.Responses = append(answer.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseTxn{ResponseTxn: nested}})
		}
		b, err := proto.Marshal(answer)
		if err != nil {
			t.Fatal(err)
		}
		var a batchAnswer
		if err := a.decode(b); err != nil || a.revision != answer.Header.Revision || a.succeeded != answer.Succeeded || len(a.responses) != len(held) {
			t.Fatalf("%+v, %v of %v", a, err, answer)
		}
		for i, op := range a.responses {
			if nestedSucceeded(op) != held[i] {
				t.Fatalf("member %d: read as %v", i, !held[i])
			}
		}
		ops, err := responseOps(a.responses)
		for i, op := range ops {
			if err != nil || !proto.Equal(op, answer.Responses[i]) {
				t.Fatalf("member %d: %v, %v", i, op, err)
			}
		}
	})
}

// Bytes that are no answer are an error and no panic, and never a write that took place.
func FuzzBatchAnswer(f *testing.F) {
	f.Add([]byte{0x0a, 0x02, 0x18, 0x05, 0x10, 0x01, 0x1a, 0x04, 0x22, 0x02, 0x10, 0x01})
	f.Fuzz(func(t *testing.T, b []byte) {
		var a batchAnswer
		var want pb.TxnResponse
		if a.decode(b) != nil {
			return
		}
		for _, op := range a.responses {
			var generated pb.ResponseOp
			if nestedSucceeded(op) && proto.Unmarshal(op, &generated) == nil && proto.Unmarshal(b, &want) == nil && !generated.GetResponseTxn().GetSucceeded() {
				// Only what repeats a field could be read two ways, which etcd does not send.
				if again, err := proto.Marshal(&generated); err == nil && len(again) == len(op) {
					t.Fatalf("%x is read as written", op)
				}
			}
		}
	})
}
