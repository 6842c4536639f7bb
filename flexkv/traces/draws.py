"""Random draws that are the same for a seed on every machine and with every version of numpy.

`Draws.uniform`, `integer`, `chance` - `exponential`, `lognormal` - `pick`. Only the raw 64-bit
output of PCG64 is used (numpy promises that stream for its bit generators, not for its
distributions); the distributions are inverse transforms of it.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import InputError

_T = TypeVar("_T")
_NORMAL = NormalDist()


class Draws:
    """A stream of draws from one seed."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise InputError(f"a seed is at least 0, got {seed}")
        self._raw = np.random.PCG64(seed)

    def uniform(self) -> float:
        """Return a number in [0, 1), of 53 random bits."""
        return (int(self._raw.random_raw()) >> 11) * 2.0**-53

    def integer(self, low: int, high: int) -> int:
        """Return an integer in [low, high], both included."""
        return low + int(self.uniform() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.uniform() < probability

    def exponential(self, mean: float) -> float:
        """Return an exponentially distributed number."""
        return -mean * math.log1p(-self.uniform())

    def lognormal(self, median: float, sigma: float) -> float:
        """Return exp(N(log median, sigma)), as lengths of prompts and answers are spread."""
        return median * math.exp(sigma * _NORMAL.inv_cdf(max(self.uniform(), 2.0**-53)))

    def length(self, median: int, sigma: float = 0.8) -> int:
        """Return a log-normal number of tokens, at least 1 and at most 64 medians."""
        return max(1, min(64 * median, round(self.lognormal(median, sigma))))

    def pick(self, cumulative: NDArray[np.float64]) -> int:
        """Return a position, drawn by the shares whose running sum (up to 1) is given."""
        place = int(np.searchsorted(cumulative, self.uniform(), side="right"))
        return min(place, len(cumulative) - 1)

    def shuffled(self, items: list[_T]) -> list[_T]:
        """Return the items in another order (Fisher and Yates)."""
        items = items.copy()
        for last in range(len(items) - 1, 0, -1):
            other = self.integer(0, last)
            items[last], items[other] = items[other], items[last]
        return items


def zipf(count: int, exponent: float) -> NDArray[np.float64]:
    """Return the running sum of the shares 1 / rank ** exponent, for `Draws.pick`."""
    shares = np.array([rank**-exponent for rank in range(1, count + 1)], np.float64)
    running: NDArray[np.float64] = np.cumsum(shares)
    running /= running[-1]
    return running
