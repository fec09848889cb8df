"""Counter-based randomness: one uniform number per (seed, choice, output position), and no state.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, §3.3), exact
32-bit integer arithmetic, so the same draw on every machine whatever was drawn before or beside it (design §6).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
_ROUNDS = 10
_WORD, _HALF = np.uint64(_MASK), np.uint64(32)
_FEW = 24
"""So many draws take as long one by one as in one numpy call."""


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


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> list[float]:
    """`uniform(seeds[i], choices[i], positions[i])` for each i, bit for bit, at a fraction of the cost for many."""
    if len(seeds) <= _FEW:
        return [uniform(*arguments) for arguments in zip(seeds, choices, positions, strict=True)]
    seed = np.array(seeds, dtype=np.uint64)
    counter = [np.array(positions, dtype=np.uint64) & _WORD, np.array(choices, dtype=np.uint64) & _WORD]
    high, low = _philox_words(counter, (seed & _WORD, seed >> _HALF))
    drawn = (high >> np.uint64(5) << np.uint64(26) | low >> np.uint64(6)).astype(np.float64) * 2.0**-53
    found: list[float] = drawn.tolist()
    return found


def _philox_words(
    counter: Sequence[NDArray[np.uint64]], key: tuple[NDArray[np.uint64], NDArray[np.uint64]]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The first two words of philox4x32((counter[0], counter[1], 0, 0), key), element by element: uint64 [n] each."""
    c0, c1 = counter
    c2 = c3 = np.zeros_like(c0)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + np.uint64(_KEY_INCREMENTS[0])) & _WORD, (k1 + np.uint64(_KEY_INCREMENTS[1])) & _WORD
    return c0, c1
