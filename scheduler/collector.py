"""Python's cyclic garbage collector, for a process that makes and drops a few objects for every token.

Its defaults look at the young objects every 700 allocations, and at all objects after every few dozen of those looks.
A report of thousands of sequences makes more than that before it is done, so that at 4,096 sequences more than half of
the engine's time was the collector's, which found nothing: what the engine drops is freed by reference counts.
"""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 50_000
"""Made and not yet freed, before the collector looks at them: some ms of work for it."""


def calm_collector() -> None:
    """Look rarely, and never at what there is already: modules, configuration, generated code. Once, after start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
