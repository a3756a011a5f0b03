package server

import (
	"context"
	"sync"
	"time"
)

// callContext is the context of one call of a session. It is what context.WithDeadline
// returns, but that it has no timer and no place in a parent: its session ends it, at
// the call's deadline or at its own end. At a hundred thousand calls a second that is
// an eighth of what a call costs.
type callContext struct {
	context.Context // has its values
	deadline        time.Time

	mu    sync.Mutex
	done  chan struct{} // made when it is asked for
	err   error
	after *afterFunc // what is called when it ends, newest first
}

type afterFunc struct {
	f          func()
	next, prev *afterFunc
}

var over = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (c *callContext) Deadline() (time.Time, bool) { return c.deadline, true }

func (c *callContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		if c.err != nil {
			return over
		}
		c.done = make(chan struct{})
	}
	return c.done
}

func (c *callContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// AfterFunc is what package context uses to end contexts made of this one.
func (c *callContext) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		go f()
		return func() bool { return false }
	}
	a := &afterFunc{f: f, next: c.after}
	if a.next != nil {
		a.next.prev = a
	}
	c.after = a
	c.mu.Unlock()
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if a.f == nil {
			return false
		}
		a.f = nil
		if a.next != nil {
			a.next.prev = a.prev
		}
		if a.prev != nil {
			a.prev.next = a.next
		} else {
			c.after = a.next
		}
		return true
	}
}

// end ends it, once.
func (c *callContext) end(why error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = why
	if c.done != nil {
		close(c.done)
	}
	var calls []func()
	for a := c.after; a != nil; a = a.next {
		calls = append(calls, a.f)
		a.f = nil
	}
	c.after = nil
	c.mu.Unlock()
	for _, f := range calls {
		f()
	}
}
