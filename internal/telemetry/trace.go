package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"
)

// Tracing is where spans go. The zero value sends none.
type Tracing struct {
	provider *sdktrace.TracerProvider
}

// propagator understands W3C traceparent, with or without an exporter.
var propagator = propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})

// StartTracing installs the W3C propagator and, if OTEL_TRACES_EXPORTER names one,
// an exporter; the other standard OTEL_* variables say how. Call Stop in the end.
func StartTracing(ctx context.Context, build Build, log *slog.Logger) (*Tracing, error) {
	otel.SetTextMapPropagator(propagator)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("OpenTelemetry", FieldError, err) }))
	if v := os.Getenv("OTEL_TRACES_EXPORTER"); v == "" || v == "none" || os.Getenv("OTEL_SDK_DISABLED") == "true" {
		return &Tracing{}, nil
	}
	exporter, err := autoexport.NewSpanExporter(ctx)
	if err != nil {
		return nil, fmt.Errorf("OTEL_TRACES_EXPORTER: %w", err)
	}
	// What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes last, and wins.
	res, err := resource.New(ctx,
		resource.WithAttributes(
			attribute.String("service.name", service),
			attribute.String("service.version", build.Version),
			attribute.String("service.instance.id", build.Node),
		),
		resource.WithFromEnv(), resource.WithTelemetrySDK())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res))
	otel.SetTracerProvider(provider)
	return &Tracing{provider: provider}, nil
}

// On reports whether spans go anywhere.
func (t *Tracing) On() bool { return t != nil && t.provider != nil }

// Stop sends what is left.
func (t *Tracing) Stop(ctx context.Context) error {
	if !t.On() {
		return nil
	}
	return t.provider.Shutdown(ctx)
}

// TraceID returns the 16 bytes of the trace that a gRPC call belongs to, from its
// span or else from the traceparent that came with it; nil if it has none.
func TraceID(ctx context.Context) []byte {
	sc := trace.SpanContextFromContext(ctx)
	if !sc.HasTraceID() {
		parent := metadata.ValueFromIncomingContext(ctx, "traceparent")
		if len(parent) == 0 {
			return nil
		}
		sc = trace.SpanContextFromContext(propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": parent[0]}))
	}
	if !sc.HasTraceID() {
		return nil
	}
	id := sc.TraceID()
	return id[:]
}
