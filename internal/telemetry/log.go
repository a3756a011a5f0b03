package telemetry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/lmittmann/tint"
	"golang.org/x/term"
)

// LogFormat is how log lines look.
type LogFormat string

// The formats.
const (
	// LogText is for people, and coloured on a terminal.
	LogText LogFormat = "text"
	LogJSON LogFormat = "json"
)

// NewLogger returns a logger that writes to w. level is debug, info, warn or error.
func NewLogger(w io.Writer, format LogFormat, level string) (*slog.Logger, error) {
	var at slog.Level
	if err := at.UnmarshalText([]byte(level)); err != nil || strings.ContainsAny(level, "+-") {
		return nil, fmt.Errorf("log level %q is none of debug, info, warn, error", level)
	}
	switch format {
	case LogJSON:
		return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: at})), nil
	case LogText:
		if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
			return slog.New(tint.NewTextHandler(w, &tint.Options{Level: at, TimeFormat: time.TimeOnly, NoColor: os.Getenv("NO_COLOR") != ""})), nil
		}
		return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: at})), nil
	}
	return nil, fmt.Errorf("log format %q is none of %s, %s", format, LogText, LogJSON)
}

// NewTerseLogger is NewLogger, except that what operators did is told at any level.
func NewTerseLogger(w io.Writer, format LogFormat, level string) (*slog.Logger, error) {
	log, err := NewLogger(w, format, level)
	if err != nil || log.Enabled(context.Background(), slog.LevelInfo) {
		return log, err
	}
	all, err := NewLogger(w, format, slog.LevelInfo.String())
	if err != nil {
		return nil, err
	}
	return slog.New(terse{all.Handler(), log.Handler()}), nil
}

// terse hands on what least would, and acts.
type terse struct {
	slog.Handler
	least slog.Handler
}

func (t terse) Handle(ctx context.Context, r slog.Record) error {
	wanted := t.least.Enabled(ctx, r.Level)
	r.Attrs(func(a slog.Attr) bool {
		wanted = wanted || a.Key == FieldAct
		return !wanted
	})
	if !wanted {
		return nil
	}
	return t.Handler.Handle(ctx, r)
}

func (t terse) WithAttrs(attrs []slog.Attr) slog.Handler {
	return terse{t.Handler.WithAttrs(attrs), t.least}
}

func (t terse) WithGroup(name string) slog.Handler { return terse{t.Handler.WithGroup(name), t.least} }

// Key returns a user's key as it may stand in a log: hashed, unless plain keys were
// asked for.
func Key(key string, plain bool) slog.Attr {
	if plain {
		return slog.String(FieldKey, key)
	}
	sum := sha256.Sum256([]byte(key))
	return slog.String(FieldKeyHash, hex.EncodeToString(sum[:6]))
}
