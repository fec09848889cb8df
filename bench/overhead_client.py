"""The client of bench.mesh_overhead, in a process of its own: as little work per token as asyncio allows.

    stdin    one JSON object, `Run`
    stdout   one JSON object, `Result`

Each stream is one connection that sends its next request when its last has ended. While the clock runs, an arriving
piece is counted and kept; only afterwards is every token looked at and held against the prediction.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import cast
from urllib.parse import urlsplit

import uvloop

from bench.cpu_time import cpu_s
from bench.workloads import WORDS
from gpu_worker.simulated_runner import TokenSource

EVENT_END = b"\n\n"
"""Of a server-sent event; HTTP's chunk framing has none."""
LAST_EVENT = b"data: [DONE]\n\n"
BODY_END = b"\r\n0\r\n\r\n"
"""HTTP's last chunk."""
DRAIN_TIMEOUT_S = 120.0
"""Running requests may take this long to end after the measurement."""
_TOKEN_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')


@dataclass(frozen=True, slots=True)
class Run:
    """What to do. Times in seconds."""

    url: str
    model: str
    vocab_size: int
    eos_token_ids: list[int]
    streams: int
    prompt_words: int
    output_tokens: int
    think_s: float
    """A stream pauses for up to this long, evenly drawn, before each request but its first."""
    warm_up_s: float
    measure_s: float
    pids: dict[str, int]
    """Whose CPU time is read when measuring begins and ends."""


@dataclass(slots=True)
class Result:
    """Tokens, gaps and CPU within the measured time; first tokens of the requests that were sent within it."""

    measured_s: float
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    first_wave_ttft_s: list[float] = field(default_factory=list)
    """Of the requests that all streams sent at once, at the start."""
    gap_s: list[float] = field(default_factory=list)
    """Between arrivals of one stream; tokens that arrive together have gaps of 0."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By service; the client's own is `client`."""
    requests: int = 0
    """In all, the warm-up's too: every token of each was looked at."""
    wrong: int = 0
    """Requests whose tokens were not the predicted ones, or that did not end in [DONE]."""
    events_of_many: int = 0
    """Events that carried more than one token."""
    example: str | None = None
    """Of a wrong one."""


@dataclass(slots=True)
class Answer:
    """One request's raw answer, and when its events came."""

    seed: int
    sent_s: float
    first_wave: bool
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(when, events in this read)"""
    data: bytearray = field(default_factory=bytearray)


class Stream(asyncio.Protocol):
    """One connection."""

    def __init__(self, run: Run, number: int) -> None:
        self._run = run
        self._number = number
        self.stop_s = math.inf
        """No request is sent after this."""
        self._rng = random.Random(number)
        self._transport: asyncio.Transport
        self.answers: list[Answer] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own does not derive from it

    def send(self) -> None:
        """Send the next request."""
        seed = self._number * 1_000_000 + len(self.answers)
        body = json.dumps(
            {
                "model": self._run.model,
                "prompt": " ".join(self._rng.choices(WORDS, k=self._run.prompt_words)),
                "max_tokens": self._run.output_tokens,
                "seed": seed,
                "stream": True,
                "return_token_ids": True,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: mesh\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self.answers.append(Answer(seed, time.perf_counter(), first_wave=not self.answers))
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        answer = self.answers[-1]
        before = len(answer.data)
        answer.data += data
        over = answer.data.endswith(BODY_END)
        # An event's end may be split over two reads; the last one, [DONE], carries no token.
        answer.arrivals.append((now_s, answer.data.count(EVENT_END, max(0, before - 1)) - over))
        if over:
            self._ended(now_s)

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(None)

    def _ended(self, now_s: float) -> None:
        if now_s >= self.stop_s:
            self._transport.close()
        elif self._run.think_s > 0:
            asyncio.get_running_loop().call_later(self._rng.uniform(0, self._run.think_s), self.send)
        else:
            self.send()


async def measure(run: Run) -> Result:
    """Start all streams at once; read clocks when the warm-up ends and when measuring ends; then check every token."""
    loop = asyncio.get_running_loop()
    server = urlsplit(run.url)
    assert server.hostname is not None and server.port is not None
    streams = [Stream(run, number) for number in range(run.streams)]
    for stream in streams:
        await loop.create_connection(lambda s=stream: s, server.hostname, server.port)  # type: ignore[misc]
    stop_s = time.perf_counter() + run.warm_up_s + run.measure_s
    for stream in streams:
        stream.stop_s = stop_s
        stream.send()
    await asyncio.sleep(run.warm_up_s)
    began_s, before = time.perf_counter(), _cpu_s(run)
    await asyncio.sleep(run.measure_s)
    ended_s, after = time.perf_counter(), _cpu_s(run)
    await asyncio.wait_for(asyncio.gather(*(stream.over for stream in streams)), DRAIN_TIMEOUT_S)
    result = Result(ended_s - began_s, cpu_s={name: after[name] - before[name] for name in before})
    source = TokenSource(run.vocab_size, run.eos_token_ids)
    for answer in itertools.chain.from_iterable(stream.answers for stream in streams):
        _check(result, run, answer, source)
        _count(result, answer, began_s, ended_s)
    return result


def _cpu_s(run: Run) -> dict[str, float]:
    return {name: cpu_s(pid) for name, pid in run.pids.items()} | {"client": cpu_s(os.getpid())}


def token_ids_by_event(data: bytes | bytearray) -> list[list[int]]:
    """Output tokens of a streamed answer, event by event; the prompt's have another name."""
    return [[int(token) for token in ids.split(b",") if token] for ids in _TOKEN_IDS.findall(data)]


def _check(result: Result, run: Run, answer: Answer, source: TokenSource) -> None:
    """Every token, in order, against the prediction."""
    result.requests += 1
    count = run.output_tokens
    expected = source.tokens([answer.seed] * count, [0] * count, range(count))
    events = token_ids_by_event(answer.data)
    got = list(itertools.chain.from_iterable(events))
    result.events_of_many += sum(len(event) > 1 for event in events)
    if got != expected or LAST_EVENT not in answer.data:
        result.wrong += 1
        differs = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        if result.example is None:
            end = bytes(answer.data[-200:]).decode(errors="replace")
            result.example = f"seed {answer.seed}: {len(got)} tokens, first difference at {differs}; ends {end!r}"


def _count(result: Result, answer: Answer, began_s: float, ended_s: float) -> None:
    if not answer.arrivals:
        return
    ttft_s = answer.arrivals[0][0] - answer.sent_s
    if answer.first_wave:
        result.first_wave_ttft_s.append(ttft_s)
    elif began_s <= answer.sent_s < ended_s:
        result.ttft_s.append(ttft_s)
    # The first event shows the prompt's ids, the last but [DONE] the finish reason: neither is a token.
    answer.arrivals[0] = answer.arrivals[0][0], answer.arrivals[0][1] - 1
    answer.arrivals[-1] = answer.arrivals[-1][0], answer.arrivals[-1][1] - 1
    earlier_s: float | None = None
    for now_s, events in answer.arrivals:
        if began_s <= now_s < ended_s:
            result.tokens += events
            if earlier_s is not None and events:
                result.gap_s += [now_s - earlier_s, *[0.0] * (events - 1)]
        if events:
            earlier_s = now_s


def main() -> None:
    run = Run(**json.load(sys.stdin))
    json.dump(asdict(uvloop.run(measure(run))), sys.stdout)


if __name__ == "__main__":
    main()
