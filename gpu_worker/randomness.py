"""Counter-based randomness: one uniform number per (seed, choice, output position), and no state.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, §3.3), exact
32-bit integer arithmetic, so the same draw on every machine whatever was drawn before or beside it (design §6).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits for a 128-bit counter under a 64-bit key, least significant word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _KEY_INCREMENTS[0]) & _MASK
        k1 = (k1 + _KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw for output token `position` of one choice: a multiple of 2^-53 in [0, 1).

    Key: the 64-bit seed. Counter: (position, choice, 0, 0). The top 27 and 26 bits of two words make the 53 bits.
    """
    high, low, _, _ = philox4x32((position & _MASK, choice & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return float(((high >> 5) << 26) | (low >> 6)) * 2.0**-53


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """The same draws for many rows at once: float64 [len(seeds)], bit for bit what `uniform` gives row by row."""
    seed = np.array([s & _MASK_64 for s in seeds], dtype=np.uint64)
    c0, c1 = (np.array([value & _MASK for value in column], dtype=np.uint64) for column in (positions, choices))
    c2 = c3 = np.zeros_like(c0)
    mask, shift = np.uint64(_MASK), np.uint64(32)
    k0, k1 = seed & mask, seed >> shift
    for _ in range(_ROUNDS):
        # Both factors are below 2^32, so their product fits.
        product0, product1 = np.uint64(_MULTIPLIERS[0]) * c0, np.uint64(_MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ k0,
            product1 & mask,
            (product0 >> shift) ^ c3 ^ k1,
            product0 & mask,
        )
        k0 = (k0 + np.uint64(_KEY_INCREMENTS[0])) & mask
        k1 = (k1 + np.uint64(_KEY_INCREMENTS[1])) & mask
    bits = ((c0 >> np.uint64(5)) << np.uint64(26)) | (c1 >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
