"""gpu_worker/sampler.py for all rows of a step at once, on the device, without making the host wait.

The order and the draws are the same (design §6): greedy tokens are equal, drawn ones too unless a row's uniform number
falls within float64's rounding of a boundary between two tokens. Rows with a bias or a penalty are adjusted one by
one; everything else is a fixed number of kernels however many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.randomness import uniforms
from gpu_worker.sampler import adjusted, changes_logits
from gpu_worker.sequences import LiveSequence
from gpu_worker.upload import upload
from wire.plan import ModelCard

ROWS_AT_ONCE = 64
"""Rows drawn together; in float64 a row of 128,000 tokens is 1 MB, and there are about ten such temporaries."""
_RANKED_TOKENS = 1024
"""top-p after a top-k of at most this many ranks those alone; otherwise the vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits and whose it is."""

    sequence: LiveSequence
    num_output_tokens: int
    """Before this draw. The sequence itself may not know its last token yet."""

    def masked_ids(self, card: ModelCard) -> list[int]:
        """Tokens that end the sequence, while it is too short to."""
        if self.num_output_tokens >= self.sequence.sampling.min_tokens:
            return []
        return [token for token in self.sequence.stop_ids(card) if token < card.vocab_size]


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """What was drawn, still on the device."""

    tokens: torch.Tensor  # int64 [num_rows]
    sound: torch.Tensor  # bool [num_rows]; False: the row holds no usable number, and its token means nothing
    logprob_rows: list[int]
    logprobs: torch.Tensor | None
    """float64 [len(logprob_rows), 1 + 2 k]: the token's own, the k likeliest ids, theirs."""


def sample_on_device(logits: torch.Tensor, rows: Sequence[SampleRow], card: ModelCard) -> DeviceSamples:
    """logits: float32 [len(rows), vocab_size], at least one row; read only."""
    best, tokens = logits.max(dim=-1)  # of equal maxima the first; NaN comes through
    sound = torch.isfinite(best)
    masked = [row.masked_ids(card) for row in rows]
    worked = [
        i
        for i, row in enumerate(rows)
        if masked[i] or row.sequence.sampling.temperature > 0 or changes_logits(row.sequence.sampling)
    ]
    for start in range(0, len(worked), ROWS_AT_ONCE):
        block = worked[start : start + ROWS_AT_ONCE]
        index = upload(block, torch.int64, logits.device)
        values = logits.index_select(0, index).double()
        for place, i in enumerate(block):
            if masked[i] or changes_logits(rows[i].sequence.sampling):
                adjusted(values[place], rows[i].sequence, masked[i])
        block_best, drawn = _draw(values, [rows[i] for i in block])
        tokens.index_copy_(0, index, drawn)
        sound.index_copy_(0, index, sound.index_select(0, index) & torch.isfinite(block_best))
    logprob_rows = [i for i, row in enumerate(rows) if row.sequence.sampling.logprobs is not None]
    logprobs = _logprobs(logits, tokens, rows, logprob_rows) if logprob_rows else None
    return DeviceSamples(tokens, sound, logprob_rows, logprobs)


def _draw(values: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Adjusted logits, float64 [num_rows, vocab_size] → their maxima and a token of each row."""
    best, likeliest = values.max(dim=-1)
    params = [row.sequence.sampling for row in rows]
    if all(p.temperature == 0 for p in params):
        return best, likeliest
    draws = uniforms(
        [p.seed for p in params],
        [row.sequence.choice for row in rows],
        [row.num_output_tokens for row in rows],
    )
    columns = upload(
        [[p.temperature or 1.0 for p in params], draws, [p.min_p for p in params]],
        torch.float64,
        values.device,
    )
    temperature, uniform, min_p = columns[:, :, None].unbind()
    probs = _filtered((values - best[:, None]) / temperature, rows)
    probs = probs.where(probs >= min_p * probs.amax(-1, keepdim=True), 0.0)
    # Inverse CDF in token-id order. A parallel prefix sum may step back by a rounding, so not every place beyond the
    # target is a token that was kept: hence the second condition, and the likeliest token where none is left.
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    beyond = (cdf > target) & (probs > 0)
    first = beyond.to(torch.uint8).argmax(-1)
    greedy = upload([p.temperature == 0 for p in params], torch.bool, values.device)
    return best, likeliest.where(greedy | ~beyond.any(-1), first)


def _filtered(scaled: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Probabilities after top-k and top-p, 0 for what they drop. scaled: float64 [num_rows, vocab_size], spoiled."""
    params = [row.sequence.sampling for row in rows]
    vocab_size = scaled.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    if cut := [i for i, k in enumerate(top_k) if k < vocab_size]:
        index, counts = _rows_and_counts(cut, [top_k[i] for i in cut], scaled.device)
        part = scaled.index_select(0, index)
        ranked = part.topk(max(top_k[i] for i in cut)).values
        kept = _largest(part, counts, ranked.gather(1, counts - 1))
        scaled.index_copy_(0, index, part.where(kept, -math.inf))
    probs = scaled.softmax(-1)
    nuclear = [i for i, p in enumerate(params) if p.top_p < 1.0]
    few = [i for i in nuclear if top_k[i] <= _RANKED_TOKENS]
    many = [i for i in nuclear if top_k[i] > _RANKED_TOKENS]
    for members, num_ranked in ((few, max((top_k[i] for i in few), default=0)), (many, vocab_size)):
        if not members:
            continue
        index, most = _rows_and_counts(members, [top_k[i] for i in members], scaled.device)
        top_p = upload([[params[i].top_p] for i in members], torch.float64, scaled.device)
        part = probs.index_select(0, index)
        ranked = part.sort(descending=True).values if num_ranked == vocab_size else part.topk(num_ranked).values
        size = torch.minimum((ranked.cumsum(-1) < top_p).sum(-1, keepdim=True) + 1, most)
        kept = _largest(part, size, ranked.gather(1, size - 1))
        probs.index_copy_(0, index, part.where(kept, 0.0))
    return probs


def _rows_and_counts(members: list[int], counts: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] and [n, 1]."""
    both = upload([members, counts], torch.int64, device)
    return both[0], both[1][:, None]


def _largest(values: torch.Tensor, counts: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Which are each row's counts [n, 1] largest; of those level with the last, thresholds [n, 1], the lowest ids."""
    above, level = values > thresholds, values == thresholds
    wanted = counts - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= wanted))


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SampleRow], members: list[int]
) -> torch.Tensor:
    """See DeviceSamples.logprobs; k is the most any of these rows wants."""
    most = min(max(rows[i].sequence.sampling.logprobs or 0 for i in members), logits.shape[-1])
    index = upload(members, torch.int64, logits.device)
    logprobs = logits.index_select(0, index).double().log_softmax(-1)
    chosen = logprobs.gather(1, tokens.index_select(0, index)[:, None])
    if most == 0:
        return chosen
    top = logprobs.sort(descending=True, stable=True)  # of equal ones the lowest ids first
    return torch.cat((chosen, top.indices[:, :most].double(), top.values[:, :most]), dim=-1)
