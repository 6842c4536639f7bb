"""Classic policies as web caches have them, to show what the prefix rule changes. Simulator only.

`alone` (policy, Columns, capacity -> matched blocks). Blocks stand alone here: a block may leave
while others still need it, and those are dead weight until they leave too. Nothing of the brain is
used: `lru-alone`, `fifo-alone` and `slru-alone` are references of their own, in a few dicts. A
request's own blocks are pinned here too; its hits are moved from the tail of the prompt to its
head, then its misses come in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.sim.columns import Columns

_OFTEN = 256  # requests from one report to the next


class _Cache(Protocol):
    """What a classic policy does with blocks; `pinned` ones may not leave."""

    def __contains__(self, block: int) -> bool: ...

    def hit(self, block: int) -> None: ...

    def miss(self, block: int, pinned: set[int]) -> None: ...


def _drop_oldest(queue: OrderedDict[int, None], pinned: set[int]) -> bool:
    """Let the oldest block leave that is not pinned; False if there is none."""
    oldest = next((block for block in queue if block not in pinned), None)
    if oldest is not None:
        del queue[oldest]
    return oldest is not None


class _Queue:
    """FIFO, or LRU if hits move a block to the newest end. Who cannot leave when it is the oldest
    queues up again.
    """

    def __init__(self, capacity: int, moves: bool) -> None:
        self._capacity, self._moves = capacity, moves
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def hit(self, block: int) -> None:
        if self._moves:
            self._blocks.move_to_end(block)

    def miss(self, block: int, pinned: set[int]) -> None:
        while len(self._blocks) >= self._capacity:
            oldest, _ = self._blocks.popitem(last=False)
            if oldest in pinned:
                self._blocks[oldest] = None
        self._blocks[block] = None


class _Segments:
    """SLRU with half of the slots protected; who is pushed out of them is on probation again."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._protected_most = capacity, capacity // 2
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._probation or block in self._protected

    def hit(self, block: int) -> None:
        self._probation.pop(block, None)
        self._protected[block] = None
        self._protected.move_to_end(block)
        if len(self._protected) > self._protected_most:
            self._probation[self._protected.popitem(last=False)[0]] = None

    def miss(self, block: int, pinned: set[int]) -> None:
        full = len(self._probation) + len(self._protected) >= self._capacity
        if full and not _drop_oldest(self._probation, pinned):
            _drop_oldest(self._protected, pinned)
        self._probation[block] = None


_CACHES: dict[str, Callable[[int], _Cache]] = {
    "lru-alone": lambda capacity: _Queue(capacity, moves=True),
    "fifo-alone": lambda capacity: _Queue(capacity, moves=False),
    "slru-alone": _Segments,
}
ALONE = tuple(_CACHES)


def alone(
    policy: str, trace: Columns, capacity_blocks: int, progress: Callable[[int], None]
) -> NDArray[np.int64]:
    """Return the blocks matched for each request: int64 [requests]."""
    cache = _CACHES[policy](capacity_blocks)
    matched = np.zeros(len(trace.times), np.int64)
    ends = trace.ends.tolist()
    for number in range(len(matched)):
        path = trace.ids[ends[number] : ends[number + 1]].tolist()
        matched[number] = next((i for i, b in enumerate(path) if b not in cache), len(path))
        kept = path[:capacity_blocks][::-1]
        pinned = set(kept)
        misses = []
        for block in kept:
            if block in cache:
                cache.hit(block)
            else:
                misses.append(block)
        for block in misses:
            cache.miss(block, pinned)
        if number % _OFTEN == 0:
            progress(ends[number + 1])
    progress(trace.accesses)
    return matched
