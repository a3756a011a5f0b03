package main

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// defaultPort is where gRPC is unless told otherwise.
const defaultPort = "7070"

// address is where to call.
type address struct {
	// target is host:port, or a name that gRPC resolves in a way of its own.
	target string
	// tls and plain say what the address itself says of TLS, if anything.
	tls, plain bool
}

// resolvers are gRPC's own ways to name a server; such names are left as they are.
var resolvers = []string{"dns", "unix", "unix-abstract", "passthrough", "ipv4", "ipv6", "vsock"}

// parseAddress reads what --addr or the environment gives: host, host:port, or
// either after http:// or https://.
func parseAddress(text string) (address, error) {
	var a address
	scheme, rest, found := strings.Cut(text, "://")
	switch scheme := strings.ToLower(scheme); {
	case !found:
		rest = text
	case slices.Contains(resolvers, scheme):
		return address{target: text}, nil
	case scheme == "http":
		a.plain = true
	case scheme == "https":
		a.tls = true
	default:
		return a, usageErrorf("--addr %q cannot be used: give host:port, or that after http:// or https://", text)
	}
	if found {
		rest = strings.TrimSuffix(rest, "/")
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		host, port = strings.TrimSuffix(strings.TrimPrefix(rest, "["), "]"), defaultPort
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if (err != nil || number == 0) && slices.ContainsFunc(resolvers, func(name string) bool { return strings.HasPrefix(text, name+":") }) {
		return address{target: text}, nil
	}
	_, notIP := netip.ParseAddr(host)
	switch {
	case rest == "":
		return a, usageErrorf("--addr %q names no host: give host:port", text)
	case strings.ContainsAny(host, "/?#@ ") || strings.Contains(host, ":") && notIP != nil:
		return a, usageErrorf("--addr %q cannot be used: give host:port and nothing after it", text)
	case err != nil || number == 0:
		return a, usageErrorf("--addr %q has the port %q, which is not a number from 1 to 65535", text, port)
	}
	a.target = net.JoinHostPort(host, port)
	return a, nil
}

// isLoopback says whether the target is this machine.
func (a address) isLoopback() bool {
	host, _, err := net.SplitHostPort(a.target)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "" || host == "localhost" || err == nil && ip.IsLoopback()
}
