package rig

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Counters are what a node has counted since it started.
type Counters struct {
	Replays float64 // Begins that were answered by what was finished
	Hits    float64 // of these, without etcd
	Memory  float64 // of these, from the node's memory
	Reads   float64 // reads that etcd was asked for
	Looks   float64 // of these, at the revisions of keys that callers wait for
	Looked  float64 // at how many keys these looked
	Evicted float64 // records that had to leave the node's memory for others
}

// Minus is what was counted since before.
func (c Counters) Minus(before Counters) Counters { return c.plus(before, -1) }

// Plus adds up.
func (c Counters) Plus(d Counters) Counters { return c.plus(d, 1) }

func (c Counters) plus(d Counters, times float64) Counters {
	return Counters{
		c.Replays + times*d.Replays, c.Hits + times*d.Hits, c.Memory + times*d.Memory,
		c.Reads + times*d.Reads, c.Looks + times*d.Looks, c.Looked + times*d.Looked, c.Evicted + times*d.Evicted,
	}
}

// State is how a node is.
type State struct {
	Waiting     float64 // Begins that wait
	Subscribers float64 // streams of Watch
	// Records is what the watch of records is: off, resyncing, catching-up or live.
	Records string
}

// Counters asks the node; nothing of a node that is not the rig's.
func (n Node) Counters(ctx context.Context) (Counters, error) {
	c, _, err := n.metrics(ctx)
	return c, err
}

// State asks the node how it is; nothing of a node that is not the rig's.
func (n Node) State(ctx context.Context) (State, error) {
	_, s, err := n.metrics(ctx)
	return s, err
}

// Await asks until the node is as it is to be, for so long; not says what it is not.
func (n Node) Await(ctx context.Context, patience time.Duration, so func(State) bool, not string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		s, err := n.State(ctx)
		if err == nil && so(s) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %v the node %s: %+v", patience, not, s)
		case <-poll.C:
		}
	}
}

func (n Node) metrics(ctx context.Context) (Counters, State, error) {
	if n.HTTP == "" {
		return Counters{}, State{}, nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.HTTP+"/metrics", nil)
	if err != nil {
		return Counters{}, State{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return Counters{}, State{}, fmt.Errorf("the node's metrics: %w", err)
	}
	defer resp.Body.Close()
	return readMetrics(resp.Body)
}

// readMetrics reads the text format.
func readMetrics(from io.Reader) (c Counters, s State, err error) {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, number, ok := strings.Cut(lines.Text(), " ")
		labels := ""
		if at := strings.IndexByte(lines.Text(), '{'); at >= 0 {
			name = lines.Text()[:at]
			labels, number, ok = strings.Cut(lines.Text()[at+1:], "} ")
		}
		v, err := strconv.ParseFloat(number, 64)
		if !ok || err != nil {
			continue // a comment, a time stamp or an exemplar: none of those that are read here
		}
		has := func(label string) bool { return strings.Contains(labels, label) }
		switch name {
		case "dualcheck_begin_verdicts_total":
			if !has(`verdict="VERDICT_REPLAY`) {
				continue
			}
			c.Replays += v
			if !has(`source="SOURCE_ETCD"`) {
				c.Hits += v
			}
			if has(`source="SOURCE_MEMORY"`) {
				c.Memory += v
			}
		case "dualcheck_etcd_call_duration_seconds_count":
			if has(`kind="read"`) || has(`kind="revisions"`) {
				c.Reads += v
			}
		case "dualcheck_wait_looks_total":
			c.Looks += v
		case "dualcheck_wait_looked_keys_total":
			c.Looked += v
		case "dualcheck_memory_evictions_total":
			c.Evicted += v
		case "dualcheck_begins_waiting":
			s.Waiting = v
		case "dualcheck_watch_subscribers":
			s.Subscribers = v
		case "dualcheck_watch_state":
			if v == 1 && has(`watch="records"`) {
				_, state, _ := strings.Cut(labels, `state="`)
				s.Records, _, _ = strings.Cut(state, `"`)
			}
		}
	}
	return c, s, lines.Err()
}
