"""bench.stack: what of the caller's environment reaches a stack that is measured, and what a client must know of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bench.openai_stream import BenchFailed
from bench.stack import ModelFacts, inherited_environ, metric, model_facts, running_stack, samples


def test_a_stack_takes_the_callers_model_and_none_of_its_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEMESH_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("PHASEMESH_ITL_TARGET_MS", "7")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    environ = inherited_environ()
    assert environ["PHASEMESH_CACHE_DIR"] == "/somewhere"
    assert not {"PHASEMESH_ITL_TARGET_MS", "OTEL_EXPORTER_OTLP_ENDPOINT"} & environ.keys()
    assert "PATH" in environ


@pytest.mark.parametrize(("generation", "expected"), [(None, [2]), ({"eos_token_id": [7, 8]}, [7, 8])])
def test_the_models_facts_are_those_of_the_directory_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: dict[str, object] | None, expected: list[int]
) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 99, "eos_token_id": 2}))
    if generation:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    monkeypatch.setenv("PHASEMESH_MODEL", str(directory))
    assert model_facts() == ModelFacts("tiny", 99, expected)
    monkeypatch.setenv("PHASEMESH_MODEL_NAME", "named")
    assert model_facts().model == "named"


def test_a_metric_is_the_sum_of_its_samples_with_the_label_and_an_unknown_one_is_an_error() -> None:
    exported = """# TYPE pages gauge
pages{state="free",worker="a"} 3.0
pages{state="free",worker="b"} 4.0
pages{state="in_use",worker="b"} 5.0
pages_total{state="free"} 100.0
# TYPE empty counter
"""
    with serving_text(exported) as url:
        assert samples(url, "pages")['{state="in_use",worker="b"}'] == 5.0
        assert metric(url, "pages", 'state="free"') == 7.0
        assert metric(url, "empty") == 0.0
        with pytest.raises(BenchFailed, match=r"exports no page$"):
            metric(url, "page")


@contextmanager
def serving_text(text: str) -> Iterator[str]:
    """The /health URL of a server whose /metrics says that."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/health"
        finally:
            server.shutdown()
            thread.join()


def test_a_stack_that_cannot_start_says_why() -> None:
    with (
        pytest.raises(BenchFailed, match="PHASEMESH_WORKERS='0': at least 1"),
        running_stack(["--simulate"], {"WORKERS": "0"}),
    ):
        pass
