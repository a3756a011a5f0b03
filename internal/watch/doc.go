// Package watch follows what governs a node: the tick, the guard, the epoch, the
// secret, the nodes and the policies, all under /m/ and /p/ in etcd.
//
// What always holds:
//
//   - A View is consistent: all that one revision changed is in it, or nothing of
//     it. One watch covers both prefixes, because two could be apart.
//   - What is applied never falls behind what was, unless etcd itself went back; then
//     everything is listed anew and nothing remembered is believed.
//   - Silence is noticed: once a second the tick and the guard are read
//     linearizably, and a watch that does not reach what was read is replaced by a
//     fresh list. Trouble leads to a told state, never to a hang.
//
// States: listing → live → (compacted, closed, behind, gone back) → listing.
package watch
