"""What the planner answers: `GetPlan`, `PutPlan`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BlockIds, KeyArray, SlotIds, TransferGraph


@dataclass(slots=True)
class GetPlan:
    """Graphs of a get (victims to save first, then the blocks), and blocks by the tier they come
    from.
    """

    graph: TransferGraph
    saves: TransferGraph | None
    by_tier: dict[str, int]


@dataclass(slots=True)
class PutPlan:
    """Blocks of a put: all of them pinned, those at `positions` have host slots that wait for their
    bytes. The last `bypassed` blocks of the prompt are none of them: a policy refused them.
    """

    blocks: BlockIds
    keys: KeyArray
    positions: NDArray[np.int64]
    slots: SlotIds
    saves: TransferGraph | None
    landing: int
    bypassed: int = 0
