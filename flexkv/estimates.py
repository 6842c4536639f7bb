"""What something costs by its size, learned from what was seen of it: `LineEstimate.add`,
`seconds`, `share_s`, `known`.

A line (seconds = `first_s` + units * `unit_s`) is fitted to relative errors, so that large samples
say no more than small ones, and newer samples count more: each takes a share of `_SHARE`, and old
ones fade with time as well. A sample can be slow by accident: it counts as `_SLOWEST` times what
was expected at most, unless `_IN_A_ROW` are slow; then the times are others. It is hardly fast by
accident: a fast one makes older ones fade at once. What decisions use follows when it is off by
more than a margin, so that they do not flap.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ENOUGH = 3  # samples until it is known
_SHARE = 1 / 8
_HALF_LIFE_S = 10.0
_SLOWEST = 4.0
_IN_A_ROW = 3
_FADED = 1 / 64
_FAST = 0.5  # of what was expected
_RIDGE = 1e-3  # samples of one size say nothing of `first_s`: it is taken to be 0
_FAR = 16.0  # how much larger a size is at which the line in use must hold, too

Units = TypeVar("Units", float, NDArray[np.float64])


class LineEstimate:
    """Seconds by units, as seen lately.

    Args:
        margin: by which share the line in use may be off.
        unit_s: seconds of a unit that are taken for granted until enough was seen; None: nothing is
            known until then.
    """

    __slots__ = (
        "_margin",
        "_mean",
        "_sizes",
        "_slow",
        "_sums",
        "first_s",
        "known",
        "seen",
        "seen_at",
        "unit_s",
    )

    def __init__(self, margin: float, unit_s: float | None = None) -> None:
        self._margin = margin
        self.known = unit_s is not None
        self.first_s, self.unit_s = 0.0, unit_s or 0.0
        self.seen, self.seen_at = 0, -math.inf
        self._slow = 0  # samples in a row
        self._sizes, self._mean = (0.0, 0.0), math.inf  # samples and their units; mean in use
        self._sums: tuple[float, ...] = (0.0,) * 5  # of weights w, w x, w y, w x x, w x y

    def seconds(self, units: Units) -> Units:
        """Return what so many units take, by the line in use."""
        return self.first_s + units * self.unit_s

    @property
    def share_s(self) -> float:
        """Seconds of a unit with its share of what a sample of mean size takes in any case.

        Where all samples are small, `unit_s` says little: it may be 0 where small ones take equally
        long. This one errs towards too much for larger sizes.
        """
        return self.unit_s + self.first_s / self._mean

    def add(self, units: float, elapsed_s: float, now: float) -> None:
        """Take in that `units` (> 0) took `elapsed_s` (> 0); others say nothing and are left out.

        `now` is in seconds of any clock that does not go back.
        """
        if not (units > 0 and 0 < elapsed_s < math.inf):
            return
        keep = 1 - _SHARE
        if self.seen:
            keep *= 0.5 ** (max(0.0, now - self.seen_at) / _HALF_LIFE_S)
        if self.seen >= ENOUGH:
            first_s, unit_s = self._fit()
            expected_s = first_s + units * unit_s
            self._slow = self._slow + 1 if elapsed_s > _SLOWEST * expected_s else 0
            if self._slow >= _IN_A_ROW:
                keep = min(keep, _FADED)
            elif self._slow:
                elapsed_s = _SLOWEST * expected_s
            elif elapsed_s < _FAST * expected_s:
                keep *= elapsed_s / expected_s
        self.seen, self.seen_at = self.seen + 1, now
        # errors are relative: a sample weighs 1 / (what is expected)^2, in units
        start = self.first_s / self.unit_s if self.unit_s else 0.0
        weight = 1 / (units + start) ** 2
        sample = (1.0, units, elapsed_s, units * units, units * elapsed_s)
        self._sums = tuple(
            keep * old + weight * new for old, new in zip(self._sums, sample, strict=True)
        )
        count, total = self._sizes
        self._sizes = keep * count + 1.0, keep * total + units
        self._follow(units)

    def _fit(self) -> tuple[float, float]:
        """The line through what was seen; neither of its numbers is negative."""
        w, wx, wy, wxx, wxy = self._sums
        held = w * (1 + _RIDGE)
        determinant = held * wxx - wx * wx
        first_s = (wy * wxx - wxy * wx) / determinant
        unit_s = (wxy * held - wx * wy) / determinant
        if first_s < 0:
            return 0.0, wxy / wxx
        if unit_s < 0:
            return wy / w, 0.0
        return first_s, unit_s

    def _follow(self, units: float) -> None:
        """Use what was seen, if that differs enough from what is in use."""
        if self.seen < ENOUGH:
            return
        first_s, unit_s = self._fit()
        count, total = self._sizes
        far = _FAR * units
        pairs = (
            (self.seconds(units), first_s + units * unit_s),
            (self.seconds(far), first_s + far * unit_s),
            (self.share_s, unit_s + first_s * count / total),
        )
        off = any(abs(found - used) > self._margin * used for used, found in pairs)
        if off or not self.known or self.seen == ENOUGH:
            self.first_s, self.unit_s, self.known = first_s, unit_s, True
            self._mean = total / count
