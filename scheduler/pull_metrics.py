"""What transfers and prefix hits become in the scheduler's metrics."""

from __future__ import annotations

from observability.metrics import SchedulerMetrics
from scheduler.commands import Timeline
from wire.ids import UNIT_TOKENS
from wire.plan import PullReport, Role


def observe_pull(metrics: SchedulerMetrics, report: PullReport) -> None:
    """Count a transfer's last report."""
    if report.failure is None:
        outcome = "complete"
    else:
        outcome = "partial" if report.num_units else "failed"
    metrics.observe_pull(report.transport, outcome, pull_s=report.elapsed_us * 1e-6, num_bytes=report.num_bytes)


def observe_hits(metrics: SchedulerMetrics, timeline: Timeline) -> None:
    """Hold what the admissions of a finished request counted on against what they got. A handoff is no hit."""
    admissions = [admission for admission in timeline.admissions if admission.role is not Role.DECODE]
    transfers = [transfer for transfer in timeline.transfers if not transfer.is_handoff]
    metrics.observe_hits(
        "local",
        predicted_tokens=sum(admission.predicted_cached_tokens for admission in admissions),
        actual_tokens=sum(admission.cached_tokens for admission in admissions),
    )
    metrics.observe_hits(
        "pull",
        predicted_tokens=sum(admission.pulled_tokens for admission in admissions),
        actual_tokens=sum(transfer.num_units for transfer in transfers) * UNIT_TOKENS,
    )
