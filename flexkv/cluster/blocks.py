"""Blocks in the arena as they travel: `views_of` (the memory of a batch) - `Sums` (checksums, bound
to keys; off the loop unless small) - `Arrival` (taking them while blocks arrive).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.backends.disk.records import Crew
from flexkv.backends.remote.heads import checksums
from flexkv.completion import Completions
from flexkv.memory import Arena
from flexkv.model import KeyArray, SlotIds

_INLINE_BYTES = 1 << 20  # some 100 us
_PIECE_BYTES = 1 << 20  # whose checksums are taken at once


class Sums:
    """XXH3-64 of arena blocks of `block_bytes`, each seeded by its key."""

    def __init__(self, completions: Completions, arena: Arena, block_bytes: int) -> None:
        self._arena, self._block_bytes = arena, block_bytes
        self._crew = Crew(completions, arena, block_bytes)

    async def of(self, slots: SlotIds, keys: KeyArray) -> NDArray[np.uint64]:
        """Return the checksum of each block.

        Raises:
            CapacityError: all tickets are out.
        """
        if len(slots) * self._block_bytes <= _INLINE_BYTES:
            return self.here(slots, keys)
        return await self._crew.begin_checksums(slots, keys).result()

    def here(self, slots: SlotIds, keys: KeyArray) -> NDArray[np.uint64]:
        """Do the same in the thread that calls."""
        return checksums(self._arena, slots, keys, self._block_bytes)


class Arrival:
    """Blocks as they arrive one behind the other: `progress` takes the checksums of whole ones,
    while they are in the cache of whoever received them.
    """

    def __init__(self, sums: Sums, slots: SlotIds, keys: KeyArray, block_bytes: int) -> None:
        self._sums, self._slots, self._keys = sums, slots, keys
        self._block_bytes = block_bytes
        self._step = max(1, _PIECE_BYTES // block_bytes)
        self._done = 0
        self.got_bytes = 0
        self.found = np.zeros(len(slots), np.uint64)

    def progress(self, got_bytes: int) -> None:
        """Say how many bytes there are."""
        self.got_bytes = got_bytes
        if self.whole - self._done >= self._step or self.whole == len(self._slots):
            self._take(self.whole)

    @property
    def whole(self) -> int:
        """Blocks that have come whole."""
        return self.got_bytes // self._block_bytes

    def finish(self) -> None:
        """Take the checksums of what came last, after it has ended early: less than a piece."""
        self._take(self.whole)

    def _take(self, end: int) -> None:
        part = slice(self._done, end)
        self.found[part] = self._sums.here(self._slots[part], self._keys[part])
        self._done = end


def views_of(arena: Arena, slots: SlotIds, block_bytes: int) -> list[memoryview]:
    """Return the bytes of blocks in arena `slots`, in their order; neighbours without a gap are one
    view.
    """
    if block_bytes < arena.stride_bytes:
        return [arena.view(int(slot))[:block_bytes].data for slot in slots]
    borders = np.flatnonzero(np.diff(slots.astype(np.int64)) != 1) + 1
    runs = np.split(slots, borders) if len(slots) else []
    return [arena.rows(int(run[0]), len(run)).reshape(-1).data for run in runs]
