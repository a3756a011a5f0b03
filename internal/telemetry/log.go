package telemetry

import (
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

// Key returns a user's key as it may stand in a log: hashed, unless plain keys were
// asked for.
func Key(key string, plain bool) slog.Attr {
	if plain {
		return slog.String(FieldKey, key)
	}
	sum := sha256.Sum256([]byte(key))
	return slog.String(FieldKeyHash, hex.EncodeToString(sum[:6]))
}
