package target

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

var (
	redisMySQLKind     = Kind{Name: "redis+mysql", About: "look up in Redis, insert into MariaDB's unique index, set Redis", Open: openRedisMySQL(false)}
	redisMySQLLifeKind = Kind{Name: "redis+mysql-life", About: "the same, then the update that stores the result, then Redis", Open: openRedisMySQL(true)}
)

// redisMySQL is what the field builds: a cache, a table with a unique index behind it.
type redisMySQL struct {
	cache *redis.Client
	db    *sql.DB
	namer
	spec                   Spec
	claim, result          []byte
	table                  string
	insert, update, lookup *sql.Stmt
	life                   bool
}

func openRedisMySQL(life bool) func(context.Context, *rig.Rig, Spec) (Target, error) {
	return func(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
		addr, err := r.Plain(ctx)
		if err != nil {
			return nil, err
		}
		size, err := recordBytes(ctx, r, s)
		if err != nil {
			return nil, err
		}
		db, err := openMariaDB(ctx, r, s)
		if err != nil {
			return nil, err
		}
		return &redisMySQL{cache: openRedis(addr, s), db: db, namer: newNamer(r, s), spec: s,
			claim: result(size), result: result(s.ResultBytes), table: tableName(s), life: life}, nil
	}
}

func (t *redisMySQL) Prepare(ctx context.Context) (err error) {
	if _, err = t.db.ExecContext(ctx, "CREATE TABLE bench."+t.table+" (k VARBINARY(255) PRIMARY KEY, v VARBINARY(4096) NOT NULL, result MEDIUMBLOB) ENGINE=InnoDB"); err != nil {
		return err
	}
	for into, text := range map[**sql.Stmt]string{
		&t.insert: "INSERT INTO bench." + t.table + " (k, v) VALUES (?, ?)",
		&t.update: "UPDATE bench." + t.table + " SET result = ? WHERE k = ?",
		&t.lookup: "SELECT result FROM bench." + t.table + " WHERE k = ?",
	} {
		if *into, err = t.db.PrepareContext(ctx, text); err != nil {
			return err
		}
	}
	return each(ctx, int(t.spec.Known), min(64, sqlConnections(t.spec)), func(ctx context.Context, i int) error {
		return t.first(ctx, t.key(uint64(i)), true)
	})
}

func (t *redisMySQL) Do(ctx context.Context, key uint64) error {
	k := t.key(key)
	found, err := t.cache.Get(ctx, k).Bytes()
	switch {
	case errors.Is(err, redis.Nil):
	case err != nil:
		return err
	default:
		return t.whole(found)
	}
	if key >= t.spec.Known {
		return t.first(ctx, k, t.life)
	}
	// Redis has dropped it: the table has the result.
	if err := t.lookup.QueryRowContext(ctx, k).Scan(&found); err != nil {
		return err
	}
	if err := t.whole(found); err != nil {
		return err
	}
	return t.cache.Set(ctx, k, found, 0).Err()
}

// first is the way of a key that nobody has begun.
func (t *redisMySQL) first(ctx context.Context, key string, life bool) error {
	if _, err := t.insert.ExecContext(ctx, key, t.claim); err != nil {
		return err
	}
	if !life {
		return t.cache.Set(ctx, key, t.claim, 0).Err()
	}
	if _, err := t.update.ExecContext(ctx, t.result, key); err != nil {
		return err
	}
	return t.cache.Set(ctx, key, t.result, 0).Err()
}

func (t *redisMySQL) whole(b []byte) error {
	if len(b) != len(t.result) {
		return fmt.Errorf("%d bytes instead of %d", len(b), len(t.result))
	}
	return nil
}

// Resize keeps so many connections to the table.
func (t *redisMySQL) Resize(inFlight int) { t.db.SetMaxIdleConns(inFlight) }

func (t *redisMySQL) Close() error { return errors.Join(t.cache.Close(), t.db.Close()) }
