// Package telemetry is how a node is seen from outside: its metrics, logs and
// traces, with every name in one place (names.go).
//
// What always holds:
//
//   - A user's key is never in a metric, and in a log only as the first 12
//     hexadecimal digits of its SHA-256, unless the operator asked for keys.
//   - The number of time series has a bound that no caller can raise: namespaces
//     beyond the first 200 are counted together as "other".
//   - The registry is private. What etcd's embedded server and Go itself put into
//     the default registry is gathered beside it, never mixed with it.
//   - Traces leave the process only if OTEL_TRACES_EXPORTER says where to; a
//     caller's traceparent is understood all the same.
package telemetry
