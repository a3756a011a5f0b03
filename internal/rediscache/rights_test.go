package rediscache_test

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/layout"
	"github.com/dualcheck/dualcheck/internal/nodetest"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/redistest"
)

// wantRights fails the test if a node was refused a command, or did not need one.
func wantRights(t *testing.T, least []string, servers ...*redistest.Server) {
	t.Helper()
	var used strings.Builder
	for _, s := range servers {
		if !s.Running() {
			continue
		}
		if refused := s.Do("ACL", "LOG").([]any); len(refused) > 0 {
			t.Errorf("these rights are too few: %v", refused[0])
		}
		used.WriteString(s.Do("INFO", "commandstats").(string))
	}
	for _, r := range least {
		if name, ok := strings.CutPrefix(r, "+"); ok && !strings.Contains(used.String(), "cmdstat_"+name+":") {
			t.Errorf("%s is not needed", r)
		}
	}
}

// damages changes the entry of something finished, so that it has to be removed.
func damages(t *testing.T, redis *redistest.Server, n *nodetest.Node, key string) {
	t.Helper()
	hit(t, n, key)
	before := n.Seen.Of("discard ok")
	nodetest.Eventually(t, soon, "a damaged entry to be removed", func() error {
		if n.Seen.Of("discard ok") > before {
			return nil
		}
		redis.Do("SET", entryOf(t, n, key), "damaged", "EX", 3600)
		if a := begins(t, n, key); a.Source != claim.SourceEtcd {
			t.Errorf("G5: told from %d", a.Source)
		}
		return fmt.Errorf("%v", n.Seen)
	})
	hit(t, n, key)
}

// entryOf is what a key's entry is called now.
func entryOf(t testing.TB, n *nodetest.Node, key string) string {
	t.Helper()
	v, err := n.Follower.View()
	if err != nil {
		t.Fatal(err)
	}
	return rediscache.KeyOf(&v, layout.NameOf("crowd", key))
}

// A locked-down Redis: TLS with an authority of one's own, and a user with the least
// rights. Who is not trusted is not talked to.
func TestTLSAndLeastRights(t *testing.T) {
	t.Parallel()
	redis, file := redistest.StartTLS(t)
	pem, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(pem)
	at := standalone(redis.Addr())
	at.User, at.Password = "dualcheck", "secret"
	at.TLS = &tls.Config{RootCAs: trusted, MinVersion: tls.VersionTLS12}
	redis.SetUser(at.User, at.Password, leastRights...)
	all := nodes(t, at)
	work := stillRight(t, 100, all, redis)
	hitsReturn(t, all)
	work.stop()
	completes(t, all[0], "damaged", "damaged")
	damages(t, redis, all[0], "damaged")
	if _, err := all[0].Get(nodetest.Within(t, 20*time.Second), &claim.GetRequest{Namespace: "crowd", Key: "damaged"}); err != nil {
		t.Error(err)
	}
	wantRights(t, leastRights, redis)

	at.TLS = &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	n := nodetest.Start(t, nodetest.Options{Client: etcdtest.Start(t, 1).Client(), Redis: at})
	degrades(t, []*nodetest.Node{n}, "certificate")
}

// A Redis without SET … NX GET is never used, and the nodes say why.
func TestOldRedis(t *testing.T) {
	t.Parallel()
	old := newOldRedis(t)
	all := nodes(t, standalone(old.addr))
	work := stillRight(t, 100, all)
	degrades(t, all, "this is Redis 6.2.6, and 7.0 or later is needed")
	work.more(100)
	work.stop()
	old.mu.Lock()
	defer old.mu.Unlock()
	for name, n := range old.asked {
		if slices.Contains([]string{"SET", "GET", "EVAL", "EVALSHA"}, name) {
			t.Errorf("%s was sent %d times", name, n)
		}
	}
	if old.asked["HELLO"] == 0 {
		t.Error("nobody came")
	}
}

// oldRedis says that it is Redis 6.2.6, and OK to everything else.
type oldRedis struct {
	addr  string
	mu    sync.Mutex
	asked map[string]int
}

func newOldRedis(t *testing.T) *oldRedis {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	old := &oldRedis{addr: l.Addr().String(), asked: map[string]int{}}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() { old.serve(conn) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		running.Wait()
	})
	return old
}

func (o *oldRedis) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	number := func() int { // *3 or $5
		line, err := in.ReadString('\n')
		if err != nil || len(line) < 3 {
			return -1
		}
		n, err := strconv.Atoi(strings.TrimSpace(line[1:]))
		if err != nil {
			return -1
		}
		return n
	}
	for {
		n := number()
		if n <= 0 {
			return
		}
		args := make([]string, n)
		for i := range args {
			size := number()
			if size < 0 {
				return
			}
			arg := make([]byte, size+2)
			for read := 0; read < len(arg); {
				k, err := in.Read(arg[read:])
				if err != nil {
					return
				}
				read += k
			}
			args[i] = string(arg[:size])
		}
		name := strings.ToUpper(args[0])
		o.mu.Lock()
		o.asked[name]++
		o.mu.Unlock()
		answer := "+OK\r\n"
		if name == "HELLO" {
			answer = "%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n6.2.6\r\n$5\r\nproto\r\n:3\r\n"
		}
		if _, err := conn.Write([]byte(answer)); err != nil {
			return
		}
	}
}
