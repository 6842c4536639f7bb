"""What policies with ageing have in common: rank = age + worth, and the age follows those who left.

A subclass says what a block is `worth` after so many uses. The age starts at 0 and becomes the rank
of whoever leaves: what was worth much long ago is caught up with, so no block stays for its past
alone (dynamic ageing; Arlitt et al., "Evaluating Content Management Techniques for Web Proxy
Caches", 1999).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BlockIds
from flexkv.policies.ranked import RankedPolicy
from flexkv.protocols import PolicyContext


class AgedPolicy(RankedPolicy):
    """Base of policies that rank by age + worth. 16 bytes a block."""

    def open(self, context: PolicyContext) -> None:
        """Start young: the age is 0 until something leaves."""
        super().open(context)
        self.age = 0.0
        self.uses = np.zeros(context.max_blocks, np.float64)
        self.known_ranks = np.zeros(context.max_blocks, np.float64)

    def worth(self, blocks: BlockIds, uses: NDArray[np.float64]) -> NDArray[np.float64]:
        """What blocks are worth that were used so often; the insertion is the first use."""
        raise NotImplementedError

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Count the first use."""
        self.uses[blocks] = 0.0
        self.touched(blocks, now)

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Count a use and rank anew, at the age of today."""
        uses = self.uses[blocks] + 1.0
        ranks = self.age + self.worth(blocks, uses)
        self.uses[blocks], self.known_ranks[blocks] = uses, ranks
        self.order.rank_each(blocks, ranks)

    def removed(self, blocks: BlockIds) -> None:
        """Let the age follow victims; not a block that was removed out of turn."""
        if len(blocks) == 0:
            return
        gone, ahead = self.known_ranks[blocks].max(), self.order.take(1)
        if len(ahead):
            gone = min(gone, self.known_ranks[ahead[0]])
        self.age = max(self.age, float(gone))
