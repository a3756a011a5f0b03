package target

import (
	"context"
	"time"

	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

const (
	// sqlStart is how long a database may take, once it listens, until it lets one in.
	sqlStart = 30 * time.Second
	sqlAgain = 50 * time.Millisecond
)

// sqlConnections is how many a target has: one for each operation in flight.
func sqlConnections(s Spec) int { return min(max(s.InFlight, 1), rig.MaxConnections/2) }

// untilIn asks until a database lets one in.
func untilIn(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, sqlStart)
	defer cancel()
	for {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(sqlAgain):
		}
	}
}
