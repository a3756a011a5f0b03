// Package server puts the contract on the wire: it decodes a call, asks a
// claim.Store, and encodes the answer, as gRPC and, through a gateway, as JSON. It
// decides nothing about claims.
//
// What always holds:
//
//   - Every error leaves through one table (errors.go) with a gRPC code and an
//     ErrorInfo. What is in no row is INTERNAL, with a message that tells nothing
//     and a log line that tells all.
//   - JSON takes the same way as gRPC: the gateway calls the gRPC server, so that
//     no interceptor can be passed by.
//   - Every call has a deadline, the server's if the caller brought none.
//   - A finish that was handed to the store is the store's; nothing here ends it.
//   - What was accepted can be told: a failure's details are refused at the door
//     if they could not be written as JSON later.
//   - Health follows readiness both ways, and goes first when the server stops.
//
// What always holds of a session (session.go):
//
//   - A call that was accepted is answered once, unless its client has gone.
//   - Calls of one key are asked for one after the other, in the order in which they
//     were sent; a Begin that waits lets the next pass. No call waits for another key's.
//   - A call takes the way of the unary methods: the same checks, counts, table, bounds
//     and guard against panics. It has a deadline from when it was read.
//   - What a session holds is bounded: Begins and Gets over it are OVERLOADED at once;
//     finishes, far above it, and a client that does not read its answers hold up the
//     reading, never the carrying out.
//   - A frame that is wrong ends the stream, after what was accepted was answered.
//   - No goroutine of a session outlives Stop, and none but its reader its handler.
//
// What always holds of a stream of Watch (watch.go; lines.go over HTTP):
//
//   - It tells what the feed tells, in that order, and a token only once all before it
//     was sent. It ends with an error, unless its client has gone.
//   - Nobody waits for a reader, a stop neither: one that takes nothing for a minute is
//     ended. Until then it holds one message here and what gRPC takes ahead of it.
//   - No goroutine of a stream outlives Stop.
//
// The life of a call: observe (count, time, log) → errors (the table, panics) →
// deadline → the method → convert → claim.Store. That of a session's call: read → its
// key's turn → errors → the method → convert → claim.Store → observe → encoded →
// sent with all others that are there.
package server
