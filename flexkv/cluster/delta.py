"""A change of what one node holds: `Delta`; `MEDIA`, what it may lie on there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.model import KeyArray

MEDIA = ("host", "disk", "remote")  # "remote": a shared store, readable also when the node is gone


@dataclass(frozen=True, slots=True)
class Delta:
    """What came to a node and what left it, each list in the order in which it happened.

    Media are positions in MEDIA. `stored_parents` are zeros for first blocks of prompts; ancestors
    stand before their descendants. `cleared`: the node held nothing of what was known before.
    """

    stored_keys: KeyArray
    stored_parents: KeyArray
    stored_media: NDArray[np.uint8]
    removed_keys: KeyArray
    removed_media: NDArray[np.uint8]
    cleared: bool = False

    def __len__(self) -> int:
        return len(self.stored_keys) + len(self.removed_keys)
