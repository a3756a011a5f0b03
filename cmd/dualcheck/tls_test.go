package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

// selfSigned makes a certificate for 127.0.0.1 that vouches for itself, and
// writes it and its key as files.
func selfSigned(t *testing.T) (pair tls.Certificate, certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "test"},
		NotAfter:              time.Now().Add(time.Hour),
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:                  true,
		BasicConstraintsValid: true,
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile = textFile(t, "cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})))
	keyFile = textFile(t, "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})))
	if pair, err = tls.LoadX509KeyPair(certFile, keyFile); err != nil {
		t.Fatal(err)
	}
	return pair, certFile, keyFile
}

func TestTLSTrustsTheGivenAuthorityAndShowsTheGivenCertificate(t *testing.T) {
	server, ca, _ := selfSigned(t)
	own, ownFile, ownKey := selfSigned(t)
	pool := x509.NewCertPool()
	pool.AddCert(own.Leaf)
	_, addr := startFake(t, &ingesttest.Service{}, grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{server},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    pool,
	})))
	t.Setenv(addrVariable, addr)
	with := []string{"--ca-file", ca, "--cert-file", ownFile, "--key-file", ownKey}
	begun := command(t, "", append([]string{"begin", "n", "a"}, with...)...)
	begun.wants(t, exitOK, "FIRST", "--ca-file="+ca, "--cert-file="+ownFile, "--key-file="+ownKey)
	command(t, "", "begin", "n", "a", "--tls").complains(t, exitUsage, "cannot be verified", "with --ca-file")
	command(t, "", "begin", "n", "a", "--ca-file", ownFile).complains(t, exitUsage, "cannot be verified")
	// Under TLS 1.3 the server says so after the handshake; a client that was writing
	// meanwhile may find the connection closed before it has read that, and is told next
	// time.
	shy := command(t, "", "begin", "n", "a", "--ca-file", ca)
	for tries := 0; shy.code != exitUsage && tries < 20; tries++ {
		shy = command(t, "", "begin", "n", "a", "--ca-file", ca)
	}
	shy.complains(t, exitUsage, "wants a certificate", "--cert-file")
	command(t, "", "begin", "n", "a").complains(t, exitUsage, "speaks TLS alone; try --tls (and --ca-file)")
	command(t, "", "begin", "n", "a", "--ca-file", ownKey).complains(t, exitUsage, "no certificate")
	command(t, "", "begin", "n", "a", "--cert-file", ownFile, "--key-file", filepath.Join(t.TempDir(), "none")).complains(t, exitUsage, "--key-file")
}
