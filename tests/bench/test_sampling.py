"""bench.sampling compares draws only after it has seen that they are the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch

from bench import sampling
from gpu_worker.kernels.library import Kernels
from gpu_worker.sampler import DrawnRow


def run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.sampling", "--rows", "1", "3", "--vocab-size", "500", "--rounds", "1"])
    threads = torch.get_num_threads()
    try:
        sampling.main()
    finally:
        torch.set_num_threads(threads)


def test_a_row_for_each_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch)
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["ms", "ratio"]
    assert len(rows) == 2 * len(sampling.PARAMETERS)
    assert all(float(row.split()[-1]) > 0 for row in rows)


def test_other_tokens_than_torchs_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(self: Kernels, rows: Sequence[DrawnRow], scratch: torch.Tensor) -> list[int | None]:
        return [None] * len(rows)

    monkeypatch.setattr(Kernels, "draw", draw)
    with pytest.raises(SystemExit, match="other tokens"):
        run(monkeypatch)
