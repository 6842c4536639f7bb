"""Two queues of blocks in one leaf order, for policies that choose from which of them to evict.

`TwoQueues.push` (to the newest end of a queue) - `front` (the oldest leaves of a queue) - `split`
(so many of one, the rest of the other) - `forget`. `Ghosts` remembers keys of evicted blocks.

The order knows one number a block. Blocks of queue 0 rank before those of queue 1; where queue 1 is
asked, the leaves of queue 0 that stand before it are parked behind, and brought back, oldest first,
when queue 0 is asked: what is parked was pushed or brought back before, and what is brought back is
asked for, so the cost stays in proportion to the blocks pushed and asked for.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BlockIds, BoolArray
from flexkv.protocols import PolicyContext

_NOWHERE, _PARKED = 2, 3
_NOBODY: BlockIds = np.empty(0, np.uint32)
_BASE = 2.0**51  # places of a queue; 0, 1 and 3 times this plus a place are exact in a float64


class TwoQueues:
    """Who stands in which queue, and where. 10 bytes a block, 130 more for one that is parked."""

    def __init__(self, context: PolicyContext) -> None:
        self._order, self._size = context.order, context.max_blocks
        self.lengths = [0, 0]
        self._queues = np.full(self._size, _NOWHERE, np.uint8)
        self._parked_now = np.zeros(self._size, np.bool_)
        self._places = np.zeros(self._size, np.float64)
        self._parked: deque[tuple[int, float]] = deque()
        self._last = 0.0

    def queue_of(self, blocks: BlockIds) -> NDArray[np.uint8]:
        """The queue in which each block stands; 2 for none."""
        return self._queues[blocks]

    def push(self, queue: int, blocks: BlockIds) -> None:
        """Move blocks, in prompt order, to the newest end of a queue; the first becomes newest."""
        self.forget(blocks)
        count = len(blocks)
        places = self._last + np.arange(count, 0, -1, dtype=np.float64)
        self._last += count
        self._queues[blocks], self._places[blocks] = queue, places
        self.lengths[queue] += count
        self._order.rank_each(blocks, queue * _BASE + places)

    def forget(self, blocks: BlockIds) -> None:
        """Take blocks out of whatever queue they stand in; their ranks stay."""
        counts = np.bincount(self._queues[blocks], minlength=2)
        self.lengths = [self.lengths[0] - int(counts[0]), self.lengths[1] - int(counts[1])]
        self._queues[blocks], self._parked_now[blocks] = _NOWHERE, False

    def front(self, queue: int, count: int) -> BlockIds:
        """Up to `count` evictable blocks, oldest first, of a queue; of the other if it has none."""
        if queue == 0:
            self._bring_back(count)
        while True:
            chosen = self._order.take(count)
            mine = (self._queues[chosen] == queue) & ~self._parked_now[chosen]
            before = np.flatnonzero(~mine & (self._queues[chosen] == 0) & ~self._parked_now[chosen])
            if queue == 1 and len(before):
                self._park(chosen[before])
                continue
            if len(chosen) == 0 or not mine[0]:
                return chosen
            return chosen[: int(np.argmin(mine))] if not mine.all() else chosen

    def split(self, from_one: int, count: int) -> BlockIds:
        """`from_one` blocks of queue 1, the rest of `count` of queue 0; what one lacks, the other
        gives.
        """
        ones = self.front(1, from_one) if from_one > 0 else _NOBODY
        if len(ones) and (len(ones) == count or self._queues[ones[0]] == 0):
            return ones
        zeros = self.front(0, count - len(ones))
        if len(ones) == 0 or len(zeros) == 0:
            return zeros if len(ones) == 0 else ones
        return ones if self._queues[zeros[0]] == 1 else np.concatenate((ones, zeros))

    def _park(self, blocks: BlockIds) -> None:
        places = self._places[blocks]
        self._parked_now[blocks] = True
        self._order.rank_each(blocks, _PARKED * _BASE + places)
        self._parked.extend(zip(blocks.tolist(), places.tolist(), strict=True))
        if len(self._parked) > 2 * self._size:
            self._parked = deque(entry for entry in self._parked if self._stands(*entry))

    def _stands(self, block: int, place: float) -> bool:
        """Whether a block has been parked all the time since it was."""
        return bool(self._parked_now[block]) and self._places[block] == place

    def _bring_back(self, count: int) -> None:
        found: list[int] = []
        while self._parked and len(found) < count:
            block, place = self._parked.popleft()
            if self._stands(block, place):
                found.append(block)
        if found:
            blocks = np.array(found, np.uint32)
            self._parked_now[blocks] = False
            self._order.rank_each(blocks, self._places[blocks])


class Ghosts:
    """Keys of blocks that left lately, for as long as the policy wants. About 140 bytes each."""

    def __init__(self, context: PolicyContext) -> None:
        self._keys_of = context.keys
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, blocks: BlockIds) -> None:
        """Remember blocks as the newest ghosts."""
        for key in self._names(blocks):
            self._known[key] = None

    def trim(self, limit: int) -> None:
        """Forget the oldest until no more than `limit` are left."""
        while len(self._known) > limit:
            self._known.popitem(last=False)

    def recall(self, blocks: BlockIds) -> BoolArray:
        """Say which blocks are ghosts, and forget those: they have come back."""
        if not self._known:
            return np.zeros(len(blocks), np.bool_)
        return np.array([self._known.pop(key, 0) is None for key in self._names(blocks)], np.bool_)

    def _names(self, blocks: BlockIds) -> list[int]:
        names: list[int] = self._keys_of(blocks)[:, 0].tolist()
        return names
