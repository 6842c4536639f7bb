"""What each slot holds, in memory.

`SlotTable`: `holds`, `commit`, `forget` - `doubt`, `trust`, `must_clear` (is the record on disk
what the table says?) - `take_sequences`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BoolArray, KeyArray, SlotIds


class SlotTable:
    """Key, checksum and sequence of every slot; sequence 0 is an empty slot. 33 bytes per slot."""

    def __init__(self, slots: int) -> None:
        self.keys = np.zeros((slots, 2), np.uint64)
        self.checksums = np.zeros(slots, np.uint64)
        self.sequences = np.zeros(slots, np.uint64)
        self.doubtful = np.zeros(slots, np.bool_)  # the record on disk may say something else
        self.next_sequence = 1
        self.used = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def filled(self, slots: SlotIds) -> BoolArray:
        """Which of `slots` hold a committed block."""
        return np.not_equal(self.sequences[slots], 0)

    def holds(self, slots: SlotIds, keys: KeyArray) -> BoolArray:
        """Which of `slots` hold a committed block of the key asked for."""
        same_key: BoolArray = (self.keys[slots] == keys).all(axis=1)
        return self.filled(slots) & same_key

    def take_sequences(self, count: int) -> NDArray[np.uint64]:
        """The next `count` sequence numbers."""
        first = self.next_sequence
        self.next_sequence += count
        return np.arange(first, first + count, dtype=np.uint64)

    def commit(
        self,
        slots: SlotIds,
        keys: KeyArray,
        checksums: NDArray[np.uint64],
        sequences: NDArray[np.uint64],
    ) -> None:
        """Say that `slots`, empty before, hold these blocks."""
        self.keys[slots] = keys
        self.checksums[slots] = checksums
        self.sequences[slots] = sequences
        self.doubtful[slots] = False
        self.used += len(slots)

    def forget(self, slots: SlotIds) -> None:
        """Say that `slots` (distinct) hold nothing."""
        self.used -= int(np.count_nonzero(self.sequences[slots]))
        self.sequences[slots] = 0

    def must_clear(self, slots: SlotIds) -> BoolArray:
        """Which of `slots` may have a record on disk that must go before their bytes change."""
        return self.filled(slots) | self.doubtful[slots]

    def doubt(self, slots: SlotIds) -> None:
        """Say that the records of `slots` are being written, or could not be."""
        self.doubtful[slots] = True

    def trust(self, slots: SlotIds) -> None:
        """Say that the records of `slots` on disk are what the table says."""
        self.doubtful[slots] = False
