"""Span, event, attribute and metric names: every string a trace or a dashboard may search for, in this one file.

`gen_ai.*`, `http.*` and `error.*` are OpenTelemetry semantic conventions; `vllm:*` are the metrics that
autoscalers and dashboards of LLM servers already read. What neither names is `phasemesh.*` or `phasemesh_*`.
"""

from __future__ import annotations

from typing import Final

# Spans of one request, in the order they happen (design §10). The root's name is request_span_name(…).
SPAN_SCHEDULE: Final = "schedule"
"""The scheduler's part, from arrival to terminal; parent of the spans below."""
SPAN_QUEUE: Final = "queue"
SPAN_ROUTE: Final = "route"
SPAN_PREFILL_CHUNK: Final = "prefill_chunk"
SPAN_DECODE: Final = "decode"

SPAN_WORKER_SESSION: Final = "worker_session"
"""A stream between scheduler and worker, in a trace of its own: the scheduler's span, and the worker's below it."""

OPERATION_CHAT: Final = "chat"
OPERATION_TEXT_COMPLETION: Final = "text_completion"


def request_span_name(operation: str, model: str) -> str:
    """Name of a request's root span: `{gen_ai.operation.name} {gen_ai.request.model}`, e.g. "chat smollm2"."""
    return f"{operation} {model}"


# Events on those spans.
EVENT_FIRST_TOKEN: Final = "first_token"
EVENT_PREEMPTED: Final = "preempted"
EVENT_WORKER_LOST: Final = "worker_lost"
EVENT_CANCELLED: Final = "cancelled"

# Attributes by semantic convention.
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds."""
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
HTTP_ROUTE: Final = "http.route"
ERROR_TYPE: Final = "error.type"
"""The stable code of wire.errors."""

PROVIDER: Final = "phasemesh"
"""Value of GEN_AI_PROVIDER_NAME."""

# Attributes of our own.
CELL: Final = "phasemesh.cell"
REQUEST_ID: Final = "phasemesh.request.id"
CHOICE: Final = "phasemesh.choice"
TENANT: Final = "phasemesh.tenant"
PRIORITY: Final = "phasemesh.priority"
WORKER_ID: Final = "phasemesh.worker.id"
INCARNATION: Final = "phasemesh.incarnation"
RESUMED: Final = "phasemesh.resumed"
"""The admission follows a preemption or a worker's death."""
CACHED_TOKENS: Final = "phasemesh.cached_tokens"
"""Tokens of the sequence that a prefix hit saved."""
ROUTE_WORKERS: Final = "phasemesh.route.workers"
"""The candidates, aligned with ROUTE_COSTS."""
ROUTE_COSTS: Final = "phasemesh.route.costs"
"""Predicted cost of each candidate, in prefill-token equivalents."""
CHUNK_START: Final = "phasemesh.chunk.start_position"
CHUNK_TOKENS: Final = "phasemesh.chunk.tokens"
BATCH_TOKENS: Final = "phasemesh.batch.tokens"
"""Tokens the whole step processed, batch mates included."""
DECODE_START: Final = "phasemesh.decode.start_position"
DECODE_TOKENS: Final = "phasemesh.decode.tokens"
DECODE_STEPS: Final = "phasemesh.decode.steps"
STEP_SECONDS: Final = "phasemesh.step_s"
"""Step time: of a chunk's step, or of all steps of a decode span together."""
FENCE: Final = "phasemesh.fence"
SCHEDULER_ID: Final = "phasemesh.scheduler.id"
PREEMPTIONS: Final = "phasemesh.preemptions"
CANCEL_REASON: Final = "phasemesh.cancel.reason"
STALL_SECONDS: Final = "phasemesh.stall_s"

# Metrics, as a scrape shows them less the counters' "_total".
VLLM_NUM_REQUESTS_RUNNING: Final = "vllm:num_requests_running"
VLLM_NUM_REQUESTS_WAITING: Final = "vllm:num_requests_waiting"
VLLM_KV_CACHE_USAGE: Final = "vllm:kv_cache_usage_perc"
VLLM_NUM_PREEMPTIONS: Final = "vllm:num_preemptions"
VLLM_PREFIX_CACHE_QUERIES: Final = "vllm:prefix_cache_queries"
VLLM_PREFIX_CACHE_HITS: Final = "vllm:prefix_cache_hits"
VLLM_QUEUE_TIME: Final = "vllm:request_queue_time_seconds"
VLLM_TIME_TO_FIRST_TOKEN: Final = "vllm:time_to_first_token_seconds"
VLLM_INTER_TOKEN_LATENCY: Final = "vllm:inter_token_latency_seconds"
VLLM_TIME_PER_OUTPUT_TOKEN: Final = "vllm:request_time_per_output_token_seconds"
VLLM_E2E_LATENCY: Final = "vllm:e2e_request_latency_seconds"
VLLM_PROMPT_TOKENS: Final = "vllm:prompt_tokens"
VLLM_GENERATION_TOKENS: Final = "vllm:generation_tokens"
VLLM_REQUEST_SUCCESS: Final = "vllm:request_success"

GATEWAY_REQUESTS: Final = "phasemesh_gateway_requests"
GATEWAY_LIVE_STREAMS: Final = "phasemesh_gateway_live_streams"
GATEWAY_CANCELS: Final = "phasemesh_gateway_cancels"
GATEWAY_REJECTIONS: Final = "phasemesh_gateway_rejections"
REDIS_RECONNECTS: Final = "phasemesh_redis_reconnects"
EVENT_LOOP_LAG: Final = "phasemesh_event_loop_lag_seconds"
SCHEDULER_WORKERS: Final = "phasemesh_scheduler_workers"
SCHEDULER_KV_PAGES: Final = "phasemesh_scheduler_kv_pages"
SCHEDULER_DISPLACED: Final = "phasemesh_scheduler_displaced_sequences"
SCHEDULER_PLANS: Final = "phasemesh_scheduler_plans"
SCHEDULER_TOKENS: Final = "phasemesh_scheduler_tokens"
SCHEDULER_STEP_TIME: Final = "phasemesh_scheduler_step_seconds"
WORKER_STEP_TIME: Final = "phasemesh_worker_step_seconds"
WORKER_TOKENS: Final = "phasemesh_worker_tokens"
WORKER_SEQUENCES: Final = "phasemesh_worker_sequences"
WORKER_QUEUED_PLANS: Final = "phasemesh_worker_queued_plans"
WORKER_STEP_FAILURES: Final = "phasemesh_worker_step_failures"
WORKER_EPOCHS: Final = "phasemesh_worker_epochs"
