package telemetry

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Zap returns a zap logger, which is what etcd wants, that writes to a slog one
// the levels that are enabled.
func Zap(log *slog.Logger, least zapcore.LevelEnabler) *zap.Logger {
	return zap.New(&zapCore{log: log, least: least})
}

// zapCore is a zapcore.Core over slog.
type zapCore struct {
	log   *slog.Logger
	least zapcore.LevelEnabler
}

func (c *zapCore) Enabled(l zapcore.Level) bool {
	return c.least.Enabled(l) && c.log.Enabled(context.Background(), slogLevel(l))
}

func (c *zapCore) With(fields []zapcore.Field) zapcore.Core {
	return &zapCore{log: slog.New(c.log.Handler().WithAttrs(attrs(fields))), least: c.least}
}

func (c *zapCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c *zapCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	r := slog.NewRecord(e.Time, slogLevel(e.Level), e.Message, 0)
	if e.LoggerName != "" {
		r.AddAttrs(slog.String("logger", e.LoggerName))
	}
	r.AddAttrs(attrs(fields)...)
	return c.log.Handler().Handle(context.Background(), r)
}

func (c *zapCore) Sync() error { return nil }

func slogLevel(l zapcore.Level) slog.Level {
	switch {
	case l <= zapcore.DebugLevel:
		return slog.LevelDebug
	case l == zapcore.InfoLevel:
		return slog.LevelInfo
	case l == zapcore.WarnLevel:
		return slog.LevelWarn
	}
	return slog.LevelError
}

func attrs(fields []zapcore.Field) []slog.Attr {
	all := make([]slog.Attr, 0, len(fields))
	for _, f := range fields {
		enc := zapcore.NewMapObjectEncoder()
		f.AddTo(enc)
		for name, value := range enc.Fields {
			all = append(all, slog.Any(name, value))
		}
	}
	return all
}
