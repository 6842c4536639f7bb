"""Staging buffers on chip: hits, prefetch_started, landed, keep, expire; who used what was fetched.

A block is staged raw. Prefetched blocks wait for their first use; used ones stay `retain_steps`
more steps. The least recently used ones make room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BoolArray

Ids = NDArray[np.int64]


class Staging:
    """Which blocks lie in the staging buffers, as arrays over all blocks."""

    def __init__(self, blocks: int, capacity_blocks: int, retain_steps: int) -> None:
        self.capacity_blocks, self.retain_steps = capacity_blocks, retain_steps
        self.there = np.zeros(blocks, np.bool_)
        self.unused = np.zeros(blocks, np.bool_)  # prefetched, not asked for yet
        self.last = np.zeros(blocks, np.int32)
        self._ids = np.zeros(0, np.int64)  # of what is there
        self.wasted = 0  # blocks that left without a use

    @property
    def held(self) -> int:
        """Return how many blocks are there."""
        return len(self._ids)

    def hits(self, blocks: Ids) -> BoolArray:
        """Say which blocks are there."""
        found: BoolArray = self.there[blocks]
        return found

    def used(self, blocks: Ids, step: int) -> int:
        """Note reads of staged blocks; return how many were first uses of a prefetch."""
        first = len(np.unique(blocks[self.unused[blocks]]))
        self.unused[blocks] = False
        self.last[blocks] = step
        return first

    def add(self, blocks: Ids, step: int, *, unused: bool) -> None:
        """Put blocks there; the least recently used ones go when they are too many."""
        new = blocks[~self.there[blocks]]
        self.last[blocks] = step
        if len(new) == 0:
            return
        self.there[new] = True
        self.unused[new] = unused
        self._ids = np.concatenate((self._ids, new))
        excess = len(self._ids) - self.capacity_blocks
        if excess > 0:
            order = np.argsort(self.last[self._ids], kind="stable")
            self._drop(self._ids[order[:excess]])

    def expire(self, step: int, lead_steps: int) -> None:
        """Let go of what was used `retain_steps` ago, and of prefetches that nobody came for."""
        ids = self._ids
        age = step - self.last[ids]
        limit = np.where(self.unused[ids], lead_steps + self.retain_steps + 1, self.retain_steps)
        self._drop(ids[age >= limit])

    def _drop(self, blocks: Ids) -> None:
        if len(blocks) == 0:
            return
        self.wasted += int(np.count_nonzero(self.unused[blocks]))
        self.there[blocks] = False
        self.unused[blocks] = False
        self._ids = self._ids[self.there[self._ids]]
