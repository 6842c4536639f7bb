"""arc: blocks used once and blocks used again share the tier as the ghosts of both suggest.

ARC (Megiddo and Modha, FAST'03): two LRU queues, T1 of blocks used once and T2 of blocks used more
often, and ghosts B1 and B2 of those who left them. `goal` is the share of T1 in blocks: a ghost of
B1 that comes back raises it by max(1, |B2|/|B1|), one of B2 lowers it by max(1, |B1|/|B2|); both
enter T2. While T1 is longer than the goal its oldest leaves, else T2's. |T1| + |B1| and half of
everything stay within the slots of the tier.

Ghosts are recognised when their blocks have been inserted: the goal moves one put late. Blocks that
others stand on are passed over until these have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from flexkv.model import BlockIds, BoolArray
from flexkv.policies.queues import Ghosts, TwoQueues
from flexkv.protocols import API_VERSION, PolicyContext

T1, T2 = 0, 1


class ARC:
    """Adaptive replacement cache. 10 bytes a block, and its ghosts."""

    flexkv_api: ClassVar[int] = API_VERSION

    def open(self, context: PolicyContext) -> None:
        """Start with nothing, and no room wanted for T1."""
        self.capacity = context.capacity_blocks
        self.queues = TwoQueues(context)
        self.ghosts = (Ghosts(context), Ghosts(context))
        self.goal = 0.0

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Start in T1, ghosts in T2; those move the goal."""
        sizes = [max(1, len(ghosts)) for ghosts in self.ghosts]
        once, often = (ghosts.recall(blocks) for ghosts in self.ghosts)
        rise = np.count_nonzero(once) * max(1.0, sizes[1] / sizes[0])
        fall = np.count_nonzero(often) * max(1.0, sizes[0] / sizes[1])
        self.goal = min(max(self.goal + float(rise - fall), 0.0), float(self.capacity))
        known = once | often
        self.queues.push(T1, blocks[~known])
        self.queues.push(T2, blocks[known])

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Move to the newest end of T2."""
        self.queues.push(T2, blocks)

    def removed(self, blocks: BlockIds) -> None:
        """Remember each as a ghost of the queue it leaves, the oldest ghosts no longer."""
        left = self.queues.queue_of(blocks)
        self.queues.forget(blocks)
        for queue, ghosts in enumerate(self.ghosts):
            ghosts.add(blocks[left == queue])
        lengths = self.queues.lengths
        self.ghosts[T1].trim(max(0, self.capacity - lengths[T1]))
        self.ghosts[T2].trim(max(0, 2 * self.capacity - sum(lengths) - len(self.ghosts[T1])))

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        """From T2 until the newcomers make T1 longer than the goal, from T1 then."""
        from_t2 = int(self.goal) + 1 - self.queues.lengths[T1]
        return self.queues.split(min(max(from_t2, 0), count), count)
