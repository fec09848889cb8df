"""SmolLM2 on several workers that bring one another KV: what a client gets is what one worker alone gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.exactness.prompts import PROMPTS
from tests.exactness.reference import MAX_DIFFERENT_SHARE
from tests.exactness.test_smollm2_mesh import Suite, at_once
from tests.mesh.gated_stack import GatedStack

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def every_prompt(smollm2_dir: Path, report_figure: Callable[[str], None]) -> Iterator[Suite]:
    suite = Suite(smollm2_dir, [p.name for p in PROMPTS])
    yield suite
    report_figure(str(suite.tally))
    assert suite.tally.share <= MAX_DIFFERENT_SHARE


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("roles", [["prefill", "decode"], ["both", "both"]], ids="-".join)
async def test_every_prompt_twice_on_workers_with_little_room(
    every_prompt: Suite, smollm2_dir: Path, tmp_path: Path, roles: list[str], transport: str
) -> None:
    """Sixteen at once, three to a worker at most: prefixes are pulled from wherever they lie."""
    with GatedStack(smollm2_dir, tmp_path, roles, MAX_RUNNING=3) as stack:
        stack.pull_by(transport)
        await at_once(every_prompt, stack.url, every_prompt.cases)
        await at_once(every_prompt, stack.url, every_prompt.cases[::-1])
        assert stack.pulls(transport) > 0
        await stack.at_rest()
