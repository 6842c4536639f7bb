"""One function builds the brain: what policies are told, what counts, what is refused."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from flexkv import plugins
from flexkv.brain import Brain, build_brain
from flexkv.errors import PluginError
from flexkv.groups import GroupKeys
from flexkv.model import BlockIds
from flexkv.policies.lru import LRU
from flexkv.protocols import PolicyContext
from flexkv.traces import block_keys


class Curious(LRU):
    """LRU that keeps what it was told."""

    opened: ClassVar[list[PolicyContext]] = []
    seen: ClassVar[list[tuple[list[int], list[int]]]] = []  # depths, first halves of keys
    gone: ClassVar[list[int]] = []

    def open(self, context: PolicyContext) -> None:
        super().open(context)
        self.opened.append(context)
        self.context = context

    def inserted(self, blocks: BlockIds, now: float) -> None:
        super().inserted(blocks, now)
        keys = self.context.keys(blocks)[:, 0].tolist()
        self.seen.append((self.context.depths(blocks).tolist(), keys))

    def removed(self, blocks: BlockIds) -> None:
        self.gone += self.context.keys(blocks)[:, 0].tolist()


def put(brain: Brain, first: int, count: int, now: float) -> list[int]:
    """Put a prompt of its own whose bytes land at once; return the first halves of its keys."""
    keys = block_keys(np.arange(first, first + count))
    plan = brain.planner.plan_put([GroupKeys(keys)], now)
    graph = brain.planner.launch_put(plan, np.arange(count, dtype=np.uint32))
    for op in graph.ops:
        brain.ledger.commit(graph, op, op.positions, np.zeros(len(op), np.uint8), now)
    brain.planner.release(plan.blocks)
    names: list[int] = keys[:, 0].tolist()
    return names


@pytest.fixture
def curious() -> type[Curious]:
    for told in (Curious.opened, Curious.seen, Curious.gone):
        told.clear()
    return Curious


def test_policies_are_told_their_tier_and_what_a_block_is(curious: type[Curious]) -> None:
    with plugins.register(plugins.POLICIES, "curious", curious):
        brain = build_brain(
            {"host": 6, "disk": 40}, lambda tier: "curious", {"x": 1}, tokens_per_block=32
        )
    told = [(c.tier, c.capacity_blocks, c.tokens_per_block, c.settings) for c in curious.opened]
    assert told == [("host", 6, 32, {"x": 1}), ("disk", 40, 32, {"x": 1})]
    names = put(brain, 100, 4, 1.0)
    assert curious.seen == [([0, 1, 2, 3], names)]


def test_a_block_keeps_its_name_while_it_is_removed(curious: type[Curious]) -> None:
    evicted: list[tuple[str, int]] = []
    with plugins.register(plugins.POLICIES, "curious", curious):
        brain = build_brain(
            {"host": 6},
            lambda tier: "curious",
            tokens_per_block=16,
            count_evicted=lambda tier, count: evicted.append((tier, count)),
        )
    names = put(brain, 100, 4, 1.0)
    put(brain, 200, 5, 2.0)
    assert curious.gone == names[:0:-1], "the tail leaves first, the head stays"
    assert evicted == [("host", 3)]


def test_tiers_may_have_policies_of_their_own() -> None:
    brain = build_brain(
        {"host": 4, "disk": 4}, {"host": "lru", "disk": "mru"}.__getitem__, tokens_per_block=16
    )
    for number, first_out in ((0, 100), (1, 300)):
        blocks = (
            [brain.index.insert(block_keys(np.array([key])), 0xFFFFFFFF) for key in (100, 200, 300)]
            if number == 0
            else [brain.index.find(block_keys(np.array([k]))) for k in (100, 200, 300)]
        )
        for slot, block in enumerate(blocks):
            brain.index.land(number, block, np.array([slot], np.uint32))
            brain.index.ready(number, block, float(slot))
        victim = brain.index.keys(brain.index.victims(number, 1))
        assert victim.tolist() == block_keys(np.array([first_out])).tolist()


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(PluginError, match=r"no flexkv\.policies plug-in is called 'lfuda'"):
        build_brain({"host": 4}, lambda tier: "lfuda", tokens_per_block=16)
