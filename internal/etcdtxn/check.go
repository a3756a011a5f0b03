package etcdtxn

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// leastOps is how many operations a transaction must be allowed to have, for batches to
// be worth the name.
const leastOps = 16

// Member is one etcd server as its status says.
type Member struct {
	Endpoint, Version      string
	Leader                 bool
	DBSize, DBInUse, Quota int64 // bytes
	Alarms                 []string
	// Err is why its status could not be had.
	Err string
}

// Members asks every endpoint for its status.
func Members(ctx context.Context, client *clientv3.Client) []Member {
	endpoints := client.Endpoints()
	members := make([]Member, len(endpoints))
	var asking sync.WaitGroup
	for i, endpoint := range endpoints {
		asking.Go(func() { members[i] = memberAt(ctx, client, endpoint) })
	}
	asking.Wait()
	return members
}

func memberAt(ctx context.Context, client *clientv3.Client, endpoint string) Member {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	m := Member{Endpoint: endpoint}
	status, err := client.Status(ctx, endpoint)
	if err != nil {
		m.Err = err.Error()
		return m
	}
	m.Version = status.Version
	m.Leader = status.Leader == status.Header.MemberId
	m.DBSize, m.DBInUse, m.Quota = status.DbSize, status.DbSizeInUse, status.DbSizeQuota
	for _, e := range status.Errors {
		for _, alarm := range []pb.AlarmType{pb.AlarmType_NOSPACE, pb.AlarmType_CORRUPT} {
			if strings.Contains(e, alarm.String()) {
				m.Alarms = append(m.Alarms, alarm.String())
			}
		}
	}
	return m
}

// Check looks at etcd before a node serves from it: versions whose nested
// transactions are sound, no corruption, room for transactions of our shape. An
// unreachable member is tolerated while a quorum answers. So is a full database: a
// node that runs can still tell of finished keys, and one that starts is ready once
// the clock moves again. The error says what to do.
func Check(ctx context.Context, client *clientv3.Client) ([]Member, error) {
	members := Members(ctx, client)
	reached := 0
	for _, m := range members {
		if m.Err != "" {
			continue
		}
		reached++
		if err := sound(m.Version); err != nil {
			return members, fmt.Errorf("etcd at %s: %w", m.Endpoint, err)
		}
		for _, alarm := range m.Alarms {
			if alarm == pb.AlarmType_CORRUPT.String() {
				return members, fmt.Errorf("etcd at %s: the CORRUPT alarm is raised: members disagree on their data; repair the cluster, then disarm the alarm", m.Endpoint)
			}
		}
	}
	if reached == 0 {
		return members, claim.Unavailable(fmt.Sprintf("no etcd endpoint answers (%s): is etcd running there?", strings.Join(client.Endpoints(), ", ")), errors.New(members[0].Err))
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	switch allowed, err := allows(ctx, client, leastOps); {
	case err != nil:
		return members, claim.Unavailable("etcd answers its status but no linearizable read: it has no leader or no quorum, or is about to have another", err)
	case !allowed:
		return members, fmt.Errorf("etcd allows fewer than %d operations a transaction: raise its --max-txn-ops (128 is its default)", leastOps)
	}
	return members, nil
}

// MaxTxnOps finds out how many operations etcd allows a transaction (its --max-txn-ops,
// which it does not tell), from leastOps to opsMost.
func MaxTxnOps(ctx context.Context, client *clientv3.Client) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	allowed, refused := leastOps, opsMost+1
	for try := usualOps; refused-allowed > 1; try = (allowed + refused) / 2 {
		ok, err := allows(ctx, client, try)
		switch {
		case err != nil:
			return allowed, err
		case !ok:
			refused = try
		case try == usualOps: // the default, as a rule: that it is no more takes one question
			allowed = try
			if ok, err = allows(ctx, client, try+1); err != nil {
				return allowed, err
			} else if !ok {
				return allowed, nil
			}
			allowed = try + 1
		default:
			allowed = try
		}
	}
	return allowed, nil
}

// allows reports whether etcd takes a transaction of so many operations.
func allows(ctx context.Context, client *clientv3.Client, n int) (bool, error) {
	ops := make([]clientv3.Op, n)
	for i := range ops {
		ops[i] = clientv3.OpGet(layout.Tick, clientv3.WithCountOnly())
	}
	_, err := client.Txn(ctx).Then(ops...).Commit()
	if errors.Is(rpctypes.Error(err), rpctypes.ErrTooManyOps) {
		return false, nil
	}
	return err == nil, err
}

// sound reports whether this version of etcd counts and guards nested transactions
// rightly: 3.6.14 and 3.7.1 are the first of their lines (etcd CHANGELOG, pull
// request 22134 and CVE-2026-33343).
func sound(version string) error {
	var v [3]int
	for i, part := range strings.SplitN(strings.SplitN(version, "-", 2)[0], ".", 3) {
		n, err := strconv.Atoi(part)
		if err != nil {
			return fmt.Errorf("version %q is not understood", version)
		}
		v[i] = n
	}
	old := v[0] < 3 || v[0] == 3 && (v[1] < 6 || v[1] == 6 && v[2] < 14 || v[1] == 7 && v[2] < 1)
	if old {
		return fmt.Errorf("version %s miscounts nested transactions: use 3.7.1 or later (or 3.6.14 or later of 3.6)", version)
	}
	return nil
}
