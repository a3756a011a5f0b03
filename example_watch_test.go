package dualcheck_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/dualcheck/dualcheck"
	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// paid answers whether an order has been paid, from the local copy while that is fresh,
// and else by asking. It only shows what is known: whoever pays asks Begin.
func paid(client *dualcheck.Client, watch *dualcheck.Watch) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		if watch.Fresh(10 * time.Second) {
			entry, known := watch.Get(id)
			fmt.Fprintln(w, known && entry.State == dualcheck.StateSucceeded, "from the copy")
			return
		}
		stored, err := client.Get(r.Context(), dualcheck.Key{Namespace: "payments", Key: id})
		if errors.Is(err, dualcheck.ErrRecordNotFound) {
			fmt.Fprintln(w, false, "from the server")
			return
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		record, err := stored.Record()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintln(w, record.GetState() == dualcheckv1.State_STATE_SUCCEEDED, "from the server")
	}
}

func ExampleClient_Watch() {
	addr, stop := servePayments()
	defer stop()
	client := connect(addr)
	defer client.Close()

	watch, err := client.Watch(context.Background(), "payments")
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /paid/{id}", paid(client, watch))
	ask := func(id string) {
		answer := httptest.NewRecorder()
		mux.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/paid/"+id, nil))
		fmt.Print(id, ": ", answer.Body)
	}

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := watch.Synced(ctx); err != nil {
		log.Fatal(err)
	}
	// The copy is complete; it is fresh once the server has said that there is no more.
	for ctx.Err() == nil && !watch.Fresh(10*time.Second) {
		<-time.After(time.Millisecond)
	}
	ask("po-1")
	ask("po-2")

	// Without a Watch that goes on, the server is asked.
	watch.Close()
	ask("po-1")
	// Output:
	// po-1: true from the copy
	// po-2: false from the copy
	// po-1: true from the server
}

// payments is a server that knows of one payment.
type payments struct {
	dualcheckv1.UnimplementedDedupServiceServer
	dualcheckv1.UnimplementedWatchServiceServer
}

func (payments) Get(context.Context, *dualcheckv1.GetRequest) (*dualcheckv1.GetResponse, error) {
	return &dualcheckv1.GetResponse{Record: &dualcheckv1.Record{State: dualcheckv1.State_STATE_SUCCEEDED}}, nil
}

func (payments) Watch(_ *dualcheckv1.WatchRequest, stream grpc.ServerStreamingServer[dualcheckv1.WatchResponse]) error {
	for _, m := range []*dualcheckv1.WatchResponse{
		{Resync: &dualcheckv1.Resync{Begin: true}},
		{Events: []*dualcheckv1.Event{{
			Type: dualcheckv1.EventType_EVENT_TYPE_PUT, Kind: dualcheckv1.EventKind_EVENT_KIND_RECORD,
			Namespace: "payments", Key: "po-1", State: dualcheckv1.State_STATE_SUCCEEDED, Revision: 7,
		}}},
		{ResumeToken: "a", Resync: &dualcheckv1.Resync{End: true}},
		{ResumeToken: "a", Progress: true},
	} {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return nil
}

func servePayments() (addr string, stop func()) {
	l, srv, up := listen(), grpc.NewServer(), health.NewServer()
	up.SetServingStatus("dualcheck.v1.DedupService", healthv1.HealthCheckResponse_SERVING)
	healthv1.RegisterHealthServer(srv, up)
	dualcheckv1.RegisterDedupServiceServer(srv, payments{})
	dualcheckv1.RegisterWatchServiceServer(srv, payments{})
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	return l.Addr().String(), func() {
		srv.Stop()
		if err := <-served; err != nil {
			log.Fatal(err)
		}
	}
}
