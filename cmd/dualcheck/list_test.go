package main

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"

	"github.com/dualcheck/dualcheck/internal/ingest/ingesttest"
)

// listCalls sees the calls that list something. before says how the call with a
// number, from 1, is answered; nil: as ever.
type listCalls struct {
	mu     sync.Mutex
	calls  int
	from   map[string]bool
	before func(ctx context.Context, number int) error
}

func (l *listCalls) intercept(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if !strings.Contains(info.FullMethod, "/List") {
		return next(ctx, q)
	}
	l.mu.Lock()
	l.calls++
	number := l.calls
	if p, ok := peer.FromContext(ctx); ok {
		l.from[p.Addr.String()] = true
	}
	l.mu.Unlock()
	if l.before != nil {
		if err := l.before(ctx, number); err != nil {
			return nil, err
		}
	}
	return next(ctx, q)
}

// startLists serves five records and five namespaces, in pages of two.
func startLists(t *testing.T, before func(context.Context, int) error) *listCalls {
	t.Helper()
	seen := &listCalls{from: map[string]bool{}, before: before}
	_, addr := startFake(t, &ingesttest.Service{}, grpc.UnaryInterceptor(seen.intercept))
	t.Setenv(addrVariable, addr)
	for _, key := range []string{"a", "b", "c", "d", "e"} {
		command(t, "", "begin", "n", key).wants(t, exitOK)
		command(t, "", "namespace", "put", key).wants(t, exitOK)
	}
	return seen
}

// bothLists are the commands that list, by what they list.
var bothLists = map[string][]string{
	"records":    {"records", "n", "--limit", "0"},
	"namespaces": {"namespace", "list"},
}

func TestAListOfManyPagesIsWholeAndComesOverOneConnection(t *testing.T) {
	for name, words := range bothLists {
		t.Run(name, func(t *testing.T) {
			seen := startLists(t, nil)
			all := command(t, "", append(words, "-o", "json")...)
			all.wants(t, exitOK)
			answer := object(t, all.stdout)
			if items, _ := answer[name].([]any); len(items) != 5 || len(answer) != 1 || strings.Count(all.stdout, "\n") != 1 {
				t.Errorf("got %s", all.stdout)
			}
			if seen.calls != 3 || len(seen.from) != 1 {
				t.Errorf("%d calls over %d connections, want 3 over 1", seen.calls, len(seen.from))
			}
			some := command(t, "", append(words, "--limit", "3", "-o", "json")...)
			some.wants(t, exitOK)
			if answer := object(t, some.stdout); answer["nextPageToken"] != "3" || len(answer[name].([]any)) != 3 || some.stderr != "" {
				t.Errorf("got %+v", some)
			}
			text := command(t, "", words...)
			text.wants(t, exitOK)
			if strings.Count(text.stdout, "\n") != 6 || text.stderr != "" {
				t.Errorf("got %+v", text)
			}
		})
	}
}

func TestAListThatBreaksOffSaysWhereItGoesOn(t *testing.T) {
	for name, words := range bothLists {
		t.Run(name, func(t *testing.T) {
			startLists(t, func(_ context.Context, number int) error {
				if number%2 == 0 {
					return ingesttest.Error(codes.PermissionDenied, "DENIED", "not this page", nil)
				}
				return nil
			})
			broken := command(t, "", append(words, "-o", "json")...)
			broken.complains(t, codeExit(codes.PermissionDenied), "not this page")
			if answer := object(t, broken.stdout); answer["nextPageToken"] != "2" || len(answer[name].([]any)) != 2 {
				t.Errorf("got %s", broken.stdout)
			}
			text := command(t, "", words...)
			text.wants(t, codeExit(codes.PermissionDenied))
			if strings.Count(text.stdout, "\n") != 3 || !strings.HasPrefix(text.stderr, "there are more: --page-token=2 goes on\ndualcheck: ") || !strings.Contains(text.stderr, "not this page") {
				t.Errorf("got %+v", text)
			}
		})
	}
	startLists(t, func(context.Context, int) error {
		return ingesttest.Error(codes.PermissionDenied, "DENIED", "no page", nil)
	})
	none := command(t, "", "records", "n", "-o", "json")
	none.complains(t, codeExit(codes.PermissionDenied), "no page")
	if none.stdout != "" {
		t.Errorf("it printed %q", none.stdout)
	}
}

func TestATimeoutIsEachPagesOwn(t *testing.T) {
	startLists(t, func(ctx context.Context, _ int) error {
		timer := time.NewTimer(800 * time.Millisecond)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		return nil
	})
	command(t, "", "records", "n", "--limit", "0", "--timeout", "2s").wants(t, exitOK, "KEY", "e PENDING")
}
