"""Draws one token per row of logits.

Order (design §6): logit bias and min_tokens mask → penalties → temperature → top-k → top-p → min-p → draw.
A row's token is a function of its logits, its parameters and (seed, choice, output position): rows are worked
on one by one, so batch mates change nothing. Ties always go to the lowest token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_worker.model_port import Sampled
from gpu_worker.randomness import uniform
from gpu_worker.sequences import LiveSequence
from wire.plan import ModelCard
from wire.sampling import SamplingParams, TokenLogprobs

FindLargest: TypeAlias = Callable[[torch.Tensor], tuple[list[float], list[int]]]
"""Of values [rows, columns]: each row's largest and the column where it first is; if it has NaN, NaN and any."""


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """A row whose token is drawn, or found among logits with bias, mask and penalties."""

    logits: torch.Tensor
    """float32 [vocab_size], contiguous, as they came."""
    sequence: LiveSequence
    """Whose parameters and tokens count."""
    masked: Sequence[int]
    """Tokens that may not come."""
    uniform: float
    """In [0, 1)."""


Draw: TypeAlias = Callable[[Sequence[DrawnRow]], list[int | None]]
"""A token of each row, None where the largest logit is not finite, or any is NaN."""

_NUCLEUS_GUESSES = (256, 4096)
"""Likeliest tokens looked at first for top-p; the whole vocabulary is sorted only when they do not reach p."""


def find_largest(values: torch.Tensor) -> tuple[list[float], list[int]]:
    """Implements FindLargest, on any device."""
    best, columns = values.max(dim=-1)  # lets NaN through; of equal maxima the first
    return best.tolist(), columns.tolist()


def sample(
    logits: torch.Tensor,
    sequences: Sequence[LiveSequence],
    card: ModelCard,
    largest: FindLargest = find_largest,
    draw: Draw | None = None,
) -> list[Sampled]:
    """Next token of each sequence. logits: float32 [len(sequences), vocab_size]. draw None: draw_each."""
    if not sequences:
        return []
    # One pass gives both the plain argmax and the soundness of each row.
    best, greedy = largest(logits)
    tokens: list[int | None] = [token if math.isfinite(b) else None for b, token in zip(best, greedy, strict=True)]
    drawn = [i for i, sequence in enumerate(sequences) if tokens[i] is not None and not _takes_largest(sequence, card)]
    if drawn:
        rows = [_drawn_row(logits[i], sequences[i], card) for i in drawn]
        for i, token in zip(drawn, (draw or draw_each)(rows), strict=True):
            tokens[i] = token
    return [_sampled(logits, i, token, sequences[i].sampling) for i, token in enumerate(tokens)]


def _sampled(logits: torch.Tensor, row: int, token: int | None, params: SamplingParams) -> Sampled:
    if token is None or params.logprobs is None:
        return Sampled(token)
    return Sampled(token, token_logprobs(logits[row], token, params.logprobs))


def _takes_largest(sequence: LiveSequence, card: ModelCard) -> bool:
    """The next token is the likeliest of the logits as they are."""
    params = sequence.sampling
    if params.temperature > 0 or changes_logits(params):
        return False
    return sequence.num_output_tokens >= params.min_tokens or not sequence.stop_ids(card)


def _drawn_row(logits: torch.Tensor, sequence: LiveSequence, card: ModelCard) -> DrawnRow:
    params = sequence.sampling
    masked: list[int] = []
    if sequence.num_output_tokens < params.min_tokens:
        masked = [stop_id for stop_id in sequence.stop_ids(card) if stop_id < len(logits)]
    u = uniform(params.seed, sequence.choice, sequence.num_output_tokens) if params.temperature else 0.0
    return DrawnRow(logits, sequence, masked, u)


def changes_logits(p: SamplingParams) -> bool:
    """Bias or penalties."""
    penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return penalized or bool(p.logit_bias)


def adjusted(logits: torch.Tensor, sequence: LiveSequence, masked: Sequence[int]) -> torch.Tensor:
    """Bias, mask and penalties. logits: float64 [vocab_size], owned by the caller and changed in place.

    Repetition over prompt and output as in Keskar et al., "CTRL" (2019), §4.1; presence and frequency over the
    output as in OpenAI's API: logit -= presence * (count > 0) + frequency * count.
    """
    p = sequence.sampling
    device = logits.device
    if p.logit_bias:
        ids, biases = zip(*p.logit_bias, strict=True)
        index = torch.tensor(ids, device=device)
        logits.index_add_(0, index, torch.tensor(biases, dtype=torch.float64, device=device))
    if masked:
        logits[torch.tensor(masked, device=device)] = -math.inf
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.token_ids)), device=device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if sequence.num_output_tokens and (p.presence_penalty != 0.0 or p.frequency_penalty != 0.0):
        counts = sequence.output_counts()
        used = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float64, device=device)
        logits[used] -= p.presence_penalty + p.frequency_penalty * times
    return logits


def draw_each(rows: Sequence[DrawnRow]) -> list[int | None]:
    """Implements Draw with torch, row by row: what others are tested against."""
    return [_draw(_adjusted_row(row), row.sequence.sampling, row.uniform) for row in rows]


def _adjusted_row(row: DrawnRow) -> torch.Tensor:
    """float64, of its own."""
    logits = row.logits.double()
    if row.masked or changes_logits(row.sequence.sampling):
        adjusted(logits, row.sequence, row.masked)
    return logits


def _draw(logits: torch.Tensor, p: SamplingParams, u: float) -> int | None:
    """A token of the filtered distribution over float64 logits [vocab_size]; None if all are -inf."""
    best, best_id = logits.max(dim=-1)
    if not math.isfinite(best):
        return None
    if p.temperature == 0:
        return int(best_id)
    ids, probs = filtered((logits - best) / p.temperature, p)
    # Inverse CDF in token-id order, on the host, whose float64 prefix sum is the same every time.
    cdf = probs.cpu().cumsum(0)
    total = float(cdf[-1])
    target = torch.tensor(min(u * total, math.nextafter(total, 0.0)), dtype=torch.float64)
    return int(ids[int(torch.searchsorted(cdf, target, right=True))])


def filtered(scaled: torch.Tensor, p: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids that survive top-k, top-p and min-p, ascending, and their probabilities (not renormalized).

    scaled: float64 [vocab_size], logits over temperature less their maximum. Each filter sees the renormalized
    distribution that the one before it left. Returns (ids [kept], probabilities [kept]).
    """
    if 0 < p.top_k < len(scaled):
        ids = _likeliest(scaled, p.top_k)
        probs = scaled[ids].softmax(0)
    else:
        ids = torch.arange(len(scaled), device=scaled.device)
        probs = scaled.softmax(0)
    if p.top_p < 1.0:
        kept = _nucleus(probs, p.top_p)
        ids, probs = ids[kept], probs[kept]
    if p.min_p > 0.0:
        kept = (probs >= p.min_p * probs.max()).nonzero()[:, 0]
        ids, probs = ids[kept], probs[kept]
    return ids, probs


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices, ascending, of the smallest set of likeliest tokens that reaches top_p (Holtzman et al. 2020, §3.1)."""
    for count in _NUCLEUS_GUESSES:
        if count < len(probs):
            ranked = probs.topk(count).values
            mass = ranked.cumsum(0)
            if float(mass[-1]) >= top_p:
                break
    else:
        ranked = probs.sort(descending=True).values
        mass = ranked.cumsum(0)
    size = min(int((mass < top_p).sum()) + 1, len(probs))
    return _largest(probs, size, ranked[size - 1])


def _likeliest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest values, ascending."""
    return _largest(values, count, values.topk(count).values[-1])


def _largest(values: torch.Tensor, count: int, threshold: torch.Tensor) -> torch.Tensor:
    """Indices of the `count` largest values, ascending; of those level with the last, `threshold`, the lowest."""
    above = (values > threshold).nonzero()[:, 0]
    level = (values == threshold).nonzero()[: count - len(above), 0]
    return torch.cat((above, level)).sort().values


def token_logprobs(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of a token and of the `count` likeliest, from raw logits [vocab_size]."""
    logprobs = logits.double().log_softmax(0)
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    if count > 0:
        ids = _likeliest(logprobs, min(count, len(logprobs)))
        top = logprobs[ids].sort(descending=True, stable=True)
        top_ids, top_logprobs = ids[top.indices].tolist(), top.values.tolist()
    return TokenLogprobs(float(logprobs[token]), top_ids, top_logprobs)
