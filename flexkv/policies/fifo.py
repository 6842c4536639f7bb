"""fifo: the block that became readable first leaves first, whatever its hits.

Upstream's formula: rank = creation time.
"""

from __future__ import annotations

from flexkv.model import BlockIds
from flexkv.policies.ranked import RankedPolicy


class FIFO(RankedPolicy):
    """First in, first out."""

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Rank by the time of creation."""
        self.order.rank(blocks, now)
