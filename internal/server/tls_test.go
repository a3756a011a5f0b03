package server

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

// issue writes a self-signed certificate for 127.0.0.1 and its key, and returns a
// pool that trusts it.
func issue(t *testing.T, certFile, keyFile string, serial int64) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "dualcheck"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	for name, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return pool
}

func TestTLSOnBothPorts(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	pool := issue(t, certFile, keyFile, 1)
	config, err := TLS(certFile, keyFile, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w := start(t, func(c *Config) { c.TLS = config })
	conn, err := grpc.NewClient(w.grpcAddr, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: pool})))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := dualcheckv1.NewDedupServiceClient(conn).Begin(t.Context(), &dualcheckv1.BeginRequest{Namespace: "a", Key: "k"}); err != nil {
		t.Errorf("gRPC: %v", err)
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	resp, err := client.Post(w.url+"/v1/dedup:begin", "application/json", strings.NewReader(`{"namespace":"a","key":"k"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.ProtoMajor != 2 {
		t.Errorf("JSON: %s %s", resp.Status, resp.Proto)
	}
}

func TestCertificateIsReadAnew(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	logs := &logBuffer{}
	c := &certificate{certFile: certFile, keyFile: keyFile, log: slog.New(slog.NewTextHandler(logs, nil))}
	if err := c.load(); err == nil {
		t.Error("no files, no error")
	}
	serial := func() int64 {
		leaf, err := x509.ParseCertificate(c.get().Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return leaf.SerialNumber.Int64()
	}
	issue(t, certFile, keyFile, 1)
	if got := serial(); got != 1 {
		t.Errorf("serial %d", got)
	}
	issue(t, certFile, keyFile, 22222222)
	if got := serial(); got != 22222222 {
		t.Errorf("serial %d after the files changed", got)
	}
	if err := os.WriteFile(certFile, []byte("half a cert"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if got := serial(); got != 22222222 {
			t.Errorf("serial %d: a broken file took the good certificate away", got)
		}
	}
	if n := strings.Count(logs.String(), "cannot be used"); n != 1 {
		t.Errorf("told %d times:\n%s", n, logs)
	}
	c.every = time.Hour
	if err := os.Remove(certFile); err != nil {
		t.Fatal(err)
	}
	looked := c.looked
	if serial(); c.looked != looked {
		t.Error("the files are looked at at every handshake")
	}
}
