// Package claim decides who may do a piece of work and what everyone else is
// told. It is pure: what to answer, and what to write, is a function of the
// record, the request, the policy and the time; etcd, memory, batches and gRPC
// only carry it out.
//
// What always holds:
//
//   - At most one claim of a key is live: a new claim is written only over no
//     record, an expired one, a released one, or one whose lease lapsed under
//     TAKEOVER_AUTO, and the store commits it by a compare on what was read (G1).
//   - SUCCEEDED and FAILED never change while the key is known (G2).
//   - Only the holder of the newest claim changes anything (G3).
//   - No wall clock decides: times are Instants of the cluster's clock.
//
// Who may move a record from where to where:
//
//	none, expired, opened mark   Begin             PENDING   attempt 1
//	RELEASED                     Begin             PENDING   attempt + 1
//	PENDING, lapsed, AUTO        Begin             PENDING   attempt + 1
//	PENDING, UNKNOWN             holder's finish   SUCCEEDED, FAILED, RELEASED, UNKNOWN
//	RELEASED by its holder       holder's finish   SUCCEEDED, FAILED
//	PENDING                      holder's Extend   PENDING, later deadline
//	UNKNOWN, lapsed, used up     operator's resolve  SUCCEEDED, FAILED, RELEASED
//	any (forced if claimed)      operator's forget   held mark, then opened mark
package claim
