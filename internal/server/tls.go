package server

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// certEvery is how often the files of a certificate are looked at, at most.
const certEvery = 5 * time.Second

// TLS returns a configuration with the certificate in these files, which is read
// again when they change. Files that cannot be read then leave the old one in use.
func TLS(certFile, keyFile string, log *slog.Logger) (*tls.Config, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile, log: log, every: certEvery}
	if err := c.load(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.get(), nil },
	}, nil
}

type certificate struct {
	certFile, keyFile string
	log               *slog.Logger
	every             time.Duration

	mu      sync.Mutex
	cert    *tls.Certificate
	stamp   string // of the files as they were loaded
	looked  time.Time
	refused string // what was last told of files that cannot be used
}

// get returns the newest certificate that could be read.
func (c *certificate) get() *tls.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.looked) < c.every {
		return c.cert
	}
	if err := c.load(); err != nil && c.refused != err.Error() {
		c.refused = err.Error()
		c.log.Error("the new TLS certificate cannot be used; the old one stays", telemetry.FieldError, err)
	}
	return c.cert
}

// load reads the files if they changed; c.mu is held, or nobody else knows c.
func (c *certificate) load() error {
	c.looked = time.Now()
	stamp := ""
	for _, name := range []string{c.certFile, c.keyFile} {
		info, err := os.Stat(name)
		if err != nil {
			return fmt.Errorf("TLS certificate: %w", err)
		}
		stamp += fmt.Sprintf("%d/%d ", info.ModTime().UnixNano(), info.Size())
	}
	if stamp == c.stamp {
		return nil
	}
	cert, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("TLS certificate: %w", err)
	}
	if c.cert != nil {
		c.log.Info("the TLS certificate was read anew")
	}
	c.cert, c.stamp, c.refused = &cert, stamp, ""
	return nil
}
