package main

import (
	"github.com/dualcheck/dualcheck/internal/memory"
	"github.com/dualcheck/dualcheck/internal/recency"
	"github.com/dualcheck/dualcheck/internal/server"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// memoryCache makes what keeps finished records in this node's memory; nil if there is to
// be none. absent is asked by cached Gets.
func (s settings) memoryCache(view memory.Viewer, habits *recency.Habits, absent func(namespace, key string) bool, metrics *telemetry.Metrics) *memory.Cache {
	if s.MemoryBytes == 0 {
		return nil
	}
	var cache *memory.Cache
	observe := metrics.Memory(func() telemetry.MemorySize { return telemetry.MemorySize(cache.Size()) })
	cache = memory.New(memory.Config{Bytes: s.MemoryBytes, View: view, Encode: server.EncodeRecord, Absent: absent, TTL: habits.TTL, Observe: observe})
	return cache
}
