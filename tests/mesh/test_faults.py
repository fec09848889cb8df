"""What each death costs (design §9): a clear end or a continued stream, never a hang, and every page back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.mesh.client import Completion, complete, events
from tests.mesh.conftest import eventually
from tests.mesh.stack import MeshStack

PROMPT = "Once upon a time, in a village by the sea,"


async def started(
    session: aiohttp.ClientSession, stack: MeshStack, max_tokens: int = 400, **params: Any
) -> tuple[asyncio.Task[Completion], asyncio.Event]:
    """A greedy stream that runs long, and the event of its first token."""
    first = asyncio.Event()

    async def run() -> Completion:
        result = Completion()
        wanted = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True} | params
        async for event in events(session, stack.url, PROMPT, **wanted):
            first.set()
            if "error" in event:
                result.error = event["error"]
                break
            for choice in event["choices"]:
                result.token_ids += choice.get("token_ids") or []
                result.finish_reason = choice["finish_reason"] or result.finish_reason
        return result

    return asyncio.create_task(run()), first


async def test_the_only_workers_death_ends_streams_and_its_return_is_enough(
    stack: MeshStack, session: aiohttp.ClientSession
) -> None:
    stream, first = await started(session, stack)
    await asyncio.wait_for(first.wait(), 30)
    stack.workers[0].kill()
    killed_s = time.monotonic()
    result = await asyncio.wait_for(stream, 10)
    assert result.error is not None and result.error["code"] == "worker_lost", result.error
    assert time.monotonic() - killed_s <= 5.0, "the issue's bar: a clear error within 5 s"
    async with session.post(f"{stack.url}/v1/completions", json={"model": "m", "prompt": PROMPT}) as refused:
        assert refused.status == 503 and "Retry-After" in refused.headers
    stack.workers[0].start()
    await eventually("ready again", stack.gateway.is_healthy, 40)
    again = await complete(session, stack.url, PROMPT, 5)
    assert len(again.token_ids) == 5 and again.error is None
    stack.wait_no_page_in_use()


async def test_a_worker_back_within_the_grace_continues_the_stream(
    smollm2_dir: Path, tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    with MeshStack(smollm2_dir, tmp_path, env={"NO_WORKER_GRACE_S": "60"}) as stack:
        whole = await complete(session, stack.url, PROMPT, 80, ignore_eos=True)
        stream, first = await started(session, stack, max_tokens=80)
        await asyncio.wait_for(first.wait(), 30)
        stack.workers[0].kill()
        stack.workers[0].start()
        result = await asyncio.wait_for(stream, 50)
        assert result.error is None and result.finish_reason == "length"
        assert result.token_ids == whole.token_ids
        stack.wait_no_page_in_use()


async def test_the_schedulers_death_loses_and_doubles_no_token(
    stack: MeshStack, session: aiohttp.ClientSession
) -> None:
    whole = await complete(session, stack.url, PROMPT, 120, ignore_eos=True)
    stream, first = await started(session, stack, max_tokens=120)
    await asyncio.wait_for(first.wait(), 30)
    stack.scheduler.kill()
    stack.scheduler.start()
    result = await asyncio.wait_for(stream, 50)
    assert result.error is None and result.finish_reason == "length"
    assert result.token_ids == whole.token_ids
    stack.wait_no_page_in_use()


async def test_redis_death_means_503_then_service_again(stack: MeshStack, session: aiohttp.ClientSession) -> None:
    before = await complete(session, stack.url, PROMPT, 5)
    stack.redis.kill()
    await eventually("not ready", lambda: not stack.gateway.is_healthy())
    asked_s = time.monotonic()
    async with session.post(f"{stack.url}/v1/completions", json={"model": "m", "prompt": PROMPT}) as refused:
        assert refused.status == 503
    assert time.monotonic() - asked_s < 5.0
    stack.redis.start()
    await eventually("ready again", stack.gateway.is_healthy, 30)
    after = await complete(session, stack.url, PROMPT, 5)
    assert after.token_ids == before.token_ids
    stack.wait_no_page_in_use()


async def test_a_stream_outlives_a_short_redis_restart(stack: MeshStack, session: aiohttp.ClientSession) -> None:
    whole = await complete(session, stack.url, PROMPT, 120, ignore_eos=True)
    stream, first = await started(session, stack, max_tokens=120)
    await asyncio.wait_for(first.wait(), 30)
    stack.redis.kill()
    await asyncio.sleep(0.5)
    stack.redis.start()
    result = await asyncio.wait_for(stream, 50)
    assert result.error is None, result.error
    assert result.token_ids == whole.token_ids
    stack.wait_no_page_in_use()


async def test_a_client_that_leaves_frees_its_pages_at_once(stack: MeshStack, session: aiohttp.ClientSession) -> None:
    for streamed in (True, False):
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": streamed}
        request = asyncio.create_task(session.post(f"{stack.url}/v1/completions", json=body))
        await eventually("running", lambda: stack.pages_in_use() > 0)
        if streamed:
            (await request).close()
        else:
            request.cancel()
        await eventually("no pages in use", lambda: stack.pages_in_use() == 0, 2.0)


async def test_a_gateways_death_frees_its_requests(stack: MeshStack, session: aiohttp.ClientSession) -> None:
    stream, first = await started(session, stack, max_tokens=4000)
    await asyncio.wait_for(first.wait(), 30)
    stack.gateway.kill()
    await asyncio.gather(stream, return_exceptions=True)
    stack.gateway.start()
    await eventually("ready again", stack.gateway.is_healthy, 30)
    again = await complete(session, stack.url, PROMPT, 5)
    assert again.error is None
    stack.wait_no_page_in_use()
