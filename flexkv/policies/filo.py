"""filo: the block that became readable last leaves first, whatever its hits.

Upstream's formula: rank = -creation time.
"""

from __future__ import annotations

from flexkv.model import BlockIds
from flexkv.policies.ranked import RankedPolicy


class FILO(RankedPolicy):
    """First in, last out."""

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Rank by the time of creation."""
        self.order.rank(blocks, -now)
