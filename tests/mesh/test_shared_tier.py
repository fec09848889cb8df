"""What a worker that was killed had stored in Redis is read by another of the cell, which was there all along."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from gpu_worker.simulated_runner import TokenSource
from tests.mesh.client import complete
from tests.mesh.conftest import eventually
from tests.mesh.stack import MeshStack

VOCAB, EOS_IDS = 49152, (2,)
"""Of SmolLM2-135M-Instruct."""
PROMPT_TOKENS = 1600
CACHED_UNITS = (PROMPT_TOKENS - 1) // 16
NUM_PROMPTS = 57
"""A MiB of host memory holds 5205 simulated units that are not on their way out: the first prompt's are, by then."""
UNITS = "phasemesh_worker_tier_units"
IN_REDIS = 'result="hit",tier="redis"'


@pytest.fixture
def stack(smollm2_dir: Path, tmp_path: Path) -> Iterator[MeshStack]:
    """The second worker is of a pool for longer prompts than any here: while the first lives, it has nothing to do."""
    environment = {
        "SIMULATE": "on",
        "SIMULATED_PREFILL_TOKEN_US": "30",
        "KV_PAGE_SIZE": "16",
        "KV_PAGES": "128",
        "HOST_KV_MB": "1",
        "REDIS_KV_MB": "64",
        "MAX_MODEL_LEN": "2000",
    }
    pool = [{}, {"WORKER_MIN_PROMPT_TOKENS": "1900"}]
    with MeshStack(smollm2_dir, tmp_path, env=environment, worker_env=pool) as stack:
        yield stack


async def test_a_prefix_in_redis_outlives_the_worker_that_stored_it(
    stack: MeshStack, session: aiohttp.ClientSession
) -> None:
    first, second = stack.workers
    for seed in range(NUM_PROMPTS):
        await complete(session, stack.url, _prompt(seed), 1, seed=1)
    await eventually("Redis has it", lambda: first.samples(UNITS).get('tier="redis"', 0) >= CACHED_UNITS)
    assert not any(second.samples("phasemesh_worker_tier_saved_total").values())
    first.kill()
    answer = await complete(session, stack.url, _prompt(0), 20, seed=5)
    assert answer.token_ids == TokenSource(VOCAB, EOS_IDS).tokens([5] * 20, [0] * 20, range(20))
    assert answer.cached_tokens == CACHED_UNITS * 16
    assert second.metric("phasemesh_worker_tier_reads_total", IN_REDIS) == CACHED_UNITS
    stack.wait_no_page_in_use()


def _prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
