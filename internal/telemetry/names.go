package telemetry

// Names of metrics.
const (
	metricBuildInfo      = "dualcheck_build_info"
	metricVerdicts       = "dualcheck_begin_verdicts_total"
	metricFinishes       = "dualcheck_finishes_total"
	metricRequests       = "dualcheck_request_duration_seconds"
	metricInFlight       = "dualcheck_requests_in_flight"
	metricWaiting        = "dualcheck_begins_waiting"
	metricSessions       = "dualcheck_sessions"
	metricRetries        = "dualcheck_retries_total"
	metricErrors         = "dualcheck_errors_total"
	metricPanics         = "dualcheck_panics_total"
	metricEtcdCalls      = "dualcheck_etcd_call_duration_seconds"
	metricSettled        = "dualcheck_settled_ambiguities_total"
	metricGuardRefusals  = "dualcheck_guard_refusals_total"
	metricUndated        = "dualcheck_undated_records_total"
	metricBatchMembers   = "dualcheck_etcd_batch_members"
	metricBatchWait      = "dualcheck_etcd_batch_wait_seconds"
	metricBatchInFlight  = "dualcheck_etcd_batches_in_flight"
	metricBatchBehind    = "dualcheck_etcd_key_waits_total"
	metricBatchCrowded   = "dualcheck_etcd_queue_refused_total"
	metricTickAge        = "dualcheck_tick_age_seconds"
	metricApplied        = "dualcheck_applied_revision"
	metricRestored       = "dualcheck_etcd_restored_total"
	metricReady          = "dualcheck_ready"
	metricRedisLooks     = "dualcheck_redis_looks_total"
	metricRedisWrites    = "dualcheck_redis_writes_total"
	metricRedisPipelines = "dualcheck_redis_pipeline_duration_seconds"
	metricRedisCommands  = "dualcheck_redis_pipeline_commands"
	metricRedisBreaker   = "dualcheck_redis_breaker"
	metricRedisOpened    = "dualcheck_redis_breaker_opened_total"
	metricRedisConns     = "dualcheck_redis_connections"
	metricRedisWaits     = "dualcheck_redis_pool_waits_total"
	metricRedisTimeouts  = "dualcheck_redis_pool_timeouts_total"
	metricRedisStale     = "dualcheck_redis_stale_connections_total"
	metricBypassed       = "dualcheck_redis_bypassed"
	metricBelieved       = "dualcheck_believed"
)

// Labels of metrics.
const (
	labelNamespace = "namespace"
	labelVerdict   = "verdict"
	labelSource    = "source"
	labelMethod    = "method"
	labelCode      = "code"
	labelReason    = "reason"
	labelKind      = "kind"
	labelOutcome   = "outcome"
	labelCause     = "cause"
	labelNode      = "node"
	labelVersion   = "version"
	labelGo        = "go_version"
	labelCommit    = "commit"
	labelFinding   = "finding"
	labelLane      = "lane"
	labelState     = "state"
)

// Fields of log lines.
const (
	FieldMethod    = "method"
	FieldCode      = "code"
	FieldReason    = "reason"
	FieldNamespace = "namespace"
	FieldKey       = "key"
	FieldKeyHash   = "key_hash"
	FieldDuration  = "duration"
	FieldPeer      = "peer"
	FieldRequestID = "x_request_id"
	FieldTraceID   = "trace_id"
	FieldRetries   = "retry_count"
	FieldIncident  = "incident"
	FieldError     = "error"
	FieldStack     = "stack"
	FieldAct       = "act"
	FieldWhy       = "why"
	FieldNode      = "node"
	// FieldLeftOut is how many lines like this one were left out before it.
	FieldLeftOut = "left_out"
	// FieldAfter is how long a state lasted that is over now.
	FieldAfter = "after"
)

// service is service.name of spans, unless OTEL_SERVICE_NAME says otherwise.
const service = "dualcheck"
