package rig

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// Counters are what a node has counted since it started.
type Counters struct {
	Replays float64 // Begins that were answered by what was finished
	Hits    float64 // of these, without etcd
	Reads   float64 // reads that etcd was asked for
}

// Minus is what was counted since before.
func (c Counters) Minus(before Counters) Counters {
	return Counters{c.Replays - before.Replays, c.Hits - before.Hits, c.Reads - before.Reads}
}

// Plus adds up.
func (c Counters) Plus(d Counters) Counters {
	return Counters{c.Replays + d.Replays, c.Hits + d.Hits, c.Reads + d.Reads}
}

// Counters asks the node; nothing of a node that is not the rig's.
func (n Node) Counters(ctx context.Context) (Counters, error) {
	if n.HTTP == "" {
		return Counters{}, nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.HTTP+"/metrics", nil)
	if err != nil {
		return Counters{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return Counters{}, fmt.Errorf("the node's metrics: %w", err)
	}
	defer resp.Body.Close()
	return readCounters(resp.Body)
}

// readCounters reads the text format.
func readCounters(from io.Reader) (c Counters, err error) {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, rest, ok := strings.Cut(lines.Text(), "{")
		if !ok {
			continue
		}
		labels, number, ok := strings.Cut(rest, "} ")
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(number, 64)
		if err != nil {
			continue // a time stamp or an exemplar: none of those that are read here
		}
		switch name {
		case "dualcheck_begin_verdicts_total":
			if strings.Contains(labels, `verdict="VERDICT_REPLAY`) {
				c.Replays += v
				if !strings.Contains(labels, `source="SOURCE_ETCD"`) {
					c.Hits += v
				}
			}
		case "dualcheck_etcd_call_duration_seconds_count":
			if strings.Contains(labels, `kind="read"`) {
				c.Reads += v
			}
		}
	}
	return c, lines.Err()
}
