package dualcheck

// ServiceConfig is the gRPC service config for clients of dualcheck in any language:
// what a unary call retries and how, and that servers which say they cannot serve are
// left alone. This package uses all of it but the retries: it counts, logs and spreads
// its own, by the same numbers.
const ServiceConfig = `{
  "loadBalancingConfig": [{"round_robin": {}}],
  "healthCheckConfig": {"serviceName": "dualcheck.v1.DedupService"},
  "methodConfig": [{
    "name": [
      {"service": "dualcheck.v1.DedupService", "method": "Begin"},
      {"service": "dualcheck.v1.DedupService", "method": "Complete"},
      {"service": "dualcheck.v1.DedupService", "method": "Fail"},
      {"service": "dualcheck.v1.DedupService", "method": "Extend"},
      {"service": "dualcheck.v1.DedupService", "method": "Get"},
      {"service": "dualcheck.v1.DedupService", "method": "BatchBegin"},
      {"service": "dualcheck.v1.DedupService", "method": "BatchFinish"}
    ],
    "retryPolicy": {
      "maxAttempts": 4,
      "initialBackoff": "0.1s",
      "maxBackoff": "5s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`
