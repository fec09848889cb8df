"""Tokenizing that never holds up the event loop: short texts inline, long ones in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.text.tokenizer import Tokenizer, to_utf8
from gateway.text.tokenizer_process import REPLY, REQUEST
from wire.child import importing_as_we_do
from wire.entries import unpack_tokens
from wire.errors import ContextLengthExceeded, Overloaded, Unavailable

INLINE_CHARS = 8192
"""Longer texts go to a process. Measured with SmolLM2: so many characters take 2 ms (English, code) to 6 ms (Chinese),
less than a decode step. A running process answers 0.2 to 1 ms later than inline; starting one takes 0.4 s."""

MAX_WAITING = 64
"""Texts that wait for a process at once; more get 429."""

CHUNK_CHARS = 256 * 1024
"""Longest stretch of a text handled between two turns of the event loop (under 1 ms)."""

ENCODE_TIMEOUT_S = 180.0
"""A process that takes longer is given up with its text: the largest body takes some 30 s on an idle core."""

MAX_KEPT_BYTES = 2 * 1024 * 1024
"""A process that tokenized more text than this ends: it would keep some 75 bytes of memory for each byte of it."""

logger = logging.getLogger(__name__)


def prompt_too_long(
    num_tokens: int, limit_tokens: int, *, at_least: bool = False, param: str = "prompt"
) -> ContextLengthExceeded:
    """The error for a prompt that does not fit, naming both lengths. `at_least`: it was not tokenized to the end."""
    length = f"at least {num_tokens}" if at_least else f"{num_tokens}"
    return ContextLengthExceeded(f"the prompt has {length} tokens, more than the {limit_tokens} that fit", param=param)


class TokenizerPool:
    """`async with TokenizerPool(…) as pool`: no process starts before the first long text, none is left afterwards."""

    def __init__(self, tokenizer: Tokenizer, model_dir: Path, num_processes: int) -> None:
        """`tokenizer` is the one of `model_dir`, which the processes load for themselves."""
        self._tokenizer = tokenizer
        self._processes = [_TokenizerProcess(model_dir) for _ in range(num_processes)]
        self._idle: asyncio.LifoQueue[_TokenizerProcess] = asyncio.LifoQueue(maxsize=num_processes)  # never full
        self._num_waiting = 0
        for process in self._processes:
            self._idle.put_nowait(process)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.closed = True
            await process.stop()
        returned = [await self._idle.get() for _ in self._processes]  # each when it has given its text up
        for process in returned:
            self._idle.put_nowait(process)  # to refuse a text that comes late

    async def encode(
        self, text: str, add_special_tokens: bool, limit_tokens: int, *, param: str = "prompt"
    ) -> list[int]:
        """Token ids, at most `limit_tokens`.

        Raises ContextLengthExceeded (naming `param`) when there are more, without tokenizing where the length in bytes
        already tells; InvalidRequest for a lone surrogate; Overloaded when too many texts wait; Unavailable when the
        process died on this text twice, or took too long. Cancelling it stops the work.
        """
        if len(text) <= INLINE_CHARS:
            token_ids = self._tokenizer.encode(text, add_special_tokens)
            if len(token_ids) > limit_tokens:
                raise prompt_too_long(len(token_ids), limit_tokens, param=param)
            return token_ids
        chunks, min_tokens = await self._to_utf8(text)
        if min_tokens > limit_tokens:
            raise prompt_too_long(min_tokens, limit_tokens, at_least=True, param=param)
        num_tokens, packed = await self._encode_elsewhere(chunks, add_special_tokens, limit_tokens)
        if packed is None:
            raise prompt_too_long(num_tokens, limit_tokens, param=param)
        return unpack_tokens(packed)

    async def _to_utf8(self, text: str) -> tuple[list[bytes], int]:
        """The text in UTF-8, chunk by chunk, and the number of tokens it has at least."""
        chunks: list[bytes] = []
        countable_bytes = 0
        for start in range(0, len(text), CHUNK_CHARS):
            chunks.append(to_utf8(text[start : start + CHUNK_CHARS]))
            countable_bytes += self._tokenizer.countable_bytes(chunks[-1])
            await asyncio.sleep(0)
        return chunks, self._tokenizer.min_tokens(countable_bytes)

    async def _encode_elsewhere(
        self, chunks: Sequence[bytes], add_special_tokens: bool, limit_tokens: int
    ) -> tuple[int, bytes | None]:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded("too many long prompts are waiting to be tokenized", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            process = await self._idle.get()
        finally:
            self._num_waiting -= 1
        try:
            for _ in range(2):
                try:
                    async with asyncio.timeout(ENCODE_TIMEOUT_S):
                        return await process.encode(chunks, add_special_tokens, limit_tokens)
                except TimeoutError as error:  # an OSError as well; trying again would take as long
                    raise Unavailable("this prompt takes too long to tokenize") from error
                except (OSError, EOFError) as error:
                    logger.warning("a tokenizer process died: %r", error)
            raise Unavailable("the tokenizer process died on this prompt, twice")
        finally:
            self._idle.put_nowait(process)


class _TokenizerProcess:
    """A child that tokenizes one text at a time: started by the first, and again by the first after a death."""

    def __init__(self, model_dir: Path) -> None:
        self.closed = False
        """No further text is taken."""
        self._model_dir = model_dir
        self._child: asyncio.subprocess.Process | None = None

    async def encode(
        self, chunks: Sequence[bytes], add_special_tokens: bool, limit_tokens: int
    ) -> tuple[int, bytes | None]:
        """(number of tokens, packed ids or None when they are more than limit_tokens). Raises OSError or EOFError when
        the child dies, Unavailable when closed. Whatever interrupts it, cancellation too, ends the child: its pipes
        hold half a conversation."""
        if self._child is None and not self.closed:
            self._child = await self._start()
        num_bytes = sum(map(len, chunks))
        reusable = False
        try:
            if self._child is None or self.closed:
                raise Unavailable("the gateway is stopping")
            stdin, stdout = self._child.stdin, self._child.stdout
            assert stdin is not None and stdout is not None
            stdin.write(REQUEST.pack(num_bytes, limit_tokens, add_special_tokens))
            for chunk in chunks:
                stdin.write(chunk)
                await stdin.drain()
            (num_tokens,) = REPLY.unpack(await stdout.readexactly(REPLY.size))
            packed = await stdout.readexactly(4 * num_tokens) if num_tokens <= limit_tokens else None
            reusable = num_bytes <= MAX_KEPT_BYTES
        finally:
            if not reusable:
                await self.stop()
        return num_tokens, packed

    async def stop(self) -> None:
        """Kill the child, if there is one, and reap it."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        with suppress(ProcessLookupError):
            child.kill()
        child.stdin.close()
        with suppress(OSError):
            await child.stdin.wait_closed()
        await child.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gateway.text.tokenizer_process", str(self._model_dir.resolve())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=importing_as_we_do(),
            start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which drains and then stops this child
        )
