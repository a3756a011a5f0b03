package dualcheck_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/dualcheck/dualcheck"
	"github.com/dualcheck/dualcheck/internal/claimtest"
	"github.com/dualcheck/dualcheck/internal/server"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// serve runs a real server in this process, over a store in memory.
func serve() (addr string, stop func()) {
	srv, err := server.New(server.Config{
		Store:      claimtest.NewMemory(),
		Namespaces: struct{ server.Namespaces }{}, Levers: struct{ server.Levers }{}, Cluster: struct{ server.Cluster }{},
		Ready:   func() error { return nil },
		Metrics: telemetry.NewMetrics(telemetry.Build{Version: "test"}), Log: slog.New(slog.DiscardHandler),
		MaxInFlight: 1000,
	})
	if err != nil {
		log.Fatal(err)
	}
	grpcListener, httpListener := listen(), listen()
	served := make(chan error, 1)
	go func() { served <- srv.Serve(grpcListener, httpListener) }()
	return grpcListener.Addr().String(), func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		srv.Stop(ctx, 0)
		if err := <-served; err != nil {
			log.Fatal(err)
		}
	}
}

func listen() net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	return l
}

func connect(addr string) *dualcheck.Client {
	client, err := dualcheck.New([]string{addr})
	if err != nil {
		log.Fatal(err)
	}
	return client
}

func Example() {
	addr, stop := serve()
	defer stop()
	client := connect(addr)
	defer client.Close()

	// The same delivery comes twice.
	key := dualcheck.Key{Namespace: "orders", Key: "po-4711", Operation: "order.accept"}
	for range 2 {
		result, err := client.Do(context.Background(), key, func(context.Context, *dualcheck.Claim) (dualcheck.Result, error) {
			fmt.Println("accepting the order")
			return dualcheck.Result{Code: 200, Body: []byte("accepted")}, nil
		})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s (replayed: %v)\n", result.Body, result.Replayed)
	}
	// Output:
	// accepting the order
	// accepted (replayed: false)
	// accepted (replayed: true)
}

func ExampleClient_Do() {
	addr, stop := serve()
	defer stop()
	client := connect(addr)
	defer client.Close()

	// The supplier's service refuses for good: that is stored, typed as it was.
	refusal, err := status.New(codes.ResourceExhausted, "no credit").WithDetails(&errdetails.ErrorInfo{Reason: "CREDIT", Domain: "supplier"})
	if err != nil {
		log.Fatal(err)
	}
	key := dualcheck.Key{Namespace: "orders", Key: "po-4712"}
	pay := func(context.Context, *dualcheck.Claim) (dualcheck.Result, error) {
		return dualcheck.Result{}, dualcheck.Terminal(refusal.Err())
	}
	_, err = client.Do(context.Background(), key, pay)
	fmt.Println("first:", status.Convert(err).Code())

	_, err = client.Do(context.Background(), key, pay)
	var failed *dualcheck.FailureError
	if errors.As(err, &failed) {
		again := status.Convert(err)
		fmt.Println("again:", again.Code(), again.Message(), len(again.Details()), failed.KeyAction)
	}
	// Output:
	// first: ResourceExhausted
	// again: ResourceExhausted no credit 1 ROTATE
}

func ExampleClient_Begin() {
	addr, stop := serve()
	defer stop()
	client := connect(addr)
	defer client.Close()
	ctx := context.Background()

	key := dualcheck.Key{Namespace: "orders", Key: "po-4713"}
	out, err := client.Begin(ctx, key, dualcheck.Lease(10*time.Second))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(out.Verdict, out.KeyAction, out.Claim.Attempt)

	other, err := client.Begin(ctx, key)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(other.Verdict, other.KeyAction)

	if _, err := client.Complete(ctx, out.Claim, dualcheck.Result{Code: 201}); err != nil {
		log.Fatal(err)
	}
	again, err := client.Begin(ctx, key)
	if err != nil {
		log.Fatal(err)
	}
	result, err := again.Result()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(again.Verdict, again.KeyAction, result.Code)
	// Output:
	// FIRST PROCEED 1
	// IN_PROGRESS REUSE
	// REPLAY STOP 201
}

func ExampleClient_Complete() {
	addr, stop := serve()
	defer stop()
	client := connect(addr)
	defer client.Close()
	ctx := context.Background()

	out, err := client.Begin(ctx, dualcheck.Key{Namespace: "orders", Key: "po-4714"})
	if err != nil {
		log.Fatal(err)
	}
	// What is kept of a claim is enough to finish it, also after a restart.
	kept := &dualcheck.Claim{Key: out.Claim.Key, Token: out.Claim.Token}
	if _, err := client.Complete(ctx, kept, dualcheck.Result{Code: 200}); err != nil {
		log.Fatal(err)
	}
	_, err = client.Complete(ctx, kept, dualcheck.Result{Code: 200})
	fmt.Println("the same again:", err)
	_, err = client.Complete(ctx, kept, dualcheck.Result{Code: 500})
	fmt.Println("another:", errors.Is(err, dualcheck.ErrAlreadyFinished), status.Code(err))
	// Output:
	// the same again: <nil>
	// another: true AlreadyExists
}

func ExampleDoJSON() {
	addr, stop := serve()
	defer stop()
	client := connect(addr)
	defer client.Close()

	type receipt struct{ Total int }
	for range 2 {
		got, err := dualcheck.DoJSON(context.Background(), client, dualcheck.Key{Namespace: "orders", Key: "po-4715"},
			func(context.Context, *dualcheck.Claim) (receipt, error) { return receipt{Total: 7}, nil })
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(got.Total)
	}
	// Output:
	// 7
	// 7
}
