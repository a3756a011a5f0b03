package server

import (
	"fmt"
	"testing"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// BenchmarkBegin is the way through gRPC, the interceptors and the conversions,
// with a store that costs next to nothing.
func BenchmarkBegin(b *testing.B) {
	w := start(b)
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for i := 0; p.Next(); i++ {
			if _, err := w.Begin(b.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: fmt.Sprintf("k%d", i%100), Fingerprint: fingerprint("f"), RequestId: "r"}); err != nil {
				b.Fatal(err)
			}
		}
	})
}
