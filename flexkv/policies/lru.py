"""lru: the block that was used longest ago leaves first; a hit may be worth some seconds of grace.

Upstream's formula: rank = grace time; inserted: now; hit: max(grace time, now) +
hit_reward_seconds. A reward of 0 is plain LRU.
"""

from __future__ import annotations

import numpy as np

from flexkv.errors import ConfigError
from flexkv.model import BlockIds
from flexkv.policies.ranked import RankedPolicy
from flexkv.protocols import PolicyContext


class LRU(RankedPolicy):
    """Least recently used, with an optional reward per hit."""

    def open(self, context: PolicyContext) -> None:
        """Read `hit_reward_seconds` (>= 0, default 0)."""
        super().open(context)
        self.hit_reward_seconds = float(context.settings.get("hit_reward_seconds", 0.0))
        if not self.hit_reward_seconds >= 0.0:
            raise ConfigError(f"hit_reward_seconds must be >= 0, got {self.hit_reward_seconds}")

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Start at `now`."""
        self.order.rank(blocks, now)

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Move to `now`, or further by the reward."""
        if self.hit_reward_seconds == 0.0:
            self.order.rank(blocks, now)
            return
        grace = np.maximum(self.order.ranks(blocks), now) + self.hit_reward_seconds
        self.order.rank_each(blocks, grace)
