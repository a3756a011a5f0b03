package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// listenAddr is an address to listen at, and its setting.
type listenAddr struct{ name, value string }

// check notes every mistake in what the settings say.
func (l *loaded) check() {
	bad := func(name, format string, args ...any) { l.mistake([]string{name}, format, args...) }
	listening := []listenAddr{{"grpc-addr", l.GRPCAddr}, {"http-addr", l.HTTPAddr}}
	if l.DebugAddr != "" {
		listening = append(listening, listenAddr{"debug-addr", l.DebugAddr})
	}
	for i, a := range listening {
		if err := checkHostPort(a.value, 0); err != nil {
			bad(a.name, "%s %q %v", a.name, a.value, err)
		}
		for _, b := range listening[:i] {
			if samePort(a.value, b.value) {
				l.mistake([]string{b.name, a.name}, "%s %q and %s %q are one port: give each its own", b.name, b.value, a.name, a.value)
			}
		}
	}
	if l.AdvertiseAddr != "" {
		if err := checkHostPort(l.AdvertiseAddr, 1); err != nil {
			bad("advertise-addr", "advertise-addr %q %v", l.AdvertiseAddr, err)
		}
	}
	if len(l.EtcdEndpoints) == 0 {
		bad("etcd-endpoints", "etcd-endpoints says no address of etcd: give one or more host:port")
	}
	secure := 0
	for _, e := range l.EtcdEndpoints {
		if overfull(e) { // it may hold a password: it is not told
			bad("etcd-endpoints", "an address in etcd-endpoints has more than host:port: use etcd-user and etcd-password-file")
		} else if err := checkEndpoint(e); err != nil {
			bad("etcd-endpoints", "etcd-endpoints: %q %v", e, err)
		}
		if strings.HasPrefix(e, "https://") {
			secure++
		}
	}
	if secure > 0 && secure < len(l.EtcdEndpoints) {
		bad("etcd-endpoints", "etcd-endpoints are https:// all or none")
	}
	if l.EtcdServerName != "" && secure == 0 && l.EtcdCAFile == "" && l.EtcdCertFile == "" {
		l.mistake([]string{"etcd-server-name", "etcd-endpoints"}, "etcd-server-name is without effect in the clear: write https:// before etcd-endpoints, or set etcd-ca-file")
	}
	if (l.EtcdCertFile == "") != (l.EtcdKeyFile == "") {
		l.mistake([]string{"etcd-cert-file", "etcd-key-file"}, "etcd-cert-file and etcd-key-file go together")
	}
	passwords := []string{"etcd-password", "etcd-password-file"}
	if l.EtcdPassword != "" && l.EtcdPasswordFile != "" {
		l.mistake(passwords, "etcd-password and etcd-password-file exclude each other")
	}
	if hasPassword := l.EtcdPassword != "" || l.EtcdPasswordFile != ""; hasPassword != (l.EtcdUser != "") {
		l.mistake(append(passwords, "etcd-user"), "etcd-user and its password go together")
	}
	l.checkRedis()
	if (l.TLSCertFile == "") != (l.TLSKeyFile == "") {
		l.mistake([]string{"tls-cert-file", "tls-key-file"}, "tls-cert-file and tls-key-file go together")
	}
	if _, err := telemetry.NewLogger(io.Discard, telemetry.LogText, l.LogLevel); err != nil {
		bad("log-level", "%v", err)
	}
	if _, err := telemetry.NewLogger(io.Discard, telemetry.LogFormat(l.LogFormat), "info"); err != nil {
		bad("log-format", "%v", err)
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"max-connection-age", l.MaxConnectionAge}, {"pre-drain-delay", l.PreDrainDelay}, {"drain-timeout", l.DrainTimeout}} {
		if d.value < 0 {
			bad(d.name, "%s is 0 or more, not %v", d.name, d.value)
		}
	}
	if l.MemoryBytes < 0 {
		bad("memory-bytes", "memory-bytes is 0 or more, not %d", l.MemoryBytes)
	}
	if l.MaxInFlight < 1 {
		bad("max-in-flight", "max-in-flight is 1 or more, not %d", l.MaxInFlight)
	}
	if l.DrainTimeout <= l.PreDrainDelay {
		l.mistake([]string{"drain-timeout", "pre-drain-delay"}, "drain-timeout %v leaves no time after a pre-drain-delay of %v", l.DrainTimeout, l.PreDrainDelay)
	}
}

// checkFiles reads the files that the settings name, to find mistakes early.
func (l *loaded) checkFiles() {
	if _, err := l.password(); err != nil {
		l.mistake([]string{"etcd-password-file"}, "%v", err)
	}
	of := func(names ...string) []string { // those that are set
		return slices.DeleteFunc(names, func(name string) bool { return l.from[name] == "" })
	}
	if (l.EtcdCertFile == "") == (l.EtcdKeyFile == "") && len(l.EtcdEndpoints) > 0 {
		if _, err := l.etcdTLS(); err != nil {
			l.mistake(of("etcd-ca-file", "etcd-cert-file", "etcd-key-file"), "%v", err)
		}
	}
	l.checkRedisFiles()
	if (l.TLSCertFile == "") == (l.TLSKeyFile == "") {
		if _, err := l.ownTLS(slog.New(slog.DiscardHandler)); err != nil {
			l.mistake(of("tls-cert-file", "tls-key-file"), "%v", err)
		}
	}
}

// checkHostPort checks host:port, the port being a number from least, or the name
// of a service.
func checkHostPort(addr string, least int) error {
	_, name, err := net.SplitHostPort(addr)
	if err != nil {
		return errors.New("is no host:port")
	}
	if port, err := net.LookupPort("tcp", name); err != nil || port < least {
		return fmt.Errorf("has port %q, which is not from %d to 65535", name, least)
	}
	return nil
}

// samePort reports whether two addresses to listen at are one.
func samePort(a, b string) bool {
	aHost, aName, errA := net.SplitHostPort(a)
	bHost, bName, errB := net.SplitHostPort(b)
	if errA != nil || errB != nil {
		return false
	}
	aPort, errA := net.LookupPort("tcp", aName)
	bPort, errB := net.LookupPort("tcp", bName)
	if errA != nil || errB != nil || aPort == 0 || aPort != bPort {
		return false // port 0 is another one each time
	}
	everywhere := func(host string) bool {
		ip := net.ParseIP(host)
		return host == "" || ip != nil && ip.IsUnspecified()
	}
	here := func(host string) bool {
		ip := net.ParseIP(host)
		return host == "localhost" || ip != nil && ip.IsLoopback()
	}
	named := aHost == "localhost" || bHost == "localhost"
	return aHost == bHost || everywhere(aHost) || everywhere(bHost) || named && here(aHost) && here(bHost)
}

// overfull reports whether an endpoint says more than a scheme, a host and a port.
func overfull(e string) bool {
	if _, rest, ok := strings.Cut(e, "://"); ok {
		e = rest
	}
	return strings.ContainsAny(strings.TrimSuffix(e, "/"), "@/?#")
}

func checkEndpoint(e string) error {
	host := e
	if strings.Contains(e, "://") {
		u, err := url.Parse(e)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" {
			return errors.New("is no http:// or https:// URL")
		}
		host = u.Host
	}
	return checkHostPort(host, 1)
}
