"""Blocks in the arena as they travel: `Sums` (their checksums, bound to keys; off the loop unless
small) - `Passage` (through a socket, checksums taken while the bytes are in the cache).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.backends.disk.records import Checksums, Crew
from flexkv.backends.remote.heads import checksums
from flexkv.completion import Completions
from flexkv.errors import CapacityError, InputError
from flexkv.memory import Arena
from flexkv.model import KeyArray, SlotIds

SUM_BYTES = 8  # of a checksum, behind its block
_INLINE_BYTES = 1 << 20  # some 100 us


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
        return await self.begin(slots, keys).result()

    def begin(self, slots: SlotIds, keys: KeyArray) -> Checksums:
        """Start to take them, off the loop.

        Raises: as `of`.
        """
        return self._crew.begin_checksums(slots, keys)


class Passage:
    """Blocks in arena `slots` on their way through a socket, in this order, each with its checksum
    behind it.

    `sums` are the checksums of what lies here, `told` what the other side says of what it sent;
    both are complete for the first `whole` blocks.

    Raises:
        InputError: a slot is not in the arena.
        CapacityError: no memory.
    """

    def __init__(self, arena: Arena, slots: SlotIds, keys: KeyArray, block_bytes: int) -> None:
        if len(slots) and int(slots.max()) >= arena.slots:
            raise InputError(f"slot {slots.max()} is not in an arena of {arena.slots} slots")
        slots, keys = np.ascontiguousarray(slots, np.uint32), np.ascontiguousarray(keys, np.uint64)
        self._keep = (arena.view(0), slots, keys)  # a view keeps the memory mapped
        self._frame_bytes = block_bytes + SUM_BYTES
        self.sums, self.told = np.zeros(len(slots), np.uint64), np.zeros(len(slots), np.uint64)
        made = lib.fx_passage_open(
            arena.base,
            arena.stride_bytes,
            ffi.from_buffer("uint32_t[]", slots),
            block_bytes,
            ffi.from_buffer("uint64_t[]", keys),
            len(slots),
            ffi.from_buffer("uint64_t[]", self.sums),
            ffi.from_buffer("uint64_t[]", self.told),
        )
        if made == ffi.NULL:
            raise CapacityError(f"no memory for the passage of {len(slots)} blocks")
        self._passage = ffi.gc(made, lib.fx_passage_close)
        self.size_bytes = len(slots) * self._frame_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that have passed, checksums included."""
        return lib.fx_passage_moved(self._passage)

    @property
    def whole(self) -> int:
        """Blocks that have passed with their checksums."""
        return self.moved_bytes // self._frame_bytes

    def move(
        self, verb: Literal["send", "receive"], descriptor: int, most_bytes: int, patience_ms: int
    ) -> int:
        """Move on over a socket that does not block, in the thread that calls, without its lock.

        Returns 1 when all has passed, 0 after `most_bytes`, else an errno, below 0: -EAGAIN where
        it stood still for `patience_ms`, -ENODATA where the other side has ended.
        """
        call = lib.fx_passage_send if verb == "send" else lib.fx_passage_receive
        return call(self._passage, descriptor, most_bytes, patience_ms)
