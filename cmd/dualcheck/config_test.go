package main

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// settled loads settings from flags, an environment and a file.
func settled(t *testing.T, file string, env []string, flags ...string) (*loaded, error) {
	t.Helper()
	cmd := &cobra.Command{Use: "serve"}
	settingsFlags(cmd)
	if file != "" {
		flags = append(flags, "--config", settingsFile(t, "dualcheck.yaml", file))
	}
	if err := cmd.ParseFlags(flags); err != nil {
		t.Fatal(err)
	}
	return loadSettings(cmd.Flags(), env)
}

func settingsFile(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFlagsGoBeforeTheEnvironmentAndThatBeforeTheFile(t *testing.T) {
	const file = `
grpc-addr: file:1
http-addr: file:2
node-id: file
etcd-endpoints: [file:2379, file:2380]
log-keys: true
drain-timeout: 21s
`
	env := []string{"DUALCHECK_HTTP_ADDR=env:2", "DUALCHECK_NODE_ID=env", "DUALCHECK_DRAIN_TIMEOUT=22s", "DUALCHECK_ADDR=client:1", "PATH=/bin", "DUALCHECK_REFLECTION=false"}
	l, err := settled(t, file, env, "--node-id", "flag")
	if err != nil {
		t.Fatal(err)
	}
	if l.GRPCAddr != "file:1" || l.HTTPAddr != "env:2" || l.NodeID != "flag" || !reflect.DeepEqual(l.EtcdEndpoints, []string{"file:2379", "file:2380"}) ||
		!l.LogKeys || l.Reflection || l.DrainTimeout != 22*time.Second || l.MaxConnectionAge != 30*time.Minute || l.LogLevel != "info" {
		t.Errorf("got %+v", l.settings)
	}
	for name, source := range map[string]string{"http-addr": "the environment", "node-id": "the flags", "log-level": ""} {
		if l.from[name] != source {
			t.Errorf("%s is from %q", name, l.from[name])
		}
	}
}

func TestListsOfEndpoints(t *testing.T) {
	for name, load := range map[string]func() (*loaded, error){
		"environment": func() (*loaded, error) { return settled(t, "", []string{"DUALCHECK_ETCD_ENDPOINTS=a:1,b:2"}) },
		"one flag":    func() (*loaded, error) { return settled(t, "", nil, "--etcd-endpoints", "a:1,b:2") },
		"two flags": func() (*loaded, error) {
			return settled(t, "", nil, "--etcd-endpoints", "a:1", "--etcd-endpoints", "b:2")
		},
		"file, text": func() (*loaded, error) { return settled(t, "etcd-endpoints: a:1,b:2", nil) },
		"file by env": func() (*loaded, error) {
			return settled(t, "", []string{"DUALCHECK_CONFIG=" + settingsFile(t, "c.yaml", "etcd-endpoints: [a:1, b:2]")})
		},
		"no longer than said": func() (*loaded, error) {
			return settled(t, "etcd-endpoints: [x:1, y:2, z:3]", nil, "--etcd-endpoints", "a:1,b:2")
		},
	} {
		l, err := load()
		if err != nil || !reflect.DeepEqual(l.EtcdEndpoints, []string{"a:1", "b:2"}) {
			t.Errorf("%s: %v %v", name, l, err)
		}
	}
}

func TestSettingsThatAreRefused(t *testing.T) {
	const ok = "--etcd-endpoints=a:1"
	for name, c := range map[string]struct {
		file  string
		env   []string
		flags []string
		says  string
	}{
		"unknown in the file":        {file: "grpc-addrs: x:1", says: "there is no setting grpc-addrs: did you mean grpc-addr?"},
		"nested in the file":         {file: "etcd:\n  endpoints: [a:1]", says: "there is no setting etcd"},
		"unknown in the environment": {env: []string{"DUALCHECK_LOG_LEVELS=debug"}, says: "did you mean DUALCHECK_LOG_LEVEL?"},
		"not YAML":                   {file: "a: [", says: "read the configuration"},
		"no such file":               {flags: []string{"--config", "/none/there"}, says: "no such file"},
		"an empty file name":         {flags: []string{"--config", ""}, says: "--config names no file"},
		"a number as a duration":     {file: "drain-timeout: 30", says: "drain-timeout: a duration needs a unit"},
		"a word as a duration":       {env: []string{"DUALCHECK_DRAIN_TIMEOUT=soon"}, says: "DUALCHECK_DRAIN_TIMEOUT: time: invalid duration"},
		"a number as text":           {file: "node-id: 7", says: "node-id: it must be text"},
		"a number as a truth":        {file: "log-keys: 1", says: "log-keys: it must be true or false"},
		"a word as a truth":          {env: []string{"DUALCHECK_LOG_KEYS=maybe"}, says: "DUALCHECK_LOG_KEYS"},
		"nothing as a truth":         {env: []string{"DUALCHECK_LOG_KEYS="}, says: "it must be true or false"},
		"no etcd":                    {flags: []string{"--etcd-endpoints="}, says: "etcd-endpoints says no address"},
		"an endpoint without port":   {flags: []string{"--etcd-endpoints=localhost"}, says: `"localhost" is no host:port`},
		"an endpoint of a kind":      {flags: []string{"--etcd-endpoints=ftp://a:1"}, says: "is no http:// or https:// URL"},
		"an endpoint with a name":    {flags: []string{"--etcd-endpoints=http://a@b:1"}, says: "an address in etcd-endpoints has more than host:port: use etcd-user and etcd-password-file (the flags)"},
		"an endpoint with a path":    {flags: []string{"--etcd-endpoints=http://a:1/v3"}, says: "has more than host:port"},
		"an endpoint with a query":   {flags: []string{"--etcd-endpoints=a:1?x=y"}, says: "has more than host:port"},
		"no questions at all":        {flags: []string{ok, "--max-in-flight=0"}, says: "max-in-flight is 1 or more, not 0 (the flags)"},
		"fewer than none":            {file: "max-in-flight: -3", flags: []string{ok}, says: "max-in-flight is 1 or more, not -3"},
		"endpoints of two kinds":     {flags: []string{"--etcd-endpoints=https://a:1,http://b:1"}, says: "https:// all or none"},
		"an address without port":    {flags: []string{ok, "--grpc-addr=localhost"}, says: `grpc-addr "localhost" is no host:port`},
		"a certificate alone":        {flags: []string{ok, "--tls-cert-file=c"}, says: "tls-cert-file and tls-key-file go together"},
		"etcd's certificate alone":   {flags: []string{ok, "--etcd-key-file=c"}, says: "etcd-cert-file and etcd-key-file go together"},
		"a user alone":               {flags: []string{ok, "--etcd-user=u"}, says: "etcd-user and its password go together"},
		"two passwords":              {env: []string{"DUALCHECK_ETCD_PASSWORD=x"}, flags: []string{ok, "--etcd-user=u", "--etcd-password-file=f"}, says: "exclude each other"},
		"Redis without an address":   {flags: []string{ok, "--redis-mode=cluster"}, says: "redis-mode is without effect: redis-addrs says no address (redis-mode: the flags, redis-addrs: default)"},
		"a mode of Redis":            {flags: []string{ok, "--redis-addrs=r:1", "--redis-mode=ring"}, says: `redis-mode "ring" is none of standalone, sentinel and cluster`},
		"two standalone Redis":       {flags: []string{ok, "--redis-addrs=r:1,s:1"}, says: "a standalone Redis has one address, not 2"},
		"sentinels of nobody":        {flags: []string{ok, "--redis-addrs=r:1", "--redis-mode=sentinel"}, says: "needs redis-master-name"},
		"a master of no sentinel":    {flags: []string{ok, "--redis-addrs=r:1", "--redis-master-name=m"}, says: "redis-master-name is for redis-mode sentinel, not standalone"},
		"a password in an address":   {flags: []string{ok, "--redis-addrs=redis://:hush@r:1"}, says: "an address in redis-addrs has more than host:port: use redis-user and redis-password-file"},
		"Redis without a port":       {flags: []string{ok, "--redis-addrs=r"}, says: `redis-addrs: "r" is no host:port`},
		"two passwords of Redis":     {env: []string{"DUALCHECK_REDIS_PASSWORD=x"}, flags: []string{ok, "--redis-addrs=r:1", "--redis-password-file=f"}, says: "exclude each other"},
		"a user of Redis alone":      {flags: []string{ok, "--redis-addrs=r:1", "--redis-user=u"}, says: "redis-user needs its password"},
		"Redis's certificate alone":  {flags: []string{ok, "--redis-addrs=r:1", "--redis-cert-file=c"}, says: "redis-cert-file and redis-key-file go together"},
		"a name of Redis in clear":   {flags: []string{ok, "--redis-addrs=r:1", "--redis-server-name=n"}, says: "redis-server-name is without effect in the clear"},
		"a name of etcd in clear":    {flags: []string{ok, "--etcd-server-name=n"}, says: "etcd-server-name is without effect in the clear"},
		"less memory than none":      {flags: []string{ok, "--memory-bytes=-1"}, says: "memory-bytes is 0 or more, not -1 (the flags)"},
		"memory without a number":    {flags: []string{ok}, file: "memory-bytes: much", says: "memory-bytes"},
		"no connection to Redis":     {flags: []string{ok, "--redis-addrs=r:1", "--redis-pool-size=-1"}, says: "redis-pool-size is 1 or more, or 0 for as many as can be of use, not -1"},
		"a log level":                {flags: []string{ok, "--log-level=loud"}, says: `log level "loud"`},
		"a log format":               {flags: []string{ok, "--log-format=xml"}, says: `log format "xml"`},
		"a negative duration":        {flags: []string{ok, "--max-connection-age=-1s"}, says: "max-connection-age is 0 or more"},
		"no time to drain":           {flags: []string{ok, "--pre-drain-delay=1m"}, says: "leaves no time"},
		"two mistakes":               {flags: []string{"--log-level=loud", "--grpc-addr=x"}, says: "is no host:port (the flags)\netcd-endpoints says no address of etcd: give one or more host:port (default)\nlog level \"loud\""},
		"mistakes of all sources": {file: "grpc-adr: x:1\nlog-keys: 1", env: []string{"DUALCHECK_DRAIN_TIMEOUT=soon"}, flags: []string{ok, "--log-level=loud"},
			says: "did you mean grpc-addr?\n"},
		"a port over 65535":      {flags: []string{ok, "--http-addr=:70700"}, says: `http-addr ":70700" has port "70700", which is not from 0 to 65535 (the flags)`},
		"a port below 0":         {env: []string{"DUALCHECK_GRPC_ADDR=:-1"}, flags: []string{ok}, says: `has port "-1", which is not from 0 to 65535 (the environment)`},
		"a word as a port":       {flags: []string{ok, "--debug-addr=localhost:pprof"}, says: `debug-addr "localhost:pprof" has port "pprof"`},
		"no port to advertise":   {flags: []string{ok, "--advertise-addr=a:0"}, says: `advertise-addr "a:0" has port "0", which is not from 1 to 65535`},
		"etcd at port 0":         {flags: []string{"--etcd-endpoints=a:0"}, says: `etcd-endpoints: "a:0" has port "0", which is not from 1`},
		"etcd's port in a URL":   {flags: []string{"--etcd-endpoints=http://a:99999"}, says: `has port "99999", which is not from 1 to 65535`},
		"one port twice":         {file: "http-addr: 0.0.0.0:7070", flags: []string{ok}, says: `grpc-addr ":7070" and http-addr "0.0.0.0:7070" are one port: give each its own (grpc-addr: default, http-addr: `},
		"the debug port as well": {flags: []string{ok, "--debug-addr=127.0.0.1:7071"}, says: `http-addr ":7071" and debug-addr "127.0.0.1:7071" are one port`},
		"one port by name":       {flags: []string{ok, "--debug-addr=localhost:9000", "--http-addr=127.0.0.1:9000"}, says: `are one port: give each its own (the flags)`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := settled(t, c.file, c.env, c.flags...)
			if err == nil || !strings.Contains(err.Error(), c.says) || !isUsage(err) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}

func TestAPasswordInAnEndpointIsNotTold(t *testing.T) {
	for _, endpoint := range []string{"http://root:hush@a:1", "root:hush@a:1", "http://root:hush%zz@a:1", "ftp://root:hush@a:1", "http://a:1/?password=hush"} {
		_, err := settled(t, "", []string{"DUALCHECK_ETCD_ENDPOINTS=" + endpoint})
		if err == nil || strings.Contains(err.Error(), "hush") || !strings.Contains(err.Error(), "use etcd-user and etcd-password-file") {
			t.Errorf("%s: %v", endpoint, err)
		}
	}
	if _, err := settled(t, "", nil, "--etcd-endpoints=http://a:1/"); err != nil {
		t.Error(err)
	}
}

func TestMistakesOfAllSourcesAreToldAtOnce(t *testing.T) {
	_, err := settled(t, "grpc-adr: x:1\nlog-keys: 1", []string{"DUALCHECK_DRAIN_TIMEOUT=soon"}, "--log-level=loud", "--http-addr=x")
	if err == nil {
		t.Fatal("accepted")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 7 {
		t.Fatalf("%d lines: %v", len(lines), err)
	}
	for i, says := range []string{
		"the settings cannot be used:", "there is no setting grpc-adr", "log-keys: it must be true or false", "the environment: DUALCHECK_DRAIN_TIMEOUT: ",
		`http-addr "x" is no host:port (the flags)`, "etcd-endpoints says no address of etcd: give one or more host:port (default)", `log level "loud" is none of debug, info, warn, error (the flags)`,
	} {
		if !strings.Contains(lines[i], says) {
			t.Errorf("line %d is %q, want %q", i, lines[i], says)
		}
	}
}

func TestPortsThatAreNotOne(t *testing.T) {
	for _, c := range [][2]string{{":0", ":0"}, {"127.0.0.1:1", "127.0.0.1:2"}, {"127.0.0.1:1", "10.0.0.1:1"}, {"localhost:1", "10.0.0.1:1"}, {"x", ":1"}, {":1", ":none"}} {
		if samePort(c[0], c[1]) || samePort(c[1], c[0]) {
			t.Errorf("%s and %s are taken for one", c[0], c[1])
		}
	}
	for _, c := range [][2]string{{":1", ":1"}, {"[::]:1", "127.0.0.1:1"}, {"localhost:1", "[::1]:1"}} {
		if !samePort(c[0], c[1]) || !samePort(c[1], c[0]) {
			t.Errorf("%s and %s are not taken for one", c[0], c[1])
		}
	}
}

func TestEverySettingHasAFlagUnlessItIsSecret(t *testing.T) {
	cmd := &cobra.Command{Use: "serve"}
	settingsFlags(cmd)
	for _, name := range settingNames() {
		secret := slices.Contains(secretSettings, name)
		if has := cmd.Flags().Lookup(name) != nil; has == secret {
			t.Errorf("%s: flag %v", name, has)
		}
	}
}

func TestPasswords(t *testing.T) {
	file := settingsFile(t, "password", "p w\r\n")
	for name, c := range map[string]struct{ env []string }{
		"in the environment": {[]string{"DUALCHECK_ETCD_PASSWORD=p w"}},
		"in a file":          {[]string{"DUALCHECK_ETCD_PASSWORD_FILE=" + file}},
	} {
		l, err := settled(t, "", append(c.env, "DUALCHECK_ETCD_USER=u", "DUALCHECK_ETCD_ENDPOINTS=a:1"))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := l.password(); err != nil || got != "p w" {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	l, err := settled(t, "", []string{"DUALCHECK_ETCD_PASSWORD_FILE=/none", "DUALCHECK_ETCD_USER=u", "DUALCHECK_ETCD_ENDPOINTS=a:1"})
	if err != nil {
		t.Fatal(err)
	}
	l.checkFiles()
	if err := l.err(); err == nil || !strings.Contains(err.Error(), "etcd-password-file") || !strings.HasSuffix(err.Error(), "(the environment)") {
		t.Errorf("a password that cannot be read: %v", err)
	}
}

// What is printed is a file that gives the same settings, and holds no secret.
func TestConfigPrint(t *testing.T) {
	l, err := settled(t, "", []string{"DUALCHECK_ETCD_USER=u", "DUALCHECK_ETCD_PASSWORD=hush"}, "--etcd-endpoints=a:1,b:2", "--log-keys", "--pre-drain-delay=1500ms", "--node-id=a: # b")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := l.print(&out); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "hush") || !strings.Contains(out.String(), "(set)") {
		t.Errorf("the password: %s", out.String())
	}
	again, err := settled(t, out.String(), []string{"DUALCHECK_ETCD_PASSWORD=hush"})
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if !reflect.DeepEqual(again.settings, l.settings) {
		t.Errorf("got %+v, want %+v", again.settings, l.settings)
	}
	for _, line := range []string{"pre-drain-delay: 1.5s # the flags", "etcd-user: u # the environment", "grpc-addr: :7070 # default"} {
		if !strings.Contains(out.String(), line+"\n") {
			t.Errorf("no %q in\n%s", line, out.String())
		}
	}
}
