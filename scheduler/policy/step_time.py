"""How long a step takes on one worker, fitted to what that worker measures; and the chunk that fits a target. Pure.

    step_us = fixed + per_token · tokens + per_pair · (chunk_pairs + PAIRS_PER_SLOT · decode_context)

| term | stands for |
|---|---|
| fixed | reading the weights once, and what a step costs whatever is in it |
| tokens | linear layers: every decode and every chunk token |
| chunk_pairs | attention of chunks: a token of a chunk attends to all before it, so the cost grows with the context |
| decode_context | attention of decodes, which read KV for one query only: dearer by slot than a chunk's by pair |

The two attentions share a factor because the context of decodes grows too evenly to tell its cost from anything else
that changes with time: fitted apart, it took the blame for whatever slowed the machine down.

No factor is negative, so a step never gets faster by more work. A sum, not the larger of a memory and a compute time: a
step of few rows is bound by memory and one of many by compute, but the change is so gradual that the sum is as near to
what is measured, and it has no corner to find (docs/adr/0007).

The fit is least squares of relative errors, over the recent steps: those with a chunk and those without are forgotten
apart, so an hour of decodes does not erase what chunks cost. A step counts for at most so much longer or shorter than
was predicted (winsorizing, Huber, "Robust Statistics", 1981, §1.7): a hiccup of ten times moves the fit by a few
percent, and a machine that did become slower is followed within some twenty steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from wire.plan import PrefillChunk, StepTiming

REMEMBERED_STEPS = 24.0
"""Steps of each kind after which one counts for 1/e."""
TRUSTED_STEPS = 8
"""Of a kind, before surprises of that kind are cut short."""
EARLY_SURPRISE = 3.0
SURPRISE = 1.5
"""A step counts as at most this many times longer, or shorter, than predicted; more while little is known."""
FIRST_CHUNK_TOKENS = 32
GROWTH = 2
"""A chunk is at most this many times the largest one measured, whatever the fit says."""
PAIRS_PER_TOKEN = 2000.0
"""Until it is measured: attention over so much context costs as much as all linear layers. Models of 100M parameters
come near; larger ones spend less on attention, so nobody is surprised by a longer step."""
ANCHOR = 0.02
"""What that guess weighs, in measured steps."""
PAIRS_PER_SLOT = 8.0
"""Of a decode's context: 7 measured with our CPU kernels. Where it is more, `fixed` adapts and takes up the rest."""
SWEEPS = 4


@dataclass(slots=True)
class StepWork:
    """What one step computes."""

    tokens: int
    """Decodes, and those of chunks."""
    chunk_tokens: int = 0
    chunk_pairs: float = 0.0
    """Query tokens of chunks × the context each attends to, summed."""
    decode_context: int = 0
    """Context of the decodes, summed."""

    @property
    def attention_pairs(self) -> float:
        return self.chunk_pairs + PAIRS_PER_SLOT * self.decode_context

    def add_chunk(self, start_pos: int, num_tokens: int) -> None:
        """A chunk of positions [start_pos, start_pos + num_tokens)."""
        self.tokens += num_tokens
        self.chunk_tokens += num_tokens
        self.chunk_pairs += num_tokens * (start_pos + 0.5 * num_tokens)


class StepTimeModel:
    """Of one worker. Times are µs."""

    def __init__(self) -> None:
        self._factors = [0.0, 0.0, 0.0]
        self._with_chunks = _RecentSteps()
        self._decodes_only = _RecentSteps()
        self._largest_chunk_tokens = FIRST_CHUNK_TOKENS // GROWTH
        self.decode_context = 0
        """Of the newest step measured."""

    def observe(self, chunks: list[PrefillChunk], timing: StepTiming) -> None:
        """Learn from a step that ran these chunks."""
        if timing.step_us <= 0 or timing.prefill_tokens != sum(chunk.num_tokens for chunk in chunks):
            return  # a clock that stood still, or the worker could not run a chunk: what it did run is not known
        ends = sum(chunk.start_pos + chunk.num_tokens for chunk in chunks)
        self.decode_context = max(0, timing.context_tokens - ends)
        work = StepWork(timing.decode_tokens, decode_context=self.decode_context)
        for chunk in chunks:
            work.add_chunk(chunk.start_pos, chunk.num_tokens)
        if work.tokens:
            self.learn(work, float(timing.step_us))

    def learn(self, work: StepWork, step_us: float) -> None:
        """Take in one measured step, of at least one token and more than no time."""
        recent = self._with_chunks if work.chunk_tokens else self._decodes_only
        predicted_us = self.predict_us(work)
        if predicted_us:
            surprise = SURPRISE if recent.count >= TRUSTED_STEPS else EARLY_SURPRISE
            step_us = min(max(step_us, predicted_us / surprise), predicted_us * surprise)
        else:
            # The first step: blame its tokens for all of it, the most careful guess for a larger one.
            self._factors[1] = step_us / (work.tokens + work.attention_pairs / PAIRS_PER_TOKEN)
        recent.add(_features(work), step_us)
        self._largest_chunk_tokens = max(self._largest_chunk_tokens, work.chunk_tokens)
        self._fit(step_us)

    def predict_us(self, work: StepWork) -> float:
        """0 while nothing was measured."""
        fixed, per_token, per_kpair = self._factors
        return fixed + per_token * work.tokens + per_kpair * 1e-3 * work.attention_pairs

    def prefill_us(self, start_pos: int, end: int, chunk_tokens: int) -> float:
        """Of prefilling positions [start_pos, end) in chunks of so many tokens, nothing beside; 0 while nothing was
        measured."""
        num_tokens = end - start_pos
        if num_tokens <= 0:
            return 0.0
        fixed, per_token, per_kpair = self._factors
        pairs = num_tokens * (start_pos + 0.5 * num_tokens)
        return fixed * -(-num_tokens // chunk_tokens) + per_token * num_tokens + per_kpair * 1e-3 * pairs

    def chunk_that_fits(self, work: StepWork, start_pos: int, target_us: float) -> int:
        """Tokens of a chunk from start_pos on that bring a step of `work` to target_us at most; 0 when it is there.

        The largest c ≥ 0 with predict(work) + per_token·c + per_pair·(start_pos·c + c²/2) ≤ target.
        """
        _, per_token, per_kpair = self._factors
        left_us = target_us - self.predict_us(work)
        if left_us <= 0:
            return 0
        per_pair = per_kpair * 1e-3
        linear = per_token + per_pair * start_pos
        # 2·left / (b + √(b² + 2·a·left)): the root of the quadratic that stays exact as per_pair goes to 0.
        divisor = linear + sqrt(linear * linear + 2.0 * per_pair * left_us)
        fits = 2.0 * left_us / divisor if divisor else inf
        return int(min(fits, GROWTH * self._largest_chunk_tokens))

    def _fit(self, step_us: float) -> None:
        """Gauss-Seidel on the normal equations, no factor below 0, from where the last fit ended."""
        factors = self._factors
        chunks, decodes = self._with_chunks, self._decodes_only
        anchor = ANCHOR * (100.0 / step_us) ** 2  # as if a step of 100,000 pairs had taken as long as the last one
        for _ in range(SWEEPS):
            for i in range(3):
                row, other = chunks.products[i], decodes.products[i]
                weight = row[i] + other[i]
                rest = chunks.targets[i] + decodes.targets[i]
                for j in range(3):
                    if j != i:
                        rest -= (row[j] + other[j]) * factors[j]
                if i == 2:
                    weight += anchor
                    rest += anchor * 1e3 * factors[1] / PAIRS_PER_TOKEN
                if weight > 0.0:
                    factors[i] = max(0.0, rest / weight)


class _RecentSteps:
    """Sums over measured steps, older ones fading: x·xᵀ/t² and x/t, for features x and times t."""

    def __init__(self) -> None:
        self.count = 0
        self.products = [[0.0] * 3 for _ in range(3)]
        self.targets = [0.0] * 3

    def add(self, features: tuple[float, float, float], step_us: float) -> None:
        self.count += 1
        keep = 1.0 - 1.0 / REMEMBERED_STEPS
        scaled = [x / step_us for x in features]
        for i, row in enumerate(self.products):
            x = scaled[i]
            self.targets[i] = self.targets[i] * keep + x
            for j, y in enumerate(scaled):
                row[j] = row[j] * keep + x * y


def _features(work: StepWork) -> tuple[float, float, float]:
    """Pairs in thousands, so that all factors are of one order."""
    return 1.0, float(work.tokens), work.attention_pairs * 1e-3
