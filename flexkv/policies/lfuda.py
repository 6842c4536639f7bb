"""lfu-da: LFU with dynamic ageing: rank = age + uses, the smallest leaves first, ties oldest first.

The age is the rank of the last victim (see `flexkv.policies.aged`): a block that was popular once
stays for as long as it takes the others to catch up, not for ever.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BlockIds
from flexkv.policies.aged import AgedPolicy


class LFUDA(AgedPolicy):
    """Least frequently used, with dynamic ageing."""

    def worth(self, blocks: BlockIds, uses: NDArray[np.float64]) -> NDArray[np.float64]:
        """One for each use."""
        return uses
