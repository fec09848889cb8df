"""bench.startup: a whole stack is started, its processes' memory read, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.openai_stream import BenchFailed
from bench.startup import Memory, Started, report, start_once
from tests.model.conftest import checkpoint  # noqa: F401  # a fixture

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")


def test_memory_is_what_the_kernel_counts() -> None:
    memory = Memory.parse(Path("/proc/self/smaps_rollup").read_text())
    assert 0 < memory.anonymous < memory.total <= psutil.Process().memory_info().rss * 1.1
    assert abs(memory.total - memory.anonymous - memory.file) < 0.01 * memory.total


def test_a_stack_of_two_int8_workers_is_started_looked_at_and_stopped(
    checkpoint: Callable[[str], Path],  # noqa: F811
) -> None:
    options = ["--model", str(checkpoint("qwen3")), "--weight-dtype", "int8", "--workers", "2"]
    before = set(psutil.Process().children(recursive=True))
    started = start_once(options, kv_memory_mb=16)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert started.memory.keys() == {"redis", "scheduler", "worker-1", "worker-2", "gateway"}
    assert all(memory.total > 1_000_000 for memory in started.memory.values())
    assert started.services_s.keys() == started.memory.keys()
    assert 0 < max(started.services_s.values()) < started.ready_s
    assert started.weight_files == {}  # so small a model is packed in memory


def test_the_bar_counts_shared_weights_once_and_a_pool_for_each_worker() -> None:
    memory = {
        "worker-1": Memory(900_000_000, 300_000_000, 600_000_000),
        "worker-2": Memory(300_000_000, 200_000_000, 0),
    }
    rounds = [
        Started(s, {"worker-1": s, "worker-2": s}, memory, {"/w.safetensors": 500_000_000}) for s in (3.0, 2.0, 9.0)
    ]
    text = report(rounds, kv_memory_mb=0)
    assert "ready after 3.0 s (max 9.0 of 3; bar 8)" in text
    assert "workers together: 1200 MB (bar 1400, KV pool 0 MiB each)" in text
    assert "w.safetensors, 500 MB" in text
    unmapped = [Started(1.0, {"worker-1": 1.0, "worker-2": 1.0}, memory, {})]
    assert "workers together: 1200 MB (no bar: no weights are mapped)" in report(unmapped, kv_memory_mb=0)


def test_what_the_launcher_says_when_it_cannot_start_is_passed_on() -> None:
    with pytest.raises(BenchFailed, match="'int4': one of auto, float32, bfloat16, int8"):
        start_once(["--weight-dtype", "int4"], kv_memory_mb=16)
