package target

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// fillBatch bounds a batch of a fill by members and by bytes.
const (
	fillBatch   = 500
	fillBytes   = 4 << 20
	fillWorkers = 4
)

// each runs f for 0 to n-1, some at once, and returns the first error.
func each(ctx context.Context, n, workers int, f func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	for i := range n {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return f(ctx, i)
		})
	}
	return group.Wait()
}

// Fill begins and completes n keys in batches: with the same requests as any caller's.
func Fill(ctx context.Context, addr string, key func(uint64) string, n int, body []byte) error {
	conn, err := dial(addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := dualcheckv1.NewDedupServiceClient(conn)
	size := max(1, min(fillBatch, fillBytes/(len(body)+1)))
	return each(ctx, (n+size-1)/size, fillWorkers, func(ctx context.Context, i int) error {
		return fillSome(ctx, client, key, i*size, min(n, (i+1)*size), body)
	})
}

func fillSome(ctx context.Context, client dualcheckv1.DedupServiceClient, key func(uint64) string, from, to int, body []byte) error {
	begins := &dualcheckv1.BatchBeginRequest{}
	for i := from; i < to; i++ {
		begins.Requests = append(begins.Requests, beginRequest(key(uint64(i))))
	}
	begun, err := client.BatchBegin(ctx, begins)
	if err != nil {
		return fmt.Errorf("fill: %w", err)
	}
	finishes := &dualcheckv1.BatchFinishRequest{}
	for i, r := range begun.GetResponses() {
		b := r.GetBegin()
		if b.GetVerdict() != dualcheckv1.Verdict_VERDICT_FIRST {
			return fmt.Errorf("fill: key %s: %v %s", begins.Requests[i].Key, b.GetVerdict(), r.GetError().GetMessage())
		}
		finishes.Requests = append(finishes.Requests, &dualcheckv1.FinishRequest{Finish: &dualcheckv1.FinishRequest_Complete{
			Complete: completeRequest(begins.Requests[i].Key, b.GetClaim().GetToken(), body)}})
	}
	finished, err := client.BatchFinish(ctx, finishes)
	if err != nil {
		return fmt.Errorf("fill: %w", err)
	}
	for i, r := range finished.GetResponses() {
		if r.GetFinish() == nil {
			return fmt.Errorf("fill: key %s: %s", begins.Requests[i].Key, r.GetError().GetMessage())
		}
	}
	return nil
}

// Result is what work brings: so many bytes that do not compress to nothing.
func Result(n int) []byte { return result(n) }

// OwnBytes is what callers give or are told of a finished record that Fill made: names,
// fingerprint and ids as they are, 32 bytes of digest, the claim's id of 16, 8 for each
// of five times (created, claimed, finished, result_until, key_until) and of two numbers
// (attempt, fence).
func OwnBytes(key string, resultBytes int) int {
	const digest, claimID, times, numbers = 32, 16, 5 * 8, 2 * 8
	b := beginRequest(key)
	return len(b.Namespace) + len(b.Key) + len(b.Operation) + len(b.Fingerprint) + len(b.Owner) + len(b.RequestId) +
		resultBytes + len(contentType) + digest + claimID + times + numbers
}
