package etcdtest

import (
	"bytes"
	"net"
	"sync"
	"testing"
)

// Proxy stands between a client and a server and does to their bytes what networks
// do. It is transparent until it is told otherwise.
type Proxy struct {
	listener net.Listener
	target   string
	running  sync.WaitGroup

	mu      sync.Mutex
	changed *sync.Cond
	conns   map[net.Conn]bool
	closed  bool
	// swallow drops answers; hold keeps requests back, in the order they came.
	swallow, hold bool
	held          []chunk
	// late keeps answers back, in the order they came.
	late bool
	kept []chunk
}

type chunk struct {
	to   net.Conn
	data []byte
}

// NewProxy starts a proxy to a server's address; it ends with the test.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("proxy: %v", err)
	}
	p := &Proxy{listener: l, target: target, conns: map[net.Conn]bool{}}
	p.changed = sync.NewCond(&p.mu)
	p.running.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// Addr is where clients connect.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// SwallowAnswers drops everything that the server says from now on.
func (p *Proxy) SwallowAnswers() { p.set(func() { p.swallow = true }) }

// HoldRequests keeps back what clients say from now on, until Release.
func (p *Proxy) HoldRequests() { p.set(func() { p.hold = true }) }

// AwaitHeld returns once what is held back contains these bytes, and how many
// pieces are held then.
func (p *Proxy) AwaitHeld(needle string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !contains(p.held, needle) {
		p.changed.Wait()
	}
	return len(p.held)
}

// HoldAnswers keeps back what servers say from now on, until ReleaseAnswers.
func (p *Proxy) HoldAnswers() { p.set(func() { p.late = true }) }

// AwaitAnswer returns once what servers said, and is held back, contains these bytes.
func (p *Proxy) AwaitAnswer(needle string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !contains(p.kept, needle) {
		p.changed.Wait()
	}
}

// ReleaseAnswers sends on what servers said, late but whole.
func (p *Proxy) ReleaseAnswers() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late = false
	for _, c := range p.kept {
		if _, err := c.to.Write(c.data); err != nil {
			return err
		}
	}
	p.kept = nil
	return nil
}

func contains(held []chunk, needle string) bool {
	var all []byte
	for _, c := range held {
		all = append(all, c.data...)
	}
	return bytes.Contains(all, []byte(needle))
}

// Release sends on the first pieces that were held back; what came after them, such
// as the client's giving up, is lost.
func (p *Proxy) Release(pieces int) error {
	p.mu.Lock()
	held := p.held[:pieces]
	p.held = nil
	p.mu.Unlock()
	for _, c := range held {
		if _, err := c.to.Write(c.data); err != nil {
			return err
		}
	}
	return nil
}

// Heal makes the proxy transparent again; connections whose bytes were tampered
// with are cut, and clients connect anew.
func (p *Proxy) Heal() {
	p.set(func() {
		p.swallow, p.hold, p.held, p.late, p.kept = false, false, nil, false, nil
		for c := range p.conns {
			c.Close() //nolint:errcheck // it is being cut
		}
	})
}

func (p *Proxy) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	p.changed.Broadcast()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			client.Close() //nolint:errcheck // nothing was said
			continue
		}
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			client.Close() //nolint:errcheck // the test is over
			server.Close() //nolint:errcheck // the test is over
			return
		}
		p.conns[client], p.conns[server] = true, true
		p.mu.Unlock()
		p.running.Go(func() { p.copy(server, client, p.request) })
		p.running.Go(func() { p.copy(client, server, p.answer) })
	}
}

// copy moves bytes until either side is closed.
func (p *Proxy) copy(to, from net.Conn, pass func(to net.Conn, data []byte) bool) {
	defer func() {
		p.mu.Lock()
		delete(p.conns, to)
		delete(p.conns, from)
		p.mu.Unlock()
		to.Close()   //nolint:errcheck // the other side is gone
		from.Close() //nolint:errcheck // the other side is gone
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && pass(to, buf[:n]) {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (p *Proxy) request(to net.Conn, data []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hold {
		p.held = append(p.held, chunk{to, bytes.Clone(data)})
		p.changed.Broadcast()
	}
	return !p.hold
}

func (p *Proxy) answer(to net.Conn, data []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.late {
		p.kept = append(p.kept, chunk{to, bytes.Clone(data)})
		p.changed.Broadcast()
	}
	return !p.swallow && !p.late
}

func (p *Proxy) close() {
	p.listener.Close() //nolint:errcheck // the test is over
	p.set(func() {
		p.closed = true
		for c := range p.conns {
			c.Close() //nolint:errcheck // the test is over
		}
	})
	p.running.Wait()
}
