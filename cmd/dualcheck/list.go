package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
)

// listing is a list that the server gives page by page. Each page is printed
// before the next is asked for, so that a long list is never held as a whole.
type listing[T proto.Message] struct {
	// name is what the list has, and its member in JSON.
	name string
	// head and row are the cells of a list for people.
	head []string
	row  func(T) []string
	// fetch asks for the page at token.
	fetch func(ctx context.Context, to *client, size int32, token string) (items []T, next string, err error)

	limit int
	// token is where the next page begins; empty at the list's beginning and,
	// after a page, at its end.
	token string
	shown int
}

// addFlags gives the command --limit and --page-token.
func (l *listing[T]) addFlags(cmd *cobra.Command, limit int) {
	cmd.Flags().IntVar(&l.limit, "limit", limit, "how many at most; 0: all")
	cmd.Flags().StringVar(&l.token, "page-token", "", "go on where an earlier list ended")
}

// print prints the list. When it ends before its end, by an error too, what was
// printed is whole and says where it goes on.
func (l *listing[T]) print(cmd *cobra.Command, server *clientFlags) error {
	if l.limit < 0 {
		return usageErrorf("--limit is %d, it must be 0 or more", l.limit)
	}
	err := server.connected(cmd, func(to *client) error {
		for more := true; more; more = l.token != "" && (l.limit == 0 || l.shown < l.limit) {
			var items []T
			var next string
			err := server.call(cmd, to, 0, func(ctx context.Context, to *client) (err error) {
				items, next, err = l.fetch(ctx, to, l.pageSize(), l.token)
				return err
			})
			if err != nil {
				return err
			}
			if err := l.printPage(cmd, items); err != nil {
				return err
			}
			l.token = next
			l.shown += len(items)
		}
		return nil
	})
	switch {
	case l.shown > 0:
		if endErr := l.printEnd(cmd); err == nil {
			err = endErr
		}
	case err == nil:
		err = printNone(cmd, l.name)
	}
	return err
}

// pageSize is how many to ask for next.
func (l *listing[T]) pageSize() int32 {
	const most = 1000
	if l.limit == 0 {
		return most
	}
	return int32(min(l.limit-l.shown, most))
}

// printPage prints items, after what begins the list if they are the first.
func (l *listing[T]) printPage(cmd *cobra.Command, items []T) error {
	if len(items) == 0 {
		return nil
	}
	first := l.shown == 0
	if !wantsJSON(cmd) {
		p := newPage(cmd.OutOrStdout())
		if first {
			p.line(l.head...)
		}
		for _, item := range items {
			p.line(l.row(item)...)
		}
		return p.flush()
	}
	var out bytes.Buffer
	if first {
		fmt.Fprintf(&out, "{%q:[", l.name)
	}
	for i, item := range items {
		if i > 0 || !first {
			out.WriteByte(',')
		}
		raw, err := messageJSON(item)
		if err != nil {
			return err
		}
		out.Write(raw)
	}
	_, err := cmd.OutOrStdout().Write(out.Bytes())
	return err
}

// printEnd ends what was printed and says where the list goes on, if it does.
func (l *listing[T]) printEnd(cmd *cobra.Command) error {
	if !wantsJSON(cmd) {
		if l.token != "" {
			fmt.Fprintf(cmd.ErrOrStderr(), "there are more: --page-token=%s goes on\n", l.token)
		}
		return nil
	}
	end := "]}\n"
	if l.token != "" {
		token, err := json.Marshal(l.token)
		if err != nil {
			return err
		}
		end = fmt.Sprintf("],\"nextPageToken\":%s}\n", token)
	}
	_, err := fmt.Fprint(cmd.OutOrStdout(), end)
	return err
}
