// Package dualcheck asks dualcheck whether a piece of work has been done, and what came
// of it, and sees to it that one caller at a time does it.
//
//	client, err := dualcheck.New([]string{"dualcheck-0:7070", "dualcheck-1:7070"})
//	if err != nil {
//		return err
//	}
//	defer client.Close()
//
//	key := dualcheck.Key{Namespace: "orders", Key: order.ID, Operation: "order.accept"}
//	result, err := client.Do(ctx, key, func(ctx context.Context, claim *dualcheck.Claim) (dualcheck.Result, error) {
//		reply, err := accept(ctx, order, claim.Fence)
//		if errors.Is(err, errNoSuchArticle) {
//			return dualcheck.Result{}, dualcheck.Terminal(err) // stored and replayed
//		}
//		return dualcheck.Result{Code: 200, Body: reply}, err
//	})
//
// The first caller runs the function; all others, and all later ones, get its result.
// Do extends the claim while the work runs, and ends the work's context before a lease
// that cannot be extended does. An error that says nothing of itself is taken to mean
// that the work may have happened, and holds the key: see Retryable, Terminal and
// WithClassifier.
//
// Begin, Complete, Fail, Extend and Get are the same in steps. Watch keeps a copy of a
// namespace's records, or those of a key prefix, in this process and up to date: what is
// done can then be shown without a question. It is always a little behind, and only Begin
// gives the right to do the work.
//
// What always holds here: a call is sent again only as the very same bytes, with the
// same request id, so that it counts once; a call of the same key goes over one stream
// while that is open, in the order in which it was made; time that is left of a lease is
// counted by this process's monotonic clock, from when the request was sent; and no
// answer is made up: what is not known is an *Error, which says whether the call may
// have been carried out.
//
// Calls share frames of one stream to each server, so one Client for a process is the
// fastest. docs/sdk.md has the table of retries, and what clients in other languages use.
package dualcheck
