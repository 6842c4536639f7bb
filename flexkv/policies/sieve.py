"""sieve: a hand moves from old to new; who was used since it last came stays, the next one leaves.

SIEVE (Zhang et al., NSDI'24): a hit only sets a mark; the hand takes a mark away and goes on, or
evicts; at the newest block it starts again at the oldest, and blocks do not move. Here the rank of
a block is the lap in which the hand comes to it, ties in the order in which they were set: who is
passed waits for the next lap, who comes new is the last of this one. The leaf order skips blocks
that others stand on; one that becomes a leaf behind the hand is looked at next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from flexkv.model import BlockIds, BoolArray
from flexkv.protocols import API_VERSION, LeafOrder, PolicyContext


class SIEVE:
    """Lazy promotion and quick demotion. 1 byte a block."""

    flexkv_api: ClassVar[int] = API_VERSION
    order: LeafOrder

    def open(self, context: PolicyContext) -> None:
        """Start in the first lap, without marks."""
        self.order = context.order
        self.marks = np.zeros(context.max_blocks, np.bool_)
        self.lap = 0.0

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Queue up as the newest."""
        self.marks[blocks] = False
        self.order.rank(blocks, self.lap)

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Mark."""
        self.marks[blocks] = True

    def removed(self, blocks: BlockIds) -> None:
        """Nothing to forget: marks are set anew when a number is used again."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        """Move the hand past marked blocks until it has seen `count` without a mark."""
        while True:
            ahead = self.order.take(count + 1)
            chosen, later = ahead[:count], ahead[count:]
            marked = self.marks[chosen]
            if not marked.any():
                break
            for number in np.flatnonzero(marked):  # one by one: their order is that of the hand
                passed = chosen[number : number + 1]
                self.order.rank(passed, float(self.order.ranks(passed)[0]) + 1.0)
            self.marks[chosen] = False
        if len(chosen):  # at the newest block, the lap is over: who comes now waits for the next
            stop = later if len(later) else chosen[-1:]
            self.lap = max(self.lap, float(self.order.ranks(stop)[0]))
        return chosen
