"""`phasemesh bench` as a user runs it, against scripted servers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from phasemesh.ports import free_port
from tests.bench.sse_server import ANSWER, Refuse, serve

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


async def bench(*arguments: str, **environ: str) -> Done:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PHASEMESH_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "phasemesh", "bench", *arguments),
        env=clean | environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


async def refused(*arguments: str, **environ: str) -> str:
    done = await bench(*arguments, **environ)
    assert done.status != 0 and done.out == ""
    assert done.err.startswith("phasemesh: ") and done.err.count("\n") == 1, done.err
    return done.err


async def test_closed_loop_with_a_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    async with serve() as server:
        done = await bench(
            *("--url", server.url, "--concurrency", "2", "--requests", "6", "--json", str(file)),
            *("--slo-ttft-ms", "60000", "--api-key", "secret-key"),
        )
    assert done.status == 0, done.err
    assert len(server.bodies) == 2 + 6, "two warm-ups"
    assert {body["model"] for body in server.bodies} == {"scripted"}
    assert server.most_running <= 2
    assert set(server.keys) == {"Bearer secret-key"}
    assert "closed loop, 2 client(s)" in done.out and "TTFT" in done.out
    report = json.loads(file.read_text())
    (target,) = report["targets"]
    assert target["results"]["ok"] == 6, "warm-ups are not measured"
    assert (target["output_tokens"], target["prefix_hit_share"], target["tokens_counted_from"]) == (18, 0.4, "usage")
    assert target["goodput"]["share"] == 1.0
    assert report["settings"]["concurrency"] == 2 and report["settings"]["seed"] == 0
    assert "secret-key" not in file.read_text()


async def test_open_loop_counts_rejections_as_misses() -> None:
    served = 0

    def every_other(body: object) -> tuple[object, ...]:
        nonlocal served
        served += 1
        return (Refuse(429),) if served % 2 else ANSWER

    async with serve(every_other) as server:  # type: ignore[arg-type]
        options = ("--rate", "200", "--requests", "10", "--warm-up", "0", "--slo-ttft-ms", "60000")
        done = await bench("--url", server.url, *options)
    assert done.status == 0, done.err
    assert "5 ok, 5 rejected" in done.out and "HTTP 429 x5" in done.out
    assert "50.0% of all kept the SLO" in done.out


async def test_compare_asks_both_the_same_in_one_run(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    async with serve() as first, serve() as second:
        done = await bench(
            *("--concurrency", "1", "--requests", "4", "--seed", "7", "--json", str(file)),
            *("--url", first.url, "--compare", second.url, "--api-key", "for-the-first"),
        )
    assert done.status == 0, done.err
    assert first.bodies == second.bodies and len(first.bodies) == 2 + 4
    assert set(first.keys) == {"Bearer for-the-first"} and set(second.keys) == {None}, "a key is for its own server"
    assert "A ÷ B" in done.out
    report = json.loads(file.read_text())
    assert [t["url"] for t in report["targets"]] == [first.url, second.url]
    assert report["ratios"]["prefix_hit_share"] == 1.0


async def test_a_file_at_its_own_times(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    lines = ({"prompt": f"p{i}", "max_tokens": 3, "at_s": 0.02 * i} for i in range(3))
    file.write_text("\n".join(map(json.dumps, lines)))
    async with serve() as server:
        done = await bench("--url", server.url, "--workload", str(file), "--warm-up", "1")
    assert done.status == 0, done.err
    assert [body["prompt"] for body in server.bodies] == ["Hello", "p0", "p1", "p2"]
    assert "open loop, at the times in the file" in done.out


async def test_the_seed_decides_what_is_asked() -> None:
    async def asked(seed: str) -> list[object]:
        async with serve() as server:
            await bench("--url", server.url, "--concurrency", "1", "--requests", "3", "--seed", seed)
            return [body["messages"] for body in server.bodies]

    assert await asked("1") == await asked("1") != await asked("2")


async def test_a_server_that_serves_nothing_fails_at_the_warm_up() -> None:
    async with serve(lambda body: [Refuse(400)]) as server:
        said = await refused("--url", server.url, "--concurrency", "1")
        assert "no warm-up request came through (HTTP 400: not now)" in said
        done = await bench("--url", server.url, "--concurrency", "1", "--requests", "2", "--warm-up", "0")
    assert done.status == 1 and "0 ok, 2 error" in done.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give --rate (open loop) or --concurrency (closed loop)"),
        (("--rate", "1", "--concurrency", "1"), "not both"),
        (("--rate", "0"), "--rate '0.0': more than 0"),
        (("--rate", "fast"), "--rate 'fast': not a number"),
        (("--concurrency", "0"), "--concurrency '0': at least 1"),
        (("--rate", "1", "--workload", "poetry"), "--workload 'poetry': one of chat, rag, reasoning, agent, or a file"),
        (("--rate", "1", "--workload", "none.jsonl"), "--workload 'none.jsonl': No such file"),
        (("--rate", "1", "--json", "/no/such/dir/r.json"), "--json '/no/such/dir/r.json': cannot be written"),
        (("--rate", "1", "--url", "localhost:8000"), "--url 'localhost:8000': not an http:// or https:// URL"),
        (("--rate", "1", "--compare", "x"), "--compare 'x': not an http:// or https:// URL"),
        (("--rate", "1"), "nothing listens at"),
    ],
)
async def test_an_error_is_one_line_that_names_its_cause(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    nobody = {"PHASEMESH_PORT": str(free_port(set())), "PHASEMESH_STATE_DIR": str(tmp_path)}
    assert expected in await refused(*arguments, **nobody)
