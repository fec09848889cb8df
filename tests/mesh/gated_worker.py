"""`python -m tests.mesh.gated_worker`: a worker with gates (gates.py) in the directory GATES.

    prefill     compute thread: before a step with prefill chunks
    decode      compute thread: before a step of decodes alone
    begin       the thread of a pull into this worker: before it asks the source
    layer-K     the same: layer K has come, not checked yet (shm), or checked and stored (grpc, and each unit of a tier)
    end         the same: all has come, and the scheduler does not know
    read-K      as a source, by grpc: layer K was read, and not sent
    redis-HASH  the thread that writes to Redis: before it stores the unit of this hash

What closes no gate: the file `grpc` makes it pull by gRPC where it could share memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gpu_worker.__main__ as worker
from gpu_worker.executor import Executor
from gpu_worker.model_port import ModelRunner, StepOutput
from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from gpu_worker.tiers.redis_store import RedisStore
from gpu_worker.transfer import plane
from gpu_worker.transfer.carriers import RemoteCarrier
from gpu_worker.transfer.port import Bytes, KvPages
from gpu_worker.transfer.pull import Pull
from gpu_worker.transfer.source import TransferSource
from gpu_worker.transfer.transports import GRPC
from tests.mesh.gates import pass_gate
from wire.config import WorkerConfig
from wire.ids import UnitHash

GATES = "GATES"


def gate_model(load_model: Callable[[WorkerConfig], ModelRunner], wait: Callable[[str], None]) -> Callable[..., Any]:
    def load(config: WorkerConfig) -> ModelRunner:
        runner = load_model(config)
        step = runner.step

        def gated_step(batch: StepBatch, sampling: Sequence[LiveSequence]) -> StepOutput:
            is_prefill = any(length > 1 for length in batch.query_lens)
            wait("prefill" if is_prefill else "decode")
            return step(batch, sampling)

        runner.step = gated_step  # type: ignore[method-assign]
        return runner

    return load


def gate_plane(wait: Callable[[str], None]) -> Callable[..., Any]:
    def wait_at(point: str, layer: int) -> None:
        wait(f"{point}-{layer}")

    class GatedPlane(plane.TransferPlane):
        def source(self, executor: Executor, **_: object) -> TransferSource:
            return plane.TransferPlane.source(self, executor, after_read=partial(wait_at, "read"))

    @contextmanager
    def open_plane(kv: KvPages | None, **options: Any) -> Iterator[GatedPlane]:
        with plane.open_plane(kv, **options, after_copy=partial(wait_at, "layer")) as opened:
            yield GatedPlane(
                opened.kv, opened.namespace, opened.tiers, opened.transports, opened.endpoint, opened.puller
            )

    return open_plane


def gate_pulls(directory: Path, wait: Callable[[str], None]) -> None:
    carry, store = RemoteCarrier.carry, Pull.store

    def gated_carry(self: RemoteCarrier, pull: Pull) -> None:
        wait("begin")
        if (directory / GRPC).exists():
            self._attempt(pull, [GRPC])
        else:
            carry(self, pull)
        wait("end")

    def gated_store(self: Pull, layer: int, first: int, data: Bytes) -> None:
        store(self, layer, first, data)
        wait(f"layer-{layer}")

    RemoteCarrier.carry = gated_carry  # type: ignore[method-assign]
    Pull.store = gated_store  # type: ignore[method-assign]


def gate_tiers(wait: Callable[[str], None]) -> None:
    put = RedisStore.put

    def gated_put(self: RedisStore, unit_hash: UnitHash, encoded: memoryview) -> bool:
        wait(f"redis-{unit_hash.hex()}")
        return put(self, unit_hash, encoded)

    RedisStore.put = gated_put  # type: ignore[method-assign]


def main() -> int:
    directory = Path(os.environ[GATES])
    wait = partial(pass_gate, directory)
    worker.load_model = gate_model(worker.load_model, wait)
    worker.open_plane = gate_plane(wait)  # type: ignore[attr-defined]
    gate_pulls(directory, wait)
    gate_tiers(wait)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
