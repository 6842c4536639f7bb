"""lfu: the block with the fewest hits leaves first, among equals the one used longest ago.

Upstream's key is (hit count, last access). The rank is the hit count alone, exact in a float64;
whenever the last access changes the rank is set again, and equal ranks leave in the order in which
they were set: the second part of the key needs no number.
"""

from __future__ import annotations

import numpy as np

from flexkv.model import BlockIds
from flexkv.policies.ranked import RankedPolicy
from flexkv.protocols import PolicyContext


class LFU(RankedPolicy):
    """Least frequently used."""

    def open(self, context: PolicyContext) -> None:
        """Start counting hits."""
        super().open(context)
        self.hits = np.zeros(context.max_blocks, np.float64)

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Start without a hit."""
        self.hits[blocks] = 0.0
        self.order.rank(blocks, 0.0)

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Count a hit."""
        hits = self.hits[blocks] + 1.0
        self.hits[blocks] = hits
        self.order.rank_each(blocks, hits)
