package target

import (
	"context"
	"database/sql"
	"errors"

	"github.com/go-sql-driver/mysql"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

var mariaDBKind = Kind{Name: "mariadb", About: "MariaDB INSERT into a unique index, innodb_flush_log_at_trx_commit=1", Open: func(ctx context.Context, r *rig.Rig, s Spec) (Target, error) {
	size, err := recordBytes(ctx, r, s)
	if err != nil {
		return nil, err
	}
	db, err := openMariaDB(ctx, r, s)
	if err != nil {
		return nil, err
	}
	return &mariaDB{DB: db, namer: newNamer(r, s), value: result(size), table: tableName(s)}, nil
}}

// mariaDB is the claim that a unique index gives. The index is the primary key's, which
// costs it least.
type mariaDB struct {
	*sql.DB
	namer
	value  []byte
	table  string
	insert *sql.Stmt
}

func openMariaDB(ctx context.Context, r *rig.Rig, s Spec) (*sql.DB, error) {
	addr, err := r.MariaDB(ctx)
	if err != nil {
		return nil, err
	}
	conf := mysql.NewConfig()
	conf.Net, conf.Addr, conf.User, conf.DBName = "tcp", addr, "root", "mysql"
	conf.Logger = &mysql.NopLogger{}
	connector, err := mysql.NewConnector(conf)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(sqlConnections(s))
	db.SetMaxIdleConns(sqlConnections(s))
	if err := untilIn(ctx, db.PingContext); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	_, err = db.ExecContext(ctx, "CREATE DATABASE IF NOT EXISTS bench")
	return db, err
}

func (t *mariaDB) Prepare(ctx context.Context) (err error) {
	if _, err = t.ExecContext(ctx, "CREATE TABLE bench."+t.table+" (k VARBINARY(255) PRIMARY KEY, v VARBINARY(4096) NOT NULL) ENGINE=InnoDB"); err != nil {
		return err
	}
	t.insert, err = t.PrepareContext(ctx, "INSERT INTO bench."+t.table+" (k, v) VALUES (?, ?)")
	return err
}

func (t *mariaDB) Do(ctx context.Context, key uint64) error {
	_, err := t.insert.ExecContext(ctx, t.key(key), t.value) // a duplicate is an error
	return err
}

// Resize keeps so many connections.
func (t *mariaDB) Resize(inFlight int) { t.SetMaxIdleConns(inFlight) }
