"""s3fifo: newcomers wait in a small queue; who is used there, or comes back soon, enters the main.

S3-FIFO (Yang et al., SOSP'23): a small FIFO of a tenth of the slots and a main FIFO. Uses are
counted up to 3. At the end of the small queue a block used more than once moves to the main one,
others leave; at the end of the main queue a block with uses goes back to its beginning, one use
poorer, others leave. Who left the small queue is remembered as a ghost, as many as the main queue
holds: a block that comes back while it is one enters the main queue at once.

Blocks that others stand on are passed over until these have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from flexkv.errors import ConfigError
from flexkv.model import BlockIds, BoolArray
from flexkv.policies.queues import Ghosts, TwoQueues
from flexkv.protocols import API_VERSION, PolicyContext

SMALL, MAIN = 0, 1
_MOST_USES = 3


class S3FIFO:
    """Three FIFO queues: small, main, ghosts. 11 bytes a block, and its ghosts."""

    flexkv_api: ClassVar[int] = API_VERSION

    def open(self, context: PolicyContext) -> None:
        """Read `s3fifo_small_share` (of the slots, > 0, < 1, default 0.1)."""
        share = float(context.settings.get("s3fifo_small_share", 0.1))
        if not 0.0 < share < 1.0:
            raise ConfigError(f"s3fifo_small_share must be between 0 and 1, got {share}")
        self.small_blocks = max(1, int(share * context.capacity_blocks))
        self.main_blocks = context.capacity_blocks - self.small_blocks
        self.queues, self.ghosts = TwoQueues(context), Ghosts(context)
        self.uses = np.zeros(context.max_blocks, np.uint8)

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Start in the small queue, ghosts in the main one."""
        self.uses[blocks] = 0
        known = self.ghosts.recall(blocks)
        self.queues.push(SMALL, blocks[~known])
        self.queues.push(MAIN, blocks[known])

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Count a use."""
        self.uses[blocks] = np.minimum(self.uses[blocks] + np.uint8(1), _MOST_USES)

    def removed(self, blocks: BlockIds) -> None:
        """Remember those of the small queue."""
        self.ghosts.add(blocks[self.queues.queue_of(blocks) == SMALL])
        self.ghosts.trim(self.main_blocks)
        self.queues.forget(blocks)

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        """Move blocks that were used until `count` stand at the ends that were not."""
        while True:
            lacking = self.small_blocks - self.queues.lengths[SMALL]
            chosen = self.queues.split(min(max(lacking, 0), count), count)
            mains, uses = self.queues.queue_of(chosen) == MAIN, self.uses[chosen]
            again, promoted = chosen[mains & (uses > 0)], chosen[~mains & (uses > 1)]
            if len(again) == len(promoted) == 0:
                return chosen
            self.uses[again] -= 1
            self.uses[promoted] = 0
            self.queues.push(MAIN, again[::-1])  # as in a prompt: they were chosen leaves first
            self.queues.push(MAIN, promoted[::-1])
