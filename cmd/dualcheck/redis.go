package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"

	"go.etcd.io/etcd/client/pkg/v3/transport"

	"github.com/dualcheck/dualcheck/internal/claim"
	"github.com/dualcheck/dualcheck/internal/recency"
	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

var redisModes = []string{string(rediscache.Standalone), string(rediscache.Sentinel), string(rediscache.Cluster)}

// redisServer is where Redis is.
func (s settings) redisServer() (rediscache.Server, error) {
	at := rediscache.Server{
		Mode: rediscache.Mode(s.RedisMode), Addrs: s.RedisAddrs, MasterName: s.RedisMasterName,
		User: s.RedisUser, SentinelUser: s.RedisSentinelUser, PoolSize: s.RedisPoolSize,
	}
	var err error
	if at.Password, err = passwordOf(s.RedisPassword, "redis-password-file", s.RedisPasswordFile); err != nil {
		return at, err
	}
	if at.SentinelPassword, err = passwordOf(s.RedisSentinelPassword, "redis-sentinel-password-file", s.RedisSentinelPasswordFile); err != nil {
		return at, err
	}
	at.TLS, err = s.redisTLS()
	return at, err
}

// redisTLS is nil for Redis in the clear.
func (s settings) redisTLS() (*tls.Config, error) {
	return clientTLS("redis", transport.TLSInfo{CertFile: s.RedisCertFile, KeyFile: s.RedisKeyFile, TrustedCAFile: s.RedisCAFile, ServerName: s.RedisServerName}, s.RedisTLS)
}

// clientTLS is how a server is reached whose settings begin with this word: nil, in the
// clear, unless files of it are named or it was asked for.
func clientTLS(of string, info transport.TLSInfo, asked bool) (*tls.Config, error) {
	if info.Empty() && info.TrustedCAFile == "" {
		if !asked {
			return nil, nil
		}
		return &tls.Config{MinVersion: tls.VersionTLS12, ServerName: info.ServerName}, nil
	}
	if err := checkAuthorities(of+"-ca-file", info.TrustedCAFile); err != nil {
		return nil, err
	}
	config, err := info.ClientConfig() // the certificate is read anew for each connection
	if err != nil {
		return nil, fmt.Errorf("TLS for %s: %w", of, err)
	}
	config.MinVersion = tls.VersionTLS12
	return config, nil
}

// checkRedis notes every mistake in what the settings say of Redis.
func (l *loaded) checkRedis() {
	bad := func(name, format string, args ...any) { l.mistake([]string{name}, format, args...) }
	if !slices.Contains(redisModes, l.RedisMode) {
		bad("redis-mode", "redis-mode %q is none of standalone, sentinel and cluster", l.RedisMode)
	}
	for _, addr := range l.RedisAddrs {
		if overfull(addr) { // it may hold a password: it is not told
			bad("redis-addrs", "an address in redis-addrs has more than host:port: use redis-user and redis-password-file")
		} else if err := checkHostPort(addr, 1); err != nil {
			bad("redis-addrs", "redis-addrs: %q %v", addr, err)
		}
	}
	sentinel := l.RedisMode == string(rediscache.Sentinel)
	switch {
	case len(l.RedisAddrs) == 0:
		for _, name := range l.changed("redis-") {
			l.mistake([]string{name, "redis-addrs"}, "%s is without effect: redis-addrs says no address", name)
		}
	case l.RedisMode == string(rediscache.Standalone) && len(l.RedisAddrs) > 1:
		l.mistake([]string{"redis-addrs", "redis-mode"}, "a standalone Redis has one address, not %d: set redis-mode to sentinel or cluster if that is what it is", len(l.RedisAddrs))
	case sentinel && l.RedisMasterName == "":
		bad("redis-master-name", "redis-mode sentinel needs redis-master-name: what the sentinels call the master")
	}
	if !sentinel {
		for _, name := range append(l.changed("redis-master-"), l.changed("redis-sentinel-")...) {
			if len(l.RedisAddrs) > 0 {
				l.mistake([]string{name, "redis-mode"}, "%s is for redis-mode sentinel, not %s", name, l.RedisMode)
			}
		}
	}
	if l.RedisPassword != "" && l.RedisPasswordFile != "" {
		l.mistake([]string{"redis-password", "redis-password-file"}, "redis-password and redis-password-file exclude each other")
	}
	if l.RedisSentinelPassword != "" && l.RedisSentinelPasswordFile != "" {
		l.mistake([]string{"redis-sentinel-password", "redis-sentinel-password-file"}, "redis-sentinel-password and redis-sentinel-password-file exclude each other")
	}
	if l.RedisUser != "" && l.RedisPassword == "" && l.RedisPasswordFile == "" {
		l.mistake([]string{"redis-user", "redis-password-file"}, "redis-user needs its password")
	}
	if (l.RedisCertFile == "") != (l.RedisKeyFile == "") {
		l.mistake([]string{"redis-cert-file", "redis-key-file"}, "redis-cert-file and redis-key-file go together")
	}
	if l.RedisServerName != "" && !l.RedisTLS && l.RedisCAFile == "" && l.RedisCertFile == "" {
		l.mistake([]string{"redis-server-name", "redis-tls"}, "redis-server-name is without effect in the clear: set redis-tls, or redis-ca-file")
	}
	if l.RedisPoolSize < 0 {
		bad("redis-pool-size", "redis-pool-size is 1 or more, or 0 for as many as can be of use, not %d", l.RedisPoolSize)
	}
}

// changed lists the settings with this beginning that are not as they are by default.
func (l *loaded) changed(prefix string) (names []string) {
	now, usual := reflect.ValueOf(l.settings), reflect.ValueOf(defaultSettings())
	for i, f := range slices.Collect(reflect.TypeFor[settings]().Fields()) {
		name := f.Tag.Get("koanf")
		if strings.HasPrefix(name, prefix) && now.Field(i).Kind() != reflect.Slice && !now.Field(i).Equal(usual.Field(i)) {
			names = append(names, name)
		}
	}
	return names
}

// checkRedisFiles reads the files that the settings of Redis name.
func (l *loaded) checkRedisFiles() {
	for _, f := range []struct{ name, path string }{{"redis-password-file", l.RedisPasswordFile}, {"redis-sentinel-password-file", l.RedisSentinelPasswordFile}} {
		if _, err := passwordOf("", f.name, f.path); err != nil {
			l.mistake([]string{f.name}, "%v", err)
		}
	}
	if (l.RedisCertFile == "") != (l.RedisKeyFile == "") {
		return // a mistake already
	}
	if _, err := l.redisTLS(); err != nil {
		names := slices.DeleteFunc([]string{"redis-ca-file", "redis-cert-file", "redis-key-file"}, func(name string) bool { return l.from[name] == "" })
		l.mistake(names, "%v", err)
	}
}

// redisCache makes what puts Redis in front of etcd; nil if there is no Redis. told may be
// nil, see rediscache.Config.
func (s settings) redisCache(view rediscache.Viewer, habits *recency.Habits, told func(*claim.View, *claim.Record), log *slog.Logger, metrics *telemetry.Metrics) (*rediscache.Cache, error) {
	if len(s.RedisAddrs) == 0 {
		return nil, nil
	}
	at, err := s.redisServer()
	if err != nil {
		return nil, err
	}
	var cache *rediscache.Cache
	observe := metrics.Redis(func() telemetry.Pool {
		p := cache.Pool()
		return telemetry.Pool{Total: p.TotalConns, Idle: p.IdleConns, Waits: p.WaitCount, Timeouts: p.Timeouts, Stale: p.StaleConns}
	})
	cache = rediscache.New(rediscache.Config{Server: at, View: view, Log: log, Observe: observe, Habits: habits, Told: told})
	return cache, nil
}

// checkAuthorities reports a file, named by its setting, that holds no certificate.
func checkAuthorities(name, path string) error {
	if path == "" {
		return nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if !x509.NewCertPool().AppendCertsFromPEM(b) {
		return fmt.Errorf("%s: %s holds no certificate in PEM", name, path)
	}
	return nil
}
