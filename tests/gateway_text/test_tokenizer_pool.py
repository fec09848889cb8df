"""Long prompts are tokenized elsewhere; nothing waits for them, nothing of them is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gateway.text import tokenizer_pool
from gateway.text.tokenizer import Tokenizer
from gateway.text.tokenizer_pool import INLINE_CHARS, MAX_KEPT_BYTES, TokenizerPool
from wire.errors import ContextLengthExceeded, InvalidRequest, Overloaded, Unavailable

LONG = "The quick brown fox – 狐狸 – jumps over 12,345 lazy dogs.\n" * 400
NO_LIMIT = 10**9


@pytest.fixture
async def pool(smollm2: Tokenizer, smollm2_dir: Path) -> AsyncIterator[TokenizerPool]:
    async with TokenizerPool(smollm2, smollm2_dir, num_processes=1) as pool:
        yield pool


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "gateway.text.tokenizer_process" in child.cmdline()]


async def until(condition: Callable[[], bool]) -> None:
    """Another process's state announces itself by no event."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_busy(child: psutil.Process) -> None:
    """Until the child spends its time on a text, not on starting."""
    await until(lambda: child.memory_info().rss > 400 * 2**20)


async def test_a_short_text_needs_no_process(pool: TokenizerPool, smollm2: Tokenizer) -> None:
    text = LONG[:INLINE_CHARS]
    assert await pool.encode(text, True, NO_LIMIT) == smollm2.encode(text, True)
    assert children() == []


async def test_a_long_text_gets_the_same_ids(pool: TokenizerPool, smollm2: Tokenizer) -> None:
    assert await pool.encode(LONG, False, NO_LIMIT) == smollm2.encode(LONG, False)
    assert await pool.encode(LONG + "x", True, NO_LIMIT) == smollm2.encode(LONG + "x", True)
    assert len(children()) == 1


async def test_special_tokens_are_added_in_the_process_too(
    tokenizers_by_layout: dict[str, Tokenizer], layout_dirs: dict[str, Path]
) -> None:
    tokenizer = tokenizers_by_layout["llama2"]
    async with TokenizerPool(tokenizer, layout_dirs["llama2"], num_processes=1) as pool:
        assert await pool.encode(LONG, True, NO_LIMIT) == tokenizer.encode(LONG, True)


@pytest.mark.parametrize("text", [LONG[:4000], LONG])
async def test_a_prompt_that_does_not_fit_names_both_lengths(
    text: str, pool: TokenizerPool, smollm2: Tokenizer
) -> None:
    num_tokens = len(smollm2.encode(text, True))
    assert len(await pool.encode(text, True, num_tokens)) == num_tokens
    with pytest.raises(ContextLengthExceeded, match=rf"\b{num_tokens} tokens.*\b{num_tokens - 1}\b") as caught:
        await pool.encode(text, True, num_tokens - 1, param="messages")
    assert caught.value.param == "messages"


async def test_a_hopeless_prompt_is_refused_without_tokenizing(pool: TokenizerPool) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"at least 246914 tokens.*\b8191\b"):
        await pool.encode("x" * 20_000_000, True, 8191)
    assert children() == []


@pytest.mark.parametrize("text", ["short \ud800", LONG + "\ud800"])
async def test_a_lone_surrogate_is_refused(text: str, pool: TokenizerPool) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        await pool.encode(text, True, NO_LIMIT)


@pytest.mark.parametrize("unit", ["plain ascii ", "天气"])
async def test_a_20_mb_prompt_leaves_the_loop_responsive(unit: str, pool: TokenizerPool) -> None:
    """Up to the child's work: everything the gateway does is over when the child is busy."""
    text = unit * (20_000_000 // len(unit.encode()))
    encoding = asyncio.create_task(pool.encode(text, True, NO_LIMIT))
    longest_turn_s = 0.0

    async def watch_turns() -> None:
        nonlocal longest_turn_s
        while True:
            started_s = time.thread_time()
            await asyncio.sleep(0)
            longest_turn_s = max(longest_turn_s, time.thread_time() - started_s)

    gc.collect()
    gc.freeze()  # a collection within a turn then looks at the objects from here on, not at those of all tests before
    try:
        watching = asyncio.create_task(watch_turns())
        await until(lambda: bool(children()))
        await until_busy(children()[0])
        for task in (watching, encoding):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    finally:
        gc.unfreeze()
    assert longest_turn_s < 0.03


async def test_cancelling_stops_the_work_and_the_next_text_is_served(pool: TokenizerPool, smollm2: Tokenizer) -> None:
    await pool.encode(LONG, True, NO_LIMIT)
    (child,) = children()
    encoding = asyncio.create_task(pool.encode(LONG * 500, True, NO_LIMIT))
    await until_busy(child)
    encoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await encoding
    assert not child.is_running()
    assert await pool.encode(LONG, True, NO_LIMIT) == smollm2.encode(LONG, True)


async def test_a_killed_process_is_replaced_unnoticed(pool: TokenizerPool, smollm2: Tokenizer) -> None:
    await pool.encode(LONG, True, NO_LIMIT)
    children()[0].kill()
    assert await pool.encode(LONG, True, NO_LIMIT) == smollm2.encode(LONG, True)


async def test_a_process_that_hangs_is_given_up_and_replaced(
    pool: TokenizerPool, smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.encode(LONG, True, NO_LIMIT)
    (child,) = children()
    child.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_pool, "ENCODE_TIMEOUT_S", 0.2)
        with pytest.raises(Unavailable, match="too long"):
            await pool.encode(LONG, True, NO_LIMIT)
    assert not child.is_running()
    assert await pool.encode(LONG, True, NO_LIMIT) == smollm2.encode(LONG, True)


async def test_a_text_that_kills_its_process_twice_is_given_up(smollm2: Tokenizer, tmp_path: Path) -> None:
    """The processes find no tokenizer in their directory and end at once."""
    async with TokenizerPool(smollm2, tmp_path, num_processes=1) as pool:
        with pytest.raises(Unavailable, match="twice"):
            await pool.encode(LONG, True, NO_LIMIT)
        assert len(await pool.encode("short", True, NO_LIMIT)) == 1


async def test_too_many_waiting_texts_are_refused(
    pool: TokenizerPool, smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "MAX_WAITING", 1)
    outcomes = await asyncio.gather(*(pool.encode(LONG, True, NO_LIMIT) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [list, list, Overloaded]
    assert await pool.encode(LONG, True, NO_LIMIT) == smollm2.encode(LONG, True)


async def test_a_process_does_not_keep_a_huge_texts_memory(pool: TokenizerPool) -> None:
    await pool.encode("word " * (MAX_KEPT_BYTES // 5 + 1), True, NO_LIMIT)
    assert children() == []


async def test_closing_ends_idle_and_busy_processes(smollm2: Tokenizer, smollm2_dir: Path) -> None:
    async with TokenizerPool(smollm2, smollm2_dir, num_processes=2) as pool:
        await pool.encode(LONG, True, NO_LIMIT)
        idle = children()
        encoding = [asyncio.create_task(pool.encode(LONG * 500, True, NO_LIMIT)) for _ in range(2)]
        await until_busy(idle[0])
    for task in encoding:
        with pytest.raises(Unavailable, match="stopping"):
            await task
    assert children() == []


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8])
async def test_closing_ends_a_process_that_is_just_starting(turns: int, smollm2: Tokenizer, smollm2_dir: Path) -> None:
    async with TokenizerPool(smollm2, smollm2_dir, num_processes=1) as pool:
        encoding = asyncio.create_task(pool.encode(LONG, True, NO_LIMIT))
        for _ in range(turns):
            await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="stopping"):
        await encoding
    assert children() == []


_PARENT = """
import asyncio, sys
from pathlib import Path
from gateway.text.tokenizer import load_tokenizer
from gateway.text.tokenizer_pool import TokenizerPool

async def main():
    model_dir = Path(sys.argv[1])
    async with TokenizerPool(load_tokenizer(model_dir), model_dir, 1) as pool:
        await pool.encode("plain ascii " * 1_500_000, True, 10**9)

asyncio.run(main())
"""


async def test_no_process_outlives_a_killed_gateway(smollm2_dir: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _PARENT, str(smollm2_dir), env=environ)
    parent_process = psutil.Process(parent.pid)
    await until(lambda: bool(parent_process.children()))
    (child,) = parent_process.children()
    await until_busy(child)
    parent.kill()
    await parent.wait()
    child.wait(timeout=2)  # it is far from done with its 18 MB
