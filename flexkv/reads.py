"""Which blocks are being read from stores, and the slots that may not be used again before that is
over.

`Reads.begin`, `end` (blocks of an op) - `keep` (slots of blocks that left a store while they are
read) - `released` (those whose last read is over), `kept`. Synchronous and deterministic.
"""

from __future__ import annotations

import numpy as np

from flexkv.model import BlockIds, BoolArray, KeyArray, SlotIds
from flexkv.tier import Tier


class Reads:
    """Counts reads by block; who reads a block has pinned it, so that its number stays its own."""

    def __init__(self, max_blocks: int) -> None:
        self._count = np.zeros(max_blocks, np.int32)
        self._kept: list[tuple[BlockIds, Tier, SlotIds, KeyArray]] = []

    def begin(self, blocks: BlockIds) -> None:
        """Count one more read of each of `blocks`, which are distinct."""
        self._count[blocks] += 1

    def end(self, blocks: BlockIds) -> None:
        """Count one read less."""
        self._count[blocks] -= 1

    def under_way(self, blocks: BlockIds) -> BoolArray:
        """Which of `blocks` somebody reads."""
        return self._count[blocks] > 0

    def keep(self, blocks: BlockIds, tier: Tier, slots: SlotIds, keys: KeyArray) -> None:
        """Keep the slots of blocks that are being read and have left `tier`."""
        if len(blocks):
            self._kept.append((blocks, tier, slots, keys))

    def released(self) -> list[tuple[Tier, SlotIds, KeyArray]]:
        """Return, and forget, the kept slots that nobody reads any more."""
        if not self._kept:
            return []
        kept, self._kept = self._kept, []
        freed = []
        for blocks, tier, slots, keys in kept:
            busy = self.under_way(blocks)
            self.keep(blocks[busy], tier, slots[busy], keys[busy])
            if not busy.all():
                freed.append((tier, slots[~busy], keys[~busy]))
        return freed

    def kept(self, tier: Tier) -> SlotIds:
        """Return the kept slots of a tier: they are in no pool and hold no block of the index."""
        parts = [slots for _, whose, slots, _ in self._kept if whose is tier]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)
