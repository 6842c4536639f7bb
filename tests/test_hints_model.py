"""Retention hints against a slow model: whatever comes, leaves, is hinted, ends or is pinned, held
blocks are the right ones, leave last and lightest first, and never lock anything.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model import key_of, keys_of
from test_policies import Clock

from flexkv.groups import GroupKeys
from flexkv.hints import Hints, RetainLimits, weight_of
from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK, READY
from flexkv.policies.lfu import LFU
from flexkv.policies.lru import LRU
from flexkv.pool import SlotPool
from flexkv.tier import Tier

Path = tuple[int, ...]
POLICIES: dict[str, Any] = {"lru": LRU, "lfu": LFU, "foreign": Clock}
paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
priorities = st.sampled_from([None, 0, 1, 50, 100])
steps = st.sampled_from([None, 0, 1, 2, 7])
lives_s = st.sampled_from([None, 0.0, 1.0, 3.0, 10.0, 1e9])
MAX_TTL_S = 100.0


class HintModel:
    """Hints, said slowly: path -> (weight, end)."""

    def __init__(self) -> None:
        self.hints: dict[Path, tuple[int, float]] = {}

    def retain(self, path: Path, now: float, weight: int, ttl_s: float | None) -> None:
        self.expire(now)
        self.hints.pop(path, None)
        life_s = 5.0 if ttl_s is None else min(ttl_s, MAX_TTL_S)
        if weight and life_s:
            self.hints[path] = (weight, now + life_s)

    def expire(self, now: float) -> None:
        self.hints = {path: hint for path, hint in self.hints.items() if hint[1] > now}

    def weight(self, path: Path) -> int:
        covering = [w for hinted, (w, _) in self.hints.items() if hinted[: len(path)] == path]
        return max(covering, default=0)


class HintMachine(RuleBasedStateMachine):
    """An index of two tiers under one policy, with hints."""

    policy: ClassVar[str]

    @initialize(
        capacity=st.integers(4, 12),
        share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        seed=st.integers(0, 1 << 20),
    )
    def open(self, capacity: int, share: float, seed: int) -> None:
        self.index = PrefixIndex(64, ["host", "disk"])
        self.pools = [SlotPool(capacity), SlotPool(2 * capacity)]
        self.tiers = []
        for number, pool in enumerate(self.pools):
            self.index.set_policy(number, POLICIES[self.policy](), {})
            self.tiers.append(Tier(("host", "disk")[number], number, self.index, pool))
        limits = RetainLimits(share, blocks=1000, ttl_s=5.0, max_ttl_s=MAX_TTL_S)
        self.hints, self.model = Hints(self.index, self.tiers, limits), HintModel()
        self.share, self.now = share, 0.0
        self.pins: dict[int, int] = {}
        chance = random.Random(seed)
        for _ in range(40):  # begin in the middle of things
            path = tuple(chance.randrange(3) for _ in range(chance.randint(1, 5)))
            self.put(path, chance.randrange(2))
            if chance.random() < 0.5:
                self.retain(path, chance.choice([1, 50, 50, 100]), chance.choice([None, 1]), 60.0)

    @rule(path=paths, tier=st.integers(0, 1))
    def put(self, path: Path, tier: int) -> None:
        """Bring a prompt into a tier; make room first, as a put does."""
        self.now += 1
        keys, pool = keys_of(path), self.pools[tier]
        known = self.index.find(keys)
        self.index.pin(known)
        self.index.touch(known, self.now)
        there = self.index.states(tier, known) == READY
        lacking = len(path) - int(np.count_nonzero(there))
        short = lacking - pool.free
        gone = self.index.victims(tier, short) if short > 0 else known[:0]
        if len(gone) >= short:
            if len(gone):
                pool.give(self.index.drop(tier, gone))
            parent = int(known[-1]) if len(known) else NO_BLOCK
            added = self.index.insert(keys[len(known) :], parent)
            new = np.concatenate((known[~there], added))
            self.index.land(tier, new, pool.take(len(new)))
            self.index.ready(tier, new, self.now)
        self.index.unpin(known)

    @rule(path=paths, priority=priorities, steps=steps, ttl_s=lives_s)
    def retain(
        self, path: Path, priority: int | None, steps: int | None, ttl_s: float | None
    ) -> None:
        given = {"priority": priority, "steps": steps, "ttl_s": ttl_s}
        kept = self.hints.retain([GroupKeys(keys_of(path))], self.now, **given)
        self.model.retain(path, self.now, weight_of(priority, steps), ttl_s)
        assert kept == (path in self.model.hints)

    @rule(seconds=st.sampled_from([0.5, 2.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(path=paths)
    def hit(self, path: Path) -> None:
        self.now += 1
        self.index.touch(self.index.match(keys_of(path)), self.now)

    @rule(path=paths)
    def pin(self, path: Path) -> None:
        blocks = self.index.match(keys_of(path))
        self.index.pin(blocks)
        for block in blocks.tolist():
            self.pins[block] = self.pins.get(block, 0) + 1

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        for block, count in self.pins.items():
            for _ in range(count):
                self.index.unpin(np.array([block], np.uint32))
        self.pins.clear()

    @rule(tier=st.integers(0, 1), count=st.integers(1, 8))
    def drop(self, tier: int, count: int) -> None:
        self.pools[tier].give(self.index.evict(tier, count)[1])

    @rule()
    def reset(self) -> None:
        self.unpin()
        self.hints.clear()
        self.model.hints.clear()
        self.index.clear()
        self.pools[:] = [SlotPool(pool.capacity) for pool in self.pools]

    @rule(tier=st.integers(0, 1), count=st.integers(1, 8))
    def ask(self, tier: int, count: int) -> None:
        """Look at who would leave: nothing else could have left before."""
        self.hints.advance(self.now)
        self.model.expire(self.now)
        before = self.index.keys(self.index.readable(tier)).tolist()
        victims = self.index.victims(tier, count).tolist()
        self.index.check_integrity()
        assert before == self.index.keys(self.index.readable(tier)).tolist()
        weights, held = self.look(tier)
        gone: set[int] = set()
        last = 0
        for victim in victims:
            free = self.evictable(tier, gone)
            assert victim in free
            if victim in held:
                assert not free - held, "a held block leaves before others"
                assert weights[victim] >= last, "a heavier block leaves before a lighter one"
                assert weights[victim] == min(weights[block] for block in free)
                last = weights[victim]
            gone.add(victim)
        assert len(victims) == count or not self.evictable(tier, gone), "a hint has locked a block"

    def evictable(self, tier: int, gone: set[int]) -> set[int]:
        """What could leave a tier if nothing were held and `gone` had left."""
        state = [set(self.index.readable(number).tolist()) for number in range(2)]
        state[tier] -= gone
        entries = {block for blocks in state for block in blocks} | set(self.pins)
        parents = {b: int(self.index.parents(np.array([b], np.uint32))[0]) for b in entries}
        inner = {parents[block] for block in state[tier]}
        above = {parents[block] for block in entries}
        free = {b for b in state[tier] if b not in inner and not self.pins.get(b)}
        return {b for b in free if b in state[1 - tier] or b not in above}

    def look(self, tier: int) -> tuple[dict[int, int], set[int]]:
        """Weights of the blocks of a tier, by the model; and which of them are held."""
        names = {key_of(path): path for path in _all_paths()}
        blocks = self.index.readable(tier)
        keys = self.index.keys(blocks).tolist()
        weights = {
            block: self.model.weight(names[key[0], key[1]])
            for block, key in zip(blocks.tolist(), keys, strict=True)
        }
        holds = self.hints.holds.get(self.tiers[tier].name)
        return weights, set() if holds is None else set(np.flatnonzero(holds._held).tolist())

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        self.index.check_integrity()
        self.hints.advance(self.now)
        self.model.expire(self.now)
        assert len(self.hints) == len(self.model.hints)
        assert self.hints.blocks == sum(len(path) for path in self.model.hints)
        assert len(self.hints._tree) == len(
            {path[: i + 1] for path in self.model.hints for i in range(len(path))}
        )
        assert bool(self.hints.holds) == bool(self.model.hints), (
            "hints that are over cost something"
        )
        for number, pool in enumerate(self.pools):
            weights, held = self.look(number)
            hinted = {block for block, weight in weights.items() if weight}
            holds = self.hints.holds.get(self.tiers[number].name)
            if holds is None:
                assert not held
                continue
            holds._settle()
            held = self.look(number)[1]
            limit = int(self.share * pool.capacity)
            assert {b: int(holds._weight[b]) for b in weights} == weights
            assert (holds.hinted, holds.held) == (len(hinted), min(len(hinted), limit))
            assert held <= hinted
            left_out = [weights[block] for block in hinted - held]
            assert not held or max(left_out, default=0) <= min(weights[block] for block in held)


@lru_cache(1)
def _all_paths() -> list[Path]:
    found: list[Path] = [()]
    for _ in range(5):
        found += [(*path, label) for path in found for label in range(3)]
    return sorted(set(found))[1:]


for _name in POLICIES:
    _machine = type(f"Hints_{_name}", (HintMachine,), {"policy": _name})
    _machine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
    globals()[f"Test_{_name}"] = _machine.TestCase
