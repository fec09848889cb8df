"""`phasemesh bench` against a whole mesh with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.test_bench_command import bench
from tests.mesh.stack import MeshStack
from tests.model.checkpoints import make_checkpoint


async def test_a_tiny_stack_is_measured(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama_gqa_tied", max_position_embeddings=4096)
    file = tmp_path / "report.json"
    with MeshStack(model, tmp_path) as stack:
        options = ("--url", stack.url, "--requests", "12", "--scale", "0.1", "--json", str(file))
        closed = await bench("--concurrency", "3", *options)
        assert closed.status == 0, closed.err
        (target,) = json.loads(file.read_text())["targets"]
        assert target["results"] == {"ok": 12, "rejected": 0, "error": 0, "dropped": 0}, target["reasons"]
        assert target["model"] == "m" and target["tokens_counted_from"] == "usage"
        assert 0.0 < target["prefix_hit_share"] < 1.0, "conversations share a system prompt"
        assert target["itl_ms"]["count"] == target["output_tokens"] - 12, "every token is an event of its own"

        opened = await bench("--rate", "50", "--workload", "rag", *options)
        assert opened.status == 0, opened.err
        (target,) = json.loads(file.read_text())["targets"]
        assert target["results"]["ok"] == 12, target["reasons"]
        stack.wait_no_page_in_use()
