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
// The life of a call: observe (count, time, log) → errors (the table, panics) →
// deadline → the method → convert → claim.Store.
package server
