// Package rediscache puts Redis in front of the Store that decides: it is written
// first and believed last.
//
// What always holds, whatever Redis holds, loses, keeps or is made to say (G5):
//
//   - Only a confirmed entry of a finished record answers a caller: the very bytes
//     that etcd holds, with their revision, their SHA-256, and an HMAC over all of it
//     and the Redis key, by the secret that was made once in etcd. Who can write to
//     Redis still cannot make one. For anything else the Store behind is asked.
//   - It answers only while this node knows of every change of the epochs that was
//     committed until claim.BelievedFor ago, only under the epochs it knows, and only
//     until claim.CacheMargin before the record's deadlines. The epochs are part of
//     the key's name, so that what was taken back is found under no name that anyone
//     asks for.
//   - A stage is what somebody is about to propose to etcd. It is never believed; a
//     confirm stamps the stage of its own nonce and digest alone. A stage never
//     replaces a confirmed entry, nor a confirmed entry a newer one.
//   - Each write is one idempotent command or script of one key, atomic with its
//     expiry. The client may send it twice, and in any order.
//   - Nothing waits for Redis longer than a few milliseconds. A breaker keeps calls
//     from a Redis that is down or slow, and Degraded says so.
//
// entry.go is what an entry looks like and when it is authentic, look.go when it may be
// told, store.go what it answers, write.go what this node writes, script.go what that
// does to an entry, pipeline.go how commands of many calls share round trips, shard.go
// what is well and what is not.
package rediscache
