"""What policies with ageing have in common: rank = age + worth, and the age follows those who left.

A subclass says what a block is `worth` after so many uses. The age starts at 0 and rises to the
rank of whoever leaves: what was worth much long ago is caught up with, so no block stays for its
past alone (dynamic ageing; Arlitt et al., "Evaluating Content Management Techniques for Web Proxy
Caches", 1999). Those who make room for a prompt leave one after the other: the last block of the
prompt takes the age that the first of them brought, and so on, as if they came one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BlockIds, BoolArray
from flexkv.protocols import API_VERSION, LeafOrder, PolicyContext

_NONE: NDArray[np.float64] = np.empty(0, np.float64)


class AgedPolicy:
    """Base of policies that rank by age + worth. 17 bytes a block.

    It is asked for victims although it ranks, to tell them from blocks that are removed out of
    turn: only victims age the others.
    """

    flexkv_api: ClassVar[int] = API_VERSION
    order: LeafOrder

    def open(self, context: PolicyContext) -> None:
        """Start young: the age is 0 until something leaves."""
        self.order = context.order
        self.uses = np.zeros(context.max_blocks, np.float64)
        self.known_ranks = np.zeros(context.max_blocks, np.float64)
        self._chosen = np.zeros(context.max_blocks, np.bool_)
        self._asked: BlockIds = np.empty(0, np.uint32)
        self.age = self._age_before = 0.0
        self._ages, self._most_ages = _NONE, context.capacity_blocks

    def worth(self, blocks: BlockIds, uses: NDArray[np.float64]) -> NDArray[np.float64]:
        """What blocks are worth that were used so often; the insertion is the first use."""
        raise NotImplementedError

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Count the first use; each block takes the age of its turn."""
        ages = np.full(len(blocks), self._age_before)
        brought = self._ages[len(self._ages) - min(len(self._ages), len(blocks)) :]
        ages[: len(brought)] = brought[::-1]
        self._ages, self._age_before = _NONE, self.age
        self._rank(blocks, ages, np.ones(len(blocks)))

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Count a use and rank anew, at the age of today."""
        self._rank(blocks, self.age, self.uses[blocks] + 1.0)

    def removed(self, blocks: BlockIds) -> None:
        """Let the age follow victims."""
        victims = blocks[self._chosen[blocks]]
        if len(victims):
            ages = np.maximum.accumulate(np.maximum(self.known_ranks[victims], self.age))
            self._ages = np.concatenate((self._ages, ages))[-self._most_ages :]
            self.age = float(ages[-1])

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        """The first `count` blocks of the leaf order."""
        self._chosen[self._asked] = False
        self._asked = self.order.take(count)
        self._chosen[self._asked] = True
        return self._asked

    def _rank(
        self, blocks: BlockIds, age: NDArray[np.float64] | float, uses: NDArray[np.float64]
    ) -> None:
        ranks = age + self.worth(blocks, uses)
        self.uses[blocks], self.known_ranks[blocks] = uses, ranks
        self.order.rank_each(blocks, ranks)
