"""Every `PHASEMESH_…` variable, in this one file: environment → frozen config, read once in a `__main__`.

A service loads its own class: `load(GatewayConfig, os.environ)`. A malformed value, and any `PHASEMESH_…`
name that no class here knows, is ConfigInvalid at start, naming the variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from wire.errors import ConfigInvalid

PREFIX = "PHASEMESH_"
T = TypeVar("T")


def env(
    name: str,
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A config field read from PHASEMESH_<name>. `default` None means "unset"."""
    meta = {"env": PREFIX + name, "help": help_text, "choices": choices, "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True)
class CellConfig:
    """What every service shares."""

    cell: str = env("CELL", "default", "Name of the cell: one scheduler and its workers.")
    redis_url: str = env(
        "REDIS_URL",
        "redis://127.0.0.1:6379/0",
        "The Redis or Valkey all services meet at, by itself, behind Sentinels or in a Cluster (docs/prefix-index.md).",
    )
    log_level: str = env("LOG_LEVEL", "info", "Log level.", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served."""

    model: str = env("MODEL", "smollm2-135m-instruct", "Name of a pulled model, or a Hugging Face directory.")
    model_name: str | None = env("MODEL_NAME", None, "Name clients use; default: the model's directory name.")
    max_model_len: int | None = env(
        "MAX_MODEL_LEN", None, "Prompt + output tokens at most; default: the model's own limit.", minimum=2
    )
    cache_dir: str | None = env(
        "CACHE_DIR", None, "Pulled models, built kernels, packed weights; default: ~/.cache/phasemesh."
    )


MAX_SIMULATED_US = 10e6
"""A part of a step, or of a pull, that takes longer simulates nothing one could wait for."""


def _simulated_us(name: str, help_text: str, *, of: str = "step") -> Any:
    return env(f"SIMULATED_{name}_US", 0.0, f"Simulated {of}: {help_text}, in µs.", minimum=0, maximum=MAX_SIMULATED_US)


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """A worker without a model: fixed + max(weights + context, prefill + decode) per step, fixed + units per pull."""

    simulate: bool = env(
        "SIMULATE",
        False,
        "Workers run no model: tokens depend on seed and position alone, steps take what these say (all 0: no time).",
    )
    fixed_us: float = _simulated_us("FIXED", "what each takes, plus the larger of memory and compute")
    weights_us: float = _simulated_us("WEIGHTS", "of memory, reading the weights once")
    context_token_us: float = _simulated_us("CONTEXT_TOKEN", "of memory, each KV position read")
    prefill_token_us: float = _simulated_us("PREFILL_TOKEN", "of compute, each token of a prefill chunk")
    decode_token_us: float = _simulated_us("DECODE_TOKEN", "of compute, each decode")
    pull_fixed_us: float = _simulated_us("PULL_FIXED", "what each takes, plus its units", of="pull of KV")
    pull_unit_us: float = _simulated_us("PULL_UNIT", "each unit of 16 tokens", of="pull of KV")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """KV below a worker's device pages."""

    host_mb: int = env(
        "HOST_KV_MB", 0, "Host memory in MiB for KV evicted from the pages; 0: evicted KV is gone.", minimum=0
    )
    disk_mb: int = env("DISK_KV_MB", 0, "Disk in MiB, per worker, for KV evicted from host memory; 0: none.", minimum=0)
    disk_dir: str | None = env(
        "DISK_KV_DIR", None, "Where; workers take a numbered directory each. Needed with DISK_KV_MB."
    )
    disk_ttl_s: float = env("DISK_KV_TTL_S", 86_400.0, "KV stays on disk so long at most, in seconds.", minimum=1)
    redis_mb: int = env(
        "REDIS_KV_MB",
        0,
        "Redis memory in MiB, for the whole cell, for KV evicted from host memory; 0: none.",
        minimum=0,
    )
    redis_ttl_s: float = env("REDIS_KV_TTL_S", 3600.0, "KV stays in Redis so long at most, in seconds.", minimum=1)
    dtype: str = env(
        "LOWER_TIER_DTYPE",
        "auto",
        "Type of KV below the pages. auto: bit for bit. int8, float8: a quarter of float32's bytes, and other tokens.",
        choices=("auto", "int8", "float8"),
    )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    cell: CellConfig = field(default_factory=CellConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    worker_id: str | None = env("WORKER_ID", None, "Stable name of a worker; default: host name and port.")
    host: str = env("WORKER_HOST", "127.0.0.1", "Address the worker's gRPC server binds.")
    port: int = env("WORKER_PORT", 0, "Port of the worker's gRPC server; 0 picks a free one.", minimum=0, maximum=65535)
    advertise_address: str | None = env(
        "WORKER_ADVERTISE_ADDRESS", None, "host:port others reach the worker at; default: what it bound."
    )
    health_host: str = env("WORKER_HEALTH_HOST", "127.0.0.1", "Address of the worker's /live, /health and /metrics.")
    health_port: int = env("WORKER_HEALTH_PORT", 0, "Port of the same; 0 picks a free one.", minimum=0, maximum=65535)
    role: str = env(
        "WORKER_ROLE",
        "both",
        "What the worker runs: prompts, outputs or both; `phasemesh role` changes it later.",
        choices=("prefill", "decode", "both"),
    )
    min_prompt_tokens: int = env(
        "WORKER_MIN_PROMPT_TOKENS", 0, "Shortest prompt of the worker's pool, in tokens; 0: no bound.", minimum=0
    )
    max_prompt_tokens: int = env(
        "WORKER_MAX_PROMPT_TOKENS", 0, "Longest prompt of the worker's pool, in tokens; 0: no bound.", minimum=0
    )
    device: str = env("DEVICE", "auto", "Torch device: auto takes cuda when there is one.")
    weight_dtype: str = env(
        "WEIGHT_DTYPE",
        "auto",
        "Type the weights are held in. auto: the checkpoint's own on CUDA; on CPU bfloat16 when the checkpoint is and "
        "our kernels run, else float32. int8: CPU only. float8: CUDA only, compute capability 8.9 or above.",
        choices=("auto", "float32", "bfloat16", "int8", "float8"),
    )
    activation_dtype: str = env(
        "ACTIVATION_DTYPE",
        "auto",
        "Type that inputs of linear layers are rounded to, on a CPU. auto: int8 where weights are held as int8 and our "
        "kernels multiply int8 (AVX512_VNNI), else float32. bfloat16 (AVX512_BF16) and int8: weights of the same type.",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    kv_dtype: str = env(
        "KV_DTYPE",
        "auto",
        "Type of the KV pages. auto: what the model computes in. float8: e4m3 with scales, CUDA only, torch attention.",
        choices=("auto", "float8"),
    )
    cuda_graphs: str = env(
        "CUDA_GRAPHS",
        "auto",
        "auto: on CUDA, decode steps are captured as graphs at start; off: every step is launched kernel by kernel.",
        choices=("auto", "off"),
    )
    attention_backend: str = env(
        "ATTENTION_BACKEND",
        "auto",
        "auto: flash-attn when importable and on CUDA, our CPU kernel where it is built, else torch.",
        choices=("auto", "torch", "flash_attn", "cpu"),
    )
    cpu_kernels: str = env(
        "CPU_KERNELS",
        "auto",
        "auto: our C++ kernels on CPU, built at first use; off: torch's.",
        choices=("auto", "off"),
    )
    page_size: int | None = env(
        "KV_PAGE_SIZE", None, "Tokens per KV page, a multiple of 16; default: the attention backend's.", minimum=16
    )
    num_pages: int | None = env("KV_PAGES", None, "KV pages; default: from KV_MEMORY_MB.", minimum=2)
    kv_memory_mb: int = env("KV_MEMORY_MB", 1024, "Memory of the KV pool in MiB when KV_PAGES is unset.", minimum=1)
    kv_transport: str = env(
        "KV_TRANSPORT",
        "auto",
        "How KV comes from another worker. auto: shared memory on one host, NIXL where installed, else gRPC.",
        choices=("auto", "grpc"),
    )
    threads: int | None = env("WORKER_THREADS", None, "Compute threads; default: all cores.", minimum=1)

    def __post_init__(self) -> None:
        if 0 < self.max_prompt_tokens < self.min_prompt_tokens:
            name = PREFIX + "WORKER_MAX_PROMPT_TOKENS"
            raise ConfigInvalid(
                f"{name}={str(self.max_prompt_tokens)!r}: at least {PREFIX}WORKER_MIN_PROMPT_TOKENS, "
                f"{self.min_prompt_tokens}, or 0 for no bound",
                param=name,
            )


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The engine's policy; pure."""

    step_token_budget: int = env(
        "STEP_TOKEN_BUDGET",
        256,
        "Tokens one step may process at most, whatever the ITL target; GPUs want 2048 or more.",
        minimum=2,
    )
    itl_target_ms: float = env(
        "ITL_TARGET_MS",
        120.0,
        "Inter-token latency that prefill beside decodes is cut to: the step budget follows it; inf: it does not.",
        minimum=1,
    )
    min_chunk_tokens: int = env("MIN_CHUNK_TOKENS", 16, "Smallest prefill chunk worth a place in a step.", minimum=1)
    max_running: int | None = env(
        "MAX_RUNNING",
        None,
        "Sequences a worker runs at once; default: half the step budget. More than fit take turns.",
        minimum=1,
    )
    max_lease_steps: int = env("MAX_LEASE_STEPS", 16, "Steps a worker may repeat one plan.", minimum=1)
    max_queued_plans: int = env(
        "MAX_QUEUED_PLANS", 2, "Plans in flight per worker: one running, the rest queued.", minimum=1
    )
    kv_watermark: float = env(
        "KV_WATERMARK",
        0.01,
        "Share of a worker's pages kept free when a new sequence is admitted.",
        minimum=0,
        maximum=0.9,
    )
    routing: str = env(
        "ROUTING",
        "precise",
        "How a worker is chosen. precise: by the exact index of prefixes, and load; approximate: by where prefixes "
        "were sent before, and load; least_loaded; random.",
        choices=("precise", "approximate", "least_loaded", "random"),
    )
    kv_pull: bool = env(
        "KV_PULL", True, "With ROUTING=precise: KV is brought from other workers and lower tiers where that is faster."
    )
    pull_lease_ms: int = env(
        "PULL_LEASE_MS",
        2000,
        "A transfer of KV that is silent for so long has failed; its source's pages are kept no longer.",
        minimum=10,
        maximum=600_000,
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    cell: CellConfig = field(default_factory=CellConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    scheduler_id: str | None = env("SCHEDULER_ID", None, "Name of this scheduler; default: host name and pid.")
    health_host: str = env("SCHEDULER_HOST", "127.0.0.1", "Address of the scheduler's /live, /health and /metrics.")
    health_port: int = env("SCHEDULER_PORT", 0, "Port of the same; 0 picks a free one.", minimum=0, maximum=65535)
    no_worker_grace_s: float = env(
        "NO_WORKER_GRACE_S", 4.0, "With no worker, sequences wait this long, then end in an error.", minimum=0
    )
    index_audit_s: float = env(
        "INDEX_AUDIT_S",
        30.0,
        "The prefix index is compared with Redis and with workers this often, and repaired; 0: never.",
        minimum=0,
    )
    routing_seed: int = env("ROUTING_SEED", 0, "Seed of the stream that breaks routing ties.", minimum=0)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    cell: CellConfig = field(default_factory=CellConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    gateway_id: str | None = env("GATEWAY_ID", None, "Name of this gateway; default: host name and port.")
    host: str = env("HOST", "127.0.0.1", "Address the HTTP API binds.")
    port: int = env("PORT", 8000, "Port of the HTTP API.", minimum=0, maximum=65535)
    max_body_mb: int = env("MAX_BODY_MB", 32, "Largest request body in MiB.", minimum=1)
    max_live_requests: int = env("MAX_LIVE_REQUESTS", 1024, "Requests in the mesh at once; more get 429.", minimum=1)
    default_max_tokens: int | None = env(
        "DEFAULT_MAX_TOKENS", None, "max_tokens of a request without one; default: what the context leaves.", minimum=1
    )
    tokenizer_processes: int = env("TOKENIZER_PROCESSES", 1, "Processes that tokenize long prompts.", minimum=1)
    mesh_grace_s: float = env(
        "MESH_GRACE_S",
        30.0,
        "With no scheduler or no Redis, running requests wait this long, then end in 503.",
        minimum=0,
    )
    api_keys: str | None = env("API_KEYS", None, "Comma-separated keys; unset lets everybody in.")
    drain_s: float = env("DRAIN_S", 10.0, "How long a stopping gateway lets running requests finish.", minimum=0)


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """`phasemesh up`."""

    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    workers: int = env("WORKERS", 1, "Workers the launcher starts.", minimum=1)
    roles: str | None = env(
        "ROLES", None, "Role of each worker the launcher starts, e.g. prefill,decode,decode; default: WORKER_ROLE."
    )
    state_dir: str | None = env(
        "STATE_DIR", None, "Logs, stack.json and Redis data of the local stack; default: ~/.local/state/phasemesh."
    )
    start_redis: bool = env("START_REDIS", True, "Start a Redis of its own; off when --redis-url is given.")


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """`phasemesh chat`."""

    url: str | None = env(
        "URL", None, "Server that `chat` and `bench` ask; default: the running local stack's, else HOST and PORT."
    )
    api_key: str | None = env("API_KEY", None, "Key that `chat` and `bench` send; default: the first of API_KEYS.")
    max_tokens: int | None = env("CHAT_MAX_TOKENS", None, "Longest answer of `chat`, in tokens.", minimum=1)
    temperature: float = env("CHAT_TEMPERATURE", 0.0, "Sampling temperature of `chat`; 0 is greedy.", minimum=0)


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """`phasemesh bench`."""

    client: ClientConfig = field(default_factory=ClientConfig)
    workload: str = env("BENCH_WORKLOAD", "chat", "What is asked: chat, rag, reasoning, agent, or a FILE.jsonl.")
    rate: float | None = env("BENCH_RATE", None, "Open loop: requests per second, Poisson arrivals.", minimum=0)
    concurrency: int | None = env("BENCH_CONCURRENCY", None, "Closed loop: clients.", minimum=1)
    requests: int | None = env(
        "BENCH_REQUESTS", None, "Measured requests; default: 100, or every line of the file.", minimum=1
    )
    warm_up: int = env("BENCH_WARM_UP", 2, "Requests sent first and not measured.", minimum=0)
    model: str | None = env("BENCH_MODEL", None, "Model to ask; default: the first the server names.")
    seed: int = env("BENCH_SEED", 0, "Seed of the workload and of the arrivals.", minimum=0)
    scale: float = env("BENCH_SCALE", 1.0, "Multiplies every length of a synthetic workload.", minimum=0)
    ignore_eos: bool = env(
        "BENCH_IGNORE_EOS", True, "Send ignore_eos, so that outputs have their full length; off where it is refused."
    )
    slo_ttft_ms: float | None = env("BENCH_SLO_TTFT_MS", None, "Goodput: longest good TTFT.", minimum=0)
    slo_itl_ms: float | None = env(
        "BENCH_SLO_ITL_MS", None, "Goodput: longest good gap between tokens, for 99 % of a request's gaps.", minimum=0
    )
    max_in_flight: int = env(
        "BENCH_MAX_IN_FLIGHT", 4096, "Open loop: a request that finds so many running is dropped, a miss.", minimum=1
    )
    timeout_s: float = env("BENCH_TIMEOUT_S", 600.0, "A request that takes longer is an error.", minimum=0.001)
    json: str | None = env("BENCH_JSON", None, "Write the report to this file as JSON.")
    compare: str | None = env("BENCH_COMPARE", None, "A second server, measured in the same run; ratios are printed.")
    compare_api_key: str | None = env("BENCH_COMPARE_API_KEY", None, "Key sent to the second server.")


CONFIGS: tuple[type[Any], ...] = (
    CellConfig,
    ModelConfig,
    WorkerConfig,
    SimulationConfig,
    TierConfig,
    BatchingConfig,
    SchedulerConfig,
    GatewayConfig,
    LauncherConfig,
    ClientConfig,
    BenchConfig,
)


def env_fields(cls: type[Any]) -> Iterator[Field[Any]]:
    """The fields of one class that come from the environment, without its nested slices."""
    return (f for f in fields(cls) if "env" in f.metadata)


def known_variables() -> set[str]:
    return {f.metadata["env"] for cls in CONFIGS for f in env_fields(cls)}


def load(cls: type[T], environ: Mapping[str, str]) -> T:
    """Build a config class from the environment. Raises ConfigInvalid naming the variable."""
    unknown = sorted(n for n in environ if n.startswith(PREFIX) and n not in known_variables())
    if unknown:
        raise ConfigInvalid(f"unknown variable {unknown[0]}", param=unknown[0])
    return _build(cls, environ)


def _build(cls: type[T], environ: Mapping[str, str]) -> T:
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in fields(cls):  # type: ignore[arg-type]  # cls is one of CONFIGS
        hint = hints[f.name]
        if is_dataclass(hint):
            values[f.name] = _build(hint, environ)  # type: ignore[arg-type]
        elif environ.get(f.metadata["env"], "") != "":
            values[f.name] = _parse(f, hint, environ[f.metadata["env"]])
        else:
            assert f.default is not MISSING
            values[f.name] = f.default
    return cls(**values)


_KINDS = {bool: "on or off", int: "a whole number", float: "a number", str: "a text"}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse(f: Field[Any], hint: Any, text: str) -> Any:
    name = f.metadata["env"]
    kind = next((a for a in get_args(hint) if a is not type(None)), hint)
    value: Any
    try:
        if kind is bool:
            value = _BOOLEANS[text.lower()]
        elif kind in (int, float):
            value = kind(text)
        else:
            value = text
    except (ValueError, KeyError) as error:
        raise ConfigInvalid(f"{name}={text!r}: not {_KINDS[kind]}", param=name) from error
    choices = f.metadata["choices"]
    if choices and value not in choices:
        raise ConfigInvalid(f"{name}={text!r}: one of {', '.join(choices)}", param=name)
    minimum = f.metadata["minimum"]
    if minimum is not None and not value >= minimum:
        raise ConfigInvalid(f"{name}={text!r}: at least {minimum}", param=name)
    maximum = f.metadata["maximum"]
    if maximum is not None and not value <= maximum:
        raise ConfigInvalid(f"{name}={text!r}: at most {maximum}", param=name)
    return value
