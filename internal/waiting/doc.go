// Package waiting is where callers wait for a key that is in progress.
//
// Those who wait for one key are a group, and ask as one. What always holds:
//
//   - A group asks with one claim.Store.BeginTogether for all who wait, in the order in
//     which they came: one read and at most one write, whatever their number, and at most
//     one of them is given the claim.
//   - Of one key at most one ask is in flight, and nobody shares one that was sent before
//     they came (H06).
//   - Nobody is asked for who has gone. Who goes while an ask is in flight is not waited
//     for, and what it was given stays: the same call sent again is told (H24). Who has only
//     had enough, or whose time has come, stays for that ask's outcome, for it may be the
//     claim.
//   - No answer depends on what woke a group: the Store decides.
//
// A group asks when its key may have changed (Changes), when the claim that stands in the
// way lapses, and when it has reason to look more closely: once a second a round reads the
// revisions of the keys of all groups, a hundred at a time and without their values, and a
// group whose key has not moved since its last answer, under a guard that has not moved
// either, does not ask. Were it not for what a watch may miss, rounds would find nothing.
// While changes are not being told, each group asks after the time that its last answer
// said, and after a second at most.
//
// A waiter has no goroutine but its call's; whichever of a group's waiters wakes first asks
// for them all. An ask in flight is a goroutine, and the rounds are one, while there is
// anybody.
//
// room.go lets callers in and out, group.go asks, rounds.go goes round.
package waiting
