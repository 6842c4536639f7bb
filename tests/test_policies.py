"""Policies: the built-in ones rank as upstream does; foreign ones need no leaf order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from flexkv.errors import CapacityError, ConfigError
from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK, BlockIds, BoolArray, TierState
from flexkv.policies.fifo import FIFO
from flexkv.policies.filo import FILO
from flexkv.policies.hazard import Hazard
from flexkv.policies.lfu import LFU
from flexkv.policies.lru import LRU
from flexkv.policies.mru import MRU
from flexkv.policies.slru import SLRU
from flexkv.pool import SlotPool
from flexkv.protocols import EvictionPolicy, PolicyContext

BUILT_IN = [LRU, LFU, SLRU, FIFO, MRU, FILO, Hazard]


class Clock:
    """A third-party policy: second chance over a plain dict, with no idea of trees."""

    flexkv_api: ClassVar[int] = 1

    def open(self, context: PolicyContext) -> None:
        self.used: dict[int, bool] = {}

    def inserted(self, blocks: BlockIds, now: float) -> None:
        self.used.update(dict.fromkeys(blocks.tolist(), False))

    def touched(self, blocks: BlockIds, now: float) -> None:
        for block in blocks.tolist():
            self.used[block] = True

    def removed(self, blocks: BlockIds) -> None:
        for block in blocks.tolist():
            del self.used[block]

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        chosen: list[int] = []
        for _ in range(2 * len(self.used)):
            block, used = next(iter(self.used.items()))
            del self.used[block]
            self.used[block] = False
            if not used and block not in chosen:
                chosen.append(block)
        return np.array(chosen, np.uint32)


class Stubborn(Clock):
    """Always answers with everything it knows, ancestors first, and then with nothing new."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        return np.array(sorted(self.used), np.uint32)


class Prompts:
    """An index with one tier; prompts are named by letters, one block each."""

    def __init__(self, policy: EvictionPolicy, *, capacity: int = 8, **settings: Any) -> None:
        self.index, self.pool = PrefixIndex(64, ["host"]), SlotPool(capacity)
        self.index.set_policy(0, policy, settings)
        self.now = 0.0

    def keys(self, prompt: str) -> Any:
        rows = [[hash_of(prompt[: i + 1]), i] for i in range(len(prompt))]
        return np.array(rows, np.uint64).reshape(-1, 2)

    def put(self, prompt: str) -> None:
        """Store a prompt as the planner does: all of it or nothing."""
        self.now += 1
        keys = self.keys(prompt)
        known = self.index.find(keys)
        missing = len(keys) - len(known)
        self.index.pin(known)
        try:
            victims = (
                self.index.victims(0, missing - self.pool.free) if missing > self.pool.free else []
            )
            if len(victims) + self.pool.free < missing:
                raise CapacityError("no room")
            self.pool.give(self.index.drop(0, np.asarray(victims, np.uint32)))
            added = self.index.insert(
                keys[len(known) :], int(known[-1]) if len(known) else NO_BLOCK
            )
            self.index.land(0, added, self.pool.take(missing))
            self.index.ready(0, added, self.now)
        finally:
            self.index.unpin(known)
        self.index.check_integrity()

    def hit(self, prompt: str) -> None:
        self.now += 1
        blocks = self.index.match(self.keys(prompt))
        assert len(blocks) == len(prompt)
        self.index.touch(blocks, self.now)

    def matched(self, prompt: str) -> int:
        return len(self.index.match(self.keys(prompt)))

    def evict(self, count: int = 1) -> str:
        """Evict and say who left, by the last letter."""
        blocks, slots = self.index.evict(0, count)
        self.pool.give(slots)
        self.index.check_integrity()
        return "".join(chr(int(key) & 0xFF) for key in self.index.keys(blocks)[:, 0])


def hash_of(prefix: str) -> int:
    """A chained key that still shows its last letter."""
    return sum(ord(letter) << (8 * i) for i, letter in enumerate(reversed(prefix)))


@pytest.mark.parametrize(
    ("policy", "settings", "leaving"),
    [
        (LRU, {}, "bdca"),
        (FIFO, {}, "abcd"),
        (MRU, {}, "acdb"),
        (FILO, {}, "dcba"),
        (LFU, {}, "bdca"),
        (SLRU, {"slru_protected_threshold": 1}, "bdca"),
        (SLRU, {}, "bdca"),
        (SLRU, {"slru_protected_threshold": 3}, "bdca"),
    ],
)
def test_single_blocks_leave_in_upstreams_order(
    policy: type[Any], settings: dict[str, Any], leaving: str
) -> None:
    prompts = Prompts(policy(), **settings)
    for prompt in "abcd":
        prompts.put(prompt)
    for prompt in "aca":
        prompts.hit(prompt)
    assert prompts.evict(9) == leaving


def test_lfu_and_slru_differ_from_lru_once_hits_are_old() -> None:
    def leaving(policy: Any, **settings: Any) -> str:
        prompts = Prompts(policy, **settings)
        for prompt in "abc":
            prompts.put(prompt)
        for prompt in "aaabbc":
            prompts.hit(prompt)
        prompts.hit("b")
        prompts.put("d")
        return prompts.evict(9)

    assert leaving(LRU()) == "acbd"
    assert leaving(LFU()) == "dcab"  # a and b have three hits each, a's last is older
    assert (
        leaving(SLRU()) == "cdab"
    )  # c has one hit, d none: both on probation, c's access is older
    assert leaving(SLRU(), slru_protected_threshold=9) == "acbd"


def test_a_hit_buys_grace_under_lru() -> None:
    prompts = Prompts(LRU(), hit_reward_seconds=10.0)
    for prompt in "abc":
        prompts.put(prompt)  # at 1, 2, 3
    prompts.hit("a")  # at 4: grace until 14
    prompts.hit("b")  # at 5: until 15
    prompts.hit("a")  # at 6: until max(14, 6) + 10 = 24
    prompts.now = 15.5
    prompts.put("d")  # at 16.5, later than b's grace
    order = prompts.index.order(0)
    ranks = [float(order.ranks(prompts.index.find(prompts.keys(p)))[0]) for p in "abcd"]
    assert ranks == [24.0, 15.0, 3.0, 16.5]
    assert prompts.evict(9) == "cbda"


def test_a_block_that_returns_starts_anew() -> None:
    for policy in (LFU(), SLRU()):
        prompts = Prompts(policy, capacity=2)
        prompts.put("a")
        prompts.hit("a")
        prompts.hit("a")
        assert prompts.evict(1) == "a"
        prompts.put("a")
        prompts.put("b")
        assert prompts.evict(1) == "a"


@pytest.mark.parametrize("policy", [*BUILT_IN, Clock, Stubborn])
def test_leaves_leave_before_their_ancestors(policy: type[Any]) -> None:
    prompts = Prompts(policy(), capacity=20)
    for prompt in ("abcd", "abxy", "abxz", "q"):
        prompts.put(prompt)
    prompts.hit("abcd")
    left = ""
    while step := prompts.evict(2):
        left += step
        for prompt in ("abcd", "abxy", "abxz", "q"):
            gone = [letter in left for letter in prompt]
            assert gone == sorted(gone), f"{prompt} lost an ancestor before a descendant: {left}"
    assert sorted(left) == sorted("abcdxyzq")
    assert prompts.pool.free == 20
    assert len(prompts.index) == 0


@pytest.mark.parametrize("policy", [*BUILT_IN, Clock, Stubborn])
def test_a_put_does_not_evict_what_it_builds_on(policy: type[Any]) -> None:
    """D04: capacity 4, content [1,2] and [8,9], 1 and 2 older; then [1,2,3,4] is put."""
    prompts = Prompts(policy(), capacity=4)
    prompts.put("12")
    prompts.put("89")
    prompts.put("1234")
    assert prompts.matched("1234") == 4
    assert prompts.matched("89") == 0


@pytest.mark.parametrize("policy", [*BUILT_IN, Clock, Stubborn])
def test_a_put_without_room_fails_as_a_whole(policy: type[Any]) -> None:
    """D04, second half: 8 and 9 are pinned, so nothing can leave; nothing is half inserted."""
    prompts = Prompts(policy(), capacity=4)
    prompts.put("12")
    prompts.put("89")
    pinned = prompts.index.match(prompts.keys("89"))
    prompts.index.pin(pinned)
    with pytest.raises(CapacityError):
        prompts.put("1234")
    assert prompts.matched("1234") == 2
    assert prompts.matched("89") == 2
    assert len(prompts.index) == 4
    assert prompts.pool.used == 4
    prompts.index.unpin(pinned)
    prompts.put("1234")
    assert prompts.matched("1234") == 4


@pytest.mark.parametrize("policy", [*BUILT_IN, Clock, Stubborn])
def test_asking_for_victims_changes_nothing(policy: type[Any]) -> None:
    prompts = Prompts(policy())
    prompts.put("abcd")
    prompts.put("abx")
    first = prompts.index.victims(0, 3).tolist()
    prompts.index.check_integrity()
    assert len(first) == 3
    assert prompts.matched("abcd") + prompts.matched("abx") == 7
    blocks = prompts.index.find(prompts.keys("abcd"))
    assert set(prompts.index.states(0, blocks).tolist()) == {TierState.READY}


def test_a_policy_that_raises_leaves_the_index_whole() -> None:
    class Failing(Clock):
        def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
            if count == 1:
                raise RuntimeError("out of ideas")
            return np.array(list(self.used)[-1:], np.uint32)

    prompts = Prompts(Failing())
    prompts.put("ab")
    with pytest.raises(RuntimeError, match="out of ideas"):
        prompts.index.victims(0, 2)
    prompts.index.check_integrity()
    assert prompts.matched("ab") == 2


def test_a_policy_sees_what_it_has_taken_already() -> None:
    seen: list[list[bool]] = []

    class Asking(Clock):
        def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
            known = np.array(list(self.used), np.uint32)
            mask = evictable(known)
            seen.append(mask.tolist())
            return known[mask]

    prompts = Prompts(Asking())
    prompts.put("abc")
    assert len(prompts.index.victims(0, 3)) == 3
    assert seen == [[False, False, True], [False, True, False], [True, False, False]]


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (LRU, {"hit_reward_seconds": -1}),
        (LRU, {"hit_reward_seconds": float("nan")}),
        (SLRU, {"slru_protected_threshold": 0}),
    ],
)
def test_settings_out_of_range_are_refused(policy: type[Any], settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Prompts(policy(), **settings)
