"""What the built-in policies have in common: the next victim is the leaf with the smallest rank.

A subclass says what rank a block gets when it is `inserted` and `touched`; the index keeps the
leaves ordered by rank, ties by the order in which ranks were set (`flexkv.protocols.LeafOrder`),
and evicts from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from flexkv.model import BlockIds, BoolArray
from flexkv.protocols import API_VERSION, LeafOrder, PolicyContext


class RankedPolicy:
    """Base of policies that order blocks by one number.

    `ranked` promises that `victims` is exactly what the leaf order says: the index may evict
    without asking.
    """

    flexkv_api: ClassVar[int] = API_VERSION
    ranked: ClassVar[bool] = True
    order: LeafOrder

    def open(self, context: PolicyContext) -> None:
        """Take the tier's leaf order; subclasses read their settings and size their arrays here."""
        self.order = context.order

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Rank blocks that became readable."""
        raise NotImplementedError

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Rank blocks that were hit; by default a hit changes nothing."""

    def removed(self, blocks: BlockIds) -> None:
        """Forget blocks; by default there is nothing to forget."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        """The first `count` blocks of the leaf order."""
        return self.order.take(count)
