package server

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/metadata"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/internal/claim"
)

// What callers say of themselves is cut, and where they are from is believed of the
// gateway alone.
func TestWhatIsLoggedOfCallers(t *testing.T) {
	w := start(t)
	long := strings.Repeat("x", 1000)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-request-id", long, "x-forwarded-for", "203.0.113.9")
	if _, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"}); err != nil {
		t.Fatal(err)
	}
	if log := w.logs.String(); strings.Contains(log, "203.0.113.9") || strings.Contains(log, long[:mostLogged+1]) || !strings.Contains(log, "x_request_id="+long[:mostLogged]) || !strings.Contains(log, "peer=127.0.0.1:") {
		t.Errorf("over gRPC:\n%s", log)
	}
	w = start(t)
	if code, _, body := w.post("/v1/dedup:begin", `{"namespace":"a","key":"k"}`, "X-Request-Id", long, "X-Forwarded-For", strings.Repeat("y", 1000)+", 203.0.113.9"); code != 200 {
		t.Fatal(body)
	}
	if log := w.logs.String(); !strings.Contains(log, "203.0.113.9, 127.0.0.1") || strings.Contains(log, strings.Repeat("y", mostLogged)) || strings.Contains(log, long[:mostLogged+1]) {
		t.Errorf("over JSON:\n%s", log)
	}
	ctx = metadata.AppendToOutgoingContext(t.Context(), "x-filler", strings.Repeat("x", maxHeaders))
	if _, err := w.Begin(ctx, &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"}); err == nil {
		t.Error("headers of any size are taken")
	}
}

// However many calls wait over JSON, a finish passes.
func TestTheGatewayHasNoBoundOfItsOwn(t *testing.T) {
	const waiting = mostStreams + 20
	w := start(t, func(c *Config) { c.MaxInFlight = 2 * waiting })
	token := w.first("held").GetToken()
	var under atomic.Int64
	goOn := make(chan struct{})
	w.store.before(func(context.Context, *claim.BeginRequest) error { under.Add(1); <-goOn; return nil })
	var calls sync.WaitGroup
	for i := range waiting {
		calls.Go(func() {
			if code, _, body := w.post("/v1/dedup:begin", fmt.Sprintf(`{"namespace":"a","key":"k%d"}`, i)); code != 200 {
				t.Errorf("%d %s", code, body)
			}
		})
	}
	eventually(t, "all are under way", func() bool { return under.Load() == waiting })
	if code, _, body := w.post("/v1/dedup:complete", `{"namespace":"a","key":"held","token":"`+token+`"}`); code != 200 {
		t.Errorf("%d %s", code, body)
	}
	close(goOn)
	calls.Wait()
}
