"""Blocks in the arena as they travel: `views_of` (the memory of a batch) - `Sums.of` (checksums,
bound to keys; off the loop unless tiny).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.backends.disk.records import Crew
from flexkv.backends.remote.heads import checksums
from flexkv.completion import Completions
from flexkv.memory import Arena
from flexkv.model import KeyArray, SlotIds

_INLINE_BYTES = 256 << 10  # some 25 us


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
            return checksums(self._arena, slots, keys, self._block_bytes)
        return await self._crew.begin_checksums(slots, keys).result()


def views_of(arena: Arena, slots: SlotIds, block_bytes: int) -> list[memoryview]:
    """Return the bytes of blocks in arena `slots`, in their order; neighbours without a gap are one
    view.
    """
    if block_bytes < arena.stride_bytes:
        return [arena.view(int(slot))[:block_bytes].data for slot in slots]
    borders = np.flatnonzero(np.diff(slots.astype(np.int64)) != 1) + 1
    runs = np.split(slots, borders) if len(slots) else []
    return [arena.rows(int(run[0]), len(run)).reshape(-1).data for run in runs]
