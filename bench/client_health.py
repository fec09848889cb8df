"""Was the client the bottleneck? It watches its own event loop and CPU; what it finds is part of every report."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from bench.measure import Outcome, Percentiles, Result, percentiles_ms

INTERVAL_S = 0.01
LAG_WARNING_MS = 10.0
LATE_WARNING_MS = 10.0
CPU_WARNING_SHARE = 0.8


@dataclass(slots=True)
class LoopWatch:
    """Lateness of a timer, and the CPU the process used."""

    lags_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClientHealth:
    loop_lag_ms: Percentiles | None
    """How late the client's event loop ran: timestamps may be late by as much."""
    sent_late_ms: Percentiles | None
    """How long after its due time a request was sent."""
    cpu_share: float
    """Of one core; the client is one thread."""
    warnings: tuple[str, ...]


@contextlib.asynccontextmanager
async def watch_loop() -> AsyncIterator[LoopWatch]:
    """Watches while the block runs; the result is complete after it."""
    watch = LoopWatch()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    watching = asyncio.create_task(_watch(watch.lags_s))
    try:
        yield watch
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        watch.wall_s = time.perf_counter() - began_s
        watch.cpu_s = time.process_time() - began_cpu_s


async def _watch(lags_s: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lags_s.append(max(0.0, time.perf_counter() - due_s))


def judge(watch: LoopWatch, outcomes: Sequence[Outcome]) -> ClientHealth:
    """The figures, and a warning for each that casts doubt on the run."""
    lag_ms = percentiles_ms(watch.lags_s)
    late_ms = percentiles_ms(o.sent_s - o.due_s for o in outcomes if o.result is not Result.DROPPED)
    cpu_share = watch.cpu_s / watch.wall_s if watch.wall_s > 0 else 0.0
    dropped = sum(o.result is Result.DROPPED for o in outcomes)
    warnings = []
    if cpu_share > CPU_WARNING_SHARE:
        warnings.append(f"the client used {cpu_share:.0%} of its core: it was the bottleneck; lower the load")
    if lag_ms is not None and lag_ms.p99 > LAG_WARNING_MS:
        warnings.append(
            f"the client's loop ran {lag_ms.p99:.0f} ms late (p99) with {cpu_share:.0%} of a core: "
            "latencies may be that much too long; "
            + ("lower the load" if cpu_share > CPU_WARNING_SHARE else "the machine is busy, run the client elsewhere")
        )
    if late_ms is not None and late_ms.p99 > LATE_WARNING_MS:
        warnings.append(f"requests were sent {late_ms.p99:.0f} ms late (p99): the load was not what was asked")
    if dropped:
        warnings.append(f"{dropped} requests were not sent: the client had its most in flight (--max-in-flight)")
    return ClientHealth(lag_ms, late_ms, cpu_share, tuple(warnings))
