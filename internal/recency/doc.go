// Package recency says for how long a cache should keep what is finished: as long as
// the keys of its kind are known to come back, and not longer. It is pure: time is
// passed in, and nothing waits but for a lock of a few hundred nanoseconds.
//
// What always holds:
//
//   - A TTL is within the policy's cache_ttl_min and cache_ttl_max.
//   - Nothing is shortened before something is known: a habit counts once it has
//     enough repeats, and has been watched for as long as the longest TTL. Sooner,
//     what comes back late could not have been seen yet, and all that had been seen
//     would look early.
//   - Of the repeats that the longest TTL would have reached, as a habit was seen to have
//     them, at most one in two hundred is older than its TTL.
//
// What is observed is the age of each repeat: the cluster time from the finish to the
// moment at which its outcome was told again. Memory, Redis and etcd are all observed,
// so a TTL that is too short is seen to be: the repeats that it lost are answered from
// etcd, at their true age. A hit does not lengthen an entry's life, so the age, not the
// distance from one repeat to the next, is what an entry has to reach.
//
// A habit is that of a namespace, or of one value of the label "supplier" in it. It is a
// histogram of ages, histogram.go; habits.go has the table of them and chooses; front.go
// watches a Store.
package recency
