package target

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

var postgresKind = Kind{Name: "postgres", About: "PostgreSQL INSERT ... ON CONFLICT DO NOTHING, durable", Open: openPostgres}

type postgres struct {
	*pgxpool.Pool
	namer
	value         []byte
	table, insert string
}

func openPostgres(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
	addr, err := r.Postgres(ctx)
	if err != nil {
		return nil, err
	}
	size, err := recordBytes(ctx, r, s)
	if err != nil {
		return nil, err
	}
	conf, err := pgxpool.ParseConfig("postgres://bench@" + addr + "/postgres?sslmode=disable")
	if err != nil {
		return nil, err
	}
	conf.MaxConns = int32(sqlConnections(s))
	pool, err := pgxpool.NewWithConfig(ctx, conf)
	if err != nil {
		return nil, err
	}
	table := tableName(s)
	return postgres{pool, newNamer(r, s), result(size), table, "INSERT INTO " + table + " (k, v) VALUES ($1, $2) ON CONFLICT DO NOTHING"}, nil
}

// tableName is a table of a target's own.
func tableName(s Spec) string {
	return "claims_" + strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' {
			return c
		}
		return '_'
	}, s.Name)
}

func (t postgres) Prepare(ctx context.Context) error {
	if err := untilIn(ctx, t.Ping); err != nil {
		return err
	}
	_, err := t.Exec(ctx, "CREATE TABLE "+t.table+" (k text PRIMARY KEY, v bytea NOT NULL)")
	return err
}

func (t postgres) Do(ctx context.Context, key uint64) error {
	k := t.key(key)
	done, err := t.Exec(ctx, t.insert, k, t.value)
	if err != nil {
		return err
	}
	if done.RowsAffected() != 1 {
		return fmt.Errorf("new key %s was there", k)
	}
	return nil
}

// Resize has it connect anew, as often as is needed.
func (t postgres) Resize(int) { t.Reset() }

func (t postgres) Close() error {
	t.Pool.Close()
	return nil
}
