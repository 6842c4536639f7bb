"""What tests of `hazard` share: traffic with something to learn in it, and a replay.

`chats` (conversations between documents that nobody asks for again), `Replay` (one tier).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flexkv.brain import build_brain
from flexkv.groups import GroupKeys
from flexkv.model import HOST
from flexkv.planned import PutPlan
from flexkv.policies.hazard import Hazard
from flexkv.traces.model import block_keys

Ids = list[int]


def chats(seed: int, requests: int, *, scans: float = 0.5) -> Iterator[tuple[float, Ids]]:
    """Yield (time in seconds, block ids): turns of conversations, and long prompts used once.

    Ids are chained: they name a whole prefix.
    """
    chance, fresh = np.random.default_rng(seed), iter(range(1, 1 << 40))
    now, talks = 0.0, [[next(fresh)] for _ in range(8)]
    for _ in range(requests):
        now += float(chance.exponential(2.0))
        if chance.random() < scans:
            yield now, [0, *(next(fresh) for _ in range(int(chance.integers(5, 40))))]
            continue
        talk = talks[int(chance.integers(len(talks)))]
        talk += [next(fresh) for _ in range(int(chance.integers(1, 4)))]
        if len(talk) > 30:
            talk[:] = [next(fresh)]
        yield now, [0, *talk]


class Replay:
    """A brain with one tier whose bytes land at once."""

    def __init__(self, capacity: int, policy: str = "hazard", **settings: Any) -> None:
        self.capacity, self.hits, self.asked = capacity, 0, 0
        self.brain = build_brain(
            {HOST: capacity}, lambda tier: policy, settings, tokens_per_block=16, spill="never"
        )

    @property
    def policy(self) -> Hazard:
        """The tier's policy."""
        policy = self.brain.index.audience(0).policy
        assert isinstance(policy, Hazard)
        return policy

    def serve(self, now: float, ids: Ids, *, read: bool = False) -> PutPlan:
        """Match a prompt (and, if `read`, get it), then put it."""
        planner, ledger = self.brain.planner, self.brain.ledger
        groups = [GroupKeys(block_keys(np.array(ids, np.int64)))]
        device = np.arange(len(ids), dtype=np.uint32)
        found = planner.match(groups).blocks[0]
        self.hits, self.asked = self.hits + len(found), self.asked + len(ids)
        if read:
            planner.plan_get(found, groups[0].keys[: len(found)], device[: len(found)], now)
        planner.release(found)
        plan = planner.plan_put([GroupKeys(groups[0].keys[: self.capacity])], now)
        graph = planner.launch_put(plan, device[: len(plan.blocks)])
        for op in graph.ops:
            ledger.commit(graph, op, op.positions, np.zeros(len(op), np.uint8), now)
        planner.release(plan.blocks)
        return plan

    def check(self) -> None:
        """Index and model are sound; AssertionError if not."""
        self.brain.index.check_integrity()
        self.policy.check_integrity()
