"""Which hinted blocks of one tier are held back from eviction, and what is left when they must go.

`Holds.assign` (weights of blocks that are there) - `came`, `left`, `cleared` (the tier changes) -
`victims` (what the policy picks, and held blocks only when that is not enough) - `hinted`, `held`
(counts). At most `limit` blocks of a tier are held: the heaviest, among equals those nearest to the
start of their prompts. A policy that knows hints (`HintedPolicy`) is told the same and
chooses by itself. Synchronous and deterministic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK, READY, BlockIds

FOREVER = np.iinfo(np.int32).max
SUFFIX = -1  # weight of a block that no hint covers, behind one that a hint covers
Weights = NDArray[np.int32]


@runtime_checkable
class HintedPolicy(Protocol):
    """Optional capability of an eviction policy: it knows what users want to keep, and chooses
    among such blocks by itself. For policies without it the index vetoes them as long as others
    can leave.
    """

    def hinted(self, blocks: BlockIds, weights: NDArray[np.float64]) -> None:
        """Hear what each block weighs from now on: above 0, the more the later it should leave; 0,
        like any other; below 0, it continues a hinted prefix, but no hint covers it.
        """
        ...


class Weigher(Protocol):
    """Who knows the weight of a key."""

    def weight(self, key: int) -> int:
        """The weight of the block whose key has this low half; 0 without a hint."""
        ...


class Holds:
    """The hinted blocks of one tier.

    Args:
        limit: blocks that may be held at once.
        weigher: asked for blocks that become readable.
    """

    def __init__(self, index: PrefixIndex, tier: int, limit: int, weigher: Weigher) -> None:
        self._index, self._tier, self.limit, self._weigher = index, tier, limit, weigher
        self._audience, self._order = index.audience(tier), index.order(tier)
        policy: object = self._audience.policy
        self._policy = policy if isinstance(policy, HintedPolicy) else None
        self._weight = np.zeros(index.max_blocks, np.int32)  # of blocks READY in the tier
        self._held = np.zeros(index.max_blocks, np.bool_)
        self._told = np.zeros(index.max_blocks, np.int32)  # what the policy knows, if it can
        self.hinted = self.held = 0
        self._least = 0  # weight of the lightest block that is held, when not all hinted ones are
        self._stale = False

    def open(self) -> None:
        """Begin to hold."""
        self._audience.holder = self

    def close(self) -> None:
        """Hold nothing any more, and cost nothing."""
        self.assign(np.flatnonzero(self._weight).astype(np.uint32), 0)
        self._stale = False
        self._audience.holder = None

    # what is where

    def assign(self, blocks: BlockIds, weights: Weights | int) -> None:
        """Give blocks their weights, as far as they are READY in the tier."""
        before = self._weight[blocks]
        differ = before != weights
        differ &= self._index.states(self._tier, blocks) == READY
        if not differ.any():
            return
        blocks, before = blocks[differ], before[differ]
        now = np.zeros(len(blocks), np.int32)
        now += weights[differ] if isinstance(weights, np.ndarray) else weights
        self._weight[blocks] = now
        self.hinted += int(np.count_nonzero(now > 0)) - int(np.count_nonzero(before > 0))
        held = self._held[blocks]
        self._hold(blocks[held & (now <= 0)], False)
        fresh = ~held & (now > 0)
        if self.hinted == self.held + int(np.count_nonzero(fresh)) <= self.limit:
            self._hold(blocks[fresh], True)
            self._least = 0
        elif (now[fresh] > self._least).any() or (held & (now < before)).any():
            self._stale = True
        self._stale |= self.held < min(self.hinted, self.limit)
        self._tell(blocks)

    def came(self, blocks: BlockIds) -> None:
        """Weigh blocks that have become READY."""
        parents = self._index.parents(blocks)
        starts = np.flatnonzero(parents[1:] != blocks[:-1]) + 1
        edges = [0, *starts.tolist(), len(blocks)]
        for start, end in itertools.pairwise(edges):
            self._weigh(blocks[start:end], int(parents[start]))

    def _weigh(self, chain: BlockIds, parent: int) -> None:
        """Weigh a chain of blocks; those that a hint covers come first."""
        keys, covered = self._index.keys(chain)[:, 0], 0
        weights = np.zeros(len(chain), np.int32)
        while covered < len(chain) and (weight := self._weigher.weight(int(keys[covered]))):
            weights[covered] = weight
            covered += 1
        if self._policy is not None and (covered or self._behind(parent)):
            weights[covered:] = SUFFIX
        if weights.any():
            self.assign(chain, weights)

    def _behind(self, parent: int) -> bool:
        """Whether a block continues a hinted prefix."""
        return parent != NO_BLOCK and bool(self._weight[parent])

    def left(self, blocks: BlockIds) -> None:
        """Forget blocks."""
        known = blocks[self._weight[blocks] != 0]
        if len(known):
            self.hinted -= int(np.count_nonzero(self._weight[known] > 0))
            self._weight[known] = self._told[known] = 0  # the policy forgets them by itself
            self._hold(known[self._held[known]], False)
            self._stale |= self.held < min(self.hinted, self.limit)
            if self.hinted <= self.limit:
                self._least = 0

    def cleared(self) -> None:
        """Forget everything."""
        self._weight[:] = self._told[:] = 0
        self._held[:] = False
        self.hinted = self.held = 0
        self._stale = False

    # who is held

    def _hold(self, blocks: BlockIds, on: bool) -> None:
        self._held[blocks] = on
        self.held += len(blocks) if on else -len(blocks)
        if self._policy is None:
            self._order.hold(blocks, on)

    def _tell(self, blocks: BlockIds) -> None:
        """Tell the policy of weights: those of blocks that are not held are not above 0."""
        if self._policy is not None:
            weights = self._weight[blocks]
            weights[~self._held[blocks]] = np.minimum(weights[~self._held[blocks]], 0)
            news = self._told[blocks] != weights
            if news.any():
                self._told[blocks[news]] = weights[news]
                self._policy.hinted(blocks[news], weights[news].astype(np.float64))

    def _settle(self) -> None:
        """Hold the heaviest `limit` of the hinted blocks; among equals those that are held, then
        those nearest to the start of their prompts.
        """
        if not self._stale:
            return
        self._stale = False
        hinted = np.flatnonzero(self._weight > 0).astype(np.uint32)
        weights, self._least = self._weight[hinted], 0
        if len(hinted) > self.limit:
            ties = (hinted, self._index.depths(hinted), ~self._held[hinted])
            order = np.lexsort((*ties, -weights))
            hinted = hinted[order]
            self._least = int(weights[order[self.limit - 1]]) if self.limit else FOREVER
        wanted = hinted[: self.limit]
        self._hold(gone := hinted[self.limit :][self._held[hinted[self.limit :]]], False)
        self._hold(new := wanted[~self._held[wanted]], True)
        self._tell(np.concatenate((gone, new)))

    # who leaves

    def victims(self, count: int, choose: Callable[[int], BlockIds]) -> BlockIds:
        """Return `count` blocks of the policy's choice; where what is not held does not suffice,
        held ones after them, lightest first, the policy deciding among equals.
        """
        self._settle()
        found = choose(count)
        if len(found) == count or not self.held or self._policy is not None:
            return found
        held = np.flatnonzero(self._held).astype(np.uint32)
        held = held[np.argsort(self._weight[held], kind="stable")]
        weights, free = self._weight[held], 0
        try:
            while len(found) < count and free < len(held):
                end = min(len(held), free + max(count - len(found), free))
                end = int(np.searchsorted(weights, weights[end - 1], side="right"))
                self._order.hold(held[free:end], False)
                more = choose(len(found) + end)  # all that can leave now
                more = more[~np.isin(more, found)]
                more = more[np.argsort(self._weight[more], kind="stable")]
                found, free = np.concatenate((found, more[: count - len(found)])), end
        finally:
            self._order.hold(held, True)
        return found
