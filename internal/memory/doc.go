// Package memory keeps finished records in a node's own memory, in front of every other
// Store.
//
// What always holds:
//
//   - Only finished records are kept, which never change for as long as their keys are
//     known. Anything else is asked of the Store behind.
//   - A record is kept with the epochs that were known before it was read or proposed, and
//     answers only while this node knows of every change of the epochs that was committed
//     until claim.BelievedFor ago, while those are the record's own, and until
//     claim.CacheMargin before its deadlines. So it does not matter how late a record comes
//     in, or that nobody told this node to drop it.
//   - Nothing older takes the place of what is there.
//   - Fingerprint, operation and policy are looked at with every answer, by claim.Begin.
//   - That there is no such key is remembered for a cached Get alone, for claim.BelievedFor
//     from when the read that found it was sent, and never over this node's own writes.
//
// cache.go is what is kept, store.go what it answers, fill.go what comes in, absent.go
// what is known not to be there.
package memory
