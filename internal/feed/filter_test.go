package feed_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/dualcheck/dualcheck/internal/etcdtest"
	"github.com/dualcheck/dualcheck/internal/feed"
	"github.com/dualcheck/dualcheck/internal/nodetest"
)

// A filter of names tells of most keys that there are not that there are none, and never
// of one that there is: not of those that were there before it was made, nor of those that
// have come since. While the watch hangs it tells of none for longer than a cache is
// believed.
func TestAbsentIsNeverSaidOfWhatIsThere(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t, 1)
	p := etcdtest.NewProxy(t, etcd.Endpoint(0))
	s := startOn(t, etcd, p.Addr(), func(c *feed.Config) { c.FilterEvery = 100 * time.Millisecond })
	before := keys("before", 50)
	s.done(before...)
	if s.feed.Absent(ns, "no such key") {
		t.Error("said of anything while nothing is followed")
	}
	_, end := s.feed.Follow("x")
	defer end()
	nodetest.Eventually(t, 30*time.Second, "a filter", func() error {
		said := 0
		for i := range 1000 {
			if s.feed.Absent(ns, fmt.Sprintf("no such key %d", i)) {
				said++
			}
		}
		if said < 900 {
			return fmt.Errorf("it knows of %d of 1000", said)
		}
		return nil
	})
	since := keys("since", 50)
	r := s.read(feed.Request{})
	s.done(since...)
	r.until("them all", func() bool { return len(r.Have) == 50 })
	for _, key := range append(before, since...) {
		if s.feed.Absent(ns, key) {
			t.Errorf("%s is there", key)
		}
	}
	p.SwallowAnswers()
	cut := time.Now()
	nodetest.Eventually(t, 30*time.Second, "doubt", func() error {
		if s.feed.Absent(ns, "no such key 1") {
			return errors.New("it is still sure")
		}
		return nil
	})
	if took := time.Since(cut); took > 6*time.Second {
		t.Errorf("it was sure for %v", took)
	}
}
