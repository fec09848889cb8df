"""Who gets in: the bound on live requests, API keys, tenants, lanes."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from tests.gateway.conftest import Stack, StackOpener
from tests.gateway.scripted_scheduler import saying
from wire import keys


async def post(stack: Stack, key: str | None = None, **body: object) -> aiohttp.ClientResponse:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": "smollm2", "prompt": "Hi", **body}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as response:
        await response.read()
        return response


async def test_a_full_cell_answers_429_with_the_predicted_drain(new_stack: StackOpener) -> None:
    async with new_stack(max_live_requests=2, card={"predicted_drain_s": 3.2}) as stack:
        running = [asyncio.create_task(post(stack)) for _ in range(2)]
        entries = [await stack.scheduler.arrived.get() for _ in running]
        refused = await post(stack)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "4")
        assert (await refused.json())["error"]["type"] == "rate_limit_error"
        assert (await post(stack, stream=True)).status == 429
        assert await stack.scheduler.live() == 2
        assert await stack.scheduler.backlog() == 2
        for entry in entries:
            await stack.scheduler.say(entry, [2])
            await stack.scheduler.end(entry, 1)
        assert [(await response).status for response in running] == [200, 200]
        stack.scheduler.script = saying([2])
        assert (await post(stack)).status == 200
        assert await stack.scheduler.live() == 0
        assert stack.scheduler.cancelled.empty()


async def test_several_prompts_get_in_together_or_not_at_all(new_stack: StackOpener) -> None:
    async with new_stack(max_live_requests=3) as stack:
        running = asyncio.create_task(post(stack, prompt=["a", "b"]))
        entries = [await stack.scheduler.arrived.get() for _ in range(2)]
        assert (await post(stack, prompt=["c", "d"])).status == 429
        assert await stack.scheduler.live() == 2
        never = await post(stack, prompt=["a", "b", "c", "d"])
        assert (never.status, (await never.json())["error"]["param"]) == (400, "prompt")
        for entry in entries:
            await stack.scheduler.say(entry, [2])
            await stack.scheduler.end(entry, 1)
        assert (await running).status == 200


async def test_a_request_leaves_its_journal_with_owner_lane_and_entry(new_stack: StackOpener) -> None:
    async with new_stack() as stack:
        for body, lane in (({}, b"interactive"), ({"priority": -1}, b"batch"), ({"service_tier": "flex"}, b"batch")):
            running = asyncio.create_task(post(stack, **body))
            entry = await stack.scheduler.arrived.get()
            journal: Any = await stack.scheduler.redis.hgetall(keys.journal(stack.scheduler.cell, entry.request_id))
            assert journal[b"gw"].decode() == stack.parts.gateway_id
            assert journal[b"lane"] == lane
            stream = keys.requests(stack.scheduler.cell, lane.decode())
            entries: Any = await stack.scheduler.redis.xrange(stream)
            assert [entry_id for entry_id, _ in entries] == [journal[b"entry"]]
            await stack.scheduler.say(entry, [2])
            await stack.scheduler.end(entry, 1)
            assert (await running).status == 200


async def test_api_keys_are_asked_for(new_stack: StackOpener) -> None:
    async with new_stack(saying([2]), api_keys="first-key, second-key") as stack:
        for key in (None, "wrong", "first-ke", "first-key2", ""):
            refused = await post(stack, key)
            assert refused.status == 401
            assert (await refused.json())["error"]["code"] == "invalid_api_key"
            assert await stack.scheduler.live() == 0
        async with stack.http.get(f"{stack.url}/v1/models") as response:
            assert response.status == 401
        for path in ("/health", "/live", "/metrics", "/"):
            async with stack.http.get(f"{stack.url}{path}") as response:
                assert response.status == 200
        assert [(await post(stack, key)).status for key in ("first-key", "second-key")] == [200, 200]


async def test_a_tenant_is_its_key_and_has_a_cache_of_its_own(new_stack: StackOpener) -> None:
    async with new_stack(saying([2]), api_keys="first-key,second-key") as stack:
        for key, salt in (("first-key", ""), ("second-key", ""), ("first-key", "mine"), ("first-key", "")):
            assert (await post(stack, key, cache_salt=salt)).status == 200
        first, second, salted, again = [await stack.scheduler.arrived.get() for _ in range(4)]
        assert first.tenant == salted.tenant == again.tenant != second.tenant
        assert len({first.salt, second.salt, salted.salt}) == 3
        assert again.salt == first.salt
        assert "first-key" not in first.tenant + first.salt


async def test_without_keys_everybody_shares_one_cache(new_stack: StackOpener) -> None:
    async with new_stack(saying([2])) as stack:
        assert (await post(stack)).status == 200
        assert (await post(stack, cache_salt="mine")).status == 200
        plain, salted = [await stack.scheduler.arrived.get() for _ in range(2)]
        assert (plain.tenant, plain.salt) == ("default", "")
        assert (salted.tenant, salted.salt) == ("default", "mine")


async def test_a_traceparent_travels_on(new_stack: StackOpener) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with new_stack(saying([2])) as stack:
        body = {"model": "smollm2", "prompt": "Hi"}
        headers = {"traceparent": traceparent}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        assert (await stack.scheduler.arrived.get()).traceparent == traceparent
