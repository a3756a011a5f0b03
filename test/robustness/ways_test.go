package robustness

import (
	"context"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/redistest"
	"github.com/dualcheck/dualcheck/internal/sdktest"
)

// breakWays does to the ways between clients and nodes what happens to them, to one
// client after another, until ctx ends.
func (w *caller) breakWays(ctx context.Context, ways [][]*redistest.Proxy) {
	acts := []func(way []*redistest.Proxy){
		func(way []*redistest.Proxy) {
			p := way[w.IntN(len(way))]
			p.Cut()
			if w.one(50) { // else it is there again at once
				pause(ctx, w.between(0, 2*time.Second))
			}
			p.Mend()
			w.stats.add("chaos: client cut from a node")
		},
		func(way []*redistest.Proxy) {
			// What was asked arrives when nobody waits for it any more.
			p := way[w.IntN(len(way))]
			p.Hold()
			pause(ctx, w.between(100*time.Millisecond, 2*time.Second))
			p.Release()
			w.stats.add("chaos: client held from a node")
		},
		func(way []*redistest.Proxy) {
			// What was asked is done, and who asked asks again, maybe another node.
			for _, p := range way {
				p.HoldAnswers()
			}
			pause(ctx, w.between(50*time.Millisecond, 500*time.Millisecond))
			late := w.IntN(len(way)) // there they only come late: it can be asked at once
			for i, p := range way {
				if i != late {
					p.Cut()
				}
				p.Release()
				p.Mend()
			}
			w.stats.add("chaos: answers lost")
		},
	}
	for round := 0; ctx.Err() == nil; round++ {
		act := min(w.IntN(len(acts)+1), len(acts)-1)
		if round < len(acts) {
			act = round
		}
		acts[act](ways[w.IntN(len(ways))])
		if !pause(ctx, w.between(10*time.Millisecond, 500*time.Millisecond)) {
			return
		}
	}
}

// breakServers stops one node's server after the other and starts it again, by turns
// with all the time it needs and with none.
func (w *caller) breakServers(ctx context.Context, t testing.TB, servers []*sdktest.Server) {
	for round := 0; pause(ctx, w.between(500*time.Millisecond, 4*time.Second)); round++ {
		s := servers[w.IntN(len(servers))]
		enough, what := 20*time.Second, "chaos: server drained"
		if round%2 != 0 {
			enough, what = 0, "chaos: server cut off"
		}
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), enough)
		err := s.Stop(stopping)
		cancel()
		if err != nil {
			t.Errorf("stop a server: %v", err)
			return
		}
		pause(ctx, w.between(0, time.Second))
		for err = s.Start(); err != nil; err = s.Start() {
			if !pause(ctx, 100*time.Millisecond) { // its port is somebody's
				t.Errorf("start a server: %v", err)
				return
			}
		}
		w.stats.add(what)
	}
}
