"""From what a client saw to figures; pure. Times are seconds of one monotonic clock.

    due ── sent ── headers ── token event ── token event ── … ── token event ── end
    └───────────── TTFT ──────┘└─── ITL ────┘
    └──────────────────────────────── E2E ──────────────────────────────────────┘
                               └────────── TPOT × (output tokens − 1) ─────────┘   (to the last token event)

A latency runs from the instant a request was due, so a client or a server that falls behind cannot hide it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Result(StrEnum):
    OK = "ok"
    REJECTED = "rejected"
    """The server refused it at the door: HTTP 429 or 503."""
    ERROR = "error"
    """Any other status, an error in the stream, a stream cut short, a timeout, no connection."""
    DROPPED = "dropped"
    """Never sent: the client had its most requests in flight already."""


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it."""

    due_s: float
    sent_s: float
    end_s: float
    result: Result
    reason: str = ""
    """Why it is not OK, in few distinct words: `HTTP 429`, `stream cut short`."""
    detail: str = ""
    """The server's own message about it."""
    token_event_times_s: list[float] = field(default_factory=list)
    """Receipt of each event that carried output."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """The three counts are the server's own (`usage`), None where it gave none."""

    @property
    def output_tokens(self) -> int:
        return len(self.token_event_times_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.token_event_times_s[0] - self.due_s if self.token_event_times_s else None

    @property
    def itls_s(self) -> list[float]:
        times = self.token_event_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens or two events."""
        times = self.token_event_times_s
        if len(times) < 2 or self.output_tokens < 2:
            return None
        return (times[-1] - times[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; None asks nothing."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Kept by 99 % of the request's own gaps: a mean would forgive a stall."""

    def met_by(self, outcome: Outcome) -> bool:
        if outcome.result is not Result.OK:
            return False
        if self.ttft_ms is not None and (outcome.ttft_s is None or 1000 * outcome.ttft_s > self.ttft_ms):
            return False
        gaps = outcome.itls_s
        return self.itl_ms is None or not gaps or 1000 * percentile(sorted(gaps), 0.99) <= self.itl_ms


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one latency, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Goodput:
    met: int
    share: float
    """Of all requests: those rejected, failed or dropped are misses."""
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What one server did in one run."""

    duration_s: float
    results: dict[Result, int]
    reasons: dict[str, int]
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None
    """Latencies are those of OK requests; None where there is no sample."""
    tokens_counted_from: str
    """usage, events, mixed (some requests each), or none: nothing came."""
    output_tokens: int
    prompt_tokens: int | None
    """Tokens of OK requests; None where a request came without usage."""
    output_tok_per_s: float
    total_tok_per_s: float | None
    requests_per_s: float
    prefix_hit_share: float | None
    """Cached ÷ prompt tokens, over the requests whose usage says both."""
    goodput: Goodput | None
    """None without an SLO."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, interpolated linearly between ranks as numpy does. `share` in [0, 1]."""
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def percentiles_ms(values_s: Iterable[float]) -> Percentiles | None:
    ordered = sorted(1000 * value for value in values_s)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def figures(outcomes: Sequence[Outcome], duration_s: float, slo: Slo) -> Figures:
    ok = [o for o in outcomes if o.result is Result.OK]
    counts = Counter(o.result for o in outcomes)
    output_tokens = sum(o.output_tokens for o in ok)
    prompt_tokens = _sum_if_all(o.prompt_tokens for o in ok)
    ttfts = (o.ttft_s for o in ok)
    tpots = (o.tpot_s for o in ok)
    return Figures(
        duration_s=duration_s,
        results={result: counts[result] for result in Result},
        reasons=dict(Counter(o.reason for o in outcomes if o.result is not Result.OK).most_common()),
        ttft_ms=percentiles_ms(t for t in ttfts if t is not None),
        itl_ms=percentiles_ms(gap for o in ok for gap in o.itls_s),
        tpot_ms=percentiles_ms(t for t in tpots if t is not None),
        e2e_ms=percentiles_ms(o.e2e_s for o in ok),
        tokens_counted_from=_source(ok),
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        output_tok_per_s=_per_s(output_tokens, duration_s),
        total_tok_per_s=None if prompt_tokens is None else _per_s(prompt_tokens + output_tokens, duration_s),
        requests_per_s=_per_s(len(ok), duration_s),
        prefix_hit_share=_prefix_hit_share(ok),
        goodput=_goodput(outcomes, duration_s, slo),
    )


def _goodput(outcomes: Sequence[Outcome], duration_s: float, slo: Slo) -> Goodput | None:
    if slo == Slo():
        return None
    met = sum(map(slo.met_by, outcomes))
    return Goodput(met, met / len(outcomes) if outcomes else 0.0, _per_s(met, duration_s))


def _source(ok: Sequence[Outcome]) -> str:
    sources = {"events" if o.completion_tokens is None else "usage" for o in ok}
    return "mixed" if len(sources) > 1 else next(iter(sources), "none")


def _sum_if_all(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _prefix_hit_share(ok: Sequence[Outcome]) -> float | None:
    known = [(o.cached_tokens, o.prompt_tokens) for o in ok if o.cached_tokens is not None and o.prompt_tokens]
    prompt_tokens = sum(prompt or 0 for _, prompt in known)
    return sum(cached or 0 for cached, _ in known) / prompt_tokens if prompt_tokens else None


def _per_s(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0
