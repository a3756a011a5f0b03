package main

import (
	"context"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/childproc"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/feedtest"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

var pausedFor = flag.Duration("paused-for", time.Minute, "how long a node is stopped and then goes on")

// apart is a node in a process of its own.
type apart struct {
	proc *childproc.Process
	conn *grpc.ClientConn
}

// serving starts nodes on one etcd and one Redis.
func serving(t *testing.T, etcd *etcdtest.Cluster, redis *redistest.Server, n int) (all []*apart) {
	t.Helper()
	for i := range n {
		port, err := childproc.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		cmd := exec.Command("dualcheck", "serve", "--grpc-addr", addr, "--http-addr", "127.0.0.1:0", "--node-id", fmt.Sprintf("n%d", i),
			"--etcd-endpoints", strings.Join(etcd.Endpoints(), ","), "--redis-addrs", redis.Addr(), "--log-level", "error")
		cmd.Stderr = os.Stderr
		proc, err := childproc.Start(cmd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(proc.Kill)
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		all = append(all, &apart{proc, conn})
	}
	for i, s := range all {
		nodetest.Eventually(t, startup, "a node to serve", func() error {
			_, err := s.begin("ready", fmt.Sprint(i))
			return err
		})
	}
	return all
}

func (s *apart) begin(namespace, key string) (*dualcheckv1.BeginResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return dualcheckv1.NewDedupServiceClient(s.conn).Begin(ctx, &dualcheckv1.BeginRequest{Namespace: namespace, Key: key})
}

// done begins and finishes a key.
func (s *apart) done(t *testing.T, key, body string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	a, err := s.begin("pay", key)
	if err == nil {
		_, err = dualcheckv1.NewDedupServiceClient(s.conn).Complete(ctx, &dualcheckv1.CompleteRequest{Namespace: "pay", Key: key, Token: a.GetClaim().GetToken(),
			Outcome: &dualcheckv1.CompleteRequest_Result{Result: &dualcheckv1.Result{Body: []byte(body)}}})
	}
	if err != nil {
		t.Errorf("%s: %v, %v", key, a, err)
	}
}

// reads has a reader read a node's stream, coming back by its token, until it is stopped.
func (s *apart) reads(t *testing.T, truth *feedtest.History) (stream *feedtest.Stream, mu *sync.Mutex, stop func()) {
	t.Helper()
	stream, mu = feedtest.NewStream(truth), &sync.Mutex{}
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan struct{})
	opened := sync.OnceFunc(func() { close(first) })
	var running sync.WaitGroup
	running.Go(func() {
		req := &dualcheckv1.WatchRequest{Namespace: "pay", Snapshot: true}
		for ctx.Err() == nil {
			err := s.read(ctx, req, func(m *dualcheckv1.WatchResponse) {
				mu.Lock()
				defer mu.Unlock()
				stream.Take(messageOf(m))
				req.ResumeToken = m.GetResumeToken()
				opened()
			})
			if c := status.Code(err); ctx.Err() == nil && c != codes.Unavailable && !errors.Is(err, io.EOF) {
				t.Errorf("the stream ended: %v", err)
				return
			}
		}
	})
	<-first
	return stream, mu, sync.OnceFunc(func() { cancel(); running.Wait() })
}

func (s *apart) read(ctx context.Context, req *dualcheckv1.WatchRequest, take func(*dualcheckv1.WatchResponse)) error {
	from, err := dualcheckv1.NewWatchServiceClient(s.conn).Watch(ctx, req, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	for {
		m, err := from.Recv()
		if err != nil {
			return err
		}
		take(m)
	}
}

func messageOf(m *dualcheckv1.WatchResponse) feedtest.Message {
	out := feedtest.Message{Token: m.GetResumeToken(), Progress: m.GetProgress(), Begin: m.GetResync().GetBegin(), End: m.GetResync().GetEnd(), Cause: m.GetResync().GetCause()}
	for _, e := range m.GetEvents() {
		told := feedtest.Event{Key: e.GetKey(), Revision: e.GetRevision(), Deleted: e.GetType() == dualcheckv1.EventType_EVENT_TYPE_DELETE}
		if !told.Deleted {
			told.State, told.Digest = e.GetState().String(), hex.EncodeToString(e.GetDigest())
		}
		out.Events = append(out.Events, told)
	}
	return out
}

// G4, G9: a node is stopped for a minute with results in its memory and a reader on its
// stream. Meanwhile keys are finished and forgotten through another node. From the moment
// it goes on it tells nothing that was forgotten, and its reader misses nothing.
func TestNodePausedForAMinute(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	nodes := serving(t, etcd, redistest.Start(t), 2)
	sleeper, other := nodes[0], nodes[1]
	truth := feedtest.Record(t, etcd.Client(), "pay")
	stream, mu, stop := sleeper.reads(t, truth)
	t.Cleanup(stop)
	const each = 20
	for i := range each {
		for _, kind := range []string{"kept", "gone"} {
			key := fmt.Sprintf("%s-%d", kind, i)
			other.done(t, key, "old")
			for range 2 { // the second time from memory
				if a, err := sleeper.begin("pay", key); err != nil || string(a.GetRecord().GetResult().GetBody()) != "old" {
					t.Fatalf("%s: %v, %v", key, a, err)
				}
			}
		}
	}
	if err := sleeper.proc.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	end := time.After(*pausedFor)
	var forgetting sync.WaitGroup
	for i := range each {
		forgetting.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			if _, err := dualcheckv1.NewAdminServiceClient(other.conn).ForgetRecord(ctx, &dualcheckv1.ForgetRecordRequest{Namespace: "pay", Key: fmt.Sprintf("gone-%d", i), Reason: "a test"}); err != nil {
				t.Errorf("forget: %v", err)
			}
		})
	}
	forgetting.Wait()
	for i := range 200 {
		other.done(t, fmt.Sprintf("new-%d", i), "new")
	}
	<-end
	if err := sleeper.proc.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	// As many as possible in its first moments.
	var asking sync.WaitGroup
	for i := range 2 * each {
		asking.Go(func() {
			key := fmt.Sprintf("gone-%d", i%each)
			for range 50 {
				if a, err := sleeper.begin("pay", key); err == nil && string(a.GetRecord().GetResult().GetBody()) == "old" {
					t.Errorf("%s was forgotten, and is told by %v", key, a.GetSource())
				}
			}
		})
	}
	asking.Wait()
	for i := range each {
		key := fmt.Sprintf("kept-%d", i)
		if a, err := sleeper.begin("pay", key); err != nil || string(a.GetRecord().GetResult().GetBody()) != "old" {
			t.Errorf("%s: %v, %v", key, a, err)
		}
	}
	truth.Await(t, etcd.Client())
	nodetest.Eventually(t, startup, "the reader to have everything", func() error {
		mu.Lock()
		defer mu.Unlock()
		if !stream.Complete("") {
			return fmt.Errorf("%d events, %d resyncs: %v", stream.Events, stream.Resyncs, stream.Errors)
		}
		return nil
	})
	stop()
	for _, err := range stream.Finish("") {
		t.Error(err)
	}
}
