"""A run's figures as a terminal table and as JSON; pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.client_health import ClientHealth
from bench.measure import Figures, Percentiles, Result

SCHEMA_VERSION = 1
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
QUANTILES = ("p50", "p90", "p99", "max")
_NAMES = "AB"


@dataclass(frozen=True, slots=True)
class TargetReport:
    url: str
    model: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Report:
    started_at: str
    """ISO 8601, UTC."""
    settings: dict[str, Any]
    load: str
    """In words: `open loop, 4 requests/s`."""
    targets: Sequence[TargetReport]
    """A, and B when two were compared."""
    client: ClientHealth


def as_json(report: Report) -> str:
    """Fields are only ever added within one schema_version."""
    targets = [{"url": t.url, "model": t.model, **asdict(t.figures)} for t in report.targets]
    whole = {
        "schema_version": SCHEMA_VERSION,
        "started_at": report.started_at,
        "load": report.load,
        "settings": report.settings,
        "targets": targets,
        "ratios": ratios(report.targets[0].figures, report.targets[1].figures) if len(report.targets) == 2 else None,
        "client": asdict(report.client),
    }
    return json.dumps(whole, indent=2) + "\n"


def ratios(a: Figures, b: Figures) -> dict[str, float | None]:
    """A ÷ B of each figure; None where either lacks it or B's is 0."""
    return {name: _ratio(get(a), get(b)) for name, get in _COMPARED.items()}


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _latency(name: str, quantile: str) -> Callable[[Figures], float | None]:
    def get(figures: Figures) -> float | None:
        found: Percentiles | None = getattr(figures, name)
        return None if found is None else float(getattr(found, quantile))

    return get


_RATES: dict[str, Callable[[Figures], float | None]] = {
    "output_tok_per_s": lambda f: f.output_tok_per_s,
    "total_tok_per_s": lambda f: f.total_tok_per_s,
    "requests_per_s": lambda f: f.requests_per_s,
    "goodput.requests_per_s": lambda f: None if f.goodput is None else f.goodput.requests_per_s,
    "prefix_hit_share": lambda f: f.prefix_hit_share,
}
_COMPARED = {f"{name}.{quantile}": _latency(name, quantile) for name in LATENCIES for quantile in QUANTILES} | _RATES


def as_table(report: Report) -> str:
    compared = len(report.targets) == 2
    lines = [f"{report.settings['workload']}: {report.load}", ""]
    for name, target in zip(_NAMES, report.targets, strict=False):
        lines += _server(f"{name}  " if compared else "", target)
    if compared:
        lines += _ratio_lines(ratios(report.targets[0].figures, report.targets[1].figures))
    lines += _client_lines(report.client)
    return "\n".join(lines) + "\n"


def _server(prefix: str, target: TargetReport) -> list[str]:
    f = target.figures
    lines = [f"{prefix}{target.url}  {target.model}", f"{'ms':<6}" + "".join(f"{q:>10}" for q in QUANTILES)]
    for name in LATENCIES:
        found: Percentiles | None = getattr(f, name)
        cells = (f"{'-':>10}" if found is None else f"{getattr(found, q):>10.1f}" for q in QUANTILES)
        lines.append(f"{name.removesuffix('_ms').upper():<6}" + "".join(cells))
    total = "-" if f.total_tok_per_s is None else f"{f.total_tok_per_s:.1f}"
    lines.append(
        f"tokens/s   {f.output_tok_per_s:.1f} output, {total} with prompts"
        f"   ({f.output_tokens} output tokens, counted from {f.tokens_counted_from}, in {f.duration_s:.1f} s)"
    )
    counts = ", ".join(f"{count} {result}" for result, count in f.results.items() if count or result is Result.OK)
    why = "".join(f"; {reason} x{count}" for reason, count in f.reasons.items())
    lines.append(f"requests   {counts}, {f.requests_per_s:.2f}/s{why}")
    if f.goodput is not None:
        lines.append(f"goodput    {f.goodput.requests_per_s:.2f} requests/s, {f.goodput.share:.1%} of all kept the SLO")
    hit = "not reported by the server" if f.prefix_hit_share is None else f"{f.prefix_hit_share:.1%} of prompt tokens"
    return [*lines, f"prefix hit {hit}", ""]


def _ratio_lines(found: dict[str, float | None]) -> list[str]:
    def cell(name: str) -> str:
        value = found[name]
        return f"{'-':>10}" if value is None else f"{value:>10.2f}"

    lines = [f"{'A ÷ B':<6}" + "".join(f"{q:>10}" for q in QUANTILES)]
    for name in LATENCIES:
        row = "".join(cell(f"{name}.{q}") for q in QUANTILES)
        lines.append(f"{name.removesuffix('_ms').upper():<6}" + row)
    lines += [f"{name.replace('_per_s', '/s').replace('_', ' '):<24}{cell(name)}" for name in _RATES]
    return [*lines, ""]


def _client_lines(client: ClientHealth) -> list[str]:
    lag = "-" if client.loop_lag_ms is None else f"{client.loop_lag_ms.p99:.1f} ms"
    late = "-" if client.sent_late_ms is None else f"{client.sent_late_ms.p99:.1f} ms"
    line = f"client     {client.cpu_share:.0%} of a core, loop lag p99 {lag}, sent late p99 {late}"
    return [line, *(f"WARNING    {warning}" for warning in client.warnings)]
