"""How far the loads are that a worker waits for, layer by layer.

`Loads.landed`, `over` (the thread that copies says what it knows) - `joined`, `parted` (which loads
are still to be heard of) - `wait` (the engine's thread).
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

_REMEMBERED = 1024
_NOBODY = 1 << 62  # loads up to this number are lost while there is no manager


class _Load:
    """Blocks that have landed, by layer; once it is over, the device blocks that failed."""

    __slots__ = ("failed", "landed")

    def __init__(self, layers: int) -> None:
        self.landed: NDArray[np.int64] = np.zeros(layers, np.int64)
        self.failed: tuple[int, ...] | None = None


class Loads:
    """Loads by their number. Loads of `joined` and before are lost unless they are over."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._loads: dict[int, _Load] = {}
        self._lost = _NOBODY
        self._news = threading.Condition()

    def landed(self, number: int, layers: tuple[int, int] | None, blocks: int) -> None:
        """Count blocks whose bytes of a half-open range of layers (None: of all) have landed."""
        first, last = layers or (0, self._layers)
        with self._news:
            self._load(number).landed[first:last] += blocks
            self._news.notify_all()

    def over(self, number: int, failed_blocks: tuple[int, ...]) -> None:
        """Note that a load is over, and which device blocks must not be read."""
        with self._news:
            self._load(number).failed = failed_blocks
            self._news.notify_all()

    def joined(self, last: int) -> None:
        """A manager has let us in; what it says of loads up to number `last` may have passed us."""
        with self._news:
            self._lost = last
            self._news.notify_all()

    def parted(self) -> None:
        """Nothing more will be heard of any load."""
        with self._news:
            self._lost = _NOBODY
            self._loads = {n: load for n, load in self._loads.items() if load.failed is not None}
            self._news.notify_all()

    def wait(
        self, number: int, blocks: int, layer: int | None, timeout_s: float
    ) -> tuple[int, ...] | None:
        """Wait until one layer of a load of so many blocks (None: every layer) has landed.

        Returns its failed device blocks: none, unless it is over; None when it is lost or the time
        is up. A load is forgotten when all of it was waited for, and when it failed.
        """
        with self._news:
            self._news.wait_for(
                lambda: number <= self._lost or self._arrived(number, blocks, layer), timeout_s
            )
            arrived = self._arrived(number, blocks, layer)
            failed = self._load(number).failed or ()
            if layer is None or failed or not arrived:
                self._loads.pop(number, None)
            return failed if arrived else None

    def _arrived(self, number: int, blocks: int, layer: int | None) -> bool:
        load = self._loads.get(number)
        if load is None:
            return False
        landed = load.landed.min() if layer is None else load.landed[layer]
        return load.failed is not None or bool(landed >= blocks)

    def _load(self, number: int) -> _Load:
        load = self._loads.get(number)
        if load is None:
            while len(self._loads) >= _REMEMBERED:
                self._loads.pop(next(iter(self._loads)))
            load = self._loads[number] = _Load(self._layers)
        return load
