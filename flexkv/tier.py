"""One level of residency, seen by the brain: a pool of slots, and who leaves when it is full.

`Tier.surplus` (how many should leave so that `count` more fit) - `Tier.take` (slots for newcomers,
evicting leaves first) - `Tier.give` (slots back).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from flexkv.index import PrefixIndex
from flexkv.model import BlockIds, KeyArray, SlotIds
from flexkv.pool import SlotPool

_NOTHING: BlockIds = np.empty(0, np.uint32)


def _ignore(count: int) -> None:
    """Count nothing."""


class Books(Protocol):
    """Who gives out the slots of a tier that lies on other machines, where nothing is written."""

    def forget(self, blocks: BlockIds) -> None:
        """Make blocks leave the tier."""

    def tidy(self) -> None:
        """Take back slots that only pins kept, if those are gone."""

    def clear(self) -> None:
        """Hear that the tier is empty."""


@dataclass(slots=True)
class Tier:
    """A tier's number in the index, its slots and its eviction thresholds.

    `evict_start_threshold` is the used share of the capacity at which eviction runs ahead of need,
    `evict_ratio` the share of the capacity that leaves at least whenever something leaves (both as
    upstream defines them). A store addressed by key must be told to `forget` what leaves: to write
    to the slot again does not. A tier with `books` is filled and emptied by them alone.
    """

    name: str
    number: int
    index: PrefixIndex
    pool: SlotPool
    evict_ratio: float = 0.0
    evict_start_threshold: float = 1.0
    count_evicted: Callable[[int], None] = _ignore
    forget: Callable[[KeyArray], None] | None = None
    books: Books | None = None
    evicted_blocks: int = field(default=0)

    @property
    def capacity(self) -> int:
        """Slots of the tier."""
        return self.pool.capacity

    @property
    def free(self) -> int:
        """Slots that hold nothing and await nothing."""
        return self.pool.free

    def surplus(self, count: int) -> int:
        """Blocks that should leave now so that `count` more fit: max(need, threshold, ratio), 0 if
        none must.
        """
        total, free = self.pool.capacity, self.pool.free
        if count == 0 or (count <= free and total - free < self.evict_start_threshold * total):
            return 0
        beyond_threshold = int(total * (1.0 - self.evict_start_threshold)) - free
        return max(count - free, beyond_threshold, int(total * self.evict_ratio))

    def victims(
        self, count: int, *, partial: bool, exact: bool = False
    ) -> tuple[int, BlockIds] | None:
        """Choose who leaves so that `count` blocks fit; nothing changes yet.

        Returns how many will fit and the victims, leaves before their ancestors; None when fewer
        than `count` can fit and `partial` is false. `exact` evicts for the need only, not ahead of
        it.
        """
        want = max(0, count - self.pool.free) if exact else self.surplus(count)
        victims = self.index.victims(self.number, want) if want > 0 else _NOTHING
        lacking = count - self.pool.free - len(victims)
        if lacking > 0:
            if not partial:
                return None
            count -= lacking
        return count, victims

    def take(self, count: int, *, partial: bool = False) -> tuple[SlotIds, SlotIds] | None:
        """Take slots for `count` newcomers, evicting what must go.

        Returns (slots, spare): `spare` are slots of victims evicted ahead of need, which the caller
        gives back once their old content is forgotten. None (and no change) when they do not all
        fit and `partial` is false.
        """
        chosen = self.victims(count, partial=partial)
        if chosen is None:
            return None
        count, victims = chosen
        if len(victims) == 0:
            return self.pool.take(count), _NOTHING
        freed = self.evict(victims)
        from_pool = min(self.pool.free, count)
        reused = count - from_pool
        slots = np.concatenate((self.pool.take(from_pool), freed[:reused]))
        return slots, freed[reused:]

    def evict(self, victims: BlockIds) -> SlotIds:
        """Make victims leave, counted; returns their slots, which are the caller's now."""
        self.evicted_blocks += len(victims)
        self.count_evicted(len(victims))
        if self.forget is not None:
            self.forget(self.index.keys(victims))
        return self.index.drop(self.number, victims)

    def give(self, slots: SlotIds) -> None:
        """Return slots whose content is forgotten and in which nothing is in flight."""
        self.pool.give(slots)
