"""A block that several tiers hold is read where it is expected to be there first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from flexkv.brain import build_brain
from flexkv.model import (
    DEVICE,
    DISK,
    HOST,
    NO_BLOCK,
    PEER,
    PRIORITY_GET,
    REMOTE,
    Copy,
    Span,
    TransferGraph,
)
from flexkv.planned import GetPlan
from flexkv.routes import PROBE_S
from flexkv.worth import Batch, Worth, WorthLimits

SIZE, BLOCKS, CHUNK = 1000, 12, 4
TIERS = (HOST, DISK, PEER, REMOTE)
SLOW, FAST = 0.010, 0.001  # seconds of a block
WHOLE = np.zeros(8, np.uint8)


class Node:
    """A brain that measures its tiers, and a prompt of which `held` says who holds which blocks."""

    def __init__(self, held: Mapping[str, Sequence[int]]) -> None:
        brain = build_brain(
            {HOST: 32, DISK: 32, PEER: 32, REMOTE: 32},
            lambda tier: "lru",
            tokens_per_block=1,
            chunk_blocks=CHUNK,
            chunks_in_flight=2,
            foreign=(PEER,),
        )
        self.planner, index = brain.planner, brain.index
        limits = WorthLimits(declines=False)
        self.worth = Worth(
            TIERS, tokens_per_block=1, block_bytes=SIZE, chunk_blocks=CHUNK, limits=limits
        )
        self.planner.routes.costs = self.worth
        self.keys = np.arange(1, 2 * BLOCKS + 1, dtype=np.uint64).reshape(BLOCKS, 2)
        self.blocks = index.insert(self.keys, NO_BLOCK)
        for name, numbers in held.items():
            tier, mine = brain.ledger.tiers[name], self.blocks[list(numbers)]
            index.land(tier.number, mine, tier.pool.take(len(mine)))
            index.ready(tier.number, mine, 0.0)

    def begin(self, tier: str, blocks: int, now: float) -> Batch | None:
        ids = np.arange(blocks, dtype=np.uint32)
        copy = Copy(Span(tier, ids), Span(HOST, ids), np.arange(blocks))
        keys, arrived = np.zeros((blocks, 2), np.uint64), np.zeros(blocks, np.bool_)
        graph = TransferGraph((copy,), ids, keys, arrived, DEVICE, PRIORITY_GET)
        self.worth.watch(graph)
        return self.worth.begin(graph, copy, now, blocks)

    def see(self, tier: str, block_s: float, now: float = 0.0) -> None:
        """Watch reads from a tier until it is known what they take."""
        for blocks in (1, 4, 8, 2):
            self.worth.end(self.begin(tier, blocks, now), now + blocks * block_s, WHOLE[:blocks])

    def get(self, now: float) -> GetPlan:
        """Plan a get of the whole prompt, and take it back."""
        index = self.planner.index
        index.pin(self.blocks)
        device = np.arange(BLOCKS, dtype=np.uint32)
        self.planner.promote = "never"
        plan = self.planner.plan_get(self.blocks, self.keys, device, now)
        index.unpin(self.blocks)
        return plan

    def by_tier(self, now: float = 1.0) -> dict[str, int]:
        return {tier: count for tier, count in self.get(now).by_tier.items() if count}


EVERYWHERE = {DISK: range(BLOCKS), PEER: range(BLOCKS), REMOTE: range(BLOCKS)}
COSTS = [
    ({}, DISK),  # the nearest, where nothing is known
    ({DISK: SLOW, PEER: FAST}, PEER),
    ({DISK: FAST, PEER: SLOW}, DISK),
    ({DISK: FAST, PEER: FAST}, DISK),
    ({DISK: SLOW, PEER: 0.9 * SLOW}, DISK),  # not much sooner
    ({PEER: FAST}, DISK),  # what was not measured is not judged
    ({DISK: SLOW}, DISK),
    ({DISK: SLOW, REMOTE: FAST}, REMOTE),
    ({DISK: SLOW, PEER: 0.5 * SLOW, REMOTE: FAST}, REMOTE),
    ({DISK: 0.5 * SLOW, PEER: FAST, REMOTE: SLOW}, PEER),
]


@pytest.mark.parametrize(("seen", "expected"), COSTS)
def test_blocks_come_from_the_tier_that_is_much_sooner_else_from_the_nearest(
    seen: Mapping[str, float], expected: str
) -> None:
    node = Node(EVERYWHERE)
    for tier, block_s in seen.items():
        node.see(tier, block_s)
    assert node.by_tier() == {expected: BLOCKS}
    sources = node.planner.routes.sources(node.blocks).tolist()
    assert sources == [TIERS.index(expected)] * BLOCKS


def test_what_only_one_tier_holds_comes_from_there() -> None:
    node = Node({DISK: range(6), PEER: range(3, 9), REMOTE: range(8, BLOCKS)})
    for tier, block_s in ((DISK, SLOW), (PEER, FAST), (REMOTE, FAST)):
        node.see(tier, block_s)
    assert node.by_tier() == {DISK: 3, PEER: 6, REMOTE: 3}
    assert node.planner.routes.sources(node.blocks).tolist() == [1] * 3 + [2] * 6 + [3] * 3
    positions = np.sort(np.concatenate([copy.positions for copy in node.get(1.0).graph.ops]))
    assert positions.tolist() == list(range(BLOCKS))


def test_what_a_tier_reads_for_others_counts() -> None:
    node = Node({DISK: range(BLOCKS), PEER: range(BLOCKS)})
    node.see(DISK, 0.5 * SLOW)
    node.see(PEER, SLOW)
    assert node.by_tier() == {DISK: BLOCKS}
    node.begin(DISK, 2 * BLOCKS, 1.0)  # three times as much before the last of ours
    assert node.by_tier() == {PEER: BLOCKS}


def test_a_tier_that_was_passed_over_is_tried_again_with_one_chunk() -> None:
    node = Node({DISK: range(BLOCKS), PEER: range(BLOCKS)})
    assert node.by_tier(100.0) == {DISK: BLOCKS}
    node.see(DISK, SLOW, 100.0)
    node.see(PEER, FAST, 100.0)
    assert node.by_tier(100.0 + 0.9 * PROBE_S) == {PEER: BLOCKS}
    assert node.by_tier(100.0 + PROBE_S) == {DISK: CHUNK, PEER: BLOCKS - CHUNK}
    assert node.by_tier(100.0 + 1.9 * PROBE_S) == {PEER: BLOCKS}
    assert node.planner.routes.probes == 1
    for _ in range(3):  # it is fast again
        node.see(DISK, 0.1 * FAST, 100.0 + 1.9 * PROBE_S)
    assert node.by_tier(100.0 + 1.9 * PROBE_S) == {DISK: BLOCKS}


def test_without_costs_the_nearest_is_read() -> None:
    node = Node(EVERYWHERE)
    node.planner.routes.costs = None
    node.see(DISK, SLOW)
    node.see(PEER, FAST)
    assert node.by_tier() == {DISK: BLOCKS}
