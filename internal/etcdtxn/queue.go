package etcdtxn

// pick is what a sender makes of one thing that waits.
type pick int

const (
	taken   pick = iota // it goes now
	left                // it waits on
	dropped             // nobody waits for it any more
	enough              // it waits on, and so does everything behind it
)

// lanes is what waits to be sent. What ends or keeps a claim has a lane of its own, that
// no limit closes: to refuse it would have work run again (H27). In each lane namespaces
// take turns, so that the storm of one is not the wait of another.
type lanes[T any] struct {
	urgent, usual turns[T]
	// passedOver: the last take had no place for anything usual.
	passedOver bool
}

// admits reports whether one more of a namespace may wait in the usual lane, of which
// most are to. A namespace that has less than its share waiting is let in all the same:
// it is others who have filled the lane.
func (l *lanes[T]) admits(namespace string, most int) bool {
	if l.usual.waiting < most {
		return true
	}
	return l.usual.waiting < 2*most && l.usual.of(namespace) < most/(len(l.usual.ring)+1)
}

func (l *lanes[T]) push(namespace string, urgent bool, x T) {
	if urgent {
		l.urgent.push(namespace, x)
		return
	}
	l.usual.push(namespace, x)
}

// take shows what waits to choose, the urgent first; but that gets only three of four of
// most while something else waits, lest a flood of extensions keep all Begins out; and if
// that leaves no room, as large results do, the next take begins with something usual.
func (l *lanes[T]) take(most int, choose func(T) pick) {
	urgent, got := most, 0
	if l.usual.waiting > 0 {
		urgent = max(most*3/4, 1)
	}
	limited := func(limit int) func(T) pick {
		return func(x T) pick {
			if got >= limit {
				return enough
			}
			p := choose(x)
			if p == taken {
				got++
			}
			return p
		}
	}
	waiting, before := l.usual.waiting > 0, 0
	if l.passedOver {
		l.usual.take(limited(1))
		before = got
	}
	l.urgent.take(limited(urgent))
	after := got
	l.usual.take(limited(most))
	l.passedOver = waiting && before+got-after == 0
	l.urgent.take(limited(most))
}

// turns is a queue in which namespaces take turns.
type turns[T any] struct {
	lines map[string]*line[T]
	// ring holds the lines that are not empty, whose turn is next first.
	ring    []*line[T]
	waiting int
}

// line is what waits of one namespace, in order.
type line[T any] struct {
	namespace string
	items     []T
	// seen are those that this take has chosen among, kept those of them that wait on.
	seen int
	kept []T
}

func (q *turns[T]) of(namespace string) int {
	if l := q.lines[namespace]; l != nil {
		return len(l.items)
	}
	return 0
}

func (q *turns[T]) push(namespace string, x T) {
	l := q.lines[namespace]
	if l == nil {
		if q.lines == nil {
			q.lines = map[string]*line[T]{}
		}
		l = &line[T]{namespace: namespace}
		q.lines[namespace] = l
		q.ring = append(q.ring, l)
	}
	l.items = append(l.items, x)
	q.waiting++
}

// take shows each thing that waits to choose, one of a namespace at a time, until all
// were shown or choose has enough.
func (q *turns[T]) take(choose func(T) pick) {
	var none T
	first := 0 // whose turn is next time
	for shown, over := true, false; shown && !over; {
		shown = false
		for i, l := range q.ring {
			if l.seen == len(l.items) {
				continue
			}
			x := l.items[l.seen]
			p := choose(x)
			if p == enough {
				first, over = i, true
				break
			}
			if p == left {
				l.kept = append(l.kept, x)
			}
			l.items[l.seen] = none // for the collector
			l.seen++
			shown = true
		}
	}
	var ring []*line[T]
	if q.waiting > 0 {
		ring = make([]*line[T], 0, len(q.ring))
	}
	q.waiting = 0
	for i := range q.ring {
		l := q.ring[(first+i)%len(q.ring)]
		rest := l.items[l.seen:]
		if len(l.kept) > 0 {
			rest = append(l.kept, rest...)
		}
		l.items, l.seen, l.kept = rest, 0, nil
		if len(l.items) == 0 {
			delete(q.lines, l.namespace)
			continue
		}
		q.waiting += len(l.items)
		ring = append(ring, l)
	}
	q.ring = ring
}
