"""A seeded stream of choices: the same seed gives the same routing, in service and in the simulator. Pure."""

_MASK = (1 << 64) - 1


class TieBreaker:
    """SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def __call__(self, num_options: int) -> int:
        """An index in [0, num_options)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (z ^ (z >> 31)) % num_options
