// Package etcdtxn carries out claim's decisions in etcd. It is the Store that
// decides: what it has not committed, or read under the guard, it does not tell.
//
// What always holds:
//
//   - Every write is one conditional transaction: at the outer level the guard and
//     the tick window, so that no node writes by an old policy, epoch or clock; in
//     a nested transaction the record's own revision, whose other branch reads what
//     is there. One round trip settles the usual case.
//   - An ambiguous commit is settled by sending the same conditional transaction
//     again, with the same bytes. A value read back that is one of those sent is
//     this call's own success. A read that finds nothing proves nothing.
//   - Every call to etcd has a deadline.
//   - A key is written by at most one transaction of this node at a time. A caller shares
//     a transaction or a read only if it is sent after the caller asked.
//
// One file per transaction shape: begin, finish (Complete, Fail, Extend), get,
// resolve, forget, list, namespace, epoch, switch, bootstrap, tick (in keeper).
// govern.go moves the guard with what all nodes obey; settle.go is the loop they
// share; commit.go gathers writes into batches and flight.go reads, queue.go says who
// goes first; txn.go is the one place that makes a guarded transaction, wire.go how a
// batch is written and read as bytes.
package etcdtxn
