"""/live, /health, /metrics over real sockets, and the probe that containers run against them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from observability import probe
from observability.health_server import serve_health


async def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and text."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def test_readiness_follows_the_service_and_names_the_reason() -> None:
    reason: str | None = "no worker"
    async with serve_health("127.0.0.1", 0, ready=lambda: reason, registry=CollectorRegistry()) as port:
        url = f"http://127.0.0.1:{port}"
        assert (await get(f"{url}/live"))[0] == 200
        status, _, text = await get(f"{url}/health")
        assert (status, "no worker" in text) == (503, True)
        reason = None
        assert (await get(f"{url}/health"))[0] == 200
        assert (await get(f"{url}/nothing"))[0] == 404


async def test_metrics_speak_the_format_the_scraper_accepts() -> None:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry).inc(3)
    async with serve_health("127.0.0.1", 0, ready=lambda: None, registry=registry) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        status, kind, text = await get(url)
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        assert "steps_total 3.0" in text
        status, kind, text = await get(url, Accept="application/openmetrics-text; version=1.0.0")
        assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")


async def test_the_port_is_free_again_after_closing_and_refused_while_taken() -> None:
    registry = CollectorRegistry()
    async with serve_health("127.0.0.1", 0, ready=lambda: None, registry=registry) as port:
        with pytest.raises(OSError, match=str(port)):
            async with serve_health("127.0.0.1", port, ready=lambda: None, registry=registry):
                pass
    async with serve_health("127.0.0.1", port, ready=lambda: None, registry=registry) as again:
        assert again == port


async def test_the_probe_exits_by_the_status() -> None:
    async with serve_health("127.0.0.1", 0, ready=lambda: "draining", registry=CollectorRegistry()) as port:
        url = f"http://127.0.0.1:{port}"
        assert await asyncio.to_thread(probe.probe, f"{url}/live") is None
        problem = await asyncio.to_thread(probe.probe, f"{url}/health")
        assert problem is not None
        assert "503" in problem
        assert "draining" in problem
        command = [sys.executable, "-m", "observability.probe", f"{url}/live"]
        assert (await asyncio.to_thread(subprocess.run, command, timeout=30)).returncode == 0


def test_the_probe_fails_on_a_dead_port_and_a_silent_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert probe.main([f"http://127.0.0.1:{unused.getsockname()[1]}/live"]) == 1
    assert "ConnectionRefusedError" in capsys.readouterr().err
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert probe.main([f"http://127.0.0.1:{silent.getsockname()[1]}/live"]) == 1
    assert "TimeoutError" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["http://a", "b"], ["not a url"], ["https://example.test/"], ["http://h:port/"]])
def test_the_probe_refuses_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(argv) == 2
    assert capsys.readouterr().err


def test_the_probe_imports_only_the_standard_library() -> None:
    code = (
        "import sys, observability.probe\n"
        "assert not {'aiohttp', 'prometheus_client', 'grpc', 'opentelemetry', 'wire'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
