"""Where blocks lie in the data files.

`Places.moves` (for engines) - `Places.extents` (for devices that read files themselves).
"""

from __future__ import annotations

import numpy as np

from flexkv.backends.disk.engines import Moves
from flexkv.backends.disk.recovery import Store
from flexkv.model import KeyArray, SlotIds
from flexkv.protocols import Extents


class Places:
    """The data files of an open store."""

    def __init__(self, store: Store) -> None:
        self._geometry, self._table = store.geometry, store.table
        self._fds = np.array([item.data_fd for item in store.directories], np.int32)

    def moves(self, write: bool, slots: SlotIds, host_slots: SlotIds) -> Moves:
        """What an engine has to do to move store `slots` from or to arena `host_slots`."""
        directories, local = self._geometry.locate(slots)
        stride_bytes = self._geometry.stride_bytes
        offsets = local * np.uint64(stride_bytes)
        return Moves(write, self._fds[directories], offsets, host_slots, stride_bytes)

    def extents(self, slots: SlotIds, keys: KeyArray) -> Extents:
        """Where `slots` lie, and what must be there."""
        reads = self.moves(False, slots, slots)
        held, sums = self._table.holds(slots, keys), self._table.checksums[slots]
        return Extents(
            held, reads.fds, reads.offsets, sums, reads.size_bytes, self._geometry.block_bytes
        )
