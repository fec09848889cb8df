"""A deterministic tiny model over a real KV tensor: the executor, the session and the scheduler are tested on it.

The "KV" of a token is (token id, position), K and V of each of three layers that must agree, written through
slot_mapping and read back through the block table.
Logits are random numbers seeded by a hash of the whole history as READ BACK, so one wrong slot, position, page copy
or context length anywhere gives other tokens than `reference_output`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from gpu_worker.model_port import StepOutput
from gpu_worker.sampler import sample
from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.port import KvFormat, KvPages
from gpu_worker.transfer.shared_pool import SharedPool
from wire.ids import UNIT_TOKENS
from wire.plan import ModelCard, PageCopy

EOS = 0
NUM_LAYERS = 3
CARD = ModelCard(
    name="fake",
    revision="r1",
    architecture="FakeForCausalLM",
    vocab_size=512,
    max_model_len=4096,
    eos_token_ids=(EOS,),
    kv_dtype="int64",
)


class FakeRunner:
    """Implements gpu_worker.model_port.ModelRunner. `before_forward` may block or raise, in the compute thread."""

    def __init__(self, card: ModelCard = CARD, *, num_pages: int = 64, page_size: int = 16) -> None:
        self.card = card
        self.num_pages = num_pages
        self.page_size = page_size
        self.before_forward: Callable[[StepBatch], None] = lambda batch: None
        self.nan_after: set[int] = set()
        """Rows whose last token is one of these get NaN logits."""
        shape = (NUM_LAYERS, num_pages, page_size, 1, 1)
        pool = SharedPool(num_pages, 8 * math.prod(shape))
        self._keys, self._values = (  # tokens, positions
            torch.frombuffer(pool.buffer, dtype=torch.int64, offset=offset, count=math.prod(shape)).view(shape)
            for offset in (pool.layout.keys, pool.layout.values)
        )
        kv_format = KvFormat(card.kv_dtype, NUM_LAYERS, 1, 1, element_bytes=8, unit_tokens=UNIT_TOKENS)
        self.kv: KvPages | None = HostPages(kv_format, page_size, pool)

    def compute_thread(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def step(self, batch: StepBatch, sampling: Sequence[LiveSequence]) -> StepOutput:
        return StepOutput(sample(self.forward(batch), sampling, self.card), sample_us=0)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.before_forward(batch)
        slots = torch.tensor(batch.slot_mapping)
        self._keys.view(NUM_LAYERS, -1)[:, slots] = torch.tensor(batch.token_ids)
        self._values.view(NUM_LAYERS, -1)[:, slots] = torch.tensor(batch.positions)
        logits = torch.empty(len(batch.logit_rows), self.card.vocab_size)
        wanted = {row: i for i, row in enumerate(batch.logit_rows)}
        row = 0
        for query_len, context_len, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
            keys, values = (half[:, table].view(NUM_LAYERS, -1) for half in (self._keys, self._values))
            history = torch.stack((keys, values), dim=2)  # [layers, pages * page_size, 2]
            for position in range(context_len - query_len, context_len):
                if row in wanted:
                    logits[wanted[row]] = self._logits(history[:, : position + 1])
                row += 1
        return logits

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            for half in (self._keys, self._values):
                half[:, copy.target_page, : copy.num_slots] = half[:, copy.source_page, : copy.num_slots]

    def _logits(self, history: torch.Tensor) -> torch.Tensor:
        first = history[0]
        if int(first[-1, 0]) in self.nan_after:
            return torch.full((self.card.vocab_size,), torch.nan)
        assert torch.equal(history, first.expand_as(history)), "the layers are not of one history"
        return history_logits([(int(token), int(position)) for token, position in first], self.card.vocab_size)


def history_logits(history: Sequence[tuple[int, int]], vocab_size: int) -> torch.Tensor:
    """float32 [vocab_size] for a history of (token, position)."""
    digest = hashlib.sha256(repr(list(history)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(vocab_size, generator=generator) * 3


def reference_output(prompt: Sequence[int], num_tokens: int, *, card: ModelCard = CARD) -> list[int]:
    """Greedy output of an unbroken run: up to num_tokens, EOS included."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        history = [(token, position) for position, token in enumerate(tokens)]
        tokens.append(int(history_logits(history, card.vocab_size).argmax()))
        if tokens[-1] in card.eos_token_ids:
            break
    return tokens[len(prompt) :]
