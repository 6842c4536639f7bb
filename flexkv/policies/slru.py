"""slru: blocks with few hits leave before protected ones; in a segment, the one used longest ago.

Upstream's key is (hit count >= slru_protected_threshold, last access). The rank is the segment, 0
or 1; it is set again at every access, and equal ranks leave in the order in which they were set.
"""

from __future__ import annotations

import numpy as np

from flexkv.errors import ConfigError
from flexkv.model import BlockIds
from flexkv.policies.ranked import RankedPolicy
from flexkv.protocols import PolicyContext


class SLRU(RankedPolicy):
    """Segmented LRU: a probationary and a protected segment."""

    def open(self, context: PolicyContext) -> None:
        """Read `slru_protected_threshold` (hits, >= 1, default 2)."""
        super().open(context)
        self.protected_threshold = int(context.settings.get("slru_protected_threshold", 2))
        if self.protected_threshold < 1:
            raise ConfigError(
                f"slru_protected_threshold must be >= 1, got {self.protected_threshold}"
            )
        self.hits = np.zeros(context.max_blocks, np.uint32)

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Start on probation."""
        self.hits[blocks] = 0
        self.order.rank(blocks, 0.0)

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Count a hit; enough of them protect."""
        hits = np.minimum(self.hits[blocks] + np.uint32(1), self.protected_threshold)
        self.hits[blocks] = hits
        self.order.rank_each(blocks, hits >= self.protected_threshold)
