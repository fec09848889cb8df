"""KV goes from host to host by gRPC, and a partition between two workers meanwhile costs nobody a token."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.mesh.hosts import WAYS, HostedStack, open_network
from tests.mesh.test_hosts import CELL, SIMULATED, Scene, Session, whole
from wire import keys
from wire.redis_client import open_redis

SPLIT = SIMULATED | {
    "STEP_TOKEN_BUDGET": "128",  # longer prompts go over the prefill worker
    "SIMULATED_PREFILL_TOKEN_US": "2000",
    "SIMULATED_PULL_UNIT_US": "5000",  # a third of what prefilling takes: worth it, whatever was learnt of the link
    "PULL_LEASE_MS": "1000",
}
PROMPT_TOKENS = 320


@pytest.fixture(scope="module", params=WAYS[:1])
def split_hosts(
    request: pytest.FixtureRequest, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostedStack]:
    roles = {"b": {"WORKER_ROLE": "prefill"}, "c": {"WORKER_ROLE": "decode"}}
    directory = tmp_path_factory.mktemp("split")
    with (
        open_network(request.param, ["a", "b", "c"]) as network,
        HostedStack(network, smollm2_dir, directory, front="a", workers=roles, env=SPLIT) as stack,
    ):
        yield stack


@pytest.fixture
async def split(split_hosts: HostedStack, session: Session) -> AsyncIterator[Scene]:
    """Redis, scheduler and gateway on a, a prefill worker on b, a decode worker on c."""
    async with whole(split_hosts, session) as scene:
        yield scene


def pulls(scene: Scene, outcome: str) -> float:
    samples = scene.stack.scheduler.samples("phasemesh_scheduler_pulls_total")
    return sum(value for labels, value in samples.items() if f'outcome="{outcome}"' in labels)


def start(scene: Scene, seed: int) -> None:
    """Streams whose prompts nobody has seen."""
    rng = random.Random(seed)
    for _ in range(4):
        scene.start(1, 40, [rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)])


async def test_kv_is_handed_from_one_host_to_another(split: Scene) -> None:
    start(split, 1)
    await split.end_right()
    assert pulls(split, "complete") > 0
    done = split.stack.scheduler.samples("phasemesh_scheduler_pulls_total")
    assert all('transport="grpc"' in labels for labels in done), "two hosts share no memory"


async def test_a_partition_between_two_workers_loses_no_token(split: Scene) -> None:
    """The pulls end by their leases, and the prompt is prefilled where it is decoded; after healing KV moves again."""
    failed = pulls(split, "failed")
    start(split, 2)
    await split.run_on("b")
    split.network.partition("b", "c")
    await split.end_right()
    assert pulls(split, "failed") > failed
    split.network.heal("b", "c")
    before = pulls(split, "complete")
    for seed in range(3, 20):  # the pair is left alone for a while after a failure
        start(split, seed)
        await split.end_right()
        if pulls(split, "complete") > before:
            return
    raise AssertionError("no KV moves any more")


async def test_workers_that_change_their_roles_under_traffic_drop_nothing(split: Scene) -> None:
    async def decoded_on_b() -> float:
        return split.stack.worker("b").metric("phasemesh_worker_tokens_total", 'phase="decode"')

    start(split, 30)
    await split.run_on("b", "c")
    async with open_redis(split.stack.redis.url) as redis:
        await redis.hset(keys.roles(CELL), mapping={"b": "decode", "c": "prefill"})
        try:
            before = await decoded_on_b()
            start(split, 31)
            await split.end_right()
            start(split, 32)  # by now each does what the other one did
            await split.end_right()
            assert await decoded_on_b() > before
        finally:
            await redis.delete(keys.roles(CELL))
