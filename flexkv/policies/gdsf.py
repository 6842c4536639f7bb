"""gdsf: what saves least prefill per byte leaves first: rank = age + uses * cost / size.

Greedy-Dual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy", 1998) for blocks of one size: only the cost differs. To
compute a block again costs a linear part, equal for all, and attention to everything before it:
cost = 1 + position / crossover, with the block's middle as its position in tokens and the
crossover where attention takes as many FLOPs as the rest (about 30,000 tokens for a model of 8B
parameters).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ConfigError
from flexkv.model import BlockIds
from flexkv.policies.aged import AgedPolicy
from flexkv.protocols import PolicyContext


class GDSF(AgedPolicy):
    """Greedy dual size frequency, the cost being the FLOPs of the prefill that a hit saves."""

    def open(self, context: PolicyContext) -> None:
        """Read `gdsf_crossover_tokens` (> 0, default 30,000)."""
        super().open(context)
        crossover = float(context.settings.get("gdsf_crossover_tokens", 30_000))
        if not crossover > 0.0:
            raise ConfigError(f"gdsf_crossover_tokens must be > 0, got {crossover}")
        self.depths = context.depths
        self.cost_per_block = context.tokens_per_block / crossover

    def worth(self, blocks: BlockIds, uses: NDArray[np.float64]) -> NDArray[np.float64]:
        """The cost of computing each block again, once for each use."""
        return uses * (1.0 + (self.depths(blocks) + 0.5) * self.cost_per_block)
