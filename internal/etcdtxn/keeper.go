package etcdtxn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v5"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/layout"
)

// registrationTTL is how long a node that died stays listed. Longer than any
// election, so that no pause of etcd's unlists the living.
const registrationTTL = 15 // seconds

// Follower is what the Keeper needs of watch.Follower.
type Follower interface {
	// Tick returns the newest tick, how long ago it was seen, and a channel that is
	// closed when anything moves.
	Tick() (claim.Tick, time.Duration, <-chan struct{})
	// FirstNode is the id of the node that has been registered longest; "": none.
	FirstNode() string
}

// KeeperConfig says who keeps what.
type KeeperConfig struct {
	Client   *clientv3.Client
	Follower Follower
	Node     layout.Node
	Log      *slog.Logger
}

// Keeper keeps a node registered and the cluster's clock moving. The node that has
// been registered longest ticks; any other does once it has not seen the tick move
// for 2 s. Two at once are harmless: each tick is a compare on the one before.
type Keeper struct {
	cfg    KeeperConfig
	seldom rate.Sometimes
}

// NewKeeper makes a Keeper; Run makes it keep.
func NewKeeper(cfg KeeperConfig) *Keeper {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Keeper{cfg: cfg, seldom: rate.Sometimes{Interval: time.Minute}}
}

// Run keeps until ctx ends; then it takes its registration back.
func (k *Keeper) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { k.register(ctx); return nil })
	g.Go(func() error { k.tick(ctx); return nil })
	return g.Wait()
}

// register keeps the node listed, under a lease that it renews.
func (k *Keeper) register(ctx context.Context) {
	lost := rate.Sometimes{Interval: 30 * time.Second}
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 100*time.Millisecond, 5*time.Second
	for ctx.Err() == nil {
		began := time.Now()
		if err := k.registered(ctx); err != nil && ctx.Err() == nil {
			lost.Do(func() {
				k.cfg.Log.Warn("this node is not registered, so others do not see it; it tries again", "cause", err)
			})
		}
		if time.Since(began) > wait.MaxInterval {
			wait.Reset()
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait.NextBackOff()):
		}
	}
}

// registered registers the node and returns when its lease is gone.
func (k *Keeper) registered(ctx context.Context) error {
	value, err := layout.EncodeNode(k.cfg.Node)
	if err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	lease, err := k.cfg.Client.Grant(call, registrationTTL)
	if err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	defer func() {
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
		defer cancel()
		if _, err := k.cfg.Client.Revoke(call, lease.ID); err != nil {
			k.cfg.Log.Debug("the node's lease was not revoked", "error", err)
		}
	}()
	if _, err := k.cfg.Client.Put(call, layout.NodeOf(k.cfg.Node.ID), value, clientv3.WithLease(lease.ID)); err != nil {
		return fmt.Errorf("register: %w", err)
	}
	k.cfg.Log.Info("registered", "lease", strconv.FormatInt(int64(lease.ID), 16))
	renewals, err := k.cfg.Client.KeepAlive(ctx, lease.ID)
	if err != nil {
		return fmt.Errorf("keep alive: %w", err)
	}
	for range renewals {
		if err := k.holds(ctx, lease.ID); err != nil {
			return err
		}
	}
	return errors.New("the lease ended")
}

// holds looks whether the registration is still this node's. One that is gone is
// made again; one of another node of the same name is told, and left to it: which of
// them has to be renamed is a person's business.
func (k *Keeper) holds(ctx context.Context, lease clientv3.LeaseID) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	there, err := k.cfg.Client.Get(ctx, layout.NodeOf(k.cfg.Node.ID))
	switch {
	case err != nil:
		return nil // the next renewal looks again
	case len(there.Kvs) == 0:
		return errors.New("it was removed")
	case there.Kvs[0].Lease != int64(lease):
		k.seldom.Do(func() {
			k.cfg.Log.Error("another living node has this node's id: ids must be unique, or one is not listed", "node", k.cfg.Node.ID)
		})
	}
	return nil
}

// tick moves the clock whenever it is this node's turn.
func (k *Keeper) tick(ctx context.Context) {
	failing := false // told once, until it works again
	for ctx.Err() == nil {
		tick, since, changed := k.cfg.Follower.Tick()
		due := claim.TickTakeover + time.Duration(rand.Int64N(int64(claim.TickEvery)))
		if k.cfg.Follower.FirstNode() == k.cfg.Node.ID {
			due = claim.TickEvery
		}
		pause := due - since
		if tick.Version == 0 { // not listed yet, or an etcd without a clock
			pause = claim.TickEvery
		} else if pause <= 0 {
			pause = claim.TickEvery / 5 // until the watch has brought it
			err := Tick(ctx, k.cfg.Client, tick, since)
			if err != nil {
				pause = claim.TickEvery
				if !failing && ctx.Err() == nil {
					k.cfg.Log.Warn("the clock could not be moved; it stands until it can", "error", err)
				}
			}
			failing = err != nil
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-time.After(max(pause, 0)):
		}
	}
}

// Tick moves the clock from this tick, which was read so long ago by its writer's
// own clock. Somebody else's tick in between is no error.
func Tick(ctx context.Context, client *clientv3.Client, from claim.Tick, since time.Duration) error {
	next, due := from.Next(since)
	if !due {
		return nil
	}
	value, err := layout.EncodeTick(next)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err = client.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(layout.Tick), "=", from.Revision)).
		Then(clientv3.OpPut(layout.Tick, value)).Commit()
	return err
}
