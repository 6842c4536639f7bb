"""An eviction policy: the shortest prompts leave first, they are cheap to compute again."""

from __future__ import annotations

import numpy as np


class Longest:
    """Ranks a block by how deep in its prompt it lies; the smallest rank leaves first."""

    flexkv_api = 1

    def open(self, context):
        self.order = context.order

    def inserted(self, blocks, now):  # in prompt order
        self.order.rank_each(blocks, np.arange(len(blocks), dtype=np.float64))

    def touched(self, blocks, now):
        pass

    def removed(self, blocks):
        pass

    def victims(self, count, evictable):
        return self.order.take(count)
