"""mru: the block that was used last leaves first (for scans that come round again).

Upstream's formula: rank = -last access.
"""

from __future__ import annotations

from flexkv.model import BlockIds
from flexkv.policies.ranked import RankedPolicy


class MRU(RankedPolicy):
    """Most recently used."""

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Count the insertion as the last access."""
        self.order.rank(blocks, -now)

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Move to the front of the queue of those who leave."""
        self.order.rank(blocks, -now)
