"""The table of rotary embeddings that the CPU kernels read."""

from __future__ import annotations

import torch

from gpu_worker.rope import RotaryEmbedding, RotaryTable
from gpu_worker.rope_config import LinearRope


def test_a_table_has_the_bits_of_its_positions_however_it_grew() -> None:
    config = LinearRope(theta=10_000.0, factor=2.0)
    at_once = RotaryTable(RotaryEmbedding(config, 64, torch.device("cpu")))
    grown = RotaryTable(RotaryEmbedding(config, 64, torch.device("cpu")))
    far = at_once.reach(9000)
    for positions in (0, 1, 4096, 4097, 9000):
        cos, sin = grown.reach(positions)
        assert len(cos) >= positions and len(sin) >= positions
    for table, wanted in zip(grown.reach(9000), far, strict=True):
        assert torch.equal(table, wanted)
    cos, sin = RotaryEmbedding(config, 64, torch.device("cpu")).cos_sin(torch.arange(9000), torch.float32)
    torch.testing.assert_close(far[0][:9000], cos.flatten(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(far[1][:9000], sin.flatten(1), rtol=0, atol=1e-6)
