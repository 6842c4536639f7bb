"""steps: blocks leave by how far the run that needs them is (retention hints), others as under lru.

The order of KVFlow (arXiv 2507.07400): what continues a hinted prefix and is covered by no hint
(the variable suffix of an agent's prompt) leaves first, then what no hint speaks of, used longest
ago first; then hinted blocks, farthest from execution first. Here hints have a priority, too, which
comes before the steps, and their share of a tier is limited (`flexkv.hints`). A suffix that is used
again is one no more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BlockIds
from flexkv.policies.ranked import RankedPolicy
from flexkv.protocols import PolicyContext

_APART = 1e12  # seconds: ranks of suffixes lie below, those of hinted blocks above all times


class Steps(RankedPolicy):
    """Farthest from execution first."""

    def open(self, context: PolicyContext) -> None:
        """Start without hints."""
        super().open(context)
        self.used = np.zeros(context.max_blocks, np.float64)
        self.weights = np.zeros(context.max_blocks, np.float64)

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Rank by time; hints come after."""
        self.used[blocks], self.weights[blocks] = now, 0.0
        self.order.rank(blocks, now)

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Note the time. It decides among blocks without a hint, and among equals."""
        self.used[blocks] = now
        self.weights[blocks] = np.maximum(self.weights[blocks], 0.0)
        self._rank(blocks)

    def hinted(self, blocks: BlockIds, weights: NDArray[np.float64]) -> None:
        """Rank by what users want to keep."""
        self.weights[blocks] = weights
        self._rank(blocks)

    def _rank(self, blocks: BlockIds) -> None:
        weights, used = self.weights[blocks], self.used[blocks]
        ranks = np.where(weights > 0, _APART + weights, used - _APART * (weights < 0))
        self.order.rank_each(blocks, ranks)
