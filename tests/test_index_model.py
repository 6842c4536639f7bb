"""Index, leaf orders, policies and slot pools against a small model in plain Python."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexkv.errors import CapacityError
from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK, NO_SLOT, TierState
from flexkv.policies.fifo import FIFO
from flexkv.policies.filo import FILO
from flexkv.policies.lfu import LFU
from flexkv.policies.lru import LRU
from flexkv.policies.mru import MRU
from flexkv.policies.slru import SLRU
from flexkv.pool import SlotPool
from flexkv.protocols import Recovered

Path = tuple[int, ...]  # a block, named by the labels on the way to it
POLICIES = {"lru": LRU, "lfu": LFU, "slru": SLRU, "fifo": FIFO, "mru": MRU, "filo": FILO}
SETTINGS = {"hit_reward_seconds": 3.0, "slru_protected_threshold": 2}
ABSENT, LANDING, READY = TierState.ABSENT, TierState.LANDING, TierState.READY


class Model:
    """What the index must do, said slowly. Blocks are paths; `state` has no ABSENT ones."""

    def __init__(self, policy: str, tiers: int) -> None:
        self.policy, self.pins, self.calls = policy, {}, 0
        self.state: list[dict[Path, int]] = [{} for _ in range(tiers)]
        self.rank: list[dict[Path, tuple[float, int]]] = [{} for _ in range(tiers)]
        self.hits: list[dict[Path, int]] = [{} for _ in range(tiers)]

    def children(self, path: Path) -> list[Path]:
        return [other for other in self.pins if other[:-1] == path and other != path]

    def readable(self, path: Path) -> bool:
        return any(state.get(path) == READY for state in self.state)

    def prune(self, path: Path) -> None:
        while path in self.pins and not self.pins[path] and not self.children(path):
            if any(path in state for state in self.state):
                return
            del self.pins[path]
            path = path[:-1]

    def evictable(self, tier: int, path: Path) -> bool:
        state, below = self.state[tier], self.children(path)
        elsewhere = any(s.get(path) == READY for i, s in enumerate(self.state) if i != tier)
        free = state.get(path) == READY and not self.pins[path]
        return free and not any(child in state for child in below) and (elsewhere or not below)

    def access(self, tier: int, paths: list[Path], now: float, hit: bool) -> None:
        self.calls += 1
        for path in paths:
            hits = self.hits[tier][path] = self.hits[tier][path] + 1 if hit else 0
            old = self.rank[tier].get(path, (now, 0))[0]
            value = {
                "lru": max(old, now) + SETTINGS["hit_reward_seconds"] if hit else now,
                "lfu": hits,
                "slru": int(hits >= SETTINGS["slru_protected_threshold"]),
                "fifo": old if hit else now,
                "mru": -now,
                "filo": old if hit else -now,
            }[self.policy]
            if not hit or self.policy not in ("fifo", "filo"):
                self.rank[tier][path] = (value, self.calls)

    def drop(self, tier: int, paths: list[Path]) -> None:
        for path in paths:
            for table in (self.state, self.rank, self.hits):
                table[tier].pop(path, None)
        for path in sorted(paths, key=len, reverse=True):
            self.prune(path)


class IndexMachine(RuleBasedStateMachine):
    """Drive index and model with the same calls: few labels, short prompts, a small table."""

    policy: ClassVar[str] = "lru"
    MAX_BLOCKS: ClassVar[int] = 24
    CAPACITY: ClassVar[tuple[int, ...]] = (10, 14)

    @initialize()
    def open(self) -> None:
        tiers = len(self.CAPACITY)
        self.index = PrefixIndex(self.MAX_BLOCKS, ["host", "disk"][:tiers])
        for tier in range(tiers):
            self.index.set_policy(tier, POLICIES[self.policy](), SETTINGS)
        self.pools = [SlotPool(capacity) for capacity in self.CAPACITY]
        self.model = Model(self.policy, tiers)
        self.block: dict[Path, int] = {}  # of every entry
        self.slot: list[dict[Path, int]] = [{} for _ in range(tiers)]
        self.now = 0.0

    def keys(self, prompt: Path) -> Any:
        """Readable keys: the path in base 8, shifted so that some share a home in the table."""
        words = [
            [sum((n + 1) << (3 * i) for i, n in enumerate(prompt[:d])) << 4, d]
            for d in range(1, len(prompt) + 1)
        ]
        return np.array(words, np.uint64).reshape(-1, 2)

    def known(self, prompt: Path) -> list[Path]:
        paths = [prompt[: i + 1] for i in range(len(prompt))]
        return paths[
            : next((i for i, path in enumerate(paths) if path not in self.block), len(paths))
        ]

    def blocks(self, paths: list[Path]) -> Any:
        return np.array([self.block[path] for path in paths], np.uint32)

    def forget_pruned(self) -> None:
        self.block = {path: block for path, block in self.block.items() if path in self.model.pins}

    prompts = st.lists(st.integers(0, 2), min_size=0, max_size=7).map(tuple)
    tier_numbers = st.integers(0, len(CAPACITY) - 1)

    @rule(prompt=prompts)
    def insert(self, prompt: Path) -> None:
        known = self.known(prompt)
        new = [prompt[: i + 1] for i in range(len(known), len(prompt))]
        parent = self.block[known[-1]] if known else NO_BLOCK
        keys = self.keys(prompt)[len(known) :]
        if len(self.block) + len(new) > self.MAX_BLOCKS:
            with pytest.raises(CapacityError):
                self.index.insert(keys, parent)
            return
        for path, block in zip(new, self.index.insert(keys, parent), strict=True):
            assert block not in self.block.values()
            self.block[path] = int(block)
            self.model.pins[path] = 0

    @rule(prompt=prompts, tier=tier_numbers, whole=st.booleans(), ready=st.booleans())
    def land(self, prompt: Path, tier: int, whole: bool, ready: bool) -> None:
        known = self.known(prompt)[0 if whole else -2 :]
        paths = [path for path in known if path not in self.model.state[tier]]
        if len(paths) > self.pools[tier].free:
            with pytest.raises(CapacityError):
                self.pools[tier].take(len(paths))
            return
        slots = self.pools[tier].take(len(paths))
        self.index.land(tier, self.blocks(paths), slots)
        self.slot[tier].update(zip(paths, slots.tolist(), strict=True))
        self.model.state[tier].update(dict.fromkeys(paths, LANDING))
        if ready:
            self.become_ready(tier, paths)

    @rule(tier=tier_numbers, data=st.data())
    def ready(self, tier: int, data: st.DataObject) -> None:
        landing = sorted(path for path, state in self.model.state[tier].items() if state == LANDING)
        self.become_ready(tier, [path for path in landing if data.draw(st.booleans())])

    def become_ready(self, tier: int, paths: list[Path]) -> None:
        self.index.ready(tier, self.blocks(paths), self.now)
        self.model.state[tier].update(dict.fromkeys(paths, READY))
        if paths:
            self.model.access(tier, paths, self.now, hit=False)

    @rule(tier=tier_numbers, data=st.data(), backwards=st.booleans())
    def drop(self, tier: int, data: st.DataObject, backwards: bool) -> None:
        paths = [path for path in sorted(self.block, reverse=backwards) if data.draw(st.booleans())]
        slots = self.index.drop(tier, self.blocks(paths))
        assert slots.tolist() == [self.slot[tier].pop(path, NO_SLOT) for path in paths]
        self.pools[tier].give(slots[slots != NO_SLOT])
        self.model.drop(tier, paths)
        self.forget_pruned()

    @rule(prompt=prompts, pin=st.booleans())
    def pin(self, prompt: Path, pin: bool) -> None:
        paths = [path for path in self.known(prompt) if pin or self.model.pins[path]]
        (self.index.pin if pin else self.index.unpin)(self.blocks(paths))
        for path in paths:
            self.model.pins[path] += 1 if pin else -1
        for path in [] if pin else reversed(paths):
            self.model.prune(path)
        self.forget_pruned()

    @rule(prompt=prompts, later=st.integers(0, 2))
    def touch(self, prompt: Path, later: int) -> None:
        self.now += later
        paths = self.known(prompt)
        self.index.touch(self.blocks(paths), self.now)
        for tier, state in enumerate(self.model.state):
            here = [path for path in paths if state.get(path) == READY]
            if here:
                self.model.access(tier, here, self.now, hit=True)

    @rule(
        tier=tier_numbers,
        count=st.integers(0, 12),
        how=st.sampled_from(["evict", "victims", "ask"]),
    )
    def evict(self, tier: int, count: int, how: str) -> None:
        model, expected = self.model, []
        offered = self.index.victims(tier, count).tolist()
        self.index.check_integrity()
        if how == "ask":
            return
        while len(expected) < count:
            free = [path for path in self.block if model.evictable(tier, path)]
            if not free:
                break
            path = min(free, key=lambda path: (*model.rank[tier][path], self.block[path]))
            expected.append((self.block[path], self.slot[tier].pop(path)))
            model.drop(tier, [path])
            self.forget_pruned()
        assert offered == [block for block, _ in expected]
        if how == "evict":
            blocks, slots = self.index.evict(tier, count)
        else:
            blocks = self.index.victims(tier, count)
            slots = self.index.drop(tier, blocks)
        assert list(zip(blocks.tolist(), slots.tolist(), strict=True)) == expected
        self.pools[tier].give(slots)

    @precondition(lambda self: not self.model.state[1])
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Rows in any order, some without their ancestors, on top of what the host tier holds."""
        rows = data.draw(st.lists(self.prompts.filter(len), max_size=8, unique=True))
        keys = np.array([self.keys(row)[-1] for row in rows], np.uint64).reshape(-1, 2)
        above = [self.keys(row)[-2] if len(row) > 1 else [0, 0] for row in rows]
        depths = np.array([len(row) - 1 for row in rows], np.uint32)
        slots = np.arange(len(rows), dtype=np.uint32)
        recovered = Recovered(keys, np.array(above, np.uint64).reshape(-1, 2), depths, slots)
        here = [
            row
            for row in rows
            if all(row[:i] in rows or row[:i] in self.block for i in range(1, len(row)))
        ]
        if len(self.block) + sum(row not in self.block for row in here) > self.MAX_BLOCKS:
            return
        kept = self.index.restore(1, recovered, self.now)
        assert [row for row, taken in zip(rows, kept, strict=True) if taken] == here
        self.pools[1].reserve(slots[kept])
        for row in sorted(here, key=len):
            self.model.pins.setdefault(row, 0)
            self.block[row] = int(self.index.find(self.keys(row))[-1])
            self.slot[1][row] = int(slots[rows.index(row)])
        self.model.state[1].update(dict.fromkeys(here, READY))
        if here:
            self.model.access(1, here, self.now, hit=False)

    @invariant()
    def agrees(self) -> None:
        model, index = self.model, self.index
        index.check_integrity()
        paths = sorted(self.block)
        assert set(self.block) == set(model.pins)
        assert len(index) == len(paths)
        assert index.pinned == sum(model.pins.values())
        for tier, pool in enumerate(self.pools):
            pool.check_integrity()
            assert pool.free + index.resident(tier) == pool.capacity
            states = [model.state[tier].get(path, ABSENT) for path in paths]
            assert index.states(tier, self.blocks(paths)).tolist() == states
            assert index.slots(tier, self.blocks(paths)).tolist() == [
                self.slot[tier].get(p, NO_SLOT) for p in paths
            ]
            free = [model.evictable(tier, path) for path in paths]
            assert index.evictable(tier, self.blocks(paths)).tolist() == free
        for path in paths:
            found = index.find(self.keys(path)).tolist()
            assert found == [self.block[path[: i + 1]] for i in range(len(path))]
            readable = [model.readable(path[: i + 1]) for i in range(len(path))]
            wanted = readable.index(False) if False in readable else len(path)
            assert index.match(self.keys(path)).tolist() == found[:wanted]


for _name in POLICIES:
    _machine = type(f"Index_{_name}", (IndexMachine,), {"policy": _name})
    _machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    globals()[f"Test_{_name}"] = _machine.TestCase
