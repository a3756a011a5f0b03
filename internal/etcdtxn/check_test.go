package etcdtxn_test

import (
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"

	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/etcdtxn"
)

func TestCheckDescribesASoundEtcd(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	members, err := etcdtxn.Check(within(t, 20*time.Second), c.Client())
	if err != nil {
		t.Fatal(err)
	}
	m := members[0]
	if len(members) != 1 || !m.Leader || m.Version == "" || m.DBSize == 0 || m.Quota == 0 || m.Err != "" {
		t.Errorf("member %+v", m)
	}
}

func TestCheckRefusesTooFewOperations(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1, func(e *embed.Config) { e.MaxTxnOps = 8 })
	_, err := etcdtxn.Check(within(t, 20*time.Second), c.Client())
	if err == nil || !strings.Contains(err.Error(), "--max-txn-ops") {
		t.Errorf("error %v, want one that names the setting", err)
	}
}

func TestCheckSaysThatNobodyAnswers(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, 1)
	client := c.Client()
	c.Kill(0)
	_, err := etcdtxn.Check(within(t, 20*time.Second), client)
	if err == nil || !strings.Contains(err.Error(), "no etcd endpoint answers") {
		t.Errorf("error %v", err)
	}
}
