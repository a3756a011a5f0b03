package target

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

var (
	redisSetAlwaysKind = Kind{Name: "redis-setnx", About: "Redis SET NX, appendfsync always", Open: func(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
		return openRedisSet(ctx, r, s, "always")
	}}
	redisSetEverySecondKind = Kind{Name: "redis-setnx-everysec", About: "Redis SET NX, appendfsync everysec: a crash loses up to a second of claims", Open: func(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
		return openRedisSet(ctx, r, s, "everysec")
	}}
	redisGetKind          = Kind{Name: "redis-get", About: "go-redis GET of the bytes that a replay brings", Open: openRedisGet}
	redisGetPipelinedKind = Kind{Name: "redis-get-pipelined", About: "the same through go-redis's automatic pipelines, which it calls experimental", Open: openRedisPipelined}
)

// openRedis has a connection for each operation in flight.
func openRedis(addr string, s Spec) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: addr, PoolSize: max(s.InFlight, 1), MaxRetries: -1, DisableIdentity: true})
}

// redisSet is the claim that a SET NX gives.
type redisSet struct {
	*redis.Client
	namer
	value []byte
}

func openRedisSet(ctx context.Context, r *rig.Rig, s Spec, fsync string) (Target, error) {
	addr, err := r.AppendOnly(ctx, fsync)
	if err != nil {
		return nil, err
	}
	size, err := recordBytes(ctx, r, s)
	if err != nil {
		return nil, err
	}
	return redisSet{openRedis(addr, s), newNamer(r, s), result(size)}, nil
}

func (t redisSet) Prepare(ctx context.Context) error { return t.Ping(ctx).Err() }

func (t redisSet) Do(ctx context.Context, key uint64) error {
	k := t.key(key)
	err := t.SetArgs(ctx, k, t.value, redis.SetArgs{Mode: "NX"}).Err()
	if errors.Is(err, redis.Nil) {
		return fmt.Errorf("new key %s was there", k)
	}
	return err
}

// getter is a client or what makes pipelines of its calls.
type getter interface {
	Get(ctx context.Context, key string) *redis.StringCmd
}

// redisGet reads known keys.
type redisGet struct {
	*redis.Client
	from getter
	namer
	spec  Spec
	value []byte
}

func openRedisGet(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
	addr, err := r.Plain(ctx)
	if err != nil {
		return nil, err
	}
	c := openRedis(addr, s)
	return redisGet{c, c, newNamer(r, s), s, result(s.ResultBytes)}, nil
}

func openRedisPipelined(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
	addr, err := r.Plain(ctx)
	if err != nil {
		return nil, err
	}
	c := openRedis(addr, s)
	p, err := c.AutoPipeline()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return redisGet{c, p, newNamer(r, s), s, result(s.ResultBytes)}, nil
}

func (t redisGet) Prepare(ctx context.Context) error {
	return each(ctx, int(t.spec.Known), 16, func(ctx context.Context, i int) error {
		return t.Set(ctx, t.key(uint64(i)), t.value, 0).Err()
	})
}

func (t redisGet) Do(ctx context.Context, key uint64) error {
	b, err := t.from.Get(ctx, t.key(key)).Bytes()
	if err != nil {
		return err
	}
	if len(b) != len(t.value) {
		return fmt.Errorf("%d bytes instead of %d", len(b), len(t.value))
	}
	return nil
}
