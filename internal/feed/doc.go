// Package feed tells of records' changes: to callers that wait for one key, and to
// subscribers of a namespace.
//
// What always holds:
//
//   - There is one watch of etcd for all of them, and only while there are any, and
//     for a while after.
//   - A subscriber gets each key's changes in order, none missing and none twice (G9);
//     or it is told to begin anew, and given what is there.
//   - Nobody waits for a reader. What was told is kept in one ring, in which each
//     subscriber has a place; whoever is too slow for it begins anew.
//   - A waiter is woken when its key may have changed, not only when it has: it asks
//     etcd, and no answer depends on the watch.
//
// feed.go is the feed, ring.go what it keeps, subscription.go what a subscriber is told,
// scan.go how many who begin anew share one look at what is there, token.go where a
// subscriber was, filter.go how it is known of a key that there is none.
package feed
