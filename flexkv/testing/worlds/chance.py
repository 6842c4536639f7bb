"""Numbers that depend on nothing but a seed and what they are for.

`mix` (words -> 64 bits) - `Chance` (for one purpose after the other: `pick`, `below`, `happens`).
Because each purpose has its own numbers, dropping a step from a story leaves the others as they
were.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = 2**64 - 1


def mix(*words: int) -> int:
    """64 well-mixed bits of some whole numbers (the finisher of splitmix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ word) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class Chance:
    """Numbers for things that have a name and happen any number of times."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._times: dict[tuple[str, int], int] = {}

    def bits(self, purpose: str, which: int = 0) -> int:
        """64 bits for the next time of `purpose` for thing number `which`."""
        times = self._times[purpose, which] = self._times.get((purpose, which), 0) + 1
        return mix(self._seed, zlib.crc32(purpose.encode()), which, times)

    def below(self, limit: int, purpose: str, which: int = 0) -> int:
        """A number in [0, limit)."""
        return self.bits(purpose, which) % limit

    def pick(self, choices: Sequence[T], purpose: str, which: int = 0) -> T:
        """One of `choices`."""
        return choices[self.bits(purpose, which) % len(choices)]
