"""Slots of one tier: which are free, which are out.

`SlotPool.take` (neighbours where possible) - `SlotPool.give` - `SlotPool.reserve` (exactly these,
when a store is reopened). Deterministic: the same calls give the same slots.
"""

from __future__ import annotations

import numpy as np

from flexkv._core import ffi, lib
from flexkv.errors import CapacityError
from flexkv.model import NO_SLOT, SlotIds


class SlotPool:
    """The slots [0, capacity) of one tier; used + free = capacity after every call."""

    def __init__(self, capacity: int) -> None:
        runs = lib.fx_runs_open(capacity)
        if runs == ffi.NULL:
            raise MemoryError(f"no memory for the bookkeeping of {capacity} slots")
        self.capacity = capacity
        self._runs = ffi.gc(runs, lib.fx_runs_close)

    @property
    def free(self) -> int:
        """Slots that may be taken."""
        return int(lib.fx_runs_free(self._runs))

    @property
    def used(self) -> int:
        """Slots that are out."""
        return self.capacity - self.free

    def take(self, count: int) -> SlotIds:
        """Take `count` slots: one contiguous run where there is one, else few long runs.

        Raises:
            CapacityError: fewer are free; nothing was taken.
        """
        slots = np.empty(count, np.uint32)
        if lib.fx_runs_take(self._runs, count, NO_SLOT, ffi.from_buffer("uint32_t[]", slots)):
            raise CapacityError(
                f"{count} slots are wanted, {self.free} of {self.capacity} are free"
            )
        return slots

    def give(self, slots: SlotIds) -> None:
        """Return slots that were taken. AssertionError for one that is free or does not exist."""
        slots = np.ascontiguousarray(slots, np.uint32)
        if lib.fx_runs_give(self._runs, ffi.from_buffer("uint32_t[]", slots), len(slots)):
            raise AssertionError(
                f"a slot is given back twice or is none of 0..{self.capacity - 1}: {slots}"
            )

    def reserve(self, slots: SlotIds) -> None:
        """Take exactly these slots, scanning the pool. AssertionError, no change, if one is out."""
        slots = np.ascontiguousarray(slots, np.uint32)
        if lib.fx_runs_reserve(self._runs, ffi.from_buffer("uint32_t[]", slots), len(slots)):
            raise AssertionError(
                "a slot to reserve is out already, twice in the list or beyond the pool"
            )

    def check_integrity(self) -> None:
        """Scan the whole pool; AssertionError when its books do not agree."""
        wrong = lib.fx_runs_check(self._runs)
        if wrong != ffi.NULL:
            raise AssertionError(f"slot pool: {ffi.string(wrong).decode()}")
