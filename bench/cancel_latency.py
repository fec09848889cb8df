"""How long a client that leaves goes on costing the worker: `python -m bench.cancel_latency URL WORKER_METRICS_URL`.

Each round starts a long request (streamed and whole in turn), closes its connection in mid-decode, and polls the
worker's own metrics until the sequence is gone. Prints milliseconds; the bar is 250 ms (design §9).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import aiohttp

from observability import names

POLL_S = 0.002
TIMEOUT_S = 30.0


async def sequences(session: aiohttp.ClientSession, metrics_url: str) -> int:
    """Sequences the worker knows now."""
    async with session.get(metrics_url) as answer:
        lines = (await answer.text()).splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names.WORKER_SEQUENCES)))


async def until(session: aiohttp.ClientSession, metrics_url: str, number: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await sequences(session, metrics_url) != number:  # noqa: ASYNC110  # another process can only be polled
            await asyncio.sleep(POLL_S)


async def leave_once(url: str, metrics_url: str, model: str, *, streamed: bool) -> float:
    """Seconds from closing the connection until the worker holds no sequence."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": streamed}
    async with aiohttp.ClientSession() as watch, aiohttp.ClientSession() as client:
        request = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await until(watch, metrics_url, 1)
        await asyncio.sleep(0.3)  # well into its decode
        left_s = time.perf_counter()
        if streamed:
            (await request).close()
        else:
            request.cancel()
        await until(watch, metrics_url, 0)
        return time.perf_counter() - left_s


async def measure(url: str, metrics_url: str, model: str, rounds: int) -> None:
    for streamed in (True, False):
        taken_ms = sorted([1000 * await leave_once(url, metrics_url, model, streamed=streamed) for _ in range(rounds)])
        kind = "streamed" if streamed else "whole"
        print(f"{kind:9} median {statistics.median(taken_ms):6.1f} ms   max {taken_ms[-1]:6.1f} ms   of {rounds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the gateway, e.g. http://127.0.0.1:8000")
    parser.add_argument("metrics_url", help="of the one worker, e.g. http://127.0.0.1:9100/metrics")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    asyncio.run(measure(asked.url, asked.metrics_url, asked.model, asked.rounds))


if __name__ == "__main__":
    main()
