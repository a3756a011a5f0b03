package redistest

import (
	"bytes"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/childproc"
)

// Proxy stands between clients and a server and does to their bytes what networks
// do. It is transparent until it is told otherwise. Bytes come late or are lost with
// their connection; they are never changed and never out of order.
type Proxy struct {
	t       testing.TB
	addr    string
	target  string
	running sync.WaitGroup

	mu       sync.Mutex
	changed  *sync.Cond
	listener net.Listener // nil while cut
	links    map[*link]bool
	delay    time.Duration
	hold     [2]bool // by direction
}

// direction is where bytes go.
type direction int

const (
	requests direction = iota
	answers
)

// link is one client's connection through the proxy. The proxy's lock guards it.
type link struct {
	client, server net.Conn
	gone           chan struct{}
	waiting        [2][]chunk // read and not yet written, by direction
	ended          [2]bool    // nothing more will be read
}

type chunk struct {
	data []byte
	due  time.Time
}

// NewProxy starts a proxy to a server's address; it ends with the test.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	port, err := childproc.FreePort()
	if err != nil {
		t.Fatalf("proxy: %v", err)
	}
	p := &Proxy{t: t, addr: loopback(port), target: target, links: map[*link]bool{}}
	p.changed = sync.NewCond(&p.mu)
	p.Mend()
	t.Cleanup(func() {
		p.Cut()
		p.running.Wait()
	})
	return p
}

// Addr is where clients connect.
func (p *Proxy) Addr() string { return p.addr }

// SetDelay makes each answer that comes from now on arrive so much later. Answers
// travel side by side: ten of them are not ten times as late.
func (p *Proxy) SetDelay(d time.Duration) { p.set(func() { p.delay = d }) }

// Hold keeps back what clients and servers say from now on, until Release.
func (p *Proxy) Hold() { p.set(func() { p.hold = [2]bool{true, true} }) }

// HoldAnswers keeps back what servers say alone: they do what they are asked, and
// clients do not learn of it.
func (p *Proxy) HoldAnswers() { p.set(func() { p.hold[answers] = true }) }

// AwaitHeld returns once what is held back of one client, in either direction,
// contains these bytes.
func (p *Proxy) AwaitHeld(needle string) {
	p.t.Helper()
	until(p.t, fmt.Sprintf("%q is held back", needle), func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		for l := range p.links {
			for d, held := range p.hold {
				if held && bytes.Contains(joined(l.waiting[d]), []byte(needle)) {
					return nil
				}
			}
		}
		return fmt.Errorf("%d connections hold no such bytes", len(p.links))
	})
}

func joined(chunks []chunk) []byte {
	var all []byte
	for _, c := range chunks {
		all = append(all, c.data...)
	}
	return all
}

// Release sends on all that was held back, late but whole: requests too whose
// clients have given up since.
func (p *Proxy) Release() { p.set(func() { p.hold = [2]bool{} }) }

// Cut closes every connection, what was on its way is lost, and refuses new ones.
func (p *Proxy) Cut() {
	p.set(func() {
		if p.listener != nil {
			p.listener.Close() //nolint:errcheck // nothing is to be heard from it
			p.listener = nil
		}
		for l := range p.links {
			p.drop(l)
		}
	})
}

// Mend undoes Cut: clients may connect again.
func (p *Proxy) Mend() {
	p.t.Helper()
	p.set(func() {
		if p.listener != nil {
			return
		}
		l, err := net.Listen("tcp", p.addr)
		if err != nil {
			p.t.Fatalf("proxy: %v", err)
		}
		p.listener = l
		p.running.Go(func() { p.accept(l) })
	})
}

func (p *Proxy) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	p.changed.Broadcast()
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.connect(listener, client) })
	}
}

func (p *Proxy) connect(listener net.Listener, client net.Conn) {
	server, err := net.DialTimeout("tcp", p.target, patience)
	if err != nil {
		client.Close() //nolint:errcheck // nothing was said
		return
	}
	l := &link{client: client, server: server, gone: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.links[l] = true
	if p.listener != listener { // cut meanwhile
		p.drop(l)
		return
	}
	p.running.Go(func() { p.read(l, requests, client) })
	p.running.Go(func() { p.read(l, answers, server) })
	p.running.Go(func() {
		// A client that is gone is not waited for, but its last words are said.
		if p.write(l, requests, server) {
			server.(*net.TCPConn).CloseWrite() //nolint:errcheck // the server may be gone
		}
	})
	p.running.Go(func() {
		p.write(l, answers, client)
		p.set(func() { p.drop(l) })
	})
}

// drop ends a connection. The lock is held.
func (p *Proxy) drop(l *link) {
	if p.links[l] {
		delete(p.links, l)
		close(l.gone)
		l.client.Close() //nolint:errcheck // it is being cut
		l.server.Close() //nolint:errcheck // it is being cut
	}
}

// read takes what comes until there is no more.
func (p *Proxy) read(l *link, d direction, from net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		p.set(func() {
			due := time.Now()
			if d == answers {
				due = due.Add(p.delay)
			}
			if n > 0 {
				l.waiting[d] = append(l.waiting[d], chunk{bytes.Clone(buf[:n]), due})
			}
			l.ended[d] = err != nil
		})
		if err != nil {
			return
		}
	}
}

// write sends on what was read once it is due and not held back. It tells whether
// all of it went out.
func (p *Proxy) write(l *link, d direction, to net.Conn) bool {
	for {
		c, more := p.next(l, d)
		if !more {
			return true
		}
		if wait := time.Until(c.due); wait > 0 {
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-l.gone:
				timer.Stop()
				return false
			}
			continue // it may be held back by now
		}
		p.set(func() { l.waiting[d] = l.waiting[d][1:] })
		if _, err := to.Write(c.data); err != nil {
			return false
		}
	}
}

// next waits for something to be sent on; there is none once the connection ended.
func (p *Proxy) next(l *link, d direction) (c chunk, more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.links[l] && (p.hold[d] || len(l.waiting[d]) == 0 && !l.ended[d]) {
		p.changed.Wait()
	}
	if !p.links[l] || len(l.waiting[d]) == 0 {
		return chunk{}, false
	}
	return l.waiting[d][0], true
}
