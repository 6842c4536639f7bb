"""A slot that somebody reads is nobody else's before the read is over, whatever became of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flexkv.brain import Brain, build_brain
from flexkv.groups import GroupKeys
from flexkv.model import DAMAGED, DISK, HOST, LANDED, READY, Copy, TransferGraph
from flexkv.planned import GetPlan
from flexkv.traces.model import block_keys

KEYS = block_keys(np.arange(2))
GROUPS = [GroupKeys(KEYS)]
DEVICE_BLOCKS = np.arange(2, dtype=np.uint32)


def told(brain: Brain, graph: TransferGraph, op: Copy, status: int) -> None:
    """Book an op all of whose blocks ended alike."""
    brain.ledger.commit(graph, op, op.positions, np.full(len(op), status, np.uint8), 1.0)


def on_disk_only() -> Brain:
    """A brain whose gets read both blocks of KEYS from disk, straight to the device."""
    capacities = {HOST: 2, DISK: 4}
    settings: dict[str, Any] = {"tokens_per_block": 4, "promote": "never", "chunk_blocks": 2}
    brain = build_brain(capacities, lambda _: "lru", **settings)
    put = brain.planner.plan_put(GROUPS, 0.0)
    graph = brain.planner.launch_put(put, DEVICE_BLOCKS)
    told(brain, graph, graph.ops[0], LANDED)
    spill = brain.planner.plan_spill(*brain.ledger.spills.pop()).graph
    assert spill is not None
    told(brain, spill, spill.ops[0], LANDED)
    for blocks in (spill.blocks, put.blocks):
        brain.planner.release(blocks)
    brain.ledger.vacate(brain.ledger.host, brain.index.drop(0, put.blocks[::-1]))
    return brain


def get(brain: Brain) -> GetPlan:
    (blocks,) = brain.planner.match(GROUPS).blocks
    assert len(blocks) == len(KEYS)
    return brain.planner.plan_get(blocks, KEYS, DEVICE_BLOCKS, 1.0)


@pytest.mark.parametrize("last", [LANDED, DAMAGED])
def test_a_damaged_block_gives_its_slot_back_when_its_last_read_is_over(last: int) -> None:
    brain = on_disk_only()
    ledger, disk = brain.ledger, brain.ledger.tiers[DISK]
    first, second = get(brain).graph, get(brain).graph
    slots = first.ops[0].source.ids
    told(brain, second, second.ops[0], DAMAGED)
    assert (brain.index.states(disk.number, first.blocks) != READY).all(), "nobody finds it"
    assert ledger.discards == []
    assert sorted(ledger.reads.kept(disk)) == sorted(slots)
    assert not set(disk.pool.take(disk.free)) & set(slots.tolist()), "its slots were handed out"
    told(brain, first, first.ops[0], last)
    assert sorted(np.concatenate([item.slots for item in ledger.discards])) == sorted(slots)
    assert len(ledger.reads.kept(disk)) == 0
