"""A worker without a model: everything but the forward pass is real. `phasemesh up --simulate`.

It is a runner behind the executor's own port, so plans, leases, sequences, residency, reports and cancels are those of
every worker; so are copies, pulls and tiers, of pages whose few bytes depend on the prefix (simulated_kv.py). A step
takes what step_cost.py predicts; tokens depend on (seed, choice, output position) alone, so a client can tell each of
them beforehand. A sequence whose pages are not its own ends in an error. Imports no torch and reads no weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from gpu_worker.model_config import DecoderConfig, context_limit, load_decoder_config
from gpu_worker.model_port import Sampled, StepOutput
from gpu_worker.randomness import uniforms
from gpu_worker.sequences import LiveSequence
from gpu_worker.simulated_kv import SimulatedKv
from gpu_worker.step_batch import StepBatch
from gpu_worker.step_cost import StepCost
from gpu_worker.transfer.port import KvPages
from wire.errors import ConfigInvalid
from wire.ids import UNIT_TOKENS
from wire.plan import ModelCard, PageCopy
from wire.sampling import TokenLogprobs

log = logging.getLogger("gpu_worker.simulated_runner")

REVISION = "simulated"
"""Of every simulated model: a scheduler refuses a cell where real and simulated workers would mix."""
DEFAULT_PAGE_SIZE = 64
"""As of the CPU's attention backends."""
KV_DTYPE = "float32"
_KV_ELEMENT_BYTES = 4


class TokenSource:
    """Draws evenly from a vocabulary less its EOS ids: a sequence ends at max_tokens or at a stop id of its own."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._eos = sorted({token for token in eos_token_ids if token < vocab_size})
        self._count = vocab_size - len(self._eos)
        self.logprob = -math.log(self._count)
        """Of every token that may be drawn."""

    def tokens(self, seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Output token `positions[i]` of choice `choices[i]` of a request with `seeds[i]`, for each i."""
        return [self._nth(int(u * self._count)) for u in uniforms(seeds, choices, positions)]

    def _nth(self, token: int) -> int:
        for eos in self._eos:
            if token >= eos:
                token += 1
        return token


class SimulatedRunner:
    """Implements gpu_worker.model_port.ModelRunner. `now` and `sleep` in seconds."""

    def __init__(
        self,
        card: ModelCard,
        cost: StepCost,
        *,
        num_pages: int,
        page_size: int,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.card = card
        self.num_pages = num_pages
        self.page_size = page_size
        self._kv = SimulatedKv(
            card.kv_dtype, num_pages=num_pages, page_size=page_size, max_positions=card.max_model_len
        )
        self.kv: KvPages | None = self._kv.pages
        self._cost = cost
        self._source = TokenSource(card.vocab_size, card.eos_token_ids)
        self._now = now
        self._sleep = sleep

    def compute_thread(self) -> AbstractContextManager[object]:
        return nullcontext()

    def step(self, batch: StepBatch, sampling: Sequence[LiveSequence]) -> StepOutput:
        """Draw the next tokens, and return when the step's predicted time is over: drawing is part of it."""
        ends_s = self._now() + self._cost.batch_us(batch) * 1e-6
        tokens = self._source.tokens(
            [sequence.sampling.seed for sequence in sampling],
            [sequence.choice for sequence in sampling],
            [sequence.num_output_tokens for sequence in sampling],
        )
        self._kv.write(batch)
        sampled = [self._sampled(token, sequence) for token, sequence in zip(tokens, sampling, strict=True)]
        left_s = ends_s - self._now()
        if left_s > 0:
            self._sleep(left_s)
        return StepOutput(sampled, sample_us=0)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._kv.copy(copies)

    def _sampled(self, token: int, sequence: LiveSequence) -> Sampled:
        """No token at the end of a prefill, where what was reused is seen, if it is not the sequence's own KV."""
        ends_prefill = not sequence.num_output_tokens or len(sequence.token_ids) - sequence.num_computed > 1
        wrong = self._kv.first_wrong(sequence) if ends_prefill else None
        if wrong is not None:
            page = sequence.block_table[wrong // self.page_size]
            what = {"request": sequence.request_id, "position": wrong, "page": page, "computed": sequence.num_computed}
            log.error("a sequence's KV is not its own", extra=what)
            return Sampled(None)
        return Sampled(token, self._logprobs(sequence))

    def _logprobs(self, sequence: LiveSequence) -> TokenLogprobs | None:
        """Every token is as likely: the lowest ids stand for the likeliest."""
        count = sequence.sampling.logprobs
        if count is None:
            return None
        return TokenLogprobs(self._source.logprob, list(range(count)), [self._source.logprob] * count)


def open_simulated(
    model_dir: Path,
    cost: StepCost,
    *,
    page_size: int | None,
    num_pages: int | None,
    kv_memory_bytes: int,
    max_model_len: int | None,
    name: str,
) -> SimulatedRunner:
    """A runner with the card of the model in `model_dir`, whose weights are not touched.

    page_size: tokens, a multiple of 16; None: DEFAULT_PAGE_SIZE. num_pages None: as many as kv_memory_bytes would hold
    in float32. Raises ModelUnsupported or ConfigInvalid as for the real model.
    """
    config = load_decoder_config(model_dir)
    size = page_size or DEFAULT_PAGE_SIZE
    if size % UNIT_TOKENS:
        raise ConfigInvalid(
            f"PHASEMESH_KV_PAGE_SIZE={size}: not a multiple of {UNIT_TOKENS}", param="PHASEMESH_KV_PAGE_SIZE"
        )
    page_bytes = _page_bytes(config, size)
    pages = kv_memory_bytes // page_bytes if num_pages is None else num_pages
    if pages < 2:
        raise ConfigInvalid(
            f"PHASEMESH_KV_MEMORY_MB: {pages} KV pages of {page_bytes} bytes each; at least 2 are needed",
            param="PHASEMESH_KV_MEMORY_MB",
        )
    card = ModelCard(
        name=name,
        revision=REVISION,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=context_limit(config, max_model_len),
        eos_token_ids=config.eos_token_ids,
        kv_dtype=KV_DTYPE,
    )
    return SimulatedRunner(card, cost, num_pages=pages, page_size=size)


def _page_bytes(config: DecoderConfig, page_size: int) -> int:
    """K and V of every layer."""
    return 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim * _KV_ELEMENT_BYTES
