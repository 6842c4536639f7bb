"""The books of the brain: which blocks are where, what is landing, and what an op achieved.

`Ledger.commit` publishes what landed and takes back what did not; `remove`, `restore`,
`forget_everything` change the whole cache. Slots that a store must forget before anyone may use
them again collect in `discards`, blocks fit for a lower tier in `spills`: the body picks both up.
Synchronous and deterministic: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexkv import groups as grouped
from flexkv.groups import GroupKeys
from flexkv.hints import Hints, RetainLimits
from flexkv.index import PrefixIndex
from flexkv.model import (
    ABSENT,
    DAMAGED,
    DEVICE,
    FAILED,
    HOST,
    LANDED,
    MISSING,
    NO_BLOCK,
    READY,
    BlockIds,
    Copy,
    KeyArray,
    SlotIds,
    Statuses,
    TransferGraph,
)
from flexkv.pool import SlotPool
from flexkv.protocols import Recovered
from flexkv.reads import Reads
from flexkv.tier import Tier

SpillMode = Literal["through", "on_evict", "never"]
PromoteMode = Literal["always", "when_room", "never"]  # without evicting; not at all


class Discard(NamedTuple):
    """Slots of a store to forget, with the keys they held (zeros where nobody knows). Stores that
    are addressed by key forget keys, of which some may be in use again, or the slots may.
    """

    tier: Tier
    slots: SlotIds
    keys: KeyArray


class Ledger:
    """Index, tiers and the numbers of what is landing.

    Tier 0 is the host, the rest are `sources` that blocks are read from, from near to far; the
    `stores` among them are written to, `foreign` ones are not.
    """

    def __init__(
        self,
        index: PrefixIndex,
        tiers: Sequence[Tier],
        *,
        max_blocks: int,
        spill: SpillMode = "through",
        max_read_failures: int = 3,
        retain: RetainLimits | None = None,
        keyed: Collection[str] = (),
        foreign: Collection[str] = (),
    ) -> None:
        self.index = index
        own = [tier for tier in tiers if tier.name not in foreign]
        self.hints = Hints(index, own, retain)
        self.host, self.stores, self.sources = tiers[0], tuple(own[1:]), tuple(tiers[1:])
        self.tiers = {tier.name: tier for tier in tiers}
        self.spill: SpillMode = spill if self.stores else "never"
        self.max_blocks = max_blocks
        self.max_read_failures = max_read_failures
        self.discards: list[Discard] = []
        for tier in self.stores:
            if tier.name in keyed:
                tier.forget = partial(self._forget, tier)
        self.spills: list[tuple[BlockIds, KeyArray]] = []
        self.offers = np.zeros(max_blocks, np.int32)  # kept by whoever spills: of each block
        self.reads = Reads(max_blocks)
        self._landing_of = np.zeros(max_blocks, np.int64)
        self._strikes = np.zeros(max_blocks, np.uint8)  # consecutive failed reads of a block
        self._last_landing = 0
        # host slots whose old content is being saved, and those of them that nobody holds any more
        self._saving = np.zeros(self.host.capacity, np.bool_)
        self._free_when_saved = np.zeros(self.host.capacity, np.bool_)

    def _forget(self, tier: Tier, keys: KeyArray) -> None:
        if len(keys):
            self.discards.append(Discard(tier, np.empty(0, np.uint32), keys))

    def keep_again(self, tier: Tier, blocks: BlockIds) -> None:
        """Take blocks that are written to a store addressed by key out of what it is to forget: a
        deletion that comes late would hit the new bytes.
        """
        if tier.forget is None or not self.discards:
            return
        wanted = {key.tobytes() for key in self.index.keys(blocks)}
        for number, (whose, slots, keys) in enumerate(self.discards):
            if whose is tier:
                left = np.array([key.tobytes() not in wanted for key in keys], np.bool_)
                self.discards[number] = Discard(tier, slots, keys[left])

    def open_landing(self, blocks: BlockIds) -> int:
        """Number a landing of `blocks` in the host that other graphs may join until it is
        committed.
        """
        self._last_landing += 1
        self._landing_of[blocks] = self._last_landing
        return self._last_landing

    def landings(self, blocks: BlockIds) -> NDArray[np.int64]:
        """The joinable landing of each block in the host, 0 where there is none."""
        return self._landing_of[blocks]

    def commit(
        self,
        graph: TransferGraph,
        op: Copy,
        positions: NDArray[np.int64],
        statuses: Statuses,
        now: float,
    ) -> None:
        """Book what an op (or a part of it) achieved: publish what landed, take back the rest."""
        blocks = graph.blocks[positions]
        if op.source.place in self.tiers and op.source.place != HOST:
            self.reads.end(blocks)
            self._judge(self.tiers[op.source.place], blocks, statuses)
            for freed in self.reads.released():
                self.vacate(*freed)
        if op.target.place == DEVICE:
            return
        tier = self.tiers[op.target.place]
        if op.source.place == HOST and op.landing:
            self._saved(op.source.ids[np.isin(op.positions, positions)])
        if tier is self.host:
            self._landing_of[blocks] = 0
        lost: BlockIds | None = None
        if np.count_nonzero(statuses):  # others than LANDED
            ok = statuses == LANDED
            lost, lost_keys = blocks[~ok], graph.keys[positions[~ok]]
            blocks, positions = blocks[ok], positions[ok]
        if len(blocks):
            self.index.ready(tier.number, blocks, now)
            if op.source.place == DEVICE and tier is self.host and self.spill == "through":
                self.spills.append((blocks, graph.keys[positions]))
        if lost is not None:
            self.vacate(tier, self.index.drop(tier.number, lost), lost_keys)

    def offer_unspilled(self, blocks: BlockIds, keys: KeyArray) -> None:
        """With spill="through", offer host blocks that no store holds: their spill was dropped."""
        if self.spill == "through" and len(blocks):
            lacking = self.index.states(self.host.number, blocks) == READY
            for store in self.stores:
                lacking &= self.index.states(store.number, blocks) == ABSENT
            if lacking.any():
                self.spills.append((blocks[lacking], keys[lacking]))

    def _judge(self, store: Tier, blocks: BlockIds, statuses: Statuses) -> None:
        """Forget stored blocks that are damaged, or that failed to be read too often in a row."""
        if not np.count_nonzero(statuses):  # all LANDED
            self._strikes[blocks] = 0
            return
        self._strikes[blocks[statuses == LANDED]] = 0
        failed = statuses == FAILED
        damaged = (statuses == DAMAGED) | (statuses == MISSING)
        self._strikes[blocks[failed]] += 1
        if store.books is None:  # another node that does not answer may have it all the same
            damaged |= failed & (self._strikes[blocks] >= self.max_read_failures)
        gone = blocks[damaged]
        gone = gone[self.index.states(store.number, gone) == READY]
        if len(gone):
            self._strikes[gone] = 0
            self._drop(store, gone)

    def _drop(self, tier: Tier, blocks: BlockIds) -> None:
        """Make blocks leave a tier; a store has to forget them, when nobody reads them any more."""
        if tier.books is not None:
            tier.books.forget(blocks)
            return
        keys, busy = self.index.keys(blocks), self.reads.under_way(blocks)
        slots = self.index.drop(tier.number, blocks)
        self.reads.keep(blocks[busy], tier, slots[busy], keys[busy])
        self.vacate(tier, slots[~busy], keys[~busy])

    def hold(self, slots: SlotIds) -> None:
        """Note host slots whose old content a save is about to read."""
        self._saving[slots] = True

    def _saved(self, slots: SlotIds) -> None:
        self._saving[slots] = False
        freed = slots[self._free_when_saved[slots]]
        self._free_when_saved[freed] = False
        self.host.give(freed)

    def vacate(self, tier: Tier, slots: SlotIds, keys: KeyArray | None = None) -> None:
        """Free slots: at once in the host (unless they are still being saved), after they are
        forgotten in a store.
        """
        if tier is self.host:
            busy = self._saving[slots]
            self._free_when_saved[slots[busy]] = True
            tier.give(slots[~busy])
        elif keys is None and tier.forget is not None:  # which was told when they left
            tier.give(slots)
        elif len(slots):
            held = np.zeros((len(slots), 2), np.uint64) if keys is None else keys
            self.discards.append(Discard(tier, slots, held))

    def remove(self, group: GroupKeys) -> int:
        """Drop the tail of a prompt, as far as no other prompt, pin or transfer uses it; returns
        blocks dropped.
        """
        blocks = grouped.find(self.index, [group])
        blocks = blocks[blocks != NO_BLOCK]
        tail = blocks[len(blocks) - self.index.removable(blocks) :][::-1]
        for tier in self.tiers.values():
            here = tail[self.index.states(tier.number, tail) == READY]
            if len(here):
                self._drop(tier, here)
        return len(tail)

    def restore(self, store: Tier, recovered: Recovered, now: float) -> int:
        """Rebuild the index from what a store kept; rows without their ancestors are forgotten
        there.
        """
        accepted = self.index.restore(store.number, recovered, now)
        store.pool.reserve(recovered.slots)
        self.vacate(store, recovered.slots[~accepted], recovered.keys[~accepted])
        return int(np.count_nonzero(accepted))

    def forget_everything(self) -> None:
        """Empty every tier; slots of stores come back once they are forgotten there. Nothing may be
        pinned or in flight.
        """
        self.hints.clear()
        for tier in self.stores:
            if tier.forget is not None:
                tier.forget(self.index.keys(self.index.readable(tier.number)))
        self.index.clear()
        self._landing_of[:] = 0
        self._strikes[:] = 0
        self.spills.clear()
        for tier in self.tiers.values():
            tier.pool = SlotPool(tier.capacity)
            if tier.books is not None:
                tier.books.clear()
            elif tier is not self.host and tier.forget is None:
                self.vacate(tier, tier.pool.take(tier.capacity))
