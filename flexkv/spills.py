"""From the host to the stores: which blocks are written down, into which slots.

`plan_spill` (host blocks that stores lack) - `plan_save` (blocks that are about to lose their only
copy). A store holds a block only together with its ancestors: without them it could not be matched
after a restart, and an ancestor that only the host holds could never leave it. Synchronous and
deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexkv.ledger import Ledger
from flexkv.model import (
    HOST,
    NO_BLOCK,
    PRIORITY_SPILL,
    READY,
    BlockIds,
    BoolArray,
    Copy,
    KeyArray,
    Span,
    TransferGraph,
)


class Spill(NamedTuple):
    """What is to be written (None: nothing), how many blocks were dropped, and those that are too
    early: an ancestor is still on its way to the host.
    """

    graph: TransferGraph | None
    dropped: int
    early: BlockIds


def plan_spill(ledger: Ledger, blocks: BlockIds, keys: KeyArray) -> Spill:
    """Plan to write host blocks, and ancestors of theirs, to the stores that lack them; pins them.

    Blocks that left the host since they were offered, that find no slot, or whose ancestors are
    nowhere, are dropped.
    """
    index, host = ledger.index, ledger.host.number
    still = (index.keys(blocks) == keys).all(axis=1)
    still &= index.states(host, blocks) == READY
    count = np.count_nonzero(still)
    dropped = len(blocks) - int(count)
    if dropped:
        blocks = blocks[still]
    lacking, unready = zip(
        *(index.lacking(host, store.number, blocks) for store in ledger.stores), strict=True
    )
    early = unready[0][:0]
    if any(map(len, unready)):
        left_out = _once(unready)
        early = left_out[_waiting(ledger, left_out)]
        dropped += len(left_out) - len(early)
    blocks = lacking[0]
    if len(lacking) > 1:
        blocks = _once(lacking)
        blocks = blocks[np.argsort(index.depths(blocks), kind="stable")]
    index.pin(blocks)
    parents = _pin_parents(ledger, blocks)
    ops, goal = [], HOST
    for store, wanted in zip(ledger.stores, lacking, strict=True):
        taken = store.take(len(wanted), partial=True)
        assert taken is not None
        slots, spare = taken
        ledger.vacate(store, spare)
        dropped += len(wanted) - len(slots)
        wanted = wanted[: len(slots)]
        if len(wanted):
            index.land(store.number, wanted, slots)
            ledger.keep_again(store, wanted)
            source = Span(HOST, index.slots(host, wanted))
            positions = np.arange(len(wanted))
            if len(lacking) > 1:
                positions = np.flatnonzero(np.isin(blocks, wanted))
            ops.append(Copy(source, Span(store.name, slots), positions))
            goal = store.name
    index.unpin(parents)
    if not ops:
        index.unpin(blocks)
        return Spill(None, dropped, early)
    return Spill(_graph(ledger, tuple(ops), blocks, goal), dropped, early)


def _spread(parents: BlockIds, blocks: BlockIds, marked: BoolArray) -> BoolArray:
    """Mark the descendants of what is marked, too."""
    while True:
        more = marked | np.isin(parents, blocks[marked])
        if np.array_equal(more, marked):
            return marked
        marked = more


def _waiting(ledger: Ledger, blocks: BlockIds) -> BoolArray:
    """Which blocks, or their ancestors among them, have a parent that is landing in the host."""
    parents = ledger.index.parents(blocks)
    landing = parents != NO_BLOCK
    landing[landing] = ledger.landings(parents[landing]) > 0
    return _spread(parents, blocks, landing)


def _pin_parents(ledger: Ledger, blocks: BlockIds) -> BlockIds:
    """Keep a store from evicting a parent to make room for its child; returns what to unpin."""
    parents: BlockIds = ledger.index.parents(blocks)
    parents = parents[parents != NO_BLOCK]
    ledger.index.pin(parents)
    return parents


def _once(parts: Sequence[BlockIds]) -> BlockIds:
    once: BlockIds = np.unique(np.concatenate(parts))
    return once


def plan_save(ledger: Ledger, blocks: BlockIds) -> tuple[BlockIds, TransferGraph | None]:
    """Plan to write blocks that are about to lose their host slots into the first store, together
    with ancestors that it lacks; pins them all. The first op brings the blocks, so that their slots
    are free early.

    Returns the blocks that found a slot: never one without its ancestors.
    """
    index, host, store = ledger.index, ledger.host.number, ledger.stores[0]
    wanted, _ = index.lacking(host, store.number, blocks)
    parents = _pin_parents(ledger, wanted)
    taken = store.take(len(wanted), partial=True)
    index.unpin(parents)
    assert taken is not None
    slots, spare = taken
    ledger.vacate(store, spare)
    wanted = wanted[: len(slots)]
    if len(wanted) == 0:
        return wanted, None
    index.land(store.number, wanted, slots)
    ledger.keep_again(store, wanted)
    leaving = np.isin(wanted, blocks)
    ops = []
    for some in (leaving, ~leaving):
        if some.any():
            source = Span(HOST, index.slots(host, wanted[some]))
            landing = ledger.open_landing(wanted[:0])
            target = Span(store.name, slots[some])
            ops.append(Copy(source, target, np.flatnonzero(some), landing=landing))
    index.pin(wanted)
    return wanted[leaving], _graph(ledger, tuple(ops), wanted, store.name)


def _graph(ledger: Ledger, ops: tuple[Copy, ...], blocks: BlockIds, goal: str) -> TransferGraph:
    index = ledger.index
    return TransferGraph(
        ops,
        blocks,
        index.keys(blocks),
        np.zeros(len(blocks), np.bool_),
        goal,
        PRIORITY_SPILL,
        index.parent_keys(blocks),
        index.depths(blocks),
    )
