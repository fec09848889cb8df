"""Python's cyclic garbage collector, for a service that makes and drops a few objects for every token.

Its defaults look at the young objects every 700 allocations, and at all objects after every few dozen of those looks.
That is a stall of all streams where there are many: torch's modules alone are 300,000 objects, 130 ms of looking in the
middle of some step. And a report of thousands of sequences makes more than 700 objects before it is done, so that at
4,096 sequences more than half of the scheduler's time was the collector's. It finds nearly nothing: what is dropped per
token and per request is freed by reference counts.
"""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 50_000
"""Made and not yet freed, before the collector looks at them: some ms of work for it."""


def calm_collector() -> None:
    """Look rarely, and never at what there is already: modules, configuration, a loaded model. Once, after start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
