"""Prometheus metrics of each service. One object per process, with its own registry, so tests can make many.

A fact has one name: where LLM servers already have a `vllm:` one, that; else `phasemesh_…`. Seconds, tokens and
pages, never milliseconds; bytes where KV is not in pages. Fields with labels are used as
`metrics.requests.labels(route, status).inc()`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from observability import names
from observability.tier_metrics import TierMetrics

# Upper bounds in seconds. A CPU decodes a step in tens of milliseconds, an accelerator in a few.
STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
ITL_BUCKETS_S = (
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
TTFT_BUCKETS_S = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
REQUEST_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 600.0)
PULL_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

PAGE_STATES = ("free", "cached", "in_use", "retiring")
HIT_SOURCES = ("local", "pull")
"""On the worker itself, or brought there from another worker or a lower tier."""
NO_TRANSPORT = "none"
STEP_PARTS = ("build", "forward", "sample")


class GatewayMetrics:
    """What clients see: requests, latencies, tokens."""

    def __init__(self) -> None:
        self.registry = r = _registry()
        model = ["model_name"]
        self.requests = Counter(
            names.GATEWAY_REQUESTS, "HTTP requests by route and status.", ["route", "status"], registry=r
        )
        self.live_streams = Gauge(names.GATEWAY_LIVE_STREAMS, "Server-sent-event streams open now.", registry=r)
        self.ttft_s = Histogram(
            names.VLLM_TIME_TO_FIRST_TOKEN,
            "Time to first token (TTFT), from the request's arrival.",
            model,
            buckets=TTFT_BUCKETS_S,
            registry=r,
        )
        self.itl_s = Histogram(
            names.VLLM_INTER_TOKEN_LATENCY,
            "Time between two tokens of a choice (ITL).",
            model,
            buckets=ITL_BUCKETS_S,
            registry=r,
        )
        self.tpot_s = Histogram(
            names.VLLM_TIME_PER_OUTPUT_TOKEN,
            "A request's mean time per output token after the first (TPOT).",
            model,
            buckets=ITL_BUCKETS_S,
            registry=r,
        )
        self.e2e_s = Histogram(
            names.VLLM_E2E_LATENCY,
            "Time from a request's arrival to its last byte.",
            model,
            buckets=REQUEST_BUCKETS_S,
            registry=r,
        )
        self.prompt_tokens = Counter(names.VLLM_PROMPT_TOKENS, "Prompt tokens of admitted requests.", model, registry=r)
        self.generation_tokens = Counter(names.VLLM_GENERATION_TOKENS, "Output tokens received.", model, registry=r)
        self.request_success = Counter(
            names.VLLM_REQUEST_SUCCESS,
            "Choices finished, by finish reason.",
            ["model_name", "finished_reason"],
            registry=r,
        )
        self.cancels = Counter(
            names.GATEWAY_CANCELS, "Cancels sent to the scheduler, by reason.", ["reason"], registry=r
        )
        self.rejections = Counter(
            names.GATEWAY_REJECTIONS, "Requests answered with an error, by its code.", ["code"], registry=r
        )
        self.redis_reconnects = _redis_reconnects(r)
        self.event_loop_lag_s = _event_loop_lag(r)


class SchedulerMetrics:
    """What the engine decided: queues, pages, plans."""

    def __init__(self) -> None:
        self.registry = r = _registry()
        model = ["model_name"]
        self.requests_running = Gauge(
            names.VLLM_NUM_REQUESTS_RUNNING, "Sequences admitted to a worker.", model, registry=r
        )
        self.requests_waiting = Gauge(
            names.VLLM_NUM_REQUESTS_WAITING, "Sequences waiting for admission.", model, registry=r
        )
        self.queue_time_s = Histogram(
            names.VLLM_QUEUE_TIME,
            "Time from a sequence's arrival to its admission.",
            model,
            buckets=TTFT_BUCKETS_S,
            registry=r,
        )
        self.preemptions = Counter(names.VLLM_NUM_PREEMPTIONS, "Sequences preempted for KV pages.", model, registry=r)
        self.prefix_cache_queries = Counter(
            names.VLLM_PREFIX_CACHE_QUERIES, "Tokens looked up in the prefix cache.", model, registry=r
        )
        self.prefix_cache_hits = Counter(
            names.VLLM_PREFIX_CACHE_HITS, "Tokens found in the prefix cache.", model, registry=r
        )
        self.kv_cache_usage = Gauge(
            names.VLLM_KV_CACHE_USAGE,
            "Share of a worker's KV pages in use or retiring, 0 to 1.",
            ["model_name", "worker"],
            registry=r,
        )
        self.workers = Gauge(
            names.SCHEDULER_WORKERS, "Workers with an open session, by the role in force.", ["role"], registry=r
        )
        self.worker_sequences = Gauge(
            names.SCHEDULER_WORKER_SEQUENCES,
            "Sequences running on a worker, with its role in force.",
            ["worker", "role"],
            registry=r,
        )
        self.pulls_in_flight = Gauge(
            names.SCHEDULER_PULLS_IN_FLIGHT,
            "KV transfers into a worker's pages that are not over.",
            ["worker"],
            registry=r,
        )
        self.pulls = Counter(
            names.SCHEDULER_PULLS,
            "KV transfers that are over, by transport and outcome: complete, partial or failed.",
            ["transport", "outcome"],
            registry=r,
        )
        self.pull_s = Histogram(
            names.SCHEDULER_PULL_TIME,
            "KV transfers from their start on the worker to their end, as it measured them.",
            ["transport"],
            buckets=PULL_BUCKETS_S,
            registry=r,
        )
        self.pulled_bytes = Counter(
            names.SCHEDULER_PULLED_BYTES, "KV moved by transfers, in bytes.", ["transport"], registry=r
        )
        self.predicted_hits = Counter(
            names.SCHEDULER_PREDICTED_HITS,
            "Prompt tokens that routing expected to find on the worker, or ordered from elsewhere.",
            ["source"],
            registry=r,
        )
        self.actual_hits = Counter(
            names.SCHEDULER_ACTUAL_HITS, "Prompt tokens that were there, or came.", ["source"], registry=r
        )
        self.pages = Gauge(
            names.SCHEDULER_KV_PAGES,
            "KV pages by state; the states add up to the pool.",
            ["worker", "state"],
            registry=r,
        )
        self.displaced = Counter(
            names.SCHEDULER_DISPLACED, "Sequences queued again because their worker was lost.", registry=r
        )
        self.prefix_units = Gauge(
            names.PREFIX_INDEX_UNITS,
            "KV units that a worker holds, in whatever tier.",
            ["worker"],
            registry=r,
        )
        self.prefix_drift = Gauge(
            names.PREFIX_INDEX_DRIFT,
            "Units that the first of these said a worker holds, and the second did not, at the last audit.",
            ["worker", "between"],
            registry=r,
        )
        self.prefix_repairs = Counter(
            names.PREFIX_INDEX_REPAIRS,
            "Units that an audit set right, by where.",
            ["worker", "in"],
            registry=r,
        )
        self.plans = Counter(names.SCHEDULER_PLANS, "Plans dispatched.", ["worker"], registry=r)
        self.tokens = Counter(
            names.SCHEDULER_TOKENS, "Tokens processed, as workers reported them.", ["worker", "phase"], registry=r
        )
        self.step_s = Histogram(
            names.SCHEDULER_STEP_TIME,
            "Whole steps, as workers measured them.",
            ["worker"],
            buckets=STEP_BUCKETS_S,
            registry=r,
        )
        self._steps: dict[str, tuple[Histogram, Counter, Counter]] = {}  # by worker: looking labels up is dearer
        self.redis_reconnects = _redis_reconnects(r)
        self.event_loop_lag_s = _event_loop_lag(r)

    def set_pages(self, model_name: str, worker: str, *, free: int, cached: int, in_use: int, retiring: int) -> None:
        """Export one worker's page pool, and the usage that autoscalers read."""
        for state, count in zip(PAGE_STATES, (free, cached, in_use, retiring), strict=True):
            self.pages.labels(worker, state).set(count)
        self.kv_cache_usage.labels(model_name, worker).set((in_use + retiring) / (free + cached + in_use + retiring))

    def observe_step(self, worker: str, *, step_s: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Count one reported step."""
        bound = self._steps.get(worker)
        if bound is None:
            prefill, decode = self.tokens.labels(worker, "prefill"), self.tokens.labels(worker, "decode")
            bound = self._steps[worker] = self.step_s.labels(worker), prefill, decode
        step, prefill, decode = bound
        step.observe(step_s)
        prefill.inc(prefill_tokens)
        decode.inc(decode_tokens)

    def observe_pull(self, transport: str, outcome: str, *, pull_s: float, num_bytes: int) -> None:
        """Count one KV transfer that is over; without a transport none was found."""
        transport = transport or NO_TRANSPORT
        self.pulls.labels(transport, outcome).inc()
        self.pull_s.labels(transport).observe(pull_s)
        self.pulled_bytes.labels(transport).inc(num_bytes)

    def observe_hits(self, source: str, *, predicted_tokens: int, actual_tokens: int) -> None:
        """Count what one request's admissions hoped to reuse, and what they could; see HIT_SOURCES."""
        self.predicted_hits.labels(source).inc(predicted_tokens)
        self.actual_hits.labels(source).inc(actual_tokens)

    def show_worker(self, worker: str, *, role: str, running: int, pulling: int) -> None:
        """Export what one worker does, under its role in force."""
        self.worker_sequences.remove_by_labels({"worker": worker})
        self.worker_sequences.labels(worker, role).set(running)
        self.pulls_in_flight.labels(worker).set(pulling)

    def set_drift(self, worker: str, between: str, units: int) -> None:
        """One comparison of an audit: "twin-redis" (either way), "twin-worker" or "worker-twin"."""
        self.prefix_drift.labels(worker, between).set(units)

    def forget_worker(self, worker: str) -> None:
        """Drop a lost worker's gauges, so that no dashboard shows pages that are gone. Its counters stay."""
        self._steps.pop(worker, None)
        held = (self.pages, self.kv_cache_usage, self.worker_sequences, self.pulls_in_flight)
        for gauge in (*held, self.prefix_units, self.prefix_drift):
            gauge.remove_by_labels({"worker": worker})


class WorkerMetrics:
    """What the device did."""

    def __init__(self) -> None:
        self.registry = r = _registry()
        self.step_s = Histogram(
            names.WORKER_STEP_TIME,
            "A step's time by part: build, forward, sample.",
            ["part"],
            buckets=STEP_BUCKETS_S,
            registry=r,
        )
        self.tokens = Counter(names.WORKER_TOKENS, "Tokens processed, by phase.", ["phase"], registry=r)
        self.sequences = Gauge(names.WORKER_SEQUENCES, "Sequences the worker knows.", registry=r)
        self.queued_plans = Gauge(names.WORKER_QUEUED_PLANS, "Plans waiting behind the running one.", registry=r)
        self.step_failures = Counter(names.WORKER_STEP_FAILURES, "Steps that raised.", registry=r)
        self.epochs = Counter(names.WORKER_EPOCHS, "Epochs begun: lives of the KV tensors.", registry=r)
        self.tiers = TierMetrics(r)
        self.redis_reconnects = _redis_reconnects(r)
        # Once: looking labels up is dearer.
        self._parts = {part: self.step_s.labels(part) for part in STEP_PARTS}
        self._phases = {phase: self.tokens.labels(phase) for phase in ("prefill", "decode")}

    def observe_step(
        self, *, build_s: float, forward_s: float, sample_s: float, prefill_tokens: int, decode_tokens: int
    ) -> None:
        """Count one step."""
        for part, seconds in zip(STEP_PARTS, (build_s, forward_s, sample_s), strict=True):
            self._parts[part].observe(seconds)
        self._phases["prefill"].inc(prefill_tokens)
        self._phases["decode"].inc(decode_tokens)


def _registry() -> CollectorRegistry:
    """A registry that already exports the process's memory, CPU time and open files (`process_…`)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def _redis_reconnects(registry: CollectorRegistry) -> Counter:
    return Counter(names.REDIS_RECONNECTS, "Connections to Redis that were lost and made again.", registry=registry)


def _event_loop_lag(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        names.EVENT_LOOP_LAG,
        "How late the event loop woke a timer.",
        buckets=LAG_BUCKETS_S,
        registry=registry,
    )
